"""The watch over a run of generate: when must it stop, and what is the matter? Pure but for its
counters; time is an argument.

Rows are watched three ways: by set, by server, and all together. The first `canary_rows` of a set
or a server are its canary; after that the last rows are its window: as many, or as many as may be
in flight if these are more. Each row costs the same, however many came before.
"""

import collections
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipelines.recipe import Gates
from pipelines.row_report import RowReport

Phase = Literal["canary", "window", "stall"]

_LONG = 16  # canaries to a drift window: long enough not to follow a handful of rows
_FEW = 4  # rows of a server, at least, that a judgement rests on
_SAME_TOKENS = 16  # two answers shorter than this may well be the same ("Yes.")

# Replies that break the contract, by the names that `actors` gives them; also missing_*, type_*.
CONTRACT_FAULTS = frozenset(
    {
        "cached_tokens",
        "clipped",
        "completion_tokens",
        "empty_stop",
        "error_in_200",
        "finish_reason",
        "foreign_prompt",
        "foreign_rid",
        "id_out_of_vocabulary",
        "nan",
        "not_an_object",
        "not_json",
        "prompt_tokens",
        "spec_counters",
        "stop_mismatch",
        "too_large",
        "too_many_tokens",
        "weight_version",
    }
)


@dataclass(frozen=True)
class Scope:
    """What is judged. The run as a whole has no name."""

    kind: Literal["run", "set", "server"]
    name: str = ""

    def holds(self, report: RowReport) -> bool:
        """Whether a row belongs to this set or server; none belongs to the run."""
        match self.kind:
            case "set":
                return report.dataset == self.name
            case "server":
                return report.server == self.name
            case "run":
                return False

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else f"the {self.kind}"


@dataclass(frozen=True)
class Figures:
    """What a window shows. A share of nothing is None, not zero."""

    rows: int
    rejected_share: float | None  # failed rows count too
    failed_share: float | None
    fault_share: float | None  # failed by replies that break the contract
    reasoning_share: float | None  # of the rows with a reply
    closed_share: float | None  # of the rows with reasoning
    length_share: float | None  # of the rows with a reply
    duplicate_share: float | None  # of the prompts with a reply of some length
    mean_output_tokens: float | None


@dataclass(frozen=True)
class Go:
    """Nothing speaks against going on."""


@dataclass(frozen=True)
class Stop:
    """What was seen where, what most likely causes it, and what to do."""

    scope: Scope
    phase: Phase
    figures: Figures
    reason: str
    cause: str
    cure: str


@dataclass(frozen=True)
class _Breach:
    reason: str
    cause: str
    cure: str


@dataclass
class _Window:
    """The last `size` rows of a scope, counted. When its canary is over, `later` may be more."""

    size: int
    later: int = 0
    canary: int = field(init=False)
    seen: int = 0  # rows ever
    rows: collections.deque[RowReport] = field(default_factory=collections.deque)
    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    failed: int = 0
    faults: int = 0
    thought: int = 0  # replies with reasoning
    closed: int = 0  # of these
    cut: int = 0  # replies that ended by length
    tokens: int = 0
    answers: collections.Counter[tuple[int, str]] = field(default_factory=collections.Counter)
    hashes: collections.Counter[int] = field(default_factory=collections.Counter)

    @property
    def is_full(self) -> bool:
        return len(self.rows) >= self.size

    @property
    def replies(self) -> int:
        return len(self.rows) - self.failed

    @property
    def bad(self) -> int:
        return len(self.rows) - self.statuses["ok"]

    @property
    def duplicates(self) -> int:
        """Prompts whose reply is that of another prompt too, beyond one for each such reply."""
        return len(self.answers) - len(self.hashes)

    def __post_init__(self) -> None:
        self.canary = self.size

    def add(self, report: RowReport) -> None:
        if self.seen == self.canary:
            self.size = max(self.size, self.later)
        self.seen += 1
        self.rows.append(report)
        self._count(report, 1)
        if len(self.rows) > self.size:
            self._count(self.rows.popleft(), -1)

    def _count(self, one: RowReport, sign: int) -> None:
        _step(self.statuses, one.status, sign)
        if not one.has_reply:
            self.failed += sign
            self.faults += sign * _breaks_the_contract(one.status)
            return
        self.tokens += sign * one.output_tokens
        self.cut += sign * (one.finish_reason == "length")
        if one.reasoning_tokens:
            self.thought += sign
            self.closed += sign * one.closed
        if one.output_tokens >= _SAME_TOKENS:
            answer = (one.output_hash, one.prompt_id)
            before = len(self.answers)
            _step(self.answers, answer, sign)
            _step(self.hashes, one.output_hash, len(self.answers) - before)

    def figures(self) -> Figures:
        rows = len(self.rows)
        return Figures(
            rows=rows,
            rejected_share=_share(self.bad, rows),
            failed_share=_share(self.failed, rows),
            fault_share=_share(self.faults, rows),
            reasoning_share=_share(self.thought, self.replies),
            closed_share=_share(self.closed, self.thought),
            length_share=_share(self.cut, self.replies),
            duplicate_share=_share(self.duplicates, len(self.answers)),
            mean_output_tokens=_share(self.tokens, self.replies),
        )


