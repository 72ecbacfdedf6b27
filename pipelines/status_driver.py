"""Whether anybody is working on a run: here, or on another machine that shares its folder or store.

Nothing here waits for a driver, or disturbs it.
"""

import fcntl
import socket
from dataclasses import dataclass

from pipelines.last_seen import LastSeen
from pipelines.lease import Lease, read_lease
from pipelines.status_events import Events
from pipelines.storage import newest
from pipelines.store import RunFolder

# A driver on Ray writes every few seconds what it sees; clocks may differ by some seconds.
SILENT_SECONDS = 60.0


@dataclass(frozen=True)
class Driver:
    """The process that works on a run."""

    pid: int  # -1 where the folder is held by somebody who has not written yet who it is
    host: str


def find_driver(
    run: RunFolder, seen: LastSeen | None, now: float, *, host: str | None = None
) -> Driver | None:
    """The living driver, or None. `host` is this machine's name.

    On this machine the lock of the run folder decides. Where a file system tells no other machine
    of a lock, a driver there is known by what it keeps writing: `servers.json`, and its lease.
    """
    here = socket.gethostname() if host is None else host
    is_fresh = seen is not None and now - seen.at < SILENT_SECONDS
    pid = lock_holder(run)
    if pid is not None:
        is_there = seen is not None and is_fresh and seen.pid == pid
        return Driver(pid, seen.host if seen is not None and is_there else here)
    if seen is not None and is_fresh and seen.host != here:
        return Driver(seen.pid, seen.host)
    lease = None if run.store is None else read_lease(run.lease)
    if lease is not None and lease.seconds_left(now) > 0 and _host_of(lease) != here:
        return Driver(lease.pid, _host_of(lease))
    return None


def lock_holder(run: RunFolder) -> int | None:
    """The pid of the process that holds the run's lock, or None.

    The probe takes a shared lock for a moment: two probes do not see each other, and a driver that
    starts in that very moment is told that the folder is held. So it is released at once.
    """
    try:
        with (run.root / ".lock").open("r") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _pid_in(handle.read()) or -1
            fcntl.flock(handle, fcntl.LOCK_UN)
    except FileNotFoundError:
        return None
    return None


def last_pid(run: RunFolder) -> int | None:
    """Who held the lock last."""
    try:
        return _pid_in((run.root / ".lock").read_text())
    except FileNotFoundError:
        return None


def freshest(run: RunFolder, events: Events) -> float | None:
    """When anything of the run was last written: an event, a segment, a shard, a metric."""
    folders = [run.training, run.features, run.checkpoints]
    times = [folder.stat().st_mtime for folder in folders if folder.exists()]
    metrics = run.training / "metrics.jsonl"
    rows = newest(run.segments)
    times += [] if rows is None else [rows]
    times += [metrics.stat().st_mtime] if metrics.exists() else ()
    times += [events[-1]["at"]] if events else ()
    return max(times, default=None)


def _pid_in(text: str) -> int | None:
    """What a holder writes into the lock file."""
    word = text.removeprefix("pid ").strip()
    return int(word) if word.isdigit() else None


def _host_of(lease: Lease) -> str:
    return lease.owner.rpartition("@")[2]
