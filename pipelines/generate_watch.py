"""The driver's watch while workers ask: counts, progress, alarms. Closes the tap when it must."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from actors.mailbox import Mailbox
from pipelines.conversation import EARLIER_TURN, HISTORY_NOT_EXACT, NO_ROOM
from pipelines.monitor import Monitor, Stop
from pipelines.row_report import RowReport
from pipelines.telemetry import Progress

logger = logging.getLogger(__name__)

# These rows say something of their conversation, and nothing of a set or a server.
_NOT_ASKED = frozenset(f"failed:{one}" for one in (EARLIER_TURN, HISTORY_NOT_EXACT, NO_ROOM))
_LOOK_SECONDS = 1.0
# Workers end their calls when the tap is closed; a driver that waits longer ends them.
_PATIENCE_SECONDS = 30.0


class Watch:
    """Looks every second, in a thread between `with` and its end, whether rows come or not.

    What stops the run is found in `stop` (a gate), or raised by `raise_error`; the tap is closed
    by then, so that the workers end their calls early.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        monitor: Monitor,
        progress: Progress,
        check_servers: Callable[[], None],
        count: Callable[[Sequence[RowReport]], None],
        *,
        stride: int,  # rows between two looks of the monitor: a bad window is seen before it passes
    ) -> None:
        self._stride = stride
        self.stop: Stop | None = None
        # By set: the rows of the window that made the gate fire, and all that came after them.
        self.suspects: dict[str, list[str]] = {}
        self._error: Exception | None = None
        self._over_since: float | None = None
        self._mailbox, self._monitor, self._progress = mailbox, monitor, progress
        self._check_servers, self._count = check_servers, count
        self._looking, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._look_often, name="watch", daemon=True)
        self._tokens, self._started = 0, time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the run must not go on."""
        return self._over_since is not None

    @property
    def is_overdue(self) -> bool:
        """Whether workers have had time enough to end their calls by themselves."""
        over = self._over_since
        return over is not None and time.monotonic() - over > _PATIENCE_SECONDS

    def raise_error(self) -> None:
        """Raise what the thread met, if anything."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None:
            self._look()  # what arrived since counts too
            self.raise_error()

    def look(self) -> bool:
        """Take in what has arrived and judge it now; return whether to go on."""
        try:
            self._look()
            self._check_servers()
        except Exception as error:  # noqa: BLE001  the main thread raises it
            self._error = error
        if not self.is_over and (self._error is not None or self.stop is not None):
            self._over_since = time.monotonic()
            self._mailbox.close()
        return not self.is_over

    def _look_often(self) -> None:
        while not self._ended.wait(_LOOK_SECONDS):
            self.look()

    def _look(self) -> None:
        with self._looking:
            reports: list[RowReport] = self._mailbox.take()
            now = time.monotonic()
            for at in range(0, len(reports), self._stride):
                self._take(reports[at : at + self._stride], now)
            self._count(reports)
            rate = self._tokens / max(now - self._started, 1e-9)
            self._progress.advance(len(reports), {"tokens/s": f"{rate:,.0f}"})
            self._judge(now)  # silence too says something

    def _take(self, reports: Sequence[RowReport], now: float) -> None:
        for one in reports:
            self._tokens += one.output_tokens
            if one.status not in _NOT_ASKED:
                self._monitor.add(one, now)
            if self.stop is not None and self.stop.scope.holds(one):
                self._suspect(one.dataset, one.sample_id)
        self._judge(now)

    def _judge(self, now: float) -> None:
        if self.stop is not None:
            return
        verdict = self._monitor.verdict(now)
        if isinstance(verdict, Stop):
            self.stop = verdict
            for name, ids in self._monitor.suspects(verdict.scope).items():
                for one in ids:
                    self._suspect(name, one)

    def _suspect(self, set_name: str, sample_id: str) -> None:
        self.suspects.setdefault(set_name, []).append(sample_id)
