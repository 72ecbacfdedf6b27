"""Durable rows are counted once, each in its best version, wherever they lie."""

import io
import os

import pyarrow as pa
import pytest

from pipelines import status_rows
from pipelines.segments import SegmentWriter, commit, reopen_failed
from pipelines.status_rows import Speed, added, read_set
from pipelines.storage import RemotePath, listed
from pipelines.store import RunFolder
from tests.support.response_rows import row

OUTPUT = row(1)["usage"]["completion_tokens"]


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path)


def write(run: RunFolder, *rows: dict) -> None:
    """One segment."""
    writer = SegmentWriter(run, "set", flush_rows=1000)
    for one in rows:
        writer.add(one)
    writer.flush()


def ids(*numbers: int) -> list[str]:
    return [row(number)["sample_id"] for number in numbers]


def test_a_set_without_files_has_no_rows(run):
    found = read_set(run, "set")
    assert (dict(found.statuses), found.arrivals, found.newest) == ({}, (), None)


def test_of_several_versions_of_a_row_the_best_counts(run):
    write(run, row(1, "failed:deadline"), row(2), row(3, "rejected:loop"))
    write(run, row(1), row(2, "failed:deadline"), row(3, "failed:nan"))
    assert read_set(run, "set").statuses == {"ok": 2, "rejected:loop": 1}


def test_committed_rows_count_the_same_and_have_arrived_before(run):
    write(run, row(1), row(2, "failed:deadline"), row(3))
    before = read_set(run, "set")
    commit(run, "set", ids(1, 2, 3))
    after = read_set(run, "set")
    assert after.statuses == before.statuses == {"ok": 2, "failed:deadline": 1}
    assert after.arrivals == ()
    assert after.newest is not None


def test_rows_beside_a_commit_are_told_apart_by_their_ids(run):
    write(run, row(1), row(2, "failed:deadline"))
    commit(run, "set", ids(1, 2))
    assert reopen_failed(run, "set") == 1
    reopened = read_set(run, "set")
    assert reopened.statuses == {"ok": 1, "failed:deadline": 1}
    assert reopened.arrivals == ()  # nobody answered it just now
    write(run, row(2))
    assert read_set(run, "set").statuses == {"ok": 2}


def test_a_speed_counts_rows_and_tokens_between_two_moments(run):
    write(run, row(1), row(2))
    write(run, row(3))
    first, second = listed(run.segments / "set", "*.arrow")
    os.utime(first, (100.0, 100.0))
    os.utime(second, (150.0, 150.0))
    rows = dict(zip(("first", "second"), [_rows_in(first), _rows_in(second)], strict=True))
    found = read_set(run, "set")
    assert found.speed(90.0, 110.0) == Speed(rows["first"], rows["first"] * OUTPUT, 20.0)
    assert found.speed(100.0, 200.0) == Speed(3, 3 * OUTPUT, 100.0)
    assert found.speed(160.0, 200.0).rows_per_second == 0
    assert found.speed(200.0, 200.5) is None
    assert found.newest == 150.0


def _rows_in(segment) -> int:
    return status_rows._read_segment(segment).arrival.rows


def test_speeds_of_sets_add_up():
    assert added([None, None]) is None
    both = added([Speed(2, 20, 10.0), None, Speed(3, 5, 10.0)])
    assert both == Speed(5, 25, 10.0)
    assert (both.rows_per_second, both.tokens_per_second) == (0.5, 2.5)


def test_a_damaged_file_is_named_and_the_others_count(run):
    write(run, row(1))
    torn = run.segments / "set" / "torn-0.arrow"
    torn.write_bytes(b"ARROW1 and no more")
    part = run.responses / "set" / "part-00000.parquet"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"PAR1 and no more")
    found = read_set(run, "set")
    assert found.statuses == {"ok": 1}
    assert sorted(found.damaged) == sorted([str(torn), str(part)])


def test_a_store_is_asked_for_new_segments_only(tmp_path, object_store):
    run = RunFolder(tmp_path, store=object_store.uri)
    write(run, row(1), row(2))
    assert read_set(run, "set").statuses == {"ok": 2}
    (old,) = listed(run.segments / "set", "*.arrow")
    write(run, row(3, "rejected:loop"))
    object_store.requests.clear()
    assert read_set(run, "set").statuses == {"ok": 2, "rejected:loop": 1}
    assert not [path for _, path in object_store.requests if path.endswith(old.name)]
    assert [path for _, path in object_store.requests if path.endswith(".arrow")]


def test_a_store_hands_over_no_bodies(tmp_path, object_store, monkeypatch):
    run = RunFolder(tmp_path, store=object_store.uri)
    write(run, row(1, text="long " * 200_000), row(2))
    (segment,) = listed(run.segments / "set", "*.arrow")
    content = _Counted(segment.read_bytes())
    monkeypatch.setattr(RemotePath, "open", lambda _: pa.PythonFile(content, "r"))
    assert read_set(run, "set").statuses == {"ok": 2}
    assert 0 < content.bytes_read < 20_000 < segment.stat().st_size


class _Counted(io.BytesIO):
    bytes_read = 0

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(size)
        self.bytes_read += len(piece)
        return piece
