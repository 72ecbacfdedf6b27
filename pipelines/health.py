"""Is a file of responses fit to learn from? Pure counting over rows, then findings with a cure.

Knows the six fields that people of this trade exchange (`sample_id, messages, reasoning, content,
finish_reason, usage`) and Eyas's own rows, which also hold ids. Absent is not zero: a missing
count, a null, an empty string and a zero are four different things here.
"""

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

import numpy as np

Severity = Literal["fault", "warning", "note"]

THINK_MARKERS = ("<think>", "</think>", "◁think▷", "◁/think▷", "<thinking>", "</thinking>")
_SPECIAL = re.compile(r"<\|[a-z0-9_]{2,40}\|>|<｜[^｜\n]{2,40}｜>|\[BOS\]|\[EOS\]")
_RESERVED = re.compile(r"<\|reserved[a-z_]*\d+\|>")
_LENGTHS_KEPT = 100_000
_HASHES_KEPT = 5_000_000
_SERVER_DEFAULT_TOKENS = 128  # SGLang's max_new_tokens where a request does not set it


@dataclass(frozen=True)
class Finding:
    """One thing that a person should know, with why it is so and what to do."""

    severity: Severity
    name: str
    seen: str
    cause: str
    cure: str


@dataclass
class Tally:
    """Rows with some property: how many, and the first one's name."""

    count: int = 0
    first: str = ""

    def add(self, row_name: str) -> None:
        """Count one more."""
        self.first = self.first or row_name
        self.count += 1


@dataclass
class _Repeats:
    """Which values came twice, by 8-byte hashes up to a limit of memory."""

    seen: set[bytes] = field(default_factory=set)
    twice: Tally = field(default_factory=Tally)

    def add(self, value: str, row_name: str) -> None:
        key = blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        if key in self.seen:
            self.twice.add(row_name)
        elif len(self.seen) < _HASHES_KEPT:
            self.seen.add(key)


def looks_like_responses(names: Iterable[str]) -> bool:
    """Whether rows with these top-level fields hold a model's answers."""
    present = set(names)
    return "content" in present and bool(
        present & {"reasoning", "reasoning_content", "finish_reason", "usage", "output_ids"}
    )


