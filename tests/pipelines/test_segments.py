"""Rows survive any kill, and the same rows make the same bytes."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines import row_index
from pipelines.errors import StorageFailed, VerificationFailed
from pipelines.schema import RESPONSE_SCHEMA
from pipelines.segments import (
    SegmentWriter,
    commit,
    committed_files,
    committed_ids,
    durable_ids,
    durable_reports,
    reopen_failed,
    table_of,
    write_segment,
)
from pipelines.store import RunFolder
from tests.support.response_rows import IDS, ROWS, fingerprint, row, write
from tests.support.small_disk import fill


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, bytes]:
    """What an undisturbed commit of all rows makes, in parts of four."""
    run = RunFolder(tmp_path_factory.mktemp("expected"))
    write(run, ROWS)
    commit(run, "set", IDS, rows_per_part=4)
    return fingerprint(run)


def test_rows_are_durable_as_soon_as_they_are_flushed(run):
    writer = SegmentWriter(run, "set", flush_rows=2)
    writer.add(ROWS[0])
    assert durable_ids(run, "set") == set()
    writer.add(ROWS[1])
    assert durable_ids(run, "set") == set(IDS[:2])
    writer.add(ROWS[2])
    writer.flush()
    writer.flush()  # nothing new, no file
    assert durable_ids(run, "set") == set(IDS[:3])
    assert len(list((run.segments / "set").iterdir())) == 2


def test_a_commit_orders_rows_and_keeps_what_is_not_ok_aside(run):
    write(run, reversed(ROWS))
    assert committed_ids(run, "set") == set()
    commit(run, "set", IDS)
    ok = pq.read_table(run.responses / "set", partitioning=None)
    rejected = pq.read_table(run.rejected_responses / "set", partitioning=None)
    assert ok["sample_id"].to_pylist() == [
        one["sample_id"] for one in ROWS if one["status"] == "ok"
    ]
    assert rejected["status"].to_pylist() == [
        one["status"] for one in ROWS if one["status"] != "ok"
    ]
    assert ok.schema.equals(RESPONSE_SCHEMA, check_metadata=True)
    assert not (run.segments / "set").exists()
    assert committed_ids(run, "set") == durable_ids(run, "set") == set(IDS)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), per_segment=st.integers(1, 31), writers=st.integers(1, 3))
def test_the_same_rows_make_the_same_bytes(tmp_path_factory, expected, seed, per_segment, writers):
    run = RunFolder(tmp_path_factory.mktemp("run"))
    rows = [*ROWS, *ROWS[:5]]  # some came twice
    random.Random(seed).shuffle(rows)
    for number in range(writers):
        write(run, rows[number::writers], per_segment)
    commit(run, "set", IDS, rows_per_part=4)
    assert fingerprint(run) == expected


@pytest.mark.parametrize("order", [1, -1])
def test_of_two_versions_of_a_row_the_better_one_is_kept(run, order):
    versions = [
        row(1, "failed:refused", attempt=1),
        row(1, "ok", attempt=2, text="second"),
        row(1, "ok", attempt=3, text="third"),
        row(1, "rejected:empty_content", attempt=1),
    ]
    write(run, versions[::order], per_segment=1)
    assert [one.status for one in durable_reports(run, "set")] == ["ok"]
    commit(run, "set", ["set-0001"])
    assert pq.read_table(run.responses / "set", partitioning=None)["text"].to_pylist() == ["second"]


def test_a_row_that_is_missing_or_foreign_stops_the_commit_and_nothing_is_lost(run):
    write(run, ROWS)
    with pytest.raises(VerificationFailed, match="1 prompts have no response"):
        commit(run, "set", [*IDS, "set-9999"])
    with pytest.raises(VerificationFailed, match="1 responses have no prompt"):
        commit(run, "set", IDS[1:])
    assert durable_ids(run, "set") == set(IDS)
    assert committed_files(run, "set") == []


def test_a_set_without_one_good_row_can_still_be_read(run):
    write(run, [row(1, "rejected:empty_content")])
    commit(run, "set", ["set-0001"])
    assert pq.read_table(run.responses / "set", partitioning=None).num_rows == 0


def test_more_prompts_later_are_committed_with_the_earlier_ones(run, expected):
    write(run, ROWS[::3])
    commit(run, "set", IDS[::3], rows_per_part=4)
    write(run, [one for one in ROWS if one not in ROWS[::3]])
    assert durable_ids(run, "set") == set(IDS)
    commit(run, "set", IDS, rows_per_part=4)
    assert fingerprint(run) == expected
    commit(run, "set", IDS, rows_per_part=4)  # nothing to do
    assert fingerprint(run) == expected


def test_a_torn_temp_file_is_no_row_and_goes_away(run):
    write(run, ROWS)
    torn = run.segments / "set" / ".abc-000001-0123.arrow.77.tmp"
    torn.write_bytes(b"ARROW1 half")
    assert durable_ids(run, "set") == set(IDS)
    commit(run, "set", IDS)
    assert not torn.exists()


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_segment_is_an_error_by_name(run, damage):
    write(run, ROWS)
    path = sorted((run.segments / "set").iterdir())[0]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes({"flip": bytes(content), "cut": bytes(content[:-9]), "empty": b""}[damage])
    for use in (lambda: durable_reports(run, "set"), lambda: commit(run, "set", IDS)):
        with pytest.raises(VerificationFailed, match=path.name):
            use()


def test_a_damaged_part_is_an_error_by_name(run):
    write(run, ROWS)
    commit(run, "set", IDS)
    path = committed_files(run, "set")[0]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(VerificationFailed, match=path.name):
        durable_ids(run, "set")


def test_a_segment_of_another_schema_is_an_error(run):
    write_segment(run.segments / "set", "x", pa.table({"sample_id": ["set-0001"]}))
    with pytest.raises(VerificationFailed, match="schema"):
        durable_ids(run, "set")


def test_a_flush_that_fails_keeps_its_rows(run, tmp_path):
    (tmp_path / "responses").mkdir()
    blocker = tmp_path / "responses" / "_segments"
    blocker.write_text("a file where the folder should be")
    writer = SegmentWriter(run, "set")
    writer.add(ROWS[0])
    with pytest.raises(OSError):  # noqa: PT011 - the system's own words
        writer.flush()
    blocker.unlink()
    writer.flush()
    assert durable_ids(run, "set") == set(IDS[:1])


def test_rows_that_find_a_full_disk_stay_and_are_written_once_there_is_room(small_disk):
    run = RunFolder(small_disk / "run")
    writer = SegmentWriter(run, "set")
    writer.add(ROWS[0])
    writer.flush()
    filler = fill(small_disk)
    writer.add({**ROWS[1], "text": "long " * 10_000})
    for _ in range(2):
        with pytest.raises(StorageFailed, match=r"the disk is full.*bytes free"):
            writer.flush()
    assert durable_ids(run, "set") == {IDS[0]}
    assert len(list((run.segments / "set").iterdir())) == 1  # no temp file
    filler.unlink()
    writer.add(ROWS[2])
    writer.flush()
    assert durable_ids(run, "set") == set(IDS[:3])


def test_a_commit_that_finds_a_full_disk_loses_nothing_and_is_done_later(small_disk, expected):
    run = RunFolder(small_disk / "run")
    write(run, ROWS)
    filler = fill(small_disk)
    with pytest.raises(StorageFailed, match="the disk is full"):
        commit(run, "set", IDS, rows_per_part=4)
    assert durable_ids(run, "set") == set(IDS)
    assert not list(run.root.rglob(".*.tmp"))
    filler.unlink()
    commit(run, "set", IDS, rows_per_part=4)
    assert fingerprint(run) == expected


@pytest.mark.parametrize(
    "hole", [{"status": None}, {"usage": {**ROWS[0]["usage"], "total_tokens": None}}]
)
def test_a_row_with_a_hole_is_refused(run, hole):
    writer = SegmentWriter(run, "set")
    writer.add({**ROWS[0], **hole})
    with pytest.raises(AssertionError, match=next(iter(hole))):
        writer.flush()


@given(lists=st.lists(st.lists(st.integers(-(2**31), 2**31 - 1)), max_size=5))
def test_a_table_holds_what_its_rows_hold(lists):
    rows = [
        {**ROWS[at], "prompt_ids": ids, "output_ids": tuple(reversed(ids))}
        for at, ids in enumerate(lists)
    ]
    assert table_of(rows).equals(pa.Table.from_pylist(rows, schema=RESPONSE_SCHEMA))


def test_an_id_that_is_no_int32_is_refused():
    with pytest.raises(OverflowError):
        table_of([{**ROWS[0], "output_ids": [2**31]}])


def test_a_commit_with_little_memory_makes_the_same_bytes(run, expected, monkeypatch):
    monkeypatch.setattr(row_index, "_WINDOW_BYTES", 1)
    write(run, ROWS)
    commit(run, "set", IDS, rows_per_part=4)
    assert fingerprint(run) == expected


def test_what_is_looked_up_without_a_check_is_the_same_and_reads_no_texts(run):
    write(run, [{**one, "text": "a text " + one["sample_id"]} for one in ROWS])
    whole = durable_reports(run, "set")
    assert durable_reports(run, "set", check=False) == whole
    path = sorted((run.segments / "set").iterdir())[0]
    path.write_bytes(path.read_bytes().replace(b"a text", b"A TEXT"))
    assert durable_reports(run, "set", check=False) == whole
    with pytest.raises(VerificationFailed, match="checksum"):
        durable_reports(run, "set")


FAILED = [one for one in ROWS if one["status"].startswith("failed")]
ANSWERED = [row(int(one["sample_id"][4:]), text="at last", attempt=2) for one in FAILED]


def missing(run: RunFolder) -> set[str]:
    """What generate asks for: all that is neither committed nor durable with a reply."""
    held = committed_ids(run, "set")
    held |= {one.sample_id for one in durable_reports(run, "set") if one.has_reply}
    return set(IDS) - held


def test_failed_rows_are_reopened_and_no_row_is_lost(run):
    write(run, ROWS)
    commit(run, "set", IDS, rows_per_part=4)
    before = fingerprint(run)
    assert missing(run) == set()
    assert reopen_failed(run, "set") == len(FAILED)
    assert reopen_failed(run, "set") == len(FAILED)  # nothing more to open
    assert missing(run) == {one["sample_id"] for one in FAILED}
    assert fingerprint(run) == before
    commit(run, "set", IDS, rows_per_part=4)  # nobody was asked: as before
    assert fingerprint(run) == before
    reopen_failed(run, "set")
    write(run, ANSWERED[1:])
    commit(run, "set", IDS, rows_per_part=4)
    statuses = {one.sample_id: one.status for one in durable_reports(run, "set")}
    assert statuses.keys() == set(IDS)
    assert [one for one in ROWS if statuses[one["sample_id"]] != one["status"]] == FAILED[1:]
    assert reopen_failed(run, "set") == 1


def test_a_set_without_failed_rows_is_not_reopened(run):
    write(run, ROWS[2:5])
    commit(run, "set", IDS[2:5])
    assert reopen_failed(run, "set") == 0
    assert not run.segments.exists()
    assert reopen_failed(run, "another") == 0


def test_a_reopening_is_survived_at_every_step_up_to_its_commit(tmp_path):
    class Killed(Exception):
        pass

    other = RunFolder(tmp_path / "other")
    write(other, [*[one for one in ROWS if one not in FAILED], *ANSWERED])
    commit(other, "set", IDS, rows_per_part=4)
    for step in range(100):
        run = RunFolder(tmp_path / str(step))
        write(run, ROWS)
        commit(run, "set", IDS, rows_per_part=4)
        left = step

        def hook(_):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        try:
            reopen_failed(run, "set", hook=hook)
            write(run, ANSWERED)
            commit(run, "set", IDS, rows_per_part=4, hook=hook)
        except Killed:
            assert durable_ids(run, "set") == set(IDS)
            reopen_failed(run, "set")
            write(run, [one for one in ANSWERED if one["sample_id"] in missing(run)])
            commit(run, "set", IDS, rows_per_part=4)
        else:
            assert step > 12
            break
        assert fingerprint(run) == fingerprint(other)
    else:
        pytest.fail("it has no end")


# Kills itself at the n-th step of a commit; says "done" if the commit ends before.
KILLED_COMMIT = """
import os, signal, sys
from pathlib import Path
from pipelines.segments import commit
from pipelines.store import RunFolder
left = int(sys.argv[2])
def hook(step):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
ids = [f"set-{number:04d}" for number in range(30)]
commit(RunFolder(Path(sys.argv[1])), "set", ids, rows_per_part=4, hook=hook)
"""


def killed_at(run: RunFolder, step: int) -> int:
    return subprocess.run(
        [sys.executable, "-c", KILLED_COMMIT, str(run.root), str(step)], check=False, timeout=60
    ).returncode


@pytest.mark.parametrize("step", [1, 4, 9, 14])
def test_a_commit_killed_at_any_step_is_finished_by_the_next(run, expected, step):
    write(run, ROWS)
    assert killed_at(run, step) == -signal.SIGKILL
    assert durable_ids(run, "set") == set(IDS)
    commit(run, "set", IDS, rows_per_part=4)
    assert fingerprint(run) == expected


def test_every_step_of_a_commit_is_survived_in_this_process(tmp_path, expected):
    class Killed(Exception):
        pass

    for step in range(100):
        run = RunFolder(Path(tmp_path / str(step)))
        write(run, ROWS[::2])
        commit(run, "set", IDS[::2], rows_per_part=4)
        # Rows that failed before are answered now, which a half-removed commit must not forget.
        before = [row(1, "failed:timeout"), row(3, "failed:timeout"), row(29, "failed:timeout")]
        write(run, [*before, *ROWS[1::2]], per_segment=3)
        left = step

        def hook(_):
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed

        try:
            commit(run, "set", IDS, rows_per_part=4, hook=hook)
        except Killed:
            assert durable_ids(run, "set") == set(IDS)
            commit(run, "set", IDS, rows_per_part=4)
        else:
            assert step > 12
            break
        assert fingerprint(run) == expected
    else:
        pytest.fail("the commit has no end")