@dataclass
class _Drift:
    """The length of answers now against the canary's: geometric means, which one giant moves
    little."""

    size: int
    canary: float | None = None  # mean logarithm
    logs: collections.deque[float] = field(default_factory=collections.deque)
    total: float = 0.0

    def add(self, report: RowReport) -> None:
        if not report.has_reply:
            return
        self.logs.append(math.log(max(report.output_tokens, 1)))
        self.total += self.logs[-1]
        if self.canary is None and len(self.logs) == self.size:
            self.canary = self.total / self.size
            self.logs.clear()
            self.total = 0.0
        elif len(self.logs) > _LONG * self.size:
            self.total -= self.logs.popleft()

    @property
    def ratio(self) -> float | None:
        """Now / canary, as soon as there are rows enough."""
        if self.canary is None or len(self.logs) < _LONG * self.size:
            return None
        return math.exp(self.total / len(self.logs) - self.canary)


@dataclass
class _Speed:
    """Output tokens per second now against the canary's. Times are those of arrival here."""

    size: int
    canary: float | None = None
    arrived: collections.deque[tuple[float, int]] = field(default_factory=collections.deque)
    tokens: int = 0
    began: float | None = None  # when the first canary row was asked
    last: float | None = None

    def add(self, report: RowReport, now: float) -> None:
        asked = now - report.latency_ms / 1000
        self.began = asked if self.began is None else min(self.began, asked)
        self.last = now
        self.arrived.append((now, report.output_tokens))
        self.tokens += report.output_tokens
        if self.canary is None and len(self.arrived) == self.size:
            self.canary = self.tokens / (now - self.began) if now > self.began else 0.0
            self.arrived.clear()
            self.tokens = 0
        elif len(self.arrived) > _LONG * self.size:
            self.tokens -= self.arrived.popleft()[1]

    def now(self, now: float) -> float | None:
        """Tokens per second up to now, as soon as there are rows enough."""
        if len(self.arrived) < _LONG * self.size or now <= self.arrived[0][0]:
            return None
        return self.tokens / (now - self.arrived[0][0])


