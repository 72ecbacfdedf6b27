"""Is anybody writing: age, speed between two looks, and who holds the file. Linux's /proc."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.glancing.places import Place

FRESH_SECONDS = 60.0
SILENT_SECONDS = 600.0
_PROC = Path("/proc")
_ACCESS = 0o3  # the bits of open(2)'s flags that say how: 0 is for reading only


@dataclass(frozen=True)
class Writer:
    """A process that holds one of the files open for writing."""

    pid: int
    name: str


@dataclass(frozen=True)
class Alive:
    """How a set of files lives. Absent is not zero: None is what could not be seen."""

    bytes: int
    age_seconds: float | None  # since the last write
    bytes_per_second: float | None  # between two looks; None where nobody seems to write
    rows_per_second: float | None
    writers: tuple[Writer, ...] | None  # those that this user may see
    looked_at: float  # seconds since the epoch

    @property
    def is_fresh(self) -> bool:
        """Written within the last minute."""
        return self.age_seconds is not None and self.age_seconds < FRESH_SECONDS


@dataclass(frozen=True)
class Sight:
    """Sizes at one moment."""

    bytes: int
    changed: float | None
    at: float


def sight_of(places: Sequence[Place], clock: Callable[[], float]) -> Sight:
    """How large the files are now, and when one was written last. What is gone counts nothing."""
    size, newest = 0, None
    for place in places:
        try:
            seen = place.stat()
        except OSError:
            continue
        size += seen.st_size
        if seen.st_mtime is not None:
            newest = seen.st_mtime if newest is None else max(newest, seen.st_mtime)
    return Sight(size, newest, clock())


def alive(
    places: Sequence[Place],
    first: Sight,
    *,
    rows_per_byte: float | None,
    clock: Callable[[], float],
    wait_seconds: float,
) -> Alive:
    """Look again, and say what happened since `first`.

    Where a writer may be at work it is given `wait_seconds` since then to show it.
    """
    writers = writers_of(places)
    if writers and (missing := wait_seconds - (clock() - first.at)) > 0:
        time.sleep(missing)
    now = sight_of(places, clock)
    passed, grown = now.at - first.at, now.bytes - first.bytes
    speed = grown / passed if passed > 0 and grown >= 0 and (writers or grown) else None
    return Alive(
        bytes=now.bytes,
        age_seconds=None if now.changed is None else max(0.0, now.at - now.changed),
        bytes_per_second=speed,
        rows_per_second=None if speed is None or rows_per_byte is None else speed * rows_per_byte,
        writers=writers,
        looked_at=now.at,
    )


def writers_of(places: Sequence[Place]) -> tuple[Writer, ...] | None:
    """Processes that hold one of these files open for writing; None where nobody can say."""
    wanted = {os.path.realpath(place) for place in places if isinstance(place, Path)}
    if not wanted or not _PROC.is_dir():
        return None
    writers = []
    for process in _PROC.iterdir():
        if process.name.isdigit() and _writes(process, wanted):
            writers.append(Writer(int(process.name), _name_of(process)))
    return tuple(sorted(writers, key=lambda one: one.pid))


def _writes(process: Path, wanted: set[str]) -> bool:
    try:
        handles = [*(process / "fd").iterdir()]
    except OSError:  # it ended, or is another user's
        return False
    for handle in handles:
        try:
            if str(handle.readlink()) in wanted and _for_writing(process, handle.name):
                return True
        except OSError:  # closed in this moment
            continue
    return False


def _for_writing(process: Path, handle: str) -> bool:
    for line in (process / "fdinfo" / handle).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "flags":
            return bool(int(value, 8) & _ACCESS)
    return False


def _name_of(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "ended"
