"""All servers as one: permits, deadlines, retries and trust. The only place that asks twice.

A server gets requests while its supervisor calls it ready, it has said what it is, that fits, and
it has not failed too often. What it is is asked before the first request, and again after every
fault of the transport: another process may answer there by then.
"""

import asyncio
import collections
import hashlib
import logging
import random
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Generic, TypeVar

from actors import dispatch
from actors.client import Client
from actors.config import PoolConfig
from actors.dispatch import (
    Affinity,
    Breaker,
    Demand,
    OutputLengths,
    ServerReport,
    ServerState,
    Trust,
)
from actors.errors import BadReply, Overloaded, RequestFault, ServerUnfit, Unreachable
from actors.protocol import Completion, GenerateRequest, ModelInfo, ServerInfo, identity_of

logger = logging.getLogger(__name__)

_CHECK_THREADS = 64
_AFFINITY_KEYS = 16_384
_LOOKAHEAD = 16  # waiting rows that are looked at for one whose prefix a server holds
# Rows wait this long at the start for servers that have not said yet what they are, lest the first
# to do so gets them all.
_GATHER_SECONDS = 1.0

T = TypeVar("T")
Check = Callable[[Completion, GenerateRequest], T]
Fit = Callable[[str, ModelInfo, ServerInfo], None]
Naming = Callable[[str, GenerateRequest], str]


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


@dataclass(frozen=True)
class ServerSnapshot:
    """One server as the pool sees it now. Counts are since the pool was entered."""

    url: str
    trust: str  # trusted, resting, probe; closed, unknown or dismissed
    in_flight: int
    limit: float
    completed: int
    output_tokens: int
    faults: Mapping[str, int]


@dataclass(slots=True, eq=False)
class _Server:
    """What the pool holds for one URL."""

    client: Client
    state: ServerState
    identity: str | None = None
    model: ModelInfo | None = None
    answers_otherwise: bool = False  # its last answer to "what are you" was none of SGLang's
    asked_at: float = float("-inf")  # when the last finished asking for its identity began
    asking: "asyncio.Task[None] | None" = None
    asked: "set[_Lease]" = field(default_factory=set)  # whose answer is still to come
    completed: int = 0
    output_tokens: int = 0
    faults: collections.Counter[str] = field(default_factory=collections.Counter)


@dataclass(slots=True, eq=False)
class _Lease:
    """One permit on one server."""

    server: _Server
    cost: int
    sent_at: float
    task: "asyncio.Task[Any] | None" = None
    is_lost: bool = False  # the server says that it does nothing


@dataclass(slots=True, eq=False)
class _Turn:
    """A row that waits for a permit."""

    demand: Demand
    affinity: str | None
    future: "asyncio.Future[_Lease]"
    passed_over: int = 0