class Monitor:
    """The watch itself: it is told of every durable row, and asked whenever someone likes.

    `sizes` are the numbers of rows of sets, so that the canary of a set with fewer than
    `canary_rows` rows is judged when all of it is there. `in_flight` is how many rows a set, and a
    server, may have in flight: a later window holds as many. Refusals and short answers come back
    first, so that fewer would show them alone whenever many rows are asked at once.
    """

    def __init__(
        self,
        gates: Gates,
        sizes: Mapping[str, int] | None = None,
        in_flight: Mapping[str, int] | None = None,
    ) -> None:
        self._gates, self._sizes = gates, dict(sizes or {})
        self._in_flight = dict(in_flight or {})
        self._windows: dict[Scope, _Window] = {}
        self._drifts: dict[str, _Drift] = {}
        self._speed = _Speed(gates.canary_rows)
        self._stale: set[Scope] = set()  # to be judged again
        self._watched_since: float | None = None

    def add(self, report: RowReport, now: float | None) -> None:
        """Count one row. `now` in seconds, on any clock that `verdict` uses too; None for a row
        of an earlier start, which counts, but tells nothing about speed."""
        self._add_to(Scope("set", report.dataset), report)
        if report.server:
            self._add_to(Scope("server", report.server), report)
        if report.dataset not in self._drifts:
            self._drifts[report.dataset] = _Drift(self._gates.canary_rows)
        self._drifts[report.dataset].add(report)
        if now is not None:
            self._speed.add(report, now)

    def verdict(self, now: float) -> Go | Stop:
        """Judge what has changed since the last verdict, and how long nothing has come.

        A fault of some servers, where others are well, is told as theirs.
        """
        if self._watched_since is None:
            self._watched_since = now
        breached = {}
        for scope in sorted(self._stale, key=lambda one: (one.kind != "set", one.name)):
            breach = self._judge(scope)
            if breach is None:
                self._stale.discard(scope)
            else:
                breached[scope] = breach
        if breached:
            return self._blame(*next(iter(breached.items())))
        for name in self._drifts:
            drifted = self._drift_of(name)
            if drifted is not None:
                return self._stop(Scope("set", name), drifted, "window")
        standing = self._standing(now)
        return Go() if standing is None else standing

    def figures(self, scope: Scope) -> Figures:
        """What the present window of a scope shows."""
        return (self._windows[scope] if scope in self._windows else _Window(1)).figures()

    def suspects(self, scope: Scope) -> dict[str, tuple[str, ...]]:
        """The sample ids of the rows in a scope's present window, by set; none of the run."""
        found: dict[str, list[str]] = {}
        for one in self._windows[scope].rows if scope in self._windows else ():
            found.setdefault(one.dataset, []).append(one.sample_id)
        return {name: tuple(ids) for name, ids in found.items()}

    def _add_to(self, scope: Scope, report: RowReport) -> None:
        if scope not in self._windows:
            size = self._gates.canary_rows
            if scope.kind == "set" and scope.name in self._sizes:
                size = max(1, min(size, self._sizes[scope.name]))
            self._windows[scope] = _Window(size, self._in_flight.get(scope.kind, 0))
        self._windows[scope].add(report)
        self._stale.add(scope)

    def _judge(self, scope: Scope) -> _Breach | None:
        if scope.kind == "server" and len(self._servers()) == 1:
            return None  # the sets say it all
        return breach_of(self._windows[scope], self._gates)

    def _servers(self) -> list[Scope]:
        return [one for one in self._windows if one.kind == "server"]

    def _blame(self, scope: Scope, breach: _Breach) -> Stop:
        """The stop for a breach: told as the fault of some servers, if it is theirs alone."""
        sources = self._servers() if scope.kind == "server" else [scope]
        rows = [one for source in sources for one in self._windows[source].rows]
        ill = ill_servers(rows, self._gates)
        if not ill:
            return self._stop(scope, breach, self._phase(scope))
        worst = max(ill, key=lambda name: (name == scope.name, ill[name].bad, name))
        found = breach_of(ill[worst], self._gates, early=True)
        assert found is not None
        names = ", ".join(sorted(ill))
        told = _Breach(
            found.reason,
            f"a fault of {names} alone, since the other servers' rows are well; {found.cause}",
            f"restart {names} or take it out, and read its log; if more is wrong: {found.cure}",
        )
        server = Scope("server", worst)
        return Stop(
            server, self._phase(server), ill[worst].figures(), told.reason, told.cause, told.cure
        )

    def _phase(self, scope: Scope) -> Phase:
        window = self._windows[scope]
        return "canary" if window.seen <= window.canary else "window"

    def _stop(self, scope: Scope, breach: _Breach, phase: Phase) -> Stop:
        figures = self.figures(scope)
        return Stop(scope, phase, figures, breach.reason, breach.cause, breach.cure)

    def _drift_of(self, name: str) -> _Breach | None:
        ratio, most = self._drifts[name].ratio, self._gates.max_length_drift
        if ratio is None or 1 / most <= ratio <= most:
            return None
        return _Breach(
            f"answers are {ratio:.2g} times as long as in the canary",
            "the weights or the sampling of the servers changed while they ran",
            "compare a late row with an early one (`eyas glance`), and weight_version among them; "
            "if the set is ordered by difficulty, raise generate.gates.max_length_drift",
        )

    def _standing(self, now: float) -> Stop | None:
        """Nothing arrives, or next to nothing."""
        scope, gates = Scope("run"), self._gates
        since = self._speed.last if self._speed.last is not None else self._watched_since
        assert since is not None
        if now - since > gates.max_silent_seconds:
            breach = _Breach(
                f"no row came for {now - since:.0f} s",
                "the servers hang, or one answer takes longer than all that is allowed",
                "ask each server's /health_generate and read its log; if answers do take so long, "
                "raise generate.gates.max_silent_seconds",
            )
            return self._stop(scope, breach, "stall")
        speed, canary = self._speed.now(now), self._speed.canary
        if speed is None or not canary or speed >= gates.min_speed_share * canary:
            return None
        breach = _Breach(
            f"{speed:.1f} output tokens/s, the canary had {canary:.1f}",
            "servers are gone, hang, or share their GPUs with something else",
            "read the server events in events.jsonl and the logs; to let a long tail run, lower "
            "generate.gates.min_speed_share",
        )
        return self._stop(scope, breach, "window")


