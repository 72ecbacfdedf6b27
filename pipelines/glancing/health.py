"""Is a file of responses fit to learn from? Counts over rows, which several processes may share.

Knows the six fields that people of this trade exchange (`sample_id, messages, reasoning, content,
finish_reason, usage`) and Eyas's own rows, which also hold ids. Absent is not zero: a missing
count, a null, an empty string and a zero are four different things here.
"""

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from pipelines.glancing.distribution import Distribution
from pipelines.glancing.reading import At, Row
from pipelines.glancing.scripts import script_of

THINK_MARKERS = (
    "<think>",
    "</think>",
    "<thinking>",
    "</thinking>",
    "<|begin_of_thought|>",
    "<|end_of_thought|>",
    "<seed:think>",
    "</seed:think>",
    "[THINK]",
    "[/THINK]",
    "<reasoning>",
    "</reasoning>",
    "◁think▷",
    "◁/think▷",
)
# Compiled when a text first holds a bracket, and kept by `re`.
_SPECIAL = r"<\|[a-z0-9_]{2,40}\|>|<｜[^｜\n]{2,40}｜>|\[BOS\]|\[EOS\]"
_RESERVED = r"<\|reserved[a-z_]*\d+\|>"
_NAN = "NaN happened"  # SGLang's word for a stop that it wrote over broken scores
_HASHES = 4_000_000  # kept in memory; of more, every second, fourth, ...
_NAMES = 1 << 16
_TAIL = 240  # characters that are looked at for a phrase said over and over
_WINDOW = 128  # characters at both ends of a text, and every 32nd between, tell it from others
_STRIDE = 32
_VOCABULARY = 1 << 20  # no tokenizer has so many ids


@dataclass
class Tally:
    """Rows with some property: how many, and the first one's name."""

    count: int = 0
    first: str = ""


@dataclass
class Repeats:
    """Which values came before, by 8-byte hashes. Beyond a limit of memory a share of them is kept.

    The share is one of hashes, not of rows, so that all copies of a value are kept or none is.
    """

    hashes: array = field(default_factory=lambda: array("Q"))
    names: list[str] = field(default_factory=list)  # of the first rows
    halvings: int = 0

    def add(self, value: str, name: str | None) -> None:
        """Take in one value. `name` is its row's, where it has one."""
        digest = sha256(value.encode("utf-8", "surrogatepass")).digest()
        key = int.from_bytes(digest[:8], "little")
        if self.halvings and key & ((1 << self.halvings) - 1):
            return
        if not self.halvings and len(self.names) < _NAMES:
            self.names.append(name or "")
        self.hashes.append(key)
        if len(self.hashes) > _HASHES:
            self._halve()

    def _halve(self) -> None:
        self.halvings += 1
        mask = (1 << self.halvings) - 1
        self.hashes = array("Q", (key for key in self.hashes if not key & mask))
        self.names = []

    def merge(self, later: "Repeats") -> None:
        """Add the values of later rows."""
        if not self.halvings and len(self.names) == len(self.hashes):
            self.names = [*self.names, *later.names][:_NAMES]
        self.hashes.extend(later.hashes)
        while self.halvings < later.halvings or len(self.hashes) > _HASHES:
            self._halve()

    def twice(self) -> Tally:
        """Rows whose value came before; an estimate once hashes were given up."""
        seen: set[int] = set()
        tally = Tally()
        for at, key in enumerate(self.hashes):
            if key not in seen:
                seen.add(key)
                continue
            tally.count += 1
            if tally.count == 1 and at < len(self.names):
                tally.first = self.names[at]
        tally.count <<= self.halvings
        return tally


def looks_like_responses(names: Iterable[str]) -> bool:
    """Whether rows with these top-level fields hold a model's answers."""
    present = set(names)
    return "content" in present and bool(
        present & {"reasoning", "reasoning_content", "finish_reason", "usage", "output_ids"}
    )


