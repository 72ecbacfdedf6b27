"""One writer for a store that several machines reach: an object renewed while its owner lives.

It keeps honest runs apart. It cannot exclude two that start within `SETTLE_SECONDS` while a write
takes longer than that, nor an owner that was paused for longer than `EXPIRES_SECONDS` and writes
before it looks again: stores have no lock to offer. Clocks may differ by some seconds. Segments are
immutable and never overwritten, so even then no row is lost before a commit, which looks first.
"""

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from pipelines.errors import PreflightFailed, RunError, StorageFailed
from pipelines.storage import Location, storage_faults, write_atomically

logger = logging.getLogger(__name__)

EXPIRES_SECONDS = 60.0  # without a heartbeat
RENEW_SECONDS = 10.0
SETTLE_SECONDS = 1.0  # between writing and looking whether somebody wrote at the same time


@dataclass(frozen=True)
class Lease:
    """Who holds a store."""

    owner: str  # user@host
    pid: int
    nonce: str
    heartbeat: float  # seconds since the epoch, by the owner's clock

    def seconds_left(self, now: float) -> float:
        """How long it still holds; below zero once it ran out."""
        return self.heartbeat + EXPIRES_SECONDS - now


@contextmanager
def hold_lease(
    place: Location,
    mark: Path,
    *,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Hold the lease at `place`, renewing it, until the block ends. Raises `PreflightFailed`.

    `mark` is a file beside the caller's own lock, which it holds: the lease named there belonged to
    somebody who is dead, and is followed at once.
    """
    lease = _take(place, mark, clock, sleep)
    ended = threading.Event()
    renewing = threading.Thread(
        target=_renew, args=(place, lease, ended, clock), name="lease", daemon=True
    )
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        _release(place, lease)


def read_lease(place: Location) -> Lease | None:
    """The lease at `place`, or None."""
    try:
        content = place.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return Lease(**json.loads(content))
    except (ValueError, TypeError) as error:
        raise PreflightFailed(
            f"{place} is no lease: {error}",
            expected="the object that the last run left there",
            change="look who writes to that store; if nobody does, remove the object",
        ) from error


def check_lease(place: Location, mark: Path) -> None:
    """Raise `StorageFailed` where somebody else holds the store by now."""
    held = read_lease(place)
    if held is None or not mark.exists() or held.nonce != mark.read_text():
        whose = "nobody" if held is None else f"{held.owner}, pid {held.pid}"
        raise StorageFailed(
            f"the store of {place} is held by {whose}, no longer by this run",
            expected="one run that writes there, and sees its store at least once a minute",
            change="let the other run end, or stop it; then the same command goes on",
        )


def _take(
    place: Location, mark: Path, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Lease:
    with storage_faults(place):
        held = read_lease(place)
    is_own = held is not None and mark.exists() and mark.read_text() == held.nonce
    if held is not None and not is_own and held.seconds_left(clock()) > 0:
        raise _held_by(held, place, clock())
    owner = f"{os.environ.get('USER', 'uid ' + str(os.getuid()))}@{socket.gethostname()}"
    lease = Lease(owner, os.getpid(), secrets.token_hex(8), clock())
    write_atomically(mark, lease.nonce.encode())
    _write(place, lease)
    sleep(SETTLE_SECONDS)
    seen = read_lease(place)
    if seen is None or seen.nonce != lease.nonce:
        raise _held_by(seen or lease, place, clock())
    return lease


def _renew(
    place: Location, lease: Lease, ended: threading.Event, clock: Callable[[], float]
) -> None:
    """Write the heartbeat again and again. A store out of reach is tried again."""
    while not ended.wait(RENEW_SECONDS):
        try:
            held = read_lease(place)
            if held is None or held.nonce != lease.nonce:
                logger.error("%s: somebody else took the lease; the commit will stop", place)
                return
            _write(place, Lease(lease.owner, lease.pid, lease.nonce, clock()))
        except (OSError, RunError) as error:
            logger.warning("the lease at %s could not be renewed: %s", place, error)


def _release(place: Location, lease: Lease) -> None:
    """Give the store free. One that is out of reach by now must not hide why the block ended."""
    try:
        held = read_lease(place)
        if held is not None and held.nonce == lease.nonce:
            place.unlink(missing_ok=True)
    except (OSError, RunError) as error:
        logger.warning(
            "the lease at %s stays for %.0f s: it could not be removed: %s",
            place,
            EXPIRES_SECONDS,
            error,
        )


def _write(place: Location, lease: Lease) -> None:
    write_atomically(place, json.dumps(asdict(lease)).encode())


def _held_by(lease: Lease, place: Location, now: float) -> PreflightFailed:
    return PreflightFailed(
        f"the store of {place} is held by another run ({lease.owner}, pid {lease.pid})",
        expected="one run that writes to a store",
        change=f"wait for that run or stop it; if it is dead, its lease ends in "
        f"{max(0.0, lease.seconds_left(now)):.0f} s; or set another generate.store",
    )
