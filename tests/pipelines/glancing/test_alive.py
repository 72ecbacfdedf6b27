"""Who writes a file, and how fast it grows."""

import subprocess
import sys
from pathlib import Path

from pipelines.glance import glance
from pipelines.glancing.alive import Sight, Writer, alive, sight_of, writers_of
from tests.support.faulty_files import HEALTHY, lines

_HOLD = (
    "import sys; h = open(sys.argv[1], sys.argv[2]); print('held', flush=True); sys.stdin.read()"
)


class Clock:
    """A time that a test sets."""

    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def held(path: Path, mode: str) -> subprocess.Popen:
    """A process that holds a file open until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path), mode],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    return process


def test_a_process_that_holds_a_file_for_writing_is_named_and_a_reader_is_not(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(HEALTHY))
    assert writers_of([path]) == ()
    with held(path, "a") as writer, held(path, "r") as reader:
        (seen,) = writers_of([path]) or ()
        assert seen.pid == writer.pid
        assert seen.name.startswith("python")
        link = tmp_path / "link.jsonl"
        link.symlink_to(path)
        assert writers_of([link]) == (Writer(writer.pid, seen.name),)
        for process in (writer, reader):
            process.communicate()
    assert writers_of([path]) == ()


def test_speed_is_what_was_written_between_two_looks(tmp_path):
    path, clock = tmp_path / "rows.jsonl", Clock(1_000.0)
    path.write_bytes(b"x" * 1_000)
    first = sight_of([path], clock)
    path.write_bytes(b"x" * 5_000)
    clock.now = 1_002.0
    seen = alive([path], first, rows_per_byte=0.01, clock=clock, wait_seconds=0.0)
    assert (seen.bytes, seen.bytes_per_second, seen.rows_per_second) == (5_000, 2_000.0, 20.0)


def test_a_file_at_rest_has_no_speed_and_one_that_shrank_neither(tmp_path):
    path, clock = tmp_path / "rows.jsonl", Clock(1_002.0)
    path.write_bytes(b"x" * 1_000)
    for before in (1_000, 3_000):
        seen = alive(
            [path], Sight(before, None, 1_000.0), rows_per_byte=1.0, clock=clock, wait_seconds=0.0
        )
        assert seen.bytes_per_second is None


def test_a_file_that_goes_away_while_it_is_looked_at_counts_nothing(tmp_path):
    seen = sight_of([tmp_path / "gone.jsonl"], Clock(5.0))
    assert seen == Sight(0, None, 5.0)


def test_two_glances_tell_the_rows_per_second(tmp_path):
    path, clock = tmp_path / "rows.jsonl", Clock(1_000.0)
    path.write_bytes(lines(HEALTHY))
    before = glance([str(path)], clock=clock)
    path.write_bytes(lines(HEALTHY * 2))
    clock.now = 1_010.0
    (one,) = glance([str(path)], before=before, clock=clock).sets
    assert one.alive.rows_per_second is not None
    assert abs(one.alive.rows_per_second - len(HEALTHY) / 10) < 0.1


def test_a_writer_that_is_silent_for_long_is_a_warning(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines(HEALTHY))
    later = Clock(path.stat().st_mtime + 700.0)
    assert glance([str(path)], clock=later).sets[0].findings == ()
    with held(path, "a") as writer:
        (one,) = glance([str(path)], clock=later, wait_seconds=0.0).sets
        writer.communicate()
    (finding,) = one.findings
    assert finding.name == "writer_silent"
    assert str(writer.pid) in finding.seen