class ResponseHealth:
    """Counts over response rows."""

    def __init__(self) -> None:
        self.rows = 0  # answers judged: rows with status ok, or without a status
        self.not_ok: Counter[str] = Counter()  # rows kept aside, by their status
        self.finish: Counter[str] = Counter()
        self.usage: Counter[str] = Counter()  # of completion_tokens: ok, missing, null, zero, ...
        self.scripts: Counter[str] = Counter()  # of contents
        self.tokens = Distribution()  # completion tokens
        self.characters = Distribution()  # of reasoning and content together
        self.reasoning_characters = 0
        self.content_characters = 0
        self.with_reasoning = 0
        self.with_segments = 0
        self.tallies: dict[str, Tally] = {}  # by the name of the finding
        self.same_id = Repeats()
        self.same_text = Repeats()

    def add(self, row: Row, at: At) -> None:
        """Judge one row, which stands at a place."""
        name = _identity(row)
        if name is not None:
            self.same_id.add(name, name)
        status = row.get("status")
        if isinstance(status, str) and status != "ok":
            self.not_ok[status] += 1
            return
        self.rows += 1
        row_name = str(at) if name is None else name[:60]
        ids = _ids(row)
        self._add_usage(row, ids, row_name)
        finish = _finish(row)
        self.finish[finish] += 1
        if _NAN in (row.get("finish_matched"), _matched(row)):
            self._tally("nan_in_server", row_name)
        content = self._add_text(row, finish, row_name)
        if repeats_itself(content) or (ids and self._loops(ids, row_name)):
            self._tally("repetition", row_name)

    def tally(self, name: str) -> Tally:
        """Rows with this property."""
        return self.tallies.get(name) or Tally()

    def _tally(self, name: str, row_name: str) -> None:
        tally = self.tallies.setdefault(name, Tally(0, row_name))
        tally.count += 1

    def _loops(self, ids: Sequence[int], row_name: str) -> bool:
        """Whether one id makes up most of the ids; says so where they cannot be ids at all."""
        if not all(type(one) is int for one in ids[:8]) or min(ids) < 0 or max(ids) >= _VOCABULARY:
            self._tally("ids_out_of_range", row_name)
            return False
        return len(ids) >= 32 and max(Counter(ids).values()) > 0.5 * len(ids)

    def _add_usage(self, row: Row, ids: Sequence[int] | None, row_name: str) -> None:
        kind, count = completion_tokens(row)
        self.usage[kind] += 1
        if kind != "ok":
            self._tally("usage", row_name)
            return
        self.tokens.add(count)
        if ids is not None and count != len(ids):
            self._tally("usage_differs_from_ids", row_name)

    def _add_text(self, row: Row, finish: str, row_name: str) -> str:
        """Judge what was said, and return the text that may repeat itself."""
        reasoning = _text(row.get("reasoning", row.get("reasoning_content")))
        content = _text(row.get("content"))
        is_reasoned = bool(reasoning) and not reasoning.isspace()
        self.with_reasoning += is_reasoned
        self.with_segments += "segments" in row
        self.reasoning_characters += len(reasoning)
        self.content_characters += len(content)
        self.characters.add(len(reasoning) + len(content))
        self._add_markup(reasoning, content, row_name)
        if "�" in content:
            self._tally("broken_characters", row_name)
        is_empty = not content or content.isspace()
        if is_empty and not _has_tool_calls(row):
            name = "cut_inside_reasoning" if finish == "length" else "content_empty"
            self._tally(name, row_name)
        if is_reasoned or not is_empty:
            self.same_text.add(f"{_mark(reasoning)}\0{_mark(content)}", row_name)
        script = script_of(content)
        self.scripts[script] += script != ""
        asked = script_of(_question(row))
        if asked and script and asked != script:
            self._tally("answer_in_another_script", row_name)
        return content or reasoning

    def _add_markup(self, reasoning: str, content: str, row_name: str) -> None:
        """Cheap looks first: most texts hold no bracket of the kind."""
        if "<" in content or "[" in content or "◁" in content:  # how all of them begin
            if any(marker in content for marker in THINK_MARKERS):
                self._tally("think_markers_in_content", row_name)
            if re.search(_RESERVED, content):
                self._tally("reserved_tokens", row_name)
                return
            if any(one[0] not in THINK_MARKERS for one in re.finditer(_SPECIAL, content)):
                self._tally("special_tokens_in_content", row_name)
        if "<" in reasoning and re.search(_RESERVED, reasoning):
            self._tally("reserved_tokens", row_name)

    def merge(self, later: "ResponseHealth") -> None:
        """Add the counts of later rows."""
        self.rows += later.rows
        self.with_reasoning += later.with_reasoning
        self.with_segments += later.with_segments
        self.reasoning_characters += later.reasoning_characters
        self.content_characters += later.content_characters
        for mine, theirs in (
            (self.not_ok, later.not_ok),
            (self.finish, later.finish),
            (self.usage, later.usage),
            (self.scripts, later.scripts),
        ):
            mine.update(theirs)
        self.tokens.merge(later.tokens)
        self.characters.merge(later.characters)
        self.same_id.merge(later.same_id)
        self.same_text.merge(later.same_text)
        for name, tally in later.tallies.items():
            self.tallies.setdefault(name, Tally(0, tally.first)).count += tally.count