class ResponseHealth:
    """Counts over response rows. `add` each row once, then ask for `findings()`."""

    def __init__(self) -> None:
        self.rows = 0  # answers judged: rows with status ok, or without a status
        self.not_ok: Counter[str] = Counter()  # rows kept aside, by their status
        self.finish: Counter[str] = Counter()
        self.usage: Counter[str] = Counter()  # of completion_tokens: ok, missing, null, zero, ...
        self.kept_lengths: list[int] = []  # a uniform sample of completion tokens
        self.with_reasoning = 0
        self.with_segments = 0
        self.count_mismatch = Tally()
        self.think_markers = Tally()
        self.special_tokens = Tally()
        self.reserved_tokens = Tally()
        self.broken_text = Tally()
        self.empty_stopped = Tally()  # no content and no tool call, though it stopped by itself
        self.empty_cut = Tally()  # no content: the answer was cut inside its reasoning
        self.repetitive = Tally()
        self.nan = Tally()
        self.usage_bad = Tally()
        self.same_id = _Repeats()
        self.same_text = _Repeats()
        self._lengths_seen = 0
        self._chooser = random.Random(0)

    def add(self, row: Mapping[str, Any], row_name: str) -> None:
        """Judge one row. `row_name` is its id, or where it stands."""
        identity = _identity(row)
        if identity is not None:
            self.same_id.add(identity, row_name)
        status = row.get("status")
        if isinstance(status, str) and status != "ok":
            self.not_ok[status] += 1
            return
        self.rows += 1
        ids = row.get("output_ids")
        ids = None if ids is None else np.asarray(ids)
        self._add_usage(row, ids, row_name)
        finish = _finish(row)
        self.finish[finish] += 1
        if "NaN happened" in (str(row.get("finish_matched")), str(_matched(row))):
            self.nan.add(row_name)
        reasoning = _text(row.get("reasoning", row.get("reasoning_content")))
        self._add_text(row, reasoning, _text(row.get("content")), ids, finish, row_name)

    def _add_usage(self, row: Mapping[str, Any], ids: np.ndarray | None, row_name: str) -> None:
        kind, count = _completion_tokens(row)
        self.usage[kind] += 1
        if kind != "ok":
            self.usage_bad.add(row_name)
        elif ids is not None and count != len(ids):
            self.count_mismatch.add(row_name)
        if kind == "ok":
            self._lengths_seen += 1
            if len(self.kept_lengths) < _LENGTHS_KEPT:
                self.kept_lengths.append(count)
            elif (at := self._chooser.randrange(self._lengths_seen)) < _LENGTHS_KEPT:
                self.kept_lengths[at] = count

    def _add_text(
        self,
        row: Mapping[str, Any],
        reasoning: str,
        content: str,
        ids: np.ndarray | None,
        finish: str,
        row_name: str,
    ) -> None:
        self.with_reasoning += bool(reasoning.strip())
        self.with_segments += "segments" in row
        if any(marker in content for marker in THINK_MARKERS):
            self.think_markers.add(row_name)
        if _RESERVED.search(content) or _RESERVED.search(reasoning):
            self.reserved_tokens.add(row_name)
        elif _SPECIAL.search(content):
            self.special_tokens.add(row_name)
        if "�" in content:
            self.broken_text.add(row_name)
        if not content.strip() and not _has_tool_calls(row):
            (self.empty_cut if finish == "length" else self.empty_stopped).add(row_name)
        if is_repetitive(content or reasoning, ids):
            self.repetitive.add(row_name)
        if content.strip() or reasoning.strip():
            self.same_text.add(f"{reasoning}\0{content}", row_name)

    def findings(self) -> list[Finding]:
        """What is wrong, worst first. Empty where nothing is."""
        if not self.rows:
            return []
        found = [*self._lost_parts(), *self._bad_counts(), *self._bad_text(), *self._bad_sets()]
        order = {"fault": 0, "warning": 1, "note": 2}
        return sorted(found, key=lambda one: order[one.severity])

    def _lost_parts(self) -> Iterable[Finding]:
        """The story this project was born from, and its single parts."""
        no_usage = sum(self.usage[kind] for kind in ("missing", "null"))
        none_reason = self.with_reasoning == 0
        if none_reason and no_usage == self.rows:
            yield Finding(
                "fault",
                "reasoning_and_usage_lost",
                f"reasoning is empty and usage.completion_tokens is absent in all {self.rows:,} "
                f"rows read{self._marker_note()}",
                "the server ran without a reasoning parser, and whoever wrote the file read "
                "the token counts from a place where the reply does not hold them; the thinking "
                "is lost or lies inside content",
                "stop the run now; check reasoning_parser in the server's /model_info; ask "
                "/generate for output_ids, split them by token id, and store len(output_ids)",
            )
            return
        if no_usage:
            yield Finding(
                "fault",
                "usage_absent",
                f"usage.completion_tokens is missing in {self.usage['missing']:,} and null in "
                f"{self.usage['null']:,} of {self.rows:,} rows; first: {self.usage_bad.first}",
                "the writer took a default for a count that the reply did not hold",
                "treat a reply without completion_tokens as failed and ask again",
            )
        if none_reason and self.think_markers.count:
            yield Finding(
                "fault",
                "reasoning_inside_content",
                f"reasoning is empty everywhere, and {self.think_markers.count:,} contents hold "
                f"think markers; first: {self.think_markers.first}",
                "the server had no reasoning parser, or one for another model (kimi for kimi_k2)",
                "split by the think-close token id; text parsers of servers are not to be trusted",
            )
        elif none_reason and not self.with_segments:
            yield Finding(
                "warning",
                "reasoning_empty",
                f"reasoning is empty in all {self.rows:,} rows read",
                "right for a target that does not reason; otherwise the server had no reasoning "
                "parser, or the template closed the thinking at once",
                "if this target reasons, stop: see reasoning_parser in the server's /model_info",
            )
        elif none_reason:
            yield Finding(
                "note",
                "reasoning_empty",
                "no row has reasoning; the segments, made from token ids, agree",
                "the target does not reason, or its template closes the thinking",
                "nothing, unless the target's profile says that it reasons",
            )

    def _marker_note(self) -> str:
        if not self.think_markers.count:
            return ""
        return f"; {self.think_markers.count:,} contents still hold think markers"

    def _bad_counts(self) -> Iterable[Finding]:
        if bad := self.usage["zero"] + self.usage["wrong type"]:
            yield Finding(
                "fault",
                "usage_not_a_count",
                f"completion_tokens is zero in {self.usage['zero']:,} and no integer in "
                f"{self.usage['wrong type']:,} of {self.rows:,} rows",
                "a default stood in for a missing count, or the answer was empty",
                f"look at these {bad:,} rows with --show; take the counts from the reply only",
            )
        if self.count_mismatch.count:
            yield Finding(
                "fault",
                "usage_differs_from_ids",
                f"completion_tokens differs from len(output_ids) in {self.count_mismatch.count:,} "
                f"rows; first: {self.count_mismatch.first}",
                "the ids were cut, joined or tokenised again after the server counted them",
                "store output_ids exactly as the server gave them; make these rows again",
            )
        if self.nan.count:
            yield Finding(
                "fault",
                "nan_in_server",
                f'{self.nan.count:,} rows finished with matched "NaN happened"; '
                f"first: {self.nan.first}",
                "the target's logits were NaN; SGLang writes a stop over it and answers 200",
                "drop these rows, and check the server's quantisation and kernels before more",
            )
        yield from self._cut_short()

    def _cut_short(self) -> Iterable[Finding]:
        cut = self.finish["length"]
        lengths = Counter(self.kept_lengths).most_common(1)
        common, times = lengths[0] if lengths else (0, 0)
        if cut > 0.5 * self.rows and times > 0.8 * len(self.kept_lengths) and self.rows >= 8:
            default = common == _SERVER_DEFAULT_TOKENS
            yield Finding(
                "warning",
                "cut_at_one_length",
                f"{cut:,} of {self.rows:,} answers were cut, nearly all at {common:,} tokens",
                "128 is SGLang's own default, which applies when max_new_tokens is not inside "
                "sampling_params (unknown top-level keys are ignored)"
                if default
                else "max_new_tokens is smaller than what the target wants to say",
                "send max_new_tokens inside sampling_params, or raise it; drafts trained on cut "
                "answers never see how answers end",
            )
        elif cut > 0.3 * self.rows:
            yield Finding(
                "warning",
                "many_cut",
                f"{cut:,} of {self.rows:,} answers ({cut / self.rows:.0%}) ended by length",
                "max_new_tokens is small, or the target loops",
                "raise max_new_tokens; look at the repetition below",
            )
        odd = {
            kind: count
            for kind, count in self.finish.items()
            if kind not in ("stop", "length", "tool_calls", "eos", "stop_sequence")
        }
        if odd:
            shown = ", ".join(f"{kind} {count:,}" for kind, count in sorted(odd.items()))
            aborted = any("abort" in kind or "error" in kind for kind in odd)
            yield Finding(
                "fault" if aborted else "warning",
                "finish_reason",
                f"finish_reason is neither stop nor length: {shown}",
                "aborted requests answer 200 with partial text; a missing reason means a cut reply",
                "drop these rows and ask again",
            )

    def _bad_text(self) -> Iterable[Finding]:
        if self.think_markers.count and self.with_reasoning:
            yield Finding(
                self._severity(self.think_markers, 0.005),
                "think_markers_in_content",
                self._share("contents hold think markers", self.think_markers),
                "the split missed a marker: implicit close, a second thinking, or quoted text",
                "split by token ids; quarantine these rows",
            )
        if self.reserved_tokens.count:
            yield Finding(
                "fault",
                "reserved_tokens",
                self._share("rows hold reserved tokens", self.reserved_tokens),
                "broken logits were sampled uniformly: word salad with HTTP 200",
                "drop these rows; check the server's weights and kernels before going on",
            )
        if self.special_tokens.count:
            yield Finding(
                "warning",
                "special_tokens_in_content",
                self._share("contents hold special tokens", self.special_tokens),
                "stop or tool markers were decoded as text (skip_special_tokens off), or the "
                "target wrote markup that was not parsed",
                "cut content at marker ids, and keep the raw ids beside it",
            )
        if self.broken_text.count:
            yield Finding(
                self._severity(self.broken_text, 0.05),
                "broken_characters",
                self._share("contents hold U+FFFD", self.broken_text),
                "an answer cut inside a character, or pieces decoded one by one",
                "decode the whole ids at once",
            )
        if self.empty_stopped.count:
            yield Finding(
                self._severity(self.empty_stopped, 0.05),
                "content_empty",
                self._share("answers stopped with empty content", self.empty_stopped),
                "the target never closed its thinking, so all went to reasoning; or the answer "
                "is truly empty",
                "quarantine them by name, never guess where the thinking ended",
            )
        if self.empty_cut.count:
            yield Finding(
                self._severity(self.empty_cut, 0.2),
                "cut_inside_reasoning",
                self._share("answers were cut before any content", self.empty_cut),
                "max_new_tokens is smaller than the reasoning",
                "raise max_new_tokens",
            )
        if self.repetitive.count:
            yield Finding(
                self._severity(self.repetitive, 0.1),
                "repetition",
                self._share("answers repeat one token or phrase", self.repetitive),
                "greedy loops of a small target, or broken logits ('!!!!')",
                "reject loops by the share of one token; if many, check quantisation and sampling",
            )

    def _bad_sets(self) -> Iterable[Finding]:
        if self.same_id.twice.count:
            yield Finding(
                "fault",
                "duplicate_id",
                f"{self.same_id.twice.count:,} rows carry an id that came before; "
                f"first: {self.same_id.twice.first}",
                "a resume that generated rows again, or files joined twice",
                "keep one row for each id, and find out which writer repeats",
            )
        if self.same_text.twice.count:
            yield Finding(
                self._severity(self.same_text.twice, 0.5) if self.rows > 20 else "warning",
                "duplicate_text",
                self._share("answers equal an earlier one", self.same_text.twice),
                "the same prompt asked twice, or a target that says one thing",
                "remove duplicate prompts; for many samples of one prompt vary the seed",
            )

    def _severity(self, tally: Tally, fault_above: float) -> Severity:
        return "fault" if tally.count > fault_above * self.rows else "warning"

    def _share(self, what: str, tally: Tally) -> str:
        return (
            f"{tally.count:,} of {self.rows:,} ({tally.count / self.rows:.1%}) {what}; "
            f"first: {tally.first}"
        )