def ill_servers(rows: Sequence[RowReport], gates: Gates) -> dict[str, _Window]:
    """The servers whose rows are bad where those of the others together are clearly well: they
    keep limits four times as strict. None if no such line can be drawn."""
    by_server: dict[str, list[RowReport]] = {}
    for one in rows:
        if one.server:
            by_server.setdefault(one.server, []).append(one)
    windows = {name: _window_of(some) for name, some in by_server.items()}
    ill = {
        name: window
        for name, window in windows.items()
        if breach_of(window, gates, early=True) is not None
    }
    others = _window_of([one for one in rows if one.server not in ill])
    if len(others.rows) < _FEW or breach_of(others, _stricter(gates), early=True) is not None:
        return {}
    return ill


def _window_of(rows: Sequence[RowReport]) -> _Window:
    window = _Window(max(_FEW, len(rows)))
    for one in rows:
        window.add(one)
    return window


def _stricter(gates: Gates) -> Gates:
    most = ("max_rejected_share", "max_failed_share", "max_fault_share", "max_duplicate_share")
    least = ("min_reasoning_share", "min_closed_share")
    values = gates.model_dump()
    changes = {name: values[name] / 4 for name in most}
    changes |= {name: 1 - (1 - values[name]) / 4 for name in least if values[name] > 0}
    if gates.max_length_share < 1:
        changes["max_length_share"] = gates.max_length_share / 4
    return gates.model_copy(update=changes)


