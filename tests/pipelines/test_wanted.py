"""Which prompts lack a response: by their places, for several turns and samples also."""

import numpy as np
import pyarrow as pa
import pytest

from pipelines.errors import VerificationFailed
from pipelines.schema import PROMPT_SCHEMA
from pipelines.segments import SegmentWriter
from pipelines.store import RunFolder, write_parquet
from pipelines.wanted import Wanted
from tests.support.generate_run import prompt_row
from tests.support.response_rows import row


@pytest.fixture
def run(tmp_path) -> RunFolder:
    """Four prompts in two files; the second is a conversation of three turns."""
    run = RunFolder(tmp_path)
    rows = [{**prompt_row(one, "set"), "sample_id": f"set-{one:04d}"} for one in range(4)]
    rows[1] |= {"history": [[7], [8]], "continuations": [[9], [9]]}
    for part in (0, 1):
        table = pa.Table.from_pylist(rows[2 * part : 2 * part + 2], schema=PROMPT_SCHEMA)
        write_parquet(run.prompts / "set" / f"part-{part:05d}.parquet", table)
    return run


def hold(run, *responses):
    """Make responses durable: (sample id, status)."""
    writer = SegmentWriter(run, "set")
    for sample_id, status in responses:
        writer.add({**row(1, status), "sample_id": sample_id})
    writer.flush()


def test_every_turn_and_sample_is_a_response(run):
    assert Wanted(run, "set", 1).responses().to_pylist() == [
        "set-0000",
        "set-0001",
        "set-0001.t2.s1",
        "set-0001.t3.s1",
        "set-0002",
        "set-0003",
    ]
    twice = Wanted(run, "set", 2)
    assert twice.total == len(set(twice.responses().to_pylist())) == 12


def test_a_prompt_is_missing_until_all_its_responses_are_held(run):
    hold(run, ("set-0000", "ok"), ("set-0001", "ok"), ("set-0001.t2.s1", "rejected:repetition"))
    hold(run, ("set-0002", "failed:timeout"), ("set-0003", "failed:http_400"))
    wanted = Wanted(run, "set", 1)
    assert wanted.missing().tolist() == [1, 2]
    assert wanted.missing(2).tolist() == [1]
    assert set(wanted.earlier_turns(wanted.missing())) == {"set-0001", "set-0001.t2.s1"}
    assert set(wanted.earlier_turns(np.array([0, 2, 3]))) == set()
    wanted.hold(["set-0002", "set-0001.t3.s1"])
    assert wanted.missing().tolist() == []
    assert Wanted(run, "set", 2).missing().tolist() == [0, 1, 2, 3]


def test_a_call_names_prompts_of_one_file(run):
    calls = list(Wanted(run, "set", 1).calls(np.array([0, 1, 3]), 8))
    assert [one["file"][0].as_py()[-13:] for one in calls] == ["00000.parquet", "00001.parquet"]
    assert [one["rows"][0].as_py() for one in calls] == [[0, 1], [1]]


def test_a_prompt_of_another_set_or_one_that_comes_twice_is_refused(run):
    table = pa.Table.from_pylist([prompt_row(1, "other")], schema=PROMPT_SCHEMA)
    write_parquet(run.prompts / "set" / "part-00002.parquet", table)
    with pytest.raises(VerificationFailed, match=r"datasets are .*other"):
        Wanted(run, "set", 1)
    again = [{**prompt_row(2, "set"), "sample_id": "set-0002"}]
    table = pa.Table.from_pylist(again, schema=PROMPT_SCHEMA)
    write_parquet(run.prompts / "set" / "part-00002.parquet", table)
    with pytest.raises(VerificationFailed, match="1 sample ids come twice"):
        Wanted(run, "set", 1)