class Pool:
    """Shares rows out over servers. Enter it inside the event loop that will use it.

    `fit` raises `ServerUnfit` for a server that must not be used. Without it a server must stay
    what it was when it was first asked. `share` is this pool's part of each server's KV memory.
    Behind a `gateway` nobody can say which server answers, so none is asked what it is. `naming`
    makes an attempt's rid from 32 characters that no other attempt has, and the request.
    """

    def __init__(
        self,
        urls: Sequence[str],
        config: PoolConfig,
        *,
        vocab_size: int,
        fit: Fit | None = None,
        share: float = 1.0,
        gateway: bool = False,
        naming: Naming | None = None,
    ) -> None:
        assert 0.0 < share <= 1.0
        self._config, self._vocab_size = config, vocab_size
        self._fit, self._share, self._gateway = fit, share, gateway
        self._naming = naming
        self._urls = tuple(urls)
        self._servers: dict[str, _Server] = {}
        self.dismissed: dict[str, ServerUnfit] = {}
        self._waiting: collections.deque[_Turn] = collections.deque()
        self._affinity = Affinity(_AFFINITY_KEYS)
        self._lengths = OutputLengths()
        # Another pool may ask for the same row while a server still holds the first request.
        self._nonce = secrets.token_hex(8)
        self._alarm: asyncio.TimerHandle | None = None
        self._last_silence = ""  # why a server did not say what it is

    async def __aenter__(self) -> "Pool":
        # Of its own: a check may wait for a file, and must not hold up anybody else's threads.
        self._checks = ThreadPoolExecutor(_CHECK_THREADS)
        self._alone_since: float | None = time.monotonic()  # since when no server is usable
        self._gathers_until = time.monotonic() + _GATHER_SECONDS
        for url in self._urls:
            self._add(url)
        self._look_after(time.monotonic())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        asking = [one.asking for one in self._servers.values() if one.asking is not None]
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await asyncio.gather(*(one.client.close() for one in self._servers.values()))
        self._checks.shutdown()

    async def generate(
        self,
        request: GenerateRequest,
        check: Check[T] | None = None,
        *,
        affinity: str | None = None,
    ) -> Completed[T | None] | Failed:
        """Ask until a reply keeps the contract, a server refuses, or the attempts are used up.

        `check` runs in a thread while the permit is held; a `RequestFault` that it raises counts
        as the attempt's fault. No fault leaves this function as an exception. Requests with the
        same `affinity` go to the same server where that costs nothing.
        """
        config = self._config
        queued, attempt, overloads, server = 0.0, 0, 0, ""
        demand = Demand(len(request.input_ids), request.max_new_tokens)
        while True:
            asked_at = time.monotonic()
            try:
                lease = await self._permit(demand, affinity)
            except Unreachable as fault:  # nobody to ask
                queued += time.monotonic() - asked_at
                return Failed(fault.fault, fault.detail, server, attempt, _ms(queued), 0)
            queued += lease.sent_at - asked_at
            attempt, server = attempt + 1, lease.server.state.url
            outcome = await self._attempt(lease, self._named(request, attempt), check)
            latency = time.monotonic() - lease.sent_at
            if not isinstance(outcome, RequestFault):
                completion, value = outcome
                return Completed(completion, value, server, attempt, _ms(queued), _ms(latency))
            overloads += isinstance(outcome, Overloaded)
            faults = attempt - overloads
            if (
                not outcome.retry_helps
                or faults >= config.attempts
                or overloads >= config.overload_attempts
                or self._is_hopeless(time.monotonic())
            ):
                return Failed(
                    outcome.fault, outcome.detail, server, attempt, _ms(queued), _ms(latency)
                )
            demand = replace(demand, avoid=server if outcome.blames_server else "")
            await asyncio.sleep(dispatch.backoff_seconds(attempt, config, random.random()))

    def apply(self, reports: Sequence[ServerReport]) -> None:
        """Take in what the supervisor knows; call it in the pool's event loop.

        Servers that joined are used, those that left or are not ready get nothing new, and requests
        that a server has lost are taken back from it.
        """
        now, wall = time.monotonic(), time.time()
        for report in reports:
            server = self._servers.get(report.url)
            if server is None:
                server = self._add(report.url, is_open=False)
            if report.url in self.dismissed:
                continue
            was_open = server.state.is_open
            # Never later than now: a clock that runs ahead must not make an old report look young.
            server.state.hear(report, min(now, now - (wall - report.seen_at)))
            if server.state.is_open and not was_open:
                server.state.is_known = self._gateway  # perhaps a new process
            if server.state.idle_since is not None:
                self._take_lost(server)
        reported = {report.url for report in reports}
        for url, server in self._servers.items():
            if url not in reported:
                server.state.is_open = False
        self._look_after(now)

    async def confirm(self, url: str, since: float) -> bool:
        """Whether the server is still the one that was checked, or a restarted one that fits.

        Asks it again unless an asking that began after `since` (`time.monotonic`) has ended; calls
        at the same time share one. False if another model answers there now, or none at all.

        A server that cannot be reached is still the one that it was: whoever answered at `since`
        is gone, and nobody has taken its place whose answers could have been mistaken for its own.
        """
        if self._gateway:
            return True
        server = self._servers[url]
        while url not in self.dismissed and server.asked_at <= since:
            await asyncio.shield(self._ask_identity(server))
        return url not in self.dismissed and not server.answers_otherwise

    def snapshot(self) -> tuple[ServerSnapshot, ...]:
        """Every server that this pool has known, in the order in which they came."""
        now = time.monotonic()
        return tuple(
            ServerSnapshot(
                url=url,
                trust=self._trust(server, now),
                in_flight=server.state.in_flight,
                limit=server.state.limit,
                completed=server.completed,
                output_tokens=server.output_tokens,
                faults=dict(server.faults),
            )
            for url, server in self._servers.items()
        )

    # One attempt

    async def _attempt(
        self, lease: _Lease, request: GenerateRequest, check: Check[T] | None
    ) -> tuple[Completion, T | None] | RequestFault:
        """One attempt with the permit that is held for it, which is given back on every path."""
        outcome: tuple[Completion, T | None] | RequestFault | None = None
        try:
            completion = await self._ask(lease, request)
            value = None
            if check is not None:
                loop = asyncio.get_running_loop()
                value = await loop.run_in_executor(self._checks, check, completion, request)
            outcome = completion, value
        except RequestFault as fault:
            outcome = fault
        finally:
            self._settle(lease, outcome)
        return outcome

    async def _ask(self, lease: _Lease, request: GenerateRequest) -> Completion:
        """The answer of the server that the permit is for. Raises `RequestFault`."""
        config, server = self._config, lease.server
        deadline = (
            config.deadline_base_seconds
            + config.deadline_per_token_seconds * request.max_new_tokens
        )
        lease.task = asyncio.current_task()
        server.asked.add(lease)
        try:
            completion = await server.client.generate(request, deadline_seconds=deadline)
        except asyncio.CancelledError:
            if not lease.is_lost or _is_cancelled_by_others(lease.task):
                raise
            waited = time.monotonic() - lease.sent_at
            raise Unreachable(
                "hung", f"the server says that it does nothing, {waited:.0f} s after it was asked"
            ) from None
        finally:
            server.asked.discard(lease)
        model = server.model
        if model is not None and completion.weight_version != model.weight_version:
            raise BadReply(
                "weight_version",
                f"{completion.weight_version!r}, and {model.weight_version!r} when it was checked",
            )
        return completion

    def _settle(self, lease: _Lease, outcome: tuple[Completion, Any] | RequestFault | None) -> None:
        """Give the permit back and learn from how the attempt ended; None is "was cancelled"."""
        now, server = time.monotonic(), lease.server
        state, was_usable = server.state, server.state.is_usable()
        match outcome:
            case None:
                state.take_back(lease.cost)
            case (completion, _):
                retracted = completion.retractions is not None and completion.retractions > 0
                state.succeed(lease.cost, lease.sent_at, now, self._config, retracted=retracted)
                self._lengths.add(completion.completion_tokens)
                server.completed += 1
                server.output_tokens += completion.completion_tokens
            case RequestFault() as fault:
                state.fail(fault, lease.cost, lease.sent_at, now, self._config)
                server.faults[fault.fault] += 1
                if _may_be_another(fault):
                    state.is_known = self._gateway
                if self._is_hopeless(now):  # this was the probe
                    self._give_up(now)
        if state.is_usable() and was_usable:
            self._serve(server, now)
        if was_usable != state.is_usable() or isinstance(outcome, RequestFault):
            self._note(server, was_usable)
            self._look_after(now)

    def _note(self, server: _Server, was_usable: bool) -> None:
        breaker, url = server.state.breaker, server.state.url
        if was_usable and breaker.rests_until is not None:
            logger.warning("%s rests after %d faults in a row", url, breaker.faults)
        elif server.state.is_usable() and not was_usable:
            logger.info("%s answers", url)

    def _take_lost(self, server: _Server) -> None:
        """Interrupt the requests that the server has lost; each ends as a fault of its own."""
        for lease in server.asked:
            if not lease.is_lost and server.state.is_hung(lease.sent_at, self._config):
                assert lease.task is not None
                lease.is_lost = True
                lease.task.cancel()

    def _named(self, request: GenerateRequest, attempt: int) -> GenerateRequest:
        """The attempt's own rid, of fixed width: SGLang aborts by prefix and refuses a live rid."""
        name = f"{self._nonce}/{request.rid}/{attempt}"
        rid = hashlib.sha256(name.encode()).hexdigest()[:32]
        return GenerateRequest(
            rid if self._naming is None else self._naming(rid, request),
            request.input_ids,
            request.sampling_params,
        )

    # Permits

    async def _permit(self, demand: Demand, affinity: str | None) -> _Lease:
        """A permit, in the order of asking. Raises `Unreachable` if there is nobody to ask."""
        now = time.monotonic()
        if not self._waiting:  # otherwise nobody has room: what came earlier would have it
            lease = self._try(demand, affinity, now)
            if lease is not None:
                return lease
        turn = _Turn(demand, affinity, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        is_alone = self._alone_since is not None
        if is_alone and (self._alarm is None or self._is_hopeless(now)):  # else the alarm will do
            self._look_after(now)
        try:
            return await turn.future
        except asyncio.CancelledError:
            future = turn.future
            if future.done() and not future.cancelled() and future.exception() is None:
                self._settle(future.result(), None)  # the permit came in the same moment
            raise

    def _try(self, demand: Demand, affinity: str | None, now: float) -> _Lease | None:
        """A permit on the best server that has room now."""
        if self._is_gathering(now):
            return None
        state = dispatch.choose(
            [one.state for one in self._servers.values()],
            self._effective(demand),
            now,
            preferred=None if affinity is None else self._affinity.url_of(affinity),
            expected_tokens=self._lengths.ninth_decile,
            share=self._share,
        )
        if state is None:
            return None
        server = self._servers[state.url]
        return self._lend(server, self._cost(server, demand), affinity, now)

    def _lend(self, server: _Server, cost: int, affinity: str | None, now: float) -> _Lease:
        server.state.send(cost, now)
        if affinity is not None:
            self._affinity.remember(affinity, server.state.url)
        return _Lease(server, cost, now)

    def _cost(self, server: _Server, demand: Demand) -> int:
        return server.state.cost(demand, self._lengths.ninth_decile, self._share)

    def _effective(self, demand: Demand) -> Demand:
        """Without the server to avoid if there is no other."""
        others = (one.state for url, one in self._servers.items() if url != demand.avoid)
        if demand.avoid and dispatch.nobody_is_usable(others):
            return replace(demand, avoid="")
        return demand

    def _serve(self, server: _Server, now: float) -> None:
        """Give what room this server has to those who wait."""
        state = server.state
        while self._waiting and state.has_room(0, now, self._share):
            if self._is_gathering(now):
                return
            index = self._next_turn(server)
            if index is None:
                return
            turn = self._waiting[index]
            cost = self._cost(server, turn.demand)
            if not state.has_room(cost, now, self._share):
                return
            del self._waiting[index]
            turn.future.set_result(self._lend(server, cost, turn.affinity, now))

    def _next_turn(self, server: _Server) -> int | None:
        """The place of the row that this server serves next: one of the first ones if it holds its
        prefix, or else the first. No row is passed over for long."""
        while self._waiting and self._waiting[0].future.done():  # cancelled
            self._waiting.popleft()
        url, first = server.state.url, None
        lookahead = _LOOKAHEAD if len(self._affinity) else 0
        for index, turn in enumerate(self._waiting):
            if first is not None and index >= lookahead:
                break
            if turn.future.done():
                continue
            if turn.demand.avoid == url and self._effective(turn.demand).avoid:
                continue
            if turn.affinity is not None and self._affinity.url_of(turn.affinity) == url:
                if first is not None:
                    self._waiting[first].passed_over += 1
                return index
            if first is None:
                first = index
                if turn.passed_over >= _LOOKAHEAD:
                    break
        return first

    def _look_after(self, now: float) -> None:
        """What is due when trust changed or time passed: identities, permits, giving up, alarm."""
        for server in self._servers.values():
            state = server.state
            is_due = state.is_open and not state.is_known and server.asking is None
            if is_due and state.breaker.trust(now) is not Trust.RESTING:
                self._ask_identity(server)
        states = [one.state for one in self._servers.values()]
        if not dispatch.nobody_is_usable(states):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        self._share_out(now)
        if self._is_hopeless(now) and not any(one.is_open for one in states):
            self._give_up(now)
        self._set_alarm(states, now)

    def _share_out(self, now: float) -> None:
        """Hand out permits to those who wait, to the emptiest server first."""
        while self._waiting:
            turn = self._waiting[0]
            if turn.future.done():
                self._waiting.popleft()
                continue
            lease = self._try(turn.demand, turn.affinity, now)
            if lease is None:
                break
            self._waiting.popleft()
            turn.future.set_result(lease)
        for server in self._servers.values():  # the first may have to avoid the only free one
            self._serve(server, now)

    def _set_alarm(self, states: Sequence[ServerState], now: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        waits = []
        rest = dispatch.seconds_until_a_rest_ends(states, now)
        if rest is not None:
            waits.append(rest)
        if self._is_gathering(now):
            waits.append(self._gathers_until - now)
        if self._alone_since is not None and not self._is_hopeless(now):
            waits.append(self._alone_since + self._config.deadline_base_seconds - now)
        if waits:
            self._alarm = asyncio.get_running_loop().call_later(min(waits), self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self._look_after(time.monotonic())

    def _is_gathering(self, now: float) -> bool:
        """Whether the pool is young and some server has not said yet what it is."""
        return now < self._gathers_until and any(
            one.state.is_open and one.asking is not None and one.identity is None
            for one in self._servers.values()
        )

    def _is_hopeless(self, now: float) -> bool:
        """Whether no server has been usable for as long as a row waits."""
        since = self._alone_since
        return since is not None and now - since >= self._config.deadline_base_seconds

    def _give_up(self, now: float) -> None:
        """Fail the waiting rows. Rows that come later wait for the next look at an open server."""
        assert self._alone_since is not None
        said = f"; the last one said: {self._last_silence}" if self._last_silence else ""
        fault = Unreachable(
            "no_server", f"no server usable for {now - self._alone_since:.0f} s{said}"
        )
        for turn in self._waiting:
            if not turn.future.done():
                turn.future.set_exception(fault)
        self._waiting.clear()

    # Identity

    def _add(self, url: str, *, is_open: bool = True) -> _Server:
        client = Client(
            url, vocab_size=self._vocab_size, connect_seconds=self._config.connect_seconds
        )
        client.open()
        state = ServerState.first(url, self._config)
        state.is_open, state.is_known = is_open, self._gateway
        server = self._servers[url] = _Server(client, state)
        return server

    def _ask_identity(self, server: _Server) -> "asyncio.Task[None]":
        """The asking that is under way, or a new one."""
        if server.asking is None:
            loop = asyncio.get_running_loop()
            server.asking = loop.create_task(self._identify(server))
        return server.asking

    async def _identify(self, server: _Server) -> None:
        began, was_usable = time.monotonic(), server.state.is_usable()
        fault: RequestFault | None = None
        try:
            model = await server.client.model_info()
            info = await server.client.server_info()
            self._said(server, model, info)
        except RequestFault as seen:
            fault = seen
            self._did_not_say(server, fault)
        finally:
            server.asking = None
        server.asked_at = began
        self._note(server, was_usable)
        now = time.monotonic()
        if fault is not None and self._is_hopeless(now):
            self._give_up(now)
        self._look_after(now)

    def _said(self, server: _Server, model: ModelInfo, info: ServerInfo) -> None:
        """The server says what it is. It is known from here on, or dismissed."""
        state, identity = server.state, identity_of(model, info)
        server.answers_otherwise = False
        if identity != server.identity:
            try:
                if self._fit is not None:
                    self._fit(state.url, model, info)
                elif server.model is not None:
                    _check_same(state.url, server.model, model)
            except ServerUnfit as unfit:
                logger.error("%s is dismissed: %s", state.url, unfit)
                self.dismissed[state.url] = unfit
                state.is_open = state.is_known = False
                return
            if server.identity is not None:
                logger.warning("%s is another process now, and fits", state.url)
                state.breaker = Breaker()  # the faults were those of the process before
            server.identity, server.model = identity, model
        if state.max_total_num_tokens is None:
            state.max_total_num_tokens = info.max_total_num_tokens
        if state.max_running_requests is None:
            state.max_running_requests = info.max_running_requests
        state.breaker = state.breaker.after_identity(self._config)
        state.is_known = True

    def _did_not_say(self, server: _Server, fault: RequestFault) -> None:
        """The server cannot be asked, or answers something else."""
        state, self._last_silence = server.state, f"{server.state.url}: {fault}"
        server.answers_otherwise = not isinstance(fault, Unreachable | Overloaded)
        if state.is_known and fault.fault == "deadline":
            return  # slow is not dead
        if state.is_known or state.breaker.rests_until is None:  # news, unlike the next ones
            logger.warning("%s does not say what it is: %s", state.url, fault)
        server.faults[f"identity_{fault.fault}"] += 1
        state.is_known = False
        state.breaker = state.breaker.after_no_answer(time.monotonic(), self._config)

    def _trust(self, server: _Server, now: float) -> str:
        state = server.state
        if state.url in self.dismissed:
            return "dismissed"
        if not state.is_open:
            return "closed"
        return state.breaker.trust(now).value if state.is_known else "unknown"


def _may_be_another(fault: RequestFault) -> bool:
    """Whether another process may answer at the server's address after this fault."""
    match fault:
        case Unreachable(fault="deadline" | "hung"):
            return False
        case Unreachable() | BadReply(fault="weight_version"):
            return True
        case _:
            return False


def _check_same(url: str, before: ModelInfo, now: ModelInfo) -> None:
    seen, expected = (
        (one.model_path, one.tokenizer_path, one.weight_version) for one in (now, before)
    )
    if seen != expected:
        raise ServerUnfit(
            f"the server {url} now serves model, tokenizer and weight version {seen}",
            expected=f"{expected}, as when it was first asked",
            change="start it with what it served before, and this command again",
        )


def _is_cancelled_by_others(task: "asyncio.Task[Any] | None") -> bool:
    """Take the pool's own cancellation back; whether somebody else's is left."""
    if sys.version_info >= (3, 11) and task is not None:
        return task.uncancel() > 0
    return False


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
