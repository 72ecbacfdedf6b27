"""Which server gets the next request, and when a server rests. Pure: time and chance are arguments.

No clock, no socket and no lock here; `pool.py` holds the current values.
"""

import enum
from collections.abc import Iterable
from dataclasses import dataclass, replace

from actors.config import PoolConfig
from actors.errors import Overloaded, RequestFault

_LONGEST_BACKOFF_SECONDS = 30.0


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

    def after_success(self) -> "Breaker":
        """The server answered: trust is whole again."""
        return Breaker()

    def after_sending(self, now: float) -> "Breaker":
        """A request leaves. When the rest is over, it is the probe."""
        return replace(self, probing=True) if self.trust(now) is Trust.PROBE else self

    def after_silence(self) -> "Breaker":
        """A request was taken back before it ended: nothing was learned, another may probe."""
        return replace(self, probing=False)


@dataclass(frozen=True)
class ServerState:
    """One server as the pool sees it. `limit` follows what the server can take."""

    url: str
    limit: float
    in_flight: int = 0
    breaker: Breaker = Breaker()

    def allows(self, now: float) -> bool:
        """Whether one more request may leave now."""
        match self.breaker.trust(now):
            case Trust.TRUSTED:
                return self.in_flight < int(self.limit)
            case Trust.PROBE:
                return True
            case Trust.RESTING:
                return False

    def after_sending(self, now: float) -> "ServerState":
        """One permit is taken."""
        return replace(self, in_flight=self.in_flight + 1, breaker=self.breaker.after_sending(now))

    def after_success(self, config: PoolConfig) -> "ServerState":
        """One permit comes back, and the limit grows by one for every `limit` successes."""
        limit = min(float(config.max_in_flight_per_server), self.limit + 1.0 / self.limit)
        return replace(
            self, in_flight=self.in_flight - 1, limit=limit, breaker=self.breaker.after_success()
        )

    def after_fault(self, fault: RequestFault, now: float, config: PoolConfig) -> "ServerState":
        """One permit comes back. "I am full" lowers the limit; a broken reply lowers trust."""
        state = replace(self, in_flight=self.in_flight - 1)
        if fault.blames_server:
            return replace(state, breaker=self.breaker.after_fault(now, config))
        limit = max(1.0, self.limit - 1.0) if isinstance(fault, Overloaded) else self.limit
        return replace(state, limit=limit, breaker=self.breaker.after_success())

    def after_silence(self) -> "ServerState":
        """One permit comes back from a request that was cancelled."""
        return replace(self, in_flight=self.in_flight - 1, breaker=self.breaker.after_silence())


def choose(states: Iterable[ServerState], now: float) -> str | None:
    """The URL with the fewest requests in flight among those that may take one; None if none."""
    free = [state for state in states if state.allows(now)]
    return min(free, key=lambda state: (state.in_flight, state.url)).url if free else None


def seconds_until_a_rest_ends(states: Iterable[ServerState], now: float) -> float | None:
    """When `choose` may change its mind without any reply; None if only a reply can change it."""
    ends = [
        state.breaker.rests_until - now
        for state in states
        if state.breaker.rests_until is not None and not state.breaker.probing
    ]
    return max(0.0, min(ends)) if ends else None


def nobody_is_trusted(states: Iterable[ServerState]) -> bool:
    """Whether every server has tripped its breaker and none has answered since."""
    return all(state.breaker.rests_until is not None for state in states)


def backoff_seconds(attempt: int, config: PoolConfig, chance: float) -> float:
    """How long to wait after failed attempt `attempt` (1 is the first): full jitter.

    `chance` is uniform in [0, 1), so that rows that failed together do not come back together.
    """
    assert attempt >= 1
    doublings = min(attempt - 1, 30)
    return chance * min(_LONGEST_BACKOFF_SECONDS, config.backoff_seconds * 2.0**doublings)