def breach_of(window: _Window, gates: Gates, *, early: bool = False) -> _Breach | None:
    """What is wrong with a window, if anything.

    Before it is full, only what no further rows can mend; with `early`, what it shows so far.
    """
    rows, replies = len(window.rows), window.replies
    # A share of a few rows says little: so many have to be bad at least.
    least = min(window.size, max(2, window.size // 8))

    def over(bad: int, base: int, most: float) -> bool:
        known = base if early or window.is_full else max(base, window.size)
        return bad >= least and bad > most * known + 1e-9

    if over(window.faults, rows, gates.max_fault_share):
        return _by_status(window, "failed:", window.faults, "break the contract")
    if over(window.failed, rows, gates.max_failed_share):
        return _by_status(window, "failed:", window.failed, "have no reply")
    if over(window.bad, rows, gates.max_rejected_share):
        return _by_status(window, "", window.bad, "are rejected or failed")
    if over(replies - window.thought, replies, 1 - gates.min_reasoning_share):
        return _Breach(
            f"{window.thought} of {replies} replies hold reasoning",
            "the chat template does not open thinking, or the profile's marker ids are not the "
            "target's",
            "check template_arguments, think_open_id and think_close_id (or channels) of the "
            "target profile",
        )
    if over(window.thought - window.closed, window.thought, 1 - gates.min_closed_share):
        return _Breach(
            f"{window.thought - window.closed} of {window.thought} replies never end their "
            "reasoning",
            "max_new_tokens is too small for this target's thinking, or think_close_id is wrong",
            "raise generate.sampling.max_new_tokens, or correct think_close_id",
        )
    if over(window.cut, replies, gates.max_length_share):
        return _Breach(
            f"{window.cut} of {replies} replies are cut at max_new_tokens",
            "max_new_tokens is too small, or answers do not end (a stop id is missing)",
            "raise generate.sampling.max_new_tokens, or add the id to stop_token_ids",
        )
    if over(window.duplicates, len(window.answers), gates.max_duplicate_share):
        return _Breach(
            f"{window.duplicates} of {len(window.answers)} prompts have the very reply of another",
            "broken weights or numerics, a cache that mixes requests up, or prompts that are "
            "nearly the same",
            "read three of the rows with `eyas glance`; if the prompts ask for the same answer, "
            "raise generate.gates.max_duplicate_share",
        )
    return None


def explain(status: str) -> tuple[str, str]:
    """The usual cause of a row's status, and the cure."""
    if status in _CAUSES:
        return _CAUSES[status]
    if _breaks_the_contract(status):
        return (
            "the servers do not answer as SGLang 0.5.23 does: a NaN, another version, or something "
            "between that changes replies",
            "read the detail of the rows; check the servers' version and log, and for a NaN their "
            "weights and dtype",
        )
    return (
        "the servers cannot be reached, are overloaded, or refuse the prompts",
        "read the detail of the rows and the servers' logs",
    )


def _by_status(window: _Window, prefix: str, bad: int, what: str) -> _Breach:
    counts = {
        status: times
        for status, times in window.statuses.items()
        if status != "ok" and status.startswith(prefix)
    }
    status = max(counts, key=lambda one: (counts[one], one))
    cause, cure = explain(status)
    reason = f"{bad} of {len(window.rows)} rows {what}, {counts[status]} of them {status}"
    return _Breach(reason, cause, cure)


def _breaks_the_contract(status: str) -> bool:
    fault = status.removeprefix("failed:")
    return fault != status and (fault in CONTRACT_FAULTS or fault.startswith(("missing_", "type_")))


def _step(counter: collections.Counter, key: object, by: int) -> None:
    """Count, and forget what comes to nothing."""
    if by == 0:
        return
    counter[key] += by
    if counter[key] == 0:
        del counter[key]


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


_TOOL_CURE = (
    "raise generate.sampling.max_new_tokens, check tool_markers of the target profile, or keep "
    "such rows with generate.gates.broken_tool_calls: flag"
)
_CAUSES = {
    "rejected:missing_think_close": (
        "the target ends its turn without closing its thinking",
        "check that the template opens thinking only where the target was trained to close it",
    ),
    "rejected:unopened_think_close": (
        "the prompt opens thinking by other ids than the profile's",
        "check think_open_id of the target profile against the end of a prompt's ids",
    ),
    "rejected:truncated_thinking": (
        "max_new_tokens is too small for this target's thinking",
        "raise generate.sampling.max_new_tokens and prompts.context_tokens",
    ),
    "rejected:residual_marker": (
        "the target writes its markers in an order that the profile does not know",
        "read one such row with `eyas glance`, and compare the profile with the target's template",
    ),
    "rejected:truncated_tool_call": ("max_new_tokens cuts tool calls off", _TOOL_CURE),
    "rejected:malformed_tool_call": (
        "the target writes its calls in another format than tool_markers.format",
        _TOOL_CURE,
    ),
    "rejected:invalid_tool_json": (
        "the target's arguments are not JSON: its format is another one, or sampling is too hot",
        _TOOL_CURE,
    ),
    "rejected:finish_reason": (
        "answers end otherwise than generate.gates.finish_reasons allows",
        "raise generate.sampling.max_new_tokens, or allow length",
    ),
    "rejected:empty_content": (
        "the target stops at once: the prompt's template is not the one it was trained on",
        "read a prompt with `eyas glance` and compare it with the target's own chat template",
    ),
    "rejected:short_content": (
        "answers are shorter than generate.gates.min_content_tokens",
        "lower it, if short answers are right for these prompts",
    ),
    "rejected:one_token_loop": (
        "broken weights or numerics (NaN logits repeat one token), or a sampling that loops",
        "ask the server one prompt by hand; check its dtype and generate.sampling",
    ),
    "rejected:repetition": (
        "a sampling that loops (greedy, small targets), or broken numerics",
        "read one such row; raise temperature, or generate.gates.max_repeated_share",
    ),
    "rejected:language_drift": (
        "the target answers in another language than it is asked in",
        "read one such row; for sets that ask for translations, set generate.gates.languages: null",
    ),
    "rejected:reserved_id": (
        "broken weights or numerics: sane answers never hold reserved ids",
        "ask the server one prompt by hand; check its dtype and its log",
    ),
}
