"""What makes a response fit to train on, and when a run must stop. Pure.

Gates judge one row; windows judge the last rows of a set, first of all its canary.
"""

import collections
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from actors.protocol import Finish
from pipelines.recipe import Gates
from pipelines.row_report import RowReport
from pipelines.split import Close, Split

# A short answer is no loop ("4" is one token only): the token must come at least this often.
_LOOP_REPEATS = 16


@dataclass(frozen=True)
class Accepted:
    """The row may be trained on."""

    flags: tuple[str, ...]


@dataclass(frozen=True)
class Rejected:
    """The row is kept aside under the gate's name."""

    gate: str
    detail: str
    flags: tuple[str, ...]


def judge(
    output_ids: Sequence[int],
    cut: Split,
    finish: Finish,
    *,
    gates: Gates,
    reserved_ids: Collection[int],
) -> Accepted | Rejected:
    """Judge one reply that kept the HTTP contract. The first gate that fails names the row."""
    flags = ("stray_think_marker",) if cut.stray_markers and cut.close is not Close.UNOPENED else ()
    failed = (
        _reserved(output_ids, reserved_ids)
        or _close(cut, gates)
        or _loop(output_ids, gates)
        or _finish(finish, gates)
        or _content(cut, gates)
    )
    if failed is None:
        truncated = ("truncated_thinking",) if cut.close is Close.TRUNCATED else ()
        return Accepted((*flags, *truncated))
    gate, detail = failed
    return Rejected(gate, detail, flags)


def _reserved(output_ids: Sequence[int], reserved_ids: Collection[int]) -> tuple[str, str] | None:
    for position, token in enumerate(output_ids):
        if token in reserved_ids:
            return "reserved_id", f"id {token} at position {position}"
    return None


def _close(cut: Split, gates: Gates) -> tuple[str, str] | None:
    match cut.close:
        case Close.NOT_REASONING | Close.NEVER_OPENED | Close.EXPLICIT:
            return None
        case Close.MISSING_ON_STOP:
            thought = cut.tokens("reasoning")
            return "missing_think_close", f"stopped after {thought} tokens of open thinking"
        case Close.UNOPENED:
            return "unopened_think_close", "thinking is closed that was never opened"
        case Close.TRUNCATED:
            if gates.min_content_tokens == 0:
                return None
            thought = cut.tokens("reasoning")
            return "truncated_thinking", f"out of tokens after {thought} tokens of thinking"


def _loop(output_ids: Sequence[int], gates: Gates) -> tuple[str, str] | None:
    if not output_ids:
        return None
    token, times = collections.Counter(output_ids).most_common(1)[0]
    if times < _LOOP_REPEATS or times <= gates.max_one_token_share * len(output_ids):
        return None
    return "one_token_loop", f"id {token} is {times} of {len(output_ids)} tokens"


def _finish(finish: Finish, gates: Gates) -> tuple[str, str] | None:
    if finish.kind in gates.finish_reasons:
        return None
    return "finish_reason", f"ended by {finish.kind}"


def _content(cut: Split, gates: Gates) -> tuple[str, str] | None:
    content = cut.tokens("content")
    if content >= gates.min_content_tokens:
        return None
    return "empty_content", f"{content} tokens of content, at least {gates.min_content_tokens}"


@dataclass(frozen=True)
class Figures:
    """What a window shows. A share of no rows is None, not zero."""

    rows: int
    rejected_share: float | None  # failed rows count too
    reasoning_share: float | None  # of the rows with a reply
    mean_output_tokens: float | None


@dataclass(frozen=True)
class Go:
    """Nothing speaks against going on."""

    figures: Figures


@dataclass(frozen=True)
class Stop:
    """What was seen, what most likely causes it, and what to do."""

    figures: Figures
    reason: str
    cause: str
    cure: str


@dataclass(frozen=True)
class Window:
    """The last rows of one set, at most `size`."""

    size: int
    reports: tuple[RowReport, ...] = ()

    def after(self, report: RowReport) -> "Window":
        """The window with one more row."""
        return replace(self, reports=(*self.reports, report)[-self.size :])

    @property
    def is_full(self) -> bool:
        """Whether it may be judged."""
        return len(self.reports) == self.size


def judge_window(reports: Sequence[RowReport], gates: Gates) -> Go | Stop:
    """Judge the canary of one set, or any later window of it."""
    figures = figures_of(reports)
    if figures.rejected_share is not None and figures.rejected_share > gates.max_rejected_share:
        bad = collections.Counter(one.status for one in reports if not one.is_ok)
        status, times = bad.most_common(1)[0]
        cause, cure = _explain(status)
        return Stop(
            figures,
            f"{sum(bad.values())} of {len(reports)} rows are rejected or failed, "
            f"{times} of them {status}",
            cause,
            cure,
        )
    share = figures.reasoning_share
    if share is not None and share < gates.min_reasoning_share:
        return Stop(
            figures,
            f"{share:.0%} of the replies hold reasoning",
            "the chat template does not open thinking, or the profile's think ids are not the "
            "target's",
            "check template_arguments, think_open_id and think_close_id of the target profile",
        )
    return Go(figures)


def figures_of(reports: Sequence[RowReport]) -> Figures:
    """Shares and means over rows."""
    replies = [one for one in reports if one.has_reply]
    return Figures(
        rows=len(reports),
        rejected_share=_share(sum(not one.is_ok for one in reports), len(reports)),
        reasoning_share=_share(sum(one.reasoning_tokens > 0 for one in replies), len(replies)),
        mean_output_tokens=_share(sum(one.output_tokens for one in replies), len(replies)),
    )


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


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
    "rejected:finish_reason": (
        "answers end otherwise than generate.gates.finish_reasons allows",
        "raise generate.sampling.max_new_tokens, or allow length",
    ),
    "rejected:empty_content": (
        "the target stops at once: the prompt's template is not the one it was trained on",
        "read a prompt with `eyas glance` and compare it with the target's own chat template",
    ),
    "rejected:one_token_loop": (
        "broken weights or numerics (NaN logits repeat one token), or a sampling that loops",
        "ask the server one prompt by hand; check its dtype and generate.sampling",
    ),
    "rejected:reserved_id": (
        "broken weights or numerics: sane answers never hold reserved ids",
        "ask the server one prompt by hand; check its dtype and its log",
    ),
}


def _explain(status: str) -> tuple[str, str]:
    if status.startswith("failed:"):
        return (
            "the servers do not answer as their contract says",
            "read the detail of the rows and the servers' logs",
        )
    return _CAUSES[status]
