"""Facts for machines: events as JSON lines, and progress lines for people."""

import errno
import json
import logging
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from pipelines.storage import storage_faults
from pipelines.store import RunFolder

logger = logging.getLogger(__name__)

_BEGINNING_SECONDS = 600.0


class EventLog:
    """Append-only log of one run's changes of state. Never one line per row."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.events

    def append(self, kind: str, **facts: Any) -> None:
        """Write one event, whole or not at all: a single `write` on an append-only handle.

        Raises `StorageFailed` where there is no room or no permission.
        """
        fact = {"at": round(time.time(), 3), "event": kind, **facts}
        line = json.dumps(fact, allow_nan=False).encode() + b"\n"
        with storage_faults(self._path):
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                before = os.fstat(handle).st_size
                if os.write(handle, line) < len(line):  # as much as there was room for
                    os.ftruncate(handle, before)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            finally:
                os.close(handle)


class Progress:
    """A line with count, rate and time left, at most every few seconds; always one at the end.

    Plain lines rather than a bar: the same text serves a terminal, a job log and a file.
    """

    def __init__(
        self, label: str, *, total: int, done: int = 0, unit: str, every_seconds: float = 5.0
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = self._first = done
        self._every = every_seconds
        self._started = self._printed = time.monotonic()

    def advance(self, count: int, notes: Mapping[str, Any] | None = None) -> None:
        """Count `count` more; print if it is time. `notes` are shown as they are."""
        self._done += count
        now = time.monotonic()
        # A run of days has a line a minute: it says that somebody is there, rows or no rows.
        every = self._every if now - self._started < _BEGINNING_SECONDS else 12 * self._every
        is_end = self._done >= self._total and count > 0
        if now - self._printed >= every or is_end:
            self._printed = now
            self._print(now, notes or {})

    def _print(self, now: float, notes: Mapping[str, Any]) -> None:
        elapsed = max(now - self._started, 1e-9)
        rate = (self._done - self._first) / elapsed
        left = (self._total - self._done) / rate if rate > 0 else float("nan")
        share = 100.0 * self._done / self._total if self._total else 100.0
        shown = "".join(f"  {key} {value}" for key, value in notes.items())
        eta = "" if self._done >= self._total else f"  ETA {duration(left)}"
        logger.info(
            "%s  %s/%s %s (%.0f%%)  %.3g %s/s%s%s",
            self._label,
            f"{self._done:,}",
            f"{self._total:,}",
            self._unit,
            share,
            rate,
            self._unit,
            eta,
            shown,
        )


def duration(seconds: float) -> str:
    """Seconds as a person says them: 42s, 3m05s, 2h10m."""
    if seconds != seconds or seconds == float("inf"):
        return "unknown"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def configure_logging() -> None:
    """Send log lines to stderr, plainly. Called by the command only."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    for noisy in ("ray", "transformers", "httpx", "urllib3", "deepspeed", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
