"""Which server gets the next request, how many it may hold, and when it rests.

Pure: time and chance are arguments; no clock, no socket and no lock here. `pool.py` holds the
values and calls this.
"""

import bisect
import collections
import enum
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from actors.config import PoolConfig
from actors.errors import Overloaded, RequestFault
from actors.protocol import Load

_LONGEST_BACKOFF_SECONDS = 30.0
_FIRST_LIMIT = 16  # requests in flight at a server of which nothing is known yet
_KV_SHARE = 0.95  # of a server's KV pool; the rest is its own slack
_LENGTHS_WANTED = 32  # outputs to have seen before their lengths say anything
_LENGTHS_KEPT = 512
# A queue this small beside what runs keeps a server busy while answers travel.
_QUEUE_SHARE = 0.1
_QUEUE_ROOM = 2
# A server keeps a prompt's next request while it is at most this much fuller than the emptiest.
_AFFINITY_SLACK = 0.25
_FRESH_SECONDS = 10.0


@dataclass(frozen=True)
class ServerReport:
    """What the supervisor of the servers knows of one of them.

    `ready` False: send nothing new (it is down, restarting, leaving or unfit). `load` None: unknown
    (a gateway, or not asked yet). `seen_at`: when the load was seen, in seconds since the epoch.
    """

    url: str
    ready: bool
    load: Load | None
    seen_at: float
    max_total_num_tokens: int | None
    max_running_requests: int | None


class Trust(enum.Enum):
    """What may be sent to a server now."""

    TRUSTED = "trusted"
    RESTING = "resting"
    PROBE = "probe"  # the rest is over: one request may try


@dataclass(frozen=True)
class Breaker:
    """Trust in one server. A value: each event returns the next one."""

    faults: int = 0  # consecutive, and blaming the server
    rests_until: float | None = None
    probing: bool = False

    def trust(self, now: float) -> Trust:
        """Closed, open or half open, as the literature calls it."""
        if self.rests_until is None:
            return Trust.TRUSTED
        if now < self.rests_until or self.probing:
            return Trust.RESTING
        return Trust.PROBE

    def after_fault(self, now: float, config: PoolConfig) -> "Breaker":
        """A fault that blames the server. While it rests, late faults prolong nothing."""
        faults = self.faults + 1
        if self.rests_until is None:
            rests = faults >= config.trip_after
            return Breaker(faults, now + config.rest_seconds if rests else None)
        if now < self.rests_until:
            return replace(self, faults=faults)
        return Breaker(faults, now + config.rest_seconds)

    def after_no_answer(self, now: float, config: PoolConfig) -> "Breaker":
        """The server does not even say what it is: it rests at once."""
        return Breaker(self.faults, now + config.rest_seconds)

    def after_identity(self, config: PoolConfig) -> "Breaker":
        """The server says again what it is: that ends a rest for not saying it, and no other."""
        return Breaker(self.faults) if self.faults < config.trip_after else self

    def after_success(self) -> "Breaker":
        """The server answered: trust is whole again."""
        return _WHOLE

    def after_sending(self, now: float) -> "Breaker":
        """A request leaves. When the rest is over, it is the probe."""
        return replace(self, probing=True) if self.trust(now) is Trust.PROBE else self

    def after_silence(self) -> "Breaker":
        """A request was taken back before it ended: nothing was learned, another may probe."""
        return replace(self, probing=False) if self.probing else self


_WHOLE = Breaker()


@dataclass(frozen=True)
class Demand:
    """What one request asks of a server. `avoid` is a server that just answered it badly."""

    prompt_tokens: int
    max_new_tokens: int
    avoid: str = ""


