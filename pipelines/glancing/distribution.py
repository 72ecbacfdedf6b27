"""How numbers are spread: exact while they are few, to three digits when they are many. Merges."""

import math
from collections import Counter
from dataclasses import dataclass

_EXACT = 20_000  # different values
_POINTS = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
_BINS = 8

Number = int | float


@dataclass(frozen=True)
class Bin:
    """Values from `low` up to `high`, both included."""

    low: Number
    high: Number
    count: int


class Distribution:
    """Counts finite numbers."""

    def __init__(self) -> None:
        self._counts: Counter[Number] = Counter()
        self._is_coarse = False

    def add(self, value: Number) -> None:
        """Count one more."""
        self._counts[_three_digits(value) if self._is_coarse else value] += 1
        if len(self._counts) > _EXACT and not self._is_coarse:
            self._coarsen()

    def merge(self, other: "Distribution") -> None:
        """Add another one's counts."""
        self._counts.update(other._counts)
        if other._is_coarse or self._is_coarse or len(self._counts) > _EXACT:
            self._coarsen()

    def _coarsen(self) -> None:
        coarse: Counter[Number] = Counter()
        for value, count in self._counts.items():
            coarse[_three_digits(value)] += count
        self._counts, self._is_coarse = coarse, True

    @property
    def count(self) -> int:
        """Numbers seen."""
        return self._counts.total()

    def most_common(self) -> tuple[Number, int]:
        """The most frequent value and how often it was seen. There must be one."""
        return self._counts.most_common(1)[0]

    def quantiles(self) -> dict[str, Number]:
        """Of what was seen, by name; empty where nothing was."""
        values, total = sorted(self._counts.items()), self.count
        result: dict[str, Number] = {}
        passed, at = 0, 0
        for name, share in _POINTS.items() if values else ():
            rank = round(share * (total - 1))
            while passed + values[at][1] <= rank:
                passed += values[at][1]
                at += 1
            result[name] = values[at][0]
        return result

    def histogram(self) -> tuple[Bin, ...]:
        """At most eight bins of equal width."""
        if not self._counts:
            return ()
        low, high = min(self._counts), max(self._counts)
        if low == high:
            return (Bin(low, high, self.count),)
        is_whole = all(isinstance(one, int) for one in self._counts)
        width = math.ceil((high - low + 1) / _BINS) if is_whole else (high - low) / _BINS
        if not math.isfinite(width) or width <= 0:
            return (Bin(low, high, self.count),)
        counts: Counter[int] = Counter()
        for value, count in self._counts.items():
            counts[min(int((value - low) / width), _BINS - 1)] += count
        return tuple(
            Bin(
                low + at * width,
                min(low + (at + 1) * width - (1 if is_whole else 0), high),
                counts[at],
            )
            for at in range(max(counts) + 1)
        )


def _three_digits(value: Number) -> Number:
    if not value:
        return value
    return round(value, 2 - math.floor(math.log10(abs(value))))
