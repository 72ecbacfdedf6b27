"""All servers as one: permits, deadlines, retries and trust. The only place that asks twice."""

import asyncio
import collections
import hashlib
import logging
import random
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Generic, TypeVar

from actors import dispatch
from actors.client import Client
from actors.config import PoolConfig
from actors.dispatch import ServerState
from actors.errors import RequestFault, Unreachable
from actors.protocol import Completion, GenerateRequest

logger = logging.getLogger(__name__)

_CHECK_THREADS = 64

T = TypeVar("T")
Check = Callable[[Completion, GenerateRequest], T]


@dataclass(frozen=True)
class Completed(Generic[T]):
    """A reply that kept the contract. `value` is what `check` made of it."""

    completion: Completion
    value: T
    server: str
    attempt: int  # 1 is the first
    queued_ms: int  # waiting for permits, over all attempts
    latency_ms: int  # of the attempt that succeeded


@dataclass(frozen=True)
class Failed:
    """No reply after all attempts: the last fault. `server` is "" if none was asked."""

    fault: str
    detail: str
    server: str
    attempt: int
    queued_ms: int
    latency_ms: int


class Pool:
    """Shares rows out over servers. Enter it inside the event loop that will use it."""

    def __init__(self, urls: Sequence[str], config: PoolConfig, *, vocab_size: int) -> None:
        assert urls, "a pool needs a server"
        self._config = config
        self._clients = {
            url: Client(url, vocab_size=vocab_size, connect_seconds=config.connect_seconds)
            for url in urls
        }
        limit = float(config.max_in_flight_per_server)
        self._states = {url: ServerState(url, limit) for url in self._clients}
        self._waiting: collections.deque[asyncio.Future[str]] = collections.deque()
        # Another pool may ask for the same row while a server still holds the first request.
        self._nonce = secrets.token_hex(8)
        self._wake: asyncio.TimerHandle | None = None
        self._alone_since: float | None = None  # since when no server is trusted

    async def __aenter__(self) -> "Pool":
        self._stack = AsyncExitStack()
        # Of its own: a check may wait for a file, and must not hold up anybody else's threads.
        threads = len(self._clients) * self._config.max_in_flight_per_server
        self._checks = self._stack.enter_context(ThreadPoolExecutor(min(threads, _CHECK_THREADS)))
        for client in self._clients.values():
            await self._stack.enter_async_context(client)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._wake is not None:
            self._wake.cancel()
        await self._stack.aclose()

    async def generate(
        self, request: GenerateRequest, check: Check[T] | None = None
    ) -> Completed[T | None] | Failed:
        """Ask until a reply keeps the contract, a server refuses, or the attempts are used up.

        `check` runs in a thread while the permit is held; a `RequestFault` that it raises counts
        as the attempt's fault. No fault leaves this function as an exception.
        """
        queued, attempt, server = 0.0, 0, ""
        while True:
            asked_at = time.monotonic()
            try:
                url = await self._permit()
            except Unreachable as fault:  # nobody to ask
                queued += time.monotonic() - asked_at
                return Failed(fault.fault, fault.detail, server, attempt, _ms(queued), 0)
            sent_at = time.monotonic()
            queued += sent_at - asked_at
            attempt, server = attempt + 1, url
            outcome = await self._attempt(url, self._named(request, attempt), check)
            latency = time.monotonic() - sent_at
            if not isinstance(outcome, RequestFault):
                completion, value = outcome
                return Completed(completion, value, url, attempt, _ms(queued), _ms(latency))
            if (
                not outcome.retry_helps
                or attempt >= self._config.attempts
                or self._alone_seconds() >= self._config.deadline_base_seconds
            ):
                return Failed(
                    outcome.fault, outcome.detail, url, attempt, _ms(queued), _ms(latency)
                )
            await asyncio.sleep(dispatch.backoff_seconds(attempt, self._config, random.random()))

    async def _attempt(
        self, url: str, request: GenerateRequest, check: Check[T] | None
    ) -> tuple[Completion, T | None] | RequestFault:
        """One attempt with the permit that is held for it, which is given back on every path."""
        config = self._config
        deadline = (
            config.deadline_base_seconds
            + config.deadline_per_token_seconds * request.max_new_tokens
        )
        state_after: Callable[[ServerState], ServerState] = ServerState.after_silence
        try:
            completion = await self._clients[url].generate(request, deadline_seconds=deadline)
            value = None
            if check is not None:
                loop = asyncio.get_running_loop()
                value = await loop.run_in_executor(self._checks, check, completion, request)
        except RequestFault as fault:
            now, seen = time.monotonic(), fault
            state_after = lambda state: state.after_fault(seen, now, config)  # noqa: E731
            return fault
        else:
            state_after = lambda state: state.after_success(config)  # noqa: E731
            return completion, value
        finally:
            self._update(url, state_after(self._states[url]))

    def _named(self, request: GenerateRequest, attempt: int) -> GenerateRequest:
        """The attempt's own rid, of fixed width: SGLang aborts by prefix and refuses a live rid."""
        name = f"{self._nonce}/{request.rid}/{attempt}"
        return replace(request, rid=hashlib.sha256(name.encode()).hexdigest()[:32])

    async def _permit(self) -> str:
        """The URL of the server that may be asked now, in the order of asking."""
        turn: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._serve()
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                url = turn.result()  # the permit came in the same moment
                self._update(url, self._states[url].after_silence())
            raise

    def _serve(self) -> None:
        """Hand out permits while there are both a turn waiting and a server for it."""
        now = time.monotonic()
        while self._waiting:
            if self._waiting[0].done():  # cancelled
                self._waiting.popleft()
                continue
            url = dispatch.choose(self._states.values(), now)
            if url is None:
                break
            self._states[url] = self._states[url].after_sending(now)
            self._waiting.popleft().set_result(url)
        self._set_alarm(now)

    def _set_alarm(self, now: float) -> None:
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        rest = dispatch.seconds_until_a_rest_ends(self._states.values(), now)
        if self._waiting and rest is not None:
            self._wake = asyncio.get_running_loop().call_later(rest, self._serve)

    def _update(self, url: str, state: ServerState) -> None:
        rested = self._states[url].breaker.rests_until is not None
        rests = state.breaker.rests_until is not None
        if rests and not rested:
            logger.warning("%s rests after %d faults in a row", url, state.breaker.faults)
        elif rested and not rests:
            logger.info("%s answers again", url)
        self._states[url] = state
        if not dispatch.nobody_is_trusted(self._states.values()):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = time.monotonic()
        elif self._alone_seconds() >= self._config.deadline_base_seconds:
            self._give_up()
        self._serve()

    def _alone_seconds(self) -> float:
        """For how long no server has been trusted."""
        return 0.0 if self._alone_since is None else time.monotonic() - self._alone_since

    def _give_up(self) -> None:
        """Fail the waiting turns. Rows that come later still probe, once each."""
        fault = Unreachable(
            "no_server", f"no server has answered for {self._alone_seconds():.0f} s"
        )
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(fault)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
