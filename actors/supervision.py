"""What is known of one server, when it is started again, and what is worth an event. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from actors.config import Supervised
from actors.dispatch import ServerReport
from actors.protocol import Load

# starting: no healthy answer yet. checking: it answers, and whether it fits is being asked.
# left: an attached server that does not answer now. unfit, failed: for good.
State = Literal["starting", "checking", "ready", "restarting", "left", "unfit", "failed"]
ENDED: frozenset[State] = frozenset({"unfit", "failed"})

# Of an error in an event: the sentence before a log's tail, and the end of that tail.
_FIRST_LETTERS, _LAST_LETTERS = 200, 1800
_HOUR_SECONDS = 3600.0
_LONGEST_DELAY_SECONDS = 300.0
# A report this old says nothing of the load; the server itself may be well.
_STALE_SECONDS = 15.0
# A server that we start lives where its supervisor lives: without a word from it both are gone.
_LOST_SECONDS = 60.0


@dataclass(frozen=True)
class ServerStatus:
    """One server as its supervisor sees it. A value: each event returns the next one."""

    name: str
    borrowed: bool
    url: str = ""  # "" until it is known
    state: State = "starting"
    incarnation: str = ""  # another one for every process that answers behind the URL
    starts: int = 0  # processes so far; for an attached server, how often it came
    error: str = ""  # why it is not ready, or was not the last time
    load: Load | None = None
    seen_at: float = 0.0  # seconds since the epoch
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None

    @property
    def restarts(self) -> int:
        """How often it was started again."""
        return max(0, self.starts - 1)

    def report(self) -> ServerReport:
        """What a pool is told."""
        return ServerReport(
            url=self.url,
            ready=self.state == "ready",
            load=self.load,
            seen_at=self.seen_at,
            max_total_num_tokens=self.max_total_num_tokens,
            max_running_requests=self.max_running_requests,
        )

    def after_silence(self, seconds: float) -> "ServerStatus":
        """The same after so many seconds without a word from its supervisor."""
        if seconds < _STALE_SECONDS:
            return self
        quiet = replace(self, load=None)
        if self.borrowed or self.state in ENDED or seconds < _LOST_SECONDS:
            return quiet
        return replace(quiet, state="restarting", error="its supervisor is silent")


def restart_delay(
    deaths: Sequence[float], now: float, config: Supervised, *, was_ready: bool
) -> float | None:
    """Seconds to wait before the next start, or None to give up. `deaths` has the latest one.

    A server that was never ready is tried once more only: a port or a GPU may still have been held.
    """
    recent = sum(now - death < _HOUR_SECONDS for death in deaths)
    allowed = config.restarts_per_hour if was_ready else min(1, config.restarts_per_hour)
    if recent > allowed:
        return None
    return min(_LONGEST_DELAY_SECONDS, config.restart_seconds * 2.0 ** (recent - 1))


def events_between(before: ServerStatus, after: ServerStatus) -> list[tuple[str, dict[str, Any]]]:
    """The events, with their fields, that lead from one look at a server to the next."""
    named = {"server": after.name, "url": after.url or before.url}
    events: list[tuple[str, dict[str, Any]]] = []
    replaced = after.incarnation != before.incarnation
    if before.state == "ready" and (replaced or after.state != "ready"):
        name = "server_left" if after.borrowed else "server_died"
        events.append((name, {**named, "error": _shortened(after.error)}))
    if after.starts > before.starts and not after.borrowed:
        events.append(("server_started", {**named, "start": after.starts}))
    if after.state == before.state and not replaced:
        return events
    match after.state:
        case "ready":
            name = "server_joined" if after.borrowed else "server_ready"
            events.append((name, {**named, "start": after.starts}))
        case "restarting":
            events.append(("server_restarting", {**named, "error": _shortened(after.error)}))
        case "unfit" | "failed":
            events.append((f"server_{after.state}", {**named, "error": _shortened(after.error)}))
    return events


def _shortened(error: str) -> str:
    if len(error) <= _FIRST_LETTERS + _LAST_LETTERS:
        return error
    return f"{error[:_FIRST_LETTERS]} ... {error[-_LAST_LETTERS:]}"
