"""What fields rows have: types, how filled, and where that changes on the way through a file."""

import json
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.glancing.findings import Finding, found
from pipelines.glancing.reading import Row

_EDGE_ROWS = 256  # rows of the head and of the tail that are compared
_EXAMPLE = 44
_DEEP = 4  # levels of objects whose fields are named
_MANY = 400  # fields; an object whose keys are data has no end of them


@dataclass(frozen=True)
class FieldGlance:
    """One field, nested ones by dotted path. Rows = filled + empty + null + missing."""

    name: str
    types: dict[str, int]
    filled: int
    empty: int  # "", [] or {}
    null: int
    missing: int
    example: str  # "" unless it was asked for


class Profile:
    """Types and fill of every field; head and tail kept apart to see a change."""

    def __init__(self, *, examples: bool) -> None:
        self.rows = 0
        self._kinds: dict[str, Counter[str]] = {}
        self._examples: dict[str, str] | None = {} if examples else None
        self._places: dict[str, tuple[int, int]] = {}  # order of the top-level field, depth
        self._head: list[dict[str, str]] = []
        self._tail: deque[dict[str, str]] = deque(maxlen=_EDGE_ROWS)

    def add(self, row: Row) -> None:
        """Look at one row."""
        self.rows += 1
        kinds: dict[str, str] = {}
        self._walk(row, "", kinds, 0)
        for name, kind in kinds.items():
            self._kinds[name][kind] += 1
        if len(self._head) < _EDGE_ROWS:
            self._head.append(kinds)
        self._tail.append(kinds)

    def _walk(
        self, row: Row, prefix: str, kinds: dict[str, str], depth: int, top: int | None = None
    ) -> None:
        for key, value in row.items():
            name = prefix + key if isinstance(key, str) else f"{prefix}{key}"
            kinds[name] = kind = kind_of(value)
            if name not in self._kinds:
                self._kinds[name] = Counter()
                self._places[name] = (len(self._kinds) if top is None else top, depth)
            if self._examples is not None and kind not in ("null", "empty"):
                self._examples.setdefault(name, _shorten(value))
            if kind == "object" and depth < _DEEP - 1 and len(self._kinds) < _MANY:
                place = self._places[name][0]
                self._walk(value, f"{name}.", kinds, depth + 1, place)

    def merge(self, later: "Profile") -> None:
        """Add the rows of a later part of the same file."""
        self.rows += later.rows
        for name, kinds in later._kinds.items():
            self._kinds.setdefault(name, Counter()).update(kinds)
            self._places.setdefault(name, later._places[name])
        if self._examples is not None and later._examples is not None:
            self._examples = {**later._examples, **self._examples}
        self._head = [*self._head, *later._head][:_EDGE_ROWS]
        self._tail.extend(later._tail)

    def top_level(self) -> set[str]:
        """The names of the fields that are not nested."""
        return {name for name, (_, depth) in self._places.items() if depth == 0}

    def fields(self) -> tuple[FieldGlance, ...]:
        """All fields, in the order of the rows."""
        result = []
        for name in sorted(self._kinds, key=lambda one: (*self._places[one], one)):
            kinds = self._kinds[name]
            empty, null, total = kinds["empty"], kinds["null"], kinds.total()
            result.append(
                FieldGlance(
                    name=name,
                    types=_types(kinds),
                    filled=total - empty - null,
                    empty=empty,
                    null=null,
                    missing=self.rows - total,
                    example="" if self._examples is None else self._examples.get(name, ""),
                )
            )
        return tuple(result)

    def findings(self) -> Iterable[Finding]:
        """A change between head and tail; a field whose rows do not agree; numbers too large."""
        changes = self._changes()
        if changes:
            more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
            yield found("schema_drift", "; ".join(list(changes.values())[:4]) + more)
        mixed = [
            f"{name}: {', '.join(f'{kind} {count:,}' for kind, count in types.items())}"
            for name, kinds in self._kinds.items()
            if name not in changes and _disagree(types := _types(kinds))
        ]
        if mixed:
            more = f" and {len(mixed) - 4} more" if len(mixed) > 4 else ""
            yield found("mixed_types", "; ".join(mixed[:4]) + more)
        huge = [name for name, kinds in self._kinds.items() if kinds["huge number"]]
        if huge:
            yield found("number_too_large", f"in {', '.join(huge[:4])}")

    def _changes(self) -> dict[str, str]:
        """Fields whose kinds in the head and in the tail have nothing in common."""
        size = min(_EDGE_ROWS, self.rows // 2)
        head, tail = self._head[:size], list(self._tail)[len(self._tail) - size :]
        if size < 4:
            return {}
        changes = {}
        for name in dict.fromkeys(name for row in (*head, *tail) for name in row):
            before, after = _state(head, name), _state(tail, name)
            if before and after and not before & after:
                changes[name] = f"{name}: {_say(before)} in the head, {_say(after)} in the tail"
        return changes


def _types(kinds: Mapping[str, int]) -> dict[str, int]:
    return {kind: count for kind, count in kinds.items() if kind not in ("empty", "null")}


def _disagree(types: Mapping[str, int]) -> bool:
    families = {
        "number" if kind in ("int", "float", "huge number") else kind.split(" ")[0].lower()
        for kind in types
    }
    return len(families - {"json"} if "text" in families else families) > 1


_SIMPLE = {type(None): "null", bool: "bool"}
_INT64 = 1 << 63


def kind_of(value: Any) -> str:
    """A value's type as a person says it."""
    kind = type(value)
    if kind is str:
        return ("JSON text" if is_json_text(value) else "text") if value else "empty"
    if kind is dict:
        return "object" if value else "empty"
    if kind is int:
        return "int" if -_INT64 <= value < _INT64 else "huge number"
    if kind is float:  # an integer beyond 64 bits is parsed as one
        return "huge number" if abs(value) >= _INT64 and value.is_integer() else "float"
    if kind is list or kind is tuple:
        return f"list of {kind_of(value[0])}" if value else "empty"
    if kind in _SIMPLE:
        return _SIMPLE[kind]
    if kind.__module__ == "numpy":  # only lists of integers stay so
        return "list of int" if len(value) else "empty"
    return kind.__name__


def is_json_text(value: str) -> bool:
    """By its edges only: a person wants to know that it is packed, not that it parses."""
    return (value[0], value[-1]) in (("[", "]"), ("{", "}"))


def _state(rows: Sequence[Mapping[str, str]], name: str) -> set[str]:
    """The kinds that a field has in more than a tenth of these rows; missing is a kind."""
    kinds = Counter(row.get(name, "missing") for row in rows)
    return {kind for kind, count in kinds.items() if count > 0.1 * len(rows)}


def _say(kinds: Iterable[str]) -> str:
    return "/".join(sorted(kinds))


def _shorten(value: Any) -> str:
    if isinstance(value, str):
        text = value[: 4 * _EXAMPLE]
    else:
        text = json.dumps(_trim(value), default=str, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _EXAMPLE else text[: _EXAMPLE - 3] + "..."


def _trim(value: Any) -> Any:
    """Cut a nested value down before it is turned into text."""
    if isinstance(value, str):
        return value[:_EXAMPLE]
    if isinstance(value, list | tuple):
        return [_trim(one) for one in value[:12]]
    if isinstance(value, Mapping):
        return {str(key): _trim(one) for key, one in list(value.items())[:12]}
    if type(value).__module__ == "numpy":
        return [int(one) for one in value[:12]]
    return value
