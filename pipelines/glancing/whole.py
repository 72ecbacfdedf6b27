"""Every row of a large JSONL file, by as many processes as there are CPUs."""

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from pipelines.glancing.lines import lines_between
from pipelines.glancing.look import Look, Wish
from pipelines.glancing.places import opened
from pipelines.glancing.reading import Notes, Reading

SPAN_BYTES = 32 << 20  # for one process at a time
_PROCESSES = 16


def is_worth_it(reading: Reading) -> bool:
    """Whether more processes than this one can read the file, and it is long enough for them."""
    is_plain = reading.format == "JSONL" and isinstance(reading.place, Path)
    return is_plain and reading.budget is None and reading.size > 2 * SPAN_BYTES


def look_at_all(reading: Reading, look: Look) -> None:
    """Look at every line. Line numbers are exact: each part counts its own."""
    assert isinstance(reading.place, Path)
    lines = 0
    reading.row_count = 0
    for part, notes, seen, rows, is_half in _parts(reading.place, reading.size, look.wish):
        look.merge(part)
        reading.notes.merge(notes, lines)
        reading.row_count += rows
        reading.ends_in_half_line = is_half
        lines += seen
    reading.rows_exact = True


_Part = tuple[Look, Notes, int, int, bool]


def _parts(path: Path, size: int, wish: Wish) -> Iterator[_Part]:
    """In order, with a few waiting: what is finished early stays small, but is not let pile up."""
    starts = range(0, size, SPAN_BYTES)
    workers = min(len(starts), os.cpu_count() or 1, _PROCESSES)
    waiting: list[Future[_Part]] = []
    # Not forked: this process may hold threads of pyarrow.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        for start in starts:
            end = min(start + SPAN_BYTES, size)
            waiting.append(pool.submit(_look_at_part, path, start, end, wish))
            if len(waiting) > 2 * workers:
                yield waiting.pop(0).result()
        for one in waiting:
            yield one.result()


def _look_at_part(path: Path, start: int, end: int, wish: Wish) -> _Part:
    """The rows whose lines begin in these bytes, and how many lines there are."""
    reading, look = Reading(path, end, None), Look(wish, part=start)
    with opened(path) as handle:
        look.add(lines_between(reading, handle, start, end, counted=True))
    return look, reading.notes, reading.lines, reading.row_count or 0, reading.ends_in_half_line