@dataclass(slots=True)
class ServerState:
    """One server as the pool sees it: trust, how much it holds, how much it may hold.

    It changes in place, unlike the values around it: a row changes it several times, and copies of
    it would be a third of what a row costs.

    The limit on requests begins small, doubles each round of answers until the server first shows
    that it is full, and then grows by one a round; each sign of fullness cuts it, once a round.
    """

    url: str
    limit: float
    is_open: bool = True  # its supervisor lets new requests come
    is_known: bool = False  # it said what it is, and that fits
    in_flight: int = 0
    tokens_in_flight: int = 0  # as the requests in flight were counted when they left
    breaker: Breaker = _WHOLE
    reached_at: float = float("-inf")  # when it last held as many requests as it may
    doubles: bool = True  # the first, steep part of the climb
    cut_at: float = float("-inf")
    may_cut: bool = True  # a request that left after the last cut has come back
    full_until: float = float("-inf")  # it asked to be left alone, or has room for nothing
    refusals: int = 0  # "I am full", in a row
    load: Load | None = None
    load_at: float = float("-inf")
    load_stamp: float = float("-inf")  # the same moment, as the report has it
    in_flight_at_load: int = 0
    idle_since: float | None = None  # since when every report says that it does nothing
    max_total_num_tokens: int | None = None  # over all data-parallel ranks
    max_running_requests: int | None = None

    @classmethod
    def first(cls, url: str, config: PoolConfig) -> "ServerState":
        """A server of which nothing is known yet."""
        return cls(url, float(min(_FIRST_LIMIT, config.max_in_flight_per_server)))

    def is_usable(self) -> bool:
        """Whether requests go there in the normal course of things."""
        return self.is_open and self.is_known and self.breaker.rests_until is None

    def cost(self, demand: Demand, expected_tokens: int | None, share: float) -> int:
        """The KV tokens that a request is expected to need here.

        `expected_tokens` is what nine of ten answers stay below. Before it is known, an answer is
        taken to be as long as it may be, but at most a quarter of this pool's share: an unknown
        target may think long, and yet a few requests must run before anything can be learnt.
        """
        expected = expected_tokens
        if expected is None:
            room = self._token_room(share)
            expected = demand.max_new_tokens if room is None else room // 4
        return demand.prompt_tokens + min(expected, demand.max_new_tokens)

    def has_room(self, cost: int, now: float, share: float) -> bool:
        """Whether one more request of this many KV tokens may leave now. One always may."""
        if not (self.is_open and self.is_known) or now < self.full_until:
            return False
        if self.breaker.rests_until is not None:
            return self.breaker.trust(now) is Trust.PROBE
        if self.in_flight == 0:
            return True
        room = self._token_room(share)
        return self.in_flight < int(self.limit) and (
            room is None or self.tokens_in_flight + cost <= room
        )

    def busyness(self, now: float) -> float:
        """How full it is relative to what it can take, with what others are known to send it."""
        own = self.in_flight / self.limit
        if (
            self.load is None
            or self.max_running_requests is None
            or now - self.load_at > _FRESH_SECONDS
        ):
            return own
        since = self.in_flight - self.in_flight_at_load
        there = self.load.running + self.load.waiting + since
        return max(own, there / self.max_running_requests)

    def send(self, cost: int, now: float) -> None:
        """One permit is taken."""
        self.in_flight += 1
        self.tokens_in_flight += cost
        if self.in_flight >= int(self.limit):
            self.reached_at = now
        self.breaker = self.breaker.after_sending(now)

    def succeed(
        self, cost: int, sent_at: float, now: float, config: PoolConfig, *, retracted: bool
    ) -> None:
        """One permit comes back with an answer. `retracted`: the server ran out of KV memory."""
        self.may_cut = self.may_cut or sent_at >= self.cut_at
        if retracted:
            self._cut(sent_at, now, 0.5)
        elif self.reached_at >= sent_at:  # a limit that nobody reached has proved nothing
            step = 1.0 if self.doubles else 1.0 / self.limit
            self.limit = min(float(config.max_in_flight_per_server), self.limit + step)
        self._give_back(cost)
        self.refusals = 0
        self.breaker = self.breaker.after_success()

    def fail(
        self, fault: RequestFault, cost: int, sent_at: float, now: float, config: PoolConfig
    ) -> None:
        """One permit comes back. "I am full" lowers the limit; a broken reply lowers trust."""
        self.may_cut = self.may_cut or sent_at >= self.cut_at
        if fault.blames_server:
            self.breaker = self.breaker.after_fault(now, config)
        else:
            self.breaker = self.breaker.after_success()
        if isinstance(fault, Overloaded) and fault.is_full:
            self._refuse(fault.retry_after_seconds, sent_at, now, config)
        self._give_back(cost)

    def _refuse(self, wait: float | None, sent_at: float, now: float, config: PoolConfig) -> None:
        """It has room for nothing more; `wait` is what it asked for, in seconds."""
        if self.limit <= 1.0:  # full even with one request: come back ever more seldom
            self.refusals += 1
            wait = backoff_seconds(self.refusals, config, 1.0) if wait is None else wait
        self._cut(sent_at, now, 0.5)
        if wait is not None:
            self.full_until = max(self.full_until, now + wait)

    def take_back(self, cost: int) -> None:
        """One permit comes back from a request that was cancelled."""
        self._give_back(cost)
        self.breaker = self.breaker.after_silence()

    def hear(self, report: ServerReport, seen_at: float) -> None:
        """Take in what the supervisor says. `seen_at` is on the same clock as every `now` here."""
        self.is_open = report.ready
        load, rank_tokens = report.load, report.max_total_num_tokens
        if rank_tokens is not None:
            self.max_total_num_tokens = rank_tokens
        if report.max_running_requests is not None:
            self.max_running_requests = report.max_running_requests
        if load is None:
            self.load, self.idle_since = None, None
            return
        if report.seen_at <= self.load_stamp:  # heard already
            return
        if load.max_total_num_tokens is not None:
            self.max_total_num_tokens = load.max_total_num_tokens
        if load.max_running_requests is not None:
            self.max_running_requests = load.max_running_requests
        self.load, self.load_at, self.load_stamp = load, seen_at, report.seen_at
        self.in_flight_at_load = self.in_flight
        if load.running or load.waiting:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = seen_at
        # A cut shows only once the requests above it have come back.
        is_settled = self.may_cut and self.in_flight <= self.limit
        if is_settled and load.waiting > self._queue_room(load):
            keeps = (load.running + self._queue_room(load)) / (load.running + load.waiting)
            self._cut(seen_at, seen_at, max(0.5, keeps))

    def is_hung(self, sent_at: float, config: PoolConfig) -> bool:
        """Whether a request that left then was lost: two of the server's own reports say that it
        does nothing, the first of them long after the request left."""
        return (
            self.idle_since is not None
            and self.load_at > self.idle_since
            and self.idle_since >= sent_at + config.hung_after_seconds
        )

    def _token_room(self, share: float) -> int | None:
        """This pool's share of the KV tokens; None if the server does not say how many it has."""
        total = self.max_total_num_tokens
        return None if total is None else int(total * _KV_SHARE * share)

    @staticmethod
    def _queue_room(load: Load) -> float:
        return max(float(_QUEUE_ROOM), _QUEUE_SHARE * load.running)

    def _give_back(self, cost: int) -> None:
        self.in_flight -= 1
        self.tokens_in_flight -= cost
        assert self.in_flight >= 0 <= self.tokens_in_flight, "a permit came back twice"

    def _cut(self, sent_at: float, now: float, keeps: float) -> None:
        """Lower the limit, unless what shows the fullness left before the last cut."""
        if sent_at < self.cut_at:
            return
        self.limit = max(1.0, min(self.limit, float(max(1, self.in_flight))) * keeps)
        self.doubles = self.may_cut = False
        self.cut_at = now


