"""What makes a response fit to train on. Pure.

Gates judge one row; `pipelines.monitor` judges the last rows of a set, of a server, of the run.
"""

import collections
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from actors.protocol import Finish
from pipelines.recipe import Gates
from pipelines.split import Close, Split
from pipelines.tool_calls import NO_CALLS, ToolCalls

# A short answer is no loop ("4" is one token only): so many tokens must come again at least.
_LOOP_REPEATS = 16
# Code and tables repeat runs of 8 tokens freely, of 16 seldom; loops repeat any length.
_RUN = 16

_Failed = tuple[str, str]  # the gate's name, and what it saw


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
    content: str,
    gates: Gates,
    reserved: frozenset[int],
    calls: ToolCalls = NO_CALLS,
    declared: Collection[str] = (),
    question: str = "",
) -> Accepted | Rejected:
    """Judge one reply that kept the HTTP contract. The first gate that fails names the row.

    `content` is the decoded answer, `declared` the names of the prompt's tools, `question` the last
    user message (needed where `gates.languages` is set).
    """
    flags = []
    if cut.stray_markers:
        flags.append("stray_marker")
    if calls.undeclared(declared):
        flags.append("undeclared_tool")
    if calls.fault is not None and gates.broken_tool_calls == "flag":
        flags.append(calls.fault)
    failed = (
        _reserved(output_ids, reserved)
        or _loop(output_ids, gates)
        or _repetition(output_ids, gates)
        or _close(cut, gates)
        or _residual(cut)
        or _tool_calls(calls, gates)
        or _finish(finish, gates)
        or _content(cut, content, gates)
        or _language(question, content, gates)
    )
    if failed is None:
        if cut.close is Close.TRUNCATED:
            flags.append("truncated_thinking")
        return Accepted(tuple(flags))
    gate, detail = failed
    return Rejected(gate, detail, tuple(flags))


def _reserved(output_ids: Sequence[int], reserved: frozenset[int]) -> _Failed | None:
    if not reserved or reserved.isdisjoint(output_ids):
        return None
    position = next(at for at, token in enumerate(output_ids) if token in reserved)
    return "reserved_id", f"id {output_ids[position]} at position {position}"


def _loop(output_ids: Sequence[int], gates: Gates) -> _Failed | None:
    most = max(_LOOP_REPEATS - 1, int(gates.max_one_token_share * len(output_ids)))
    ordered = np.sort(np.asarray(output_ids, np.int64))
    if not np.any(ordered[most:] == ordered[:-most]):  # no token comes more than `most` times
        return None
    token, times = collections.Counter(output_ids).most_common(1)[0]
    return "one_token_loop", f"id {token} is {times} of {len(output_ids)} tokens"


def _repetition(output_ids: Sequence[int], gates: Gates) -> _Failed | None:
    repeated, runs = repeated_runs(output_ids, gates.max_repeated_share)
    if repeated < _LOOP_REPEATS or repeated <= gates.max_repeated_share * runs:
        return None
    return "repetition", f"{repeated} of {runs} runs of {_RUN} tokens came before"


def repeated_runs(output_ids: Sequence[int], share: float) -> tuple[int, int]:
    """How many runs of 16 tokens came before in the same response, and how many runs there are.

    Exact where more than `share` of them did; zero where the pairs alone show that it is less.
    """
    runs = len(output_ids) - _RUN + 1
    if runs < 1 or share >= 1.0:  # the second can never be exceeded: the gate is off
        return 0, max(0, runs)
    # Where a run came before, its first pair did too. Counting pairs is much cheaper.
    ids = np.asarray(output_ids, np.int64)
    pairs = np.sort(ids[:-1] << 32 | ids[1:])  # an id has at most 32 bits
    if np.count_nonzero(pairs[1:] == pairs[:-1]) <= share * runs:
        return 0, runs
    return runs - len(
        set(zip(*(output_ids[at : at + runs] for at in range(_RUN)), strict=True))
    ), runs


def _close(cut: Split, gates: Gates) -> _Failed | None:
    match cut.close:
        case Close.NOT_REASONING | Close.NEVER_OPENED | Close.EXPLICIT | Close.IMPLICIT_TOOL:
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


def _residual(cut: Split) -> _Failed | None:
    if cut.residual is None:
        return None
    position, token = cut.residual
    return "residual_marker", f"the content holds the marker id {token} at position {position}"


def _tool_calls(calls: ToolCalls, gates: Gates) -> _Failed | None:
    if calls.fault is None or gates.broken_tool_calls == "flag":
        return None
    return calls.fault, calls.detail


def _finish(finish: Finish, gates: Gates) -> _Failed | None:
    if finish.kind in gates.finish_reasons:
        return None
    return "finish_reason", f"ended by {finish.kind}"


def _content(cut: Split, content: str, gates: Gates) -> _Failed | None:
    if gates.min_content_tokens == 0 or cut.tokens("tool_call"):
        return None
    if not content.strip():
        return "empty_content", "no content but white space, and no tool call"
    tokens = cut.tokens("content")
    if tokens >= gates.min_content_tokens:
        return None
    return "short_content", f"{tokens} tokens of content, at least {gates.min_content_tokens}"


# Scripts

_MIN_LETTERS = 40  # less says little about a language
_PRESENT = 0.1  # of a text's letters: its author uses this script
_SCRIPTS = {
    "Latin": "A-Za-z\u00c0-\u024f\u1e00-\u1eff",
    "Greek": "\u0370-\u03ff",
    "Cyrillic": "\u0400-\u052f",
    "Hebrew": "\u0590-\u05ff",
    "Arabic": "\u0600-\u06ff\u0750-\u077f",
    "Devanagari": "\u0900-\u097f",
    "Bengali": "\u0980-\u09ff",
    "Tamil": "\u0b80-\u0bff",
    "Thai": "\u0e00-\u0e7f",
    # Japanese mixes both, and Chinese is Han alone: one script here.
    "Han and Kana": "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff",
    "Hangul": "\uac00-\ud7af\u1100-\u11ff",
}
_LETTERS = {name: re.compile(f"[{ranges}]+") for name, ranges in _SCRIPTS.items()}
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`|\$[^$\n]*\$", re.DOTALL)


def scripts_of(text: str) -> dict[str, float]:
    """The share of each script in the letters of a text outside code and formulas.

    Empty where there are too few letters to tell.
    """
    prose = _CODE.sub(" ", text)
    known = ("Latin",) if prose.isascii() else tuple(_LETTERS)
    counts = {name: sum(map(len, _LETTERS[name].findall(prose))) for name in known}
    total = sum(counts.values())
    if total < _MIN_LETTERS:
        return {}
    return {name: count / total for name, count in counts.items() if count}


def _language(question: str, content: str, gates: Gates) -> _Failed | None:
    if gates.languages is None:
        return None
    asked, answered = scripts_of(question), scripts_of(content)
    if not asked or not answered:
        return None
    main = max(answered, key=answered.__getitem__)
    if main in asked and asked[main] >= _PRESENT:
        return None
    seen = ", ".join(f"{share:.0%} {name}" for name, share in sorted(asked.items()))
    return "language_drift", f"{answered[main]:.0%} {main}, where the question is {seen}"


def last_question(messages: str) -> str:
    """The last user message of a row's `messages` (JSON)."""
    said = [one["content"] for one in json.loads(messages) if one["role"] == "user"]
    return said[-1] if said else ""
