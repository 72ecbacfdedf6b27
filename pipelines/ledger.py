"""Outcomes on their way to disk: made into rows in a thread, confirmed, written, then reported.

The event loop that asks never waits for any of it.
"""

import asyncio
import collections
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from actors.pool import Completed, Failed
from pipelines.errors import StorageFailed
from pipelines.row_report import RowReport, report_of
from pipelines.segments import SegmentWriter

logger = logging.getLogger(__name__)

Row = dict[str, Any]
T = TypeVar("T")

_FLUSH_SECONDS = 1.0
_FLUSH_ROWS = 256
_WRITE_ATTEMPTS = 3
_OUTAGE_SECONDS = 600.0
_LONGEST_PAUSE = 30  # in flush times


@dataclass(frozen=True)
class Answered:
    """One response that was asked for, and how it ended. `prompt` is the prompt's row, with the
    prompt_ids and messages that this turn was asked with."""

    prompt: Mapping[str, Any]
    turn: int
    sample: int
    params: Mapping[str, Any]
    outcome: Completed[Any] | Failed
    ended: float  # monotonic seconds


@dataclass(frozen=True)
class _Entry:
    answered: Answered
    kept: "asyncio.Future[Row | None]"


def _settle(entry: _Entry, row: Row | None) -> None:
    if not entry.kept.done():  # nobody waits for it, or it has failed
        entry.kept.set_result(row)


def _fail(entry: _Entry, error: Exception) -> None:
    if not entry.kept.done():
        entry.kept.set_exception(error)


class Ledger:
    """The one owner of a worker's rows between reply and disk. Enter it inside the event loop."""

    def __init__(
        self,
        make: Callable[[Answered], Row],
        writers: Mapping[str, SegmentWriter],
        *,
        confirm: Callable[[str, float], Awaitable[bool]],
        report: Callable[[Sequence[RowReport]], object],
    ) -> None:
        self._make, self._writers = make, writers
        self._confirm, self._report = confirm, report
        self._waiting: list[_Entry] = []
        self._broken: BaseException | None = None
        self._thread = ThreadPoolExecutor(1)

    async def __aenter__(self) -> "Ledger":
        self._full, self._flushing = asyncio.Event(), asyncio.Lock()
        self._task = asyncio.create_task(self._flush_often())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        await self.flush()
        self._thread.shutdown()

    async def keep(self, answered: Answered) -> Row | None:
        """Return the row once it is durable; None if its server is by now another one, so that the
        reply cannot be trusted. Raises `StorageFailed`, or `OSError` after a long outage, when rows
        cannot be written any more.

        Who stops waiting loses nothing: the row is written all the same.
        """
        if self._broken is not None:
            raise self._broken
        entry = _Entry(answered, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        if len(self._waiting) >= _FLUSH_ROWS:
            self._full.set()
        return await entry.kept

    async def flush(self) -> None:
        """Make everything durable that was handed over before this call."""
        async with self._flushing:
            entries, self._waiting = self._waiting, []
            self._full.clear()
            if not entries:
                return
            try:
                rows, trusted = await asyncio.gather(
                    self._in_thread(self._make_all, entries), self._trusted(entries)
                )
                made = [
                    (entry, row)
                    for entry, row in zip(entries, rows, strict=True)
                    if row is not None and entry.answered.outcome.server in trusted
                ]
                await self._write([row for _, row in made])
            except Exception as error:
                self._break(error, entries)
                raise
        for entry, row in made:
            _settle(entry, row)
        for entry in entries:  # what is left is not to be trusted
            _settle(entry, None)

    async def _flush_often(self) -> None:
        while self._broken is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._full.wait(), _FLUSH_SECONDS)
            try:
                await self.flush()
            except Exception as error:  # noqa: BLE001  every waiter has it already
                logger.error("rows cannot be made durable: %s", error)

    def _make_all(self, entries: Sequence[_Entry]) -> list[Row | None]:
        """One row for each; None for what cannot be made, whose waiter is told why."""
        made: list[Row | None] = []
        for entry in entries:
            try:
                made.append(self._make(entry.answered))
            except Exception as error:  # noqa: BLE001  it belongs to this row's waiter alone
                made.append(None)
                entry.kept.get_loop().call_soon_threadsafe(_fail, entry, error)
        return made

    async def _trusted(self, entries: Sequence[_Entry]) -> set[str]:
        """The servers whose rows may be written; "" stands for rows that no server answered."""
        latest: dict[str, float] = collections.defaultdict(float)
        for one in entries:
            if isinstance(one.answered.outcome, Completed):
                url = one.answered.outcome.server
                latest[url] = max(latest[url], one.answered.ended)
        answers = await asyncio.gather(*(self._confirm(url, at) for url, at in latest.items()))
        changed = {url for url, same in zip(latest, answers, strict=True) if not same}
        if changed:
            logger.warning("rows of %s are asked again: another model answers there", changed)
        return {one.answered.outcome.server for one in entries} - changed

    async def _write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._writers[row["dataset"]].add(row)
        began = time.monotonic()
        for attempt in itertools.count(1):
            try:
                await self._in_thread(self._write_segments)
                break
            except StorageFailed as error:  # somebody has to mend it
                if attempt == _WRITE_ATTEMPTS:
                    raise
                logger.warning("rows are not durable yet: %s", error)
            except OSError as error:  # a store that is away comes back
                if time.monotonic() - began > _OUTAGE_SECONDS:
                    raise
                logger.warning("rows are not durable yet: %s", error)
            await asyncio.sleep(_FLUSH_SECONDS * min(attempt, _LONGEST_PAUSE))
        await self._in_thread(lambda: self._report([report_of(row) for row in rows]))

    def _write_segments(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    async def _in_thread(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def _break(self, error: Exception, entries: Sequence[_Entry]) -> None:
        self._broken = error
        for entry in (*entries, *self._waiting):
            _fail(entry, error)
