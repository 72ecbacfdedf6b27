"""What a gate stopped on is set aside, once, and nothing else is."""

import pyarrow.parquet as pq
import pytest

from pipelines.quality_stop import (
    QualityMark,
    holds_suspects_only,
    remember_stop,
    remembered_stop,
    set_aside_suspects,
)
from pipelines.segments import SegmentWriter, commit, durable_ids
from pipelines.store import RunFolder
from tests.support.response_rows import row

MARK = QualityMark("no reasoning", "canary", {"set": ("set-1", "set-2")})


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def write(run, *names):
    writer = SegmentWriter(run, "set")
    for name in names:
        writer.add({**row(1), "sample_id": name})
    writer.flush()


def suspects(run):
    return sorted(
        name
        for path in (run.root / "suspect").glob("*.parquet")
        for name in pq.read_table(path)["sample_id"].to_pylist()
    )


def test_only_the_suspect_rows_leave_and_they_stay_readable(run):
    write(run, "set-1", "set-3")
    write(run, "set-2")
    write(run, "set-4")
    remember_stop(run, MARK)
    assert remembered_stop(run) == MARK
    assert set_aside_suspects(run) == 2
    assert durable_ids(run, "set") == {"set-3", "set-4"}
    assert suspects(run) == ["set-1", "set-2"]
    assert remembered_stop(run) is None
    assert set_aside_suspects(run) == 0
    commit(run, "set", ["set-3", "set-4"])


def test_a_kill_while_rows_are_set_aside_loses_none(run, monkeypatch):
    write(run, "set-1", "set-3")
    write(run, "set-2", "set-4")
    remember_stop(run, MARK)
    calls = []

    def dies_at_the_second(folder, name, table):
        calls.append(name)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(folder, name, table)

    from pipelines import quality_stop

    real = quality_stop.write_segment
    monkeypatch.setattr(quality_stop, "write_segment", dies_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        set_aside_suspects(run)
    left = durable_ids(run, "set")  # segments have random names: which was first is chance
    assert len(left) == 3
    assert left >= {"set-3", "set-4"}
    monkeypatch.undo()
    assert set_aside_suspects(run) == 1
    assert durable_ids(run, "set") == {"set-3", "set-4"}
    assert set(suspects(run)) == {"set-1", "set-2"}


def test_a_canary_that_failed_is_all_there_is_or_is_not(run):
    assert holds_suspects_only(run)  # nothing at all
    write(run, "set-1", "set-2")
    assert not holds_suspects_only(run)
    remember_stop(run, MARK)
    assert holds_suspects_only(run)
    write(run, "set-3")
    assert not holds_suspects_only(run)
