"""Facts for machines: events as JSON lines, and figures to publish; progress lines for people."""

import errno
import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipelines.metrics import METRICS, Reading
from pipelines.storage import storage_faults
from pipelines.store import RunFolder
from pipelines.words import duration as duration

logger = logging.getLogger(__name__)

_BEGINNING_SECONDS = 600.0
_OBSERVATIONS_KEPT = 16_384  # more than a second brings; what nobody publishes must not grow

_Series = tuple[str, tuple[tuple[str, str], ...]]


class Figures:
    """What a stage counts and measures of itself, until somebody publishes it. Any thread may add.

    Adding costs a dictionary's update: it may be done for each row, publishing may not.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._grown: Counter[_Series] = Counter()  # counters, since the last `drain`
        self._totals: Counter[_Series] = Counter()
        self._shown: dict[_Series, float] = {}  # gauges
        self._observed: deque[Reading] = deque(maxlen=_OBSERVATIONS_KEPT)
        self.servers: Callable[[], Sequence[Any]] = tuple  # of the stage, as `ServerStatus`

    def take(self, readings: Iterable[Reading]) -> None:
        """Add to counters, replace what gauges show, keep what histograms observe."""
        taken = list(readings)  # outside the lock, and whole or not at all
        with self._lock:
            for one in taken:
                series = (one.name, tuple(sorted(one.labels.items())))
                match METRICS[one.name].kind:
                    case "counter":
                        self._grown[series] += one.value  # type: ignore[assignment]
                        self._totals[series] += one.value  # type: ignore[assignment]
                    case "gauge":
                        self._shown[series] = one.value
                    case "histogram":
                        self._observed.append(one)

    def drain(self) -> list[Reading]:
        """What counters grew by and histograms observed since the last call, and what every gauge
        shows: one that is not read again and again is gone from Ray's endpoint after seconds."""
        with self._lock:
            grown, self._grown = self._grown, Counter()
            observed = list(self._observed)
            self._observed.clear()
            shown = dict(self._shown)
        return [*_readings({**grown, **shown}), *observed]

    def summary(self) -> dict[str, float]:
        """Every counter's total and what every gauge shows, by series. Empty before the first."""
        with self._lock:
            values = {**self._totals, **self._shown}
        return {one.series: round(one.value, 6) for one in _readings(values)}


def _readings(values: Mapping[_Series, float]) -> list[Reading]:
    return [Reading(name, value, dict(labels)) for (name, labels), value in values.items()]


class EventLog:
    """Append-only log of one run's changes of state. Never one line per row.

    `figures` are what changes all the time; see `pipelines/publish.py`.
    """

    def __init__(self, run: RunFolder) -> None:
        self._path = run.events
        self.figures = Figures()

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
        self,
        label: str,
        *,
        total: int,
        done: int = 0,
        unit: str,
        every_seconds: float = 5.0,
        figures: Figures | None = None,
    ) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._done = self._first = done
        self._every = every_seconds
        self._figures = figures
        self._started = self._printed = time.monotonic()

    def advance(self, count: int, notes: Mapping[str, Any] | None = None) -> None:
        """Count `count` more; print if it is time. `notes` are shown as they are."""
        self._done += count
        if self._figures is not None:
            labels = {"stage": self._label, "unit": self._unit}
            self._figures.take(
                (
                    Reading("eyas_progress_done", self._done, labels),
                    Reading("eyas_progress_wanted", self._total, labels),
                )
            )
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