def is_repetitive(text: str, ids: np.ndarray | None) -> bool:
    """One token makes up most of the ids, or the text ends in one phrase said over and over."""
    if ids is not None and len(ids) >= 32:
        _, counts = np.unique(ids, return_counts=True)
        if counts.max() > 0.5 * len(ids):
            return True
    tail = text[-240:].rstrip()
    if len(tail) < 120:
        return False
    # A tail is periodic when it equals itself shifted by the period: four times or more.
    return any(tail[period:] == tail[:-period] for period in range(1, len(tail) // 4))


def _identity(row: Mapping[str, Any]) -> str | None:
    for key in ("sample_id", "id", "uuid"):
        if isinstance(row.get(key), str | int):
            return str(row[key])
    return None


def _completion_tokens(row: Mapping[str, Any]) -> tuple[str, int]:
    """(ok | missing | null | zero | wrong type, the count where it is one)."""
    if "usage" not in row:
        if "completion_tokens" not in row:
            return "missing", 0
        holder: Any = row
    else:
        holder = row["usage"]
    if isinstance(holder, str):
        try:
            holder = json.loads(holder)
        except ValueError:
            return "wrong type", 0
    if holder is None:
        return "null", 0
    if not isinstance(holder, Mapping):
        return "wrong type", 0
    if "completion_tokens" not in holder:
        return "missing", 0
    count = holder["completion_tokens"]
    if count is None:
        return "null", 0
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        return "wrong type", 0
    return ("ok", count) if count else ("zero", 0)


def _finish(row: Mapping[str, Any]) -> str:
    if "finish_reason" not in row:
        return "(missing)"
    match row["finish_reason"]:
        case None:
            return "(null)"
        case {"type": str(kind)}:
            return kind
        case "":
            return "(empty)"
        case other:
            return str(other)[:40]


def _matched(row: Mapping[str, Any]) -> Any:
    match row.get("finish_reason"):
        case {"matched": matched}:
            return matched
        case _:
            return None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _has_tool_calls(row: Mapping[str, Any]) -> bool:
    return row.get("tool_calls") not in (None, "", "[]", [], "null")
