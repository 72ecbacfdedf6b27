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
from typing import Any

from actors.pool import Completed, Failed
from pipelines.errors import StorageFailed
from pipelines.row_report import RowReport, report_of
from pipelines.segments import SegmentWriter

logger = logging.getLogger(__name__)

Row = dict[str, Any]

_FLUSH_SECONDS = 1.0
_FLUSH_ROWS = 64
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
    row: Row
    kept: "asyncio.Future[Row | None]"


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
        self._fresh: list[tuple[Answered, asyncio.Future[Row | None]]] = []
        self._made: list[_Entry] = []
        self._broken: BaseException | None = None
        # One thread each: rows are made in their order, and a slow disk holds up no splitting.
        self._maker, self._disk = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    async def __aenter__(self) -> "Ledger":
        self._arrived, self._full = asyncio.Event(), asyncio.Event()
        self._making, self._flushing = asyncio.Lock(), asyncio.Lock()
        self._tasks = [asyncio.create_task(one()) for one in (self._make_often, self._flush_often)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.flush()
        self._maker.shutdown()
        self._disk.shutdown()

    async def keep(self, answered: Answered) -> Row | None:
        """Return the row once it is durable; None if its server is by now another one, so that the
        reply cannot be trusted. Raises `StorageFailed` when rows cannot be written any more.

        Who stops waiting loses nothing: the row is written all the same.
        """
        if self._broken is not None:
            raise self._broken
        kept: asyncio.Future[Row | None] = asyncio.get_running_loop().create_future()
        self._fresh.append((answered, kept))
        self._arrived.set()
        return await kept

    async def flush(self) -> None:
        """Make everything durable that was handed over before this call."""
        async with self._flushing:
            await self._make_fresh()
            entries, self._made = self._made, []
            self._full.clear()
            if not entries:
                return
            try:
                trusted = await self._trusted(entries)
                rows = [one.row for one in entries if one.answered.outcome.server in trusted]
                await self._write(rows)
            except Exception as error:
                self._break(error, entries)
                raise
        for one in entries:
            if not one.kept.done():
                one.kept.set_result(one.row if one.answered.outcome.server in trusted else None)

    async def _make_often(self) -> None:
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await self._make_fresh()

    async def _make_fresh(self) -> None:
        async with self._making:
            fresh, self._fresh = self._fresh, []
            if not fresh:
                return
            loop = asyncio.get_running_loop()
            rows = await loop.run_in_executor(self._maker, self._make_all, fresh)
            for (answered, kept), row in zip(fresh, rows, strict=True):
                if not isinstance(row, Exception):
                    self._made.append(_Entry(answered, row, kept))
                elif not kept.done():
                    kept.set_exception(row)
        if len(self._made) >= _FLUSH_ROWS:
            self._full.set()

    def _make_all(
        self, fresh: Sequence[tuple[Answered, "asyncio.Future[Row | None]"]]
    ) -> list[Row | Exception]:
        made: list[Row | Exception] = []
        for answered, _ in fresh:
            try:
                made.append(self._make(answered))
            except Exception as error:  # noqa: BLE001  it belongs to this row's waiter alone
                made.append(error)
        return made

    async def _flush_often(self) -> None:
        while self._broken is None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._full.wait(), _FLUSH_SECONDS)
            try:
                await self.flush()
            except Exception as error:  # noqa: BLE001  every waiter has it already
                logger.error("rows cannot be made durable: %s", error)

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
        reports = [report_of(row) for row in rows]
        loop = asyncio.get_running_loop()
        for row in rows:
            self._writers[row["dataset"]].add(row)
        began = time.monotonic()
        for attempt in itertools.count(1):
            try:
                await loop.run_in_executor(self._disk, self._write_segments)
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
        await loop.run_in_executor(self._disk, self._report, reports)

    def _write_segments(self) -> None:
        for writer in self._writers.values():
            writer.flush()

    def _break(self, error: BaseException, entries: Sequence[_Entry]) -> None:
        self._broken = error
        waiting = [one.kept for one in entries] + [kept for _, kept in self._fresh]
        for kept in waiting:
            if not kept.done():
                kept.set_exception(error)
