"""One field in depth: types, fill, quantiles, frequent values, and where it is missing."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.glancing.distribution import Bin, Distribution, Number
from pipelines.glancing.fields import kind_of
from pipelines.glancing.reading import At, Row

_PARTS = 10  # of the rows read, in their order
_SHORT = 40  # characters of a value that may be a category
_DIFFERENT = 50  # values, each counted; with more of them it is no category
_TOP = 10
_NAMED = 5
_ABSENT = ("missing", "null", "empty")


@dataclass(frozen=True)
class FieldDrill:
    """What one field holds. Numbers are its values, or lengths in characters or items."""

    name: str
    rows: int
    types: dict[str, int]
    empty: int
    null: int
    missing: int
    measured: str  # value, length; "" where there is nothing to measure
    quantiles: dict[str, Number]
    histogram: tuple[Bin, ...]
    top: dict[str, int]  # values that came more than once, if they are short and few
    absent_first: tuple[str, ...]  # the first rows where it is missing, null or empty
    absent_by_part: tuple[float, ...]  # share of each tenth of the rows read


class Drill:
    """Collects one field, by a dotted path that goes through lists and JSON texts."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.rows = 0
        self._kinds: Counter[str] = Counter()
        self._values, self._lengths = Distribution(), Distribution()
        self._top: Counter[str] | None = Counter()
        self._absent = bytearray()  # a byte for each row
        self._absent_first: list[str] = []

    def add(self, row: Row, at: At) -> None:
        """Look at one row."""
        self.rows += 1
        kinds = [self._take(value) for value in _at_path(row, self.path.split("."))]
        if not kinds:
            self._kinds["missing"] += 1
        is_absent = all(kind in _ABSENT for kind in kinds)
        self._absent.append(is_absent)
        if is_absent and len(self._absent_first) < _NAMED:
            self._absent_first.append(str(at))

    def _take(self, value: Any) -> str:
        kind = kind_of(value)
        self._kinds[kind] += 1
        if isinstance(value, int | float) and not isinstance(value, bool):
            if math.isfinite(value) and abs(value) < 1e300:
                self._values.add(value)
        elif isinstance(value, str | list | Mapping) or type(value).__module__ == "numpy":
            self._lengths.add(len(value))
        if isinstance(value, str | int | float) and self._top is not None and kind != "empty":
            text = str(value)
            if len(text) <= _SHORT:
                self._top[text] += 1
            if len(self._top) > _DIFFERENT:
                self._top = None
        return kind

    def merge(self, later: "Drill") -> None:
        """Add later rows."""
        self.rows += later.rows
        self._kinds.update(later._kinds)
        self._values.merge(later._values)
        self._lengths.merge(later._lengths)
        if self._top is not None and later._top is not None:
            self._top.update(later._top)
        else:
            self._top = None
        self._absent += later._absent
        self._absent_first = [*self._absent_first, *later._absent_first][:_NAMED]

    def result(self) -> FieldDrill:
        """What was found."""
        numbers = self._values if self._values.count else self._lengths
        top = {} if self._top is None else dict(self._top.most_common(_TOP))
        return FieldDrill(
            name=self.path,
            rows=self.rows,
            types={kind: n for kind, n in self._kinds.most_common() if kind not in _ABSENT},
            empty=self._kinds["empty"],
            null=self._kinds["null"],
            missing=self._kinds["missing"],
            measured="value" if self._values.count else "length" if self._lengths.count else "",
            quantiles=numbers.quantiles(),
            histogram=numbers.histogram(),
            top={value: count for value, count in top.items() if count > 1},
            absent_first=tuple(self._absent_first),
            absent_by_part=tuple(_parts(self._absent)),
        )


def _at_path(value: Any, parts: list[str]) -> Iterator[Any]:
    """The values at a path; a key that itself holds dots is found, too."""
    if not parts:
        yield value
        return
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return
    if isinstance(value, list):
        for one in value:
            yield from _at_path(one, parts)
    elif isinstance(value, Mapping):
        for many in range(len(parts), 0, -1):
            if (key := ".".join(parts[:many])) in value:
                yield from _at_path(value[key], parts[many:])
                return


def _parts(absent: bytearray) -> Iterator[float]:
    size = max(1, math.ceil(len(absent) / _PARTS))
    for start in range(0, len(absent), size):
        part = absent[start : start + size]
        yield sum(part) / len(part)