def repeats_itself(text: str) -> bool:
    """The text ends in one phrase that is said four times or more."""
    tail = text[-_TAIL:].rstrip()
    if len(tail) < _TAIL // 2:
        return False
    # A tail is periodic when it equals itself shifted by the period; then so does its last quarter.
    quarter = tail[-(len(tail) // 4) :]
    at = tail.rfind(quarter, 0, len(tail) - 1)
    while at >= len(tail) - 2 * len(quarter):
        period = len(tail) - len(quarter) - at
        if tail[period:] == tail[:-period]:
            return True
        at = tail.rfind(quarter, 0, at + len(quarter) - 1)
    return False


def completion_tokens(row: Row) -> tuple[str, int]:
    """(ok | missing | null | zero | negative | text | wrong type, the count where it is one)."""
    holder: Any = row.get("usage", row)
    if isinstance(holder, str):
        try:
            holder = json.loads(holder)
        except ValueError:
            return "wrong type", 0
    if holder is None:
        return "null", 0
    if not isinstance(holder, dict):
        return "wrong type", 0
    if "completion_tokens" not in holder:
        return "missing", 0
    count = holder["completion_tokens"]
    if type(count) is int:
        return ("ok", count) if count > 0 else ("negative" if count else "zero", 0)
    if count is None:
        return "null", 0
    return "text" if isinstance(count, str) else "wrong type", 0


def _mark(text: str) -> str:
    """What two texts have in common only if they are the same but for a few characters."""
    if len(text) <= 4 * _WINDOW:
        return text
    return f"{len(text)}:{text[:_WINDOW]}{text[_WINDOW:-_WINDOW:_STRIDE]}{text[-_WINDOW:]}"


def _identity(row: Row) -> str | None:
    for key in ("sample_id", "id", "uuid"):
        if isinstance(value := row.get(key), (str, int)):
            return str(value)
    return None


def _finish(row: Row) -> str:
    if "finish_reason" not in row:
        return "(missing)"
    match row["finish_reason"]:
        case "stop" | "length" as usual:
            return usual
        case None:
            return "(null)"
        case {"type": str(kind)}:
            return kind
        case "":
            return "(empty)"
        case other:
            return str(other)[:40]


def _matched(row: Row) -> Any:
    reason = row.get("finish_reason")
    return reason.get("matched") if isinstance(reason, dict) else None


def _question(row: Row) -> str:
    """The last thing that a person said, where the row holds it openly."""
    messages = row.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if isinstance(last, dict) and last.get("role") == "user":
        content = last.get("content")
        return content if isinstance(content, str) else ""
    return ""


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _ids(row: Row) -> list[int] | None:
    ids = row.get("output_ids")
    if type(ids).__module__ == "numpy":
        return ids.tolist()  # type: ignore[union-attr]
    return ids if isinstance(ids, list) else None


def _has_tool_calls(row: Row) -> bool:
    return row.get("tool_calls") not in (None, "", "[]", [], "null")