@dataclass
class OutputLengths:
    """How long answers are: the length that nine of ten of the last ones stay below."""

    _recent: collections.deque[int] = field(
        default_factory=lambda: collections.deque(maxlen=_LENGTHS_KEPT)
    )
    _sorted: list[int] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        """One more answer."""
        if len(self._recent) == _LENGTHS_KEPT:
            del self._sorted[bisect.bisect_left(self._sorted, self._recent[0])]
        self._recent.append(tokens)
        bisect.insort(self._sorted, tokens)

    @property
    def ninth_decile(self) -> int | None:
        """None before enough answers were seen."""
        seen = len(self._sorted)
        return None if seen < _LENGTHS_WANTED else self._sorted[9 * seen // 10]


class Affinity:
    """Which server served a key last. Remembers the keys that were used last."""

    def __init__(self, keys: int) -> None:
        self._keys = keys
        self._urls: collections.OrderedDict[str, str] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._urls)

    def url_of(self, key: str) -> str | None:
        """The server that served this key last; None if that is not known (any more)."""
        return self._urls.get(key)

    def remember(self, key: str, url: str) -> None:
        """The key was sent there."""
        self._urls[key] = url
        self._urls.move_to_end(key)
        if len(self._urls) > self._keys:
            self._urls.popitem(last=False)


def choose(
    states: Iterable[ServerState],
    demand: Demand,
    now: float,
    *,
    preferred: str | None = None,
    expected_tokens: int | None = None,
    share: float = 1.0,
) -> ServerState | None:
    """The server for this request: the emptiest that has room, relative to its own limit.

    `preferred` has the request's prefix in its cache: it is taken if it has room and is not clearly
    fuller than the emptiest. None if no server may be asked now.
    """
    free = [
        (one.busyness(now), one.url, one)
        for one in states
        if one.url != demand.avoid
        and one.has_room(one.cost(demand, expected_tokens, share), now, share)
    ]
    if not free:
        return None
    least, _, emptiest = min(free, key=lambda item: item[:2])
    for busyness, url, one in free:
        if url == preferred and busyness <= least + _AFFINITY_SLACK:
            return one
    return emptiest


def seconds_until_a_rest_ends(states: Iterable[ServerState], now: float) -> float | None:
    """When `choose` may change its mind without any reply; None if only a reply can change it."""
    ends = [end - now for state in states if (end := _rest_end(state, now)) is not None]
    return min(ends) if ends else None


def _rest_end(state: ServerState, now: float) -> float | None:
    if not state.is_open:
        return None
    tripped = state.breaker.rests_until
    if tripped is not None and not state.breaker.probing:
        end = max(tripped, state.full_until)
    else:
        end = state.full_until
    return end if end > now else None


def nobody_is_usable(states: Iterable[ServerState]) -> bool:
    """Whether no server is there, known and trusted."""
    return not any(state.is_usable() for state in states)


def backoff_seconds(attempt: int, config: PoolConfig, chance: float) -> float:
    """How long to wait after failed attempt `attempt` (1 is the first): full jitter.

    `chance` is uniform in [0, 1), so that rows that failed together do not come back together.
    """
    assert attempt >= 1
    doublings = min(attempt - 1, 30)
    return chance * min(_LONGEST_BACKOFF_SECONDS, config.backoff_seconds * 2.0**doublings)
