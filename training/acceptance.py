"""Acceptance of drafts, counted: acceptance length, rates by step, intervals, the n-gram baseline.

Pure arithmetic on counters and token ids. No server here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True)
class Counters:
    """Verifications of one request, or summed. `histogram[k]`: those with k accepted drafts."""

    histogram: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.histogram) < 2 or min(self.histogram) < 0:
            raise ValueError(f"{self.histogram} counts no drafts; one count for each of 0..steps")

    @classmethod
    def none(cls, steps: int) -> "Counters":
        """No verification yet, of drafts `steps` tokens long."""
        return cls((0,) * (steps + 1))

    @property
    def steps(self) -> int:
        """Tokens drafted for one verification."""
        return len(self.histogram) - 1

    @property
    def verifications(self) -> int:
        """Target forwards that verified a draft."""
        return sum(self.histogram)

    @property
    def correct_drafts(self) -> int:
        """Drafted tokens that the target accepted."""
        return sum(accepted * count for accepted, count in enumerate(self.histogram))

    @property
    def acceptance_length(self) -> float | None:
        """AL = 1 + correct drafts / verifications; None where nothing was verified."""
        if self.verifications == 0:
            return None
        return 1.0 + self.correct_drafts / self.verifications

    @property
    def acceptance_rates(self) -> tuple[float | None, ...]:
        """P(step k accepted | step k-1 accepted), k from 0; None where none came so far."""
        reached = [sum(self.histogram[step:]) for step in range(self.steps + 1)]
        return tuple(None if before == 0 else after / before for before, after in pairwise(reached))

    def __add__(self, other: "Counters") -> "Counters":
        if self.steps != other.steps:
            raise ValueError(f"drafts of {self.steps} and of {other.steps} tokens do not add up")
        return Counters(tuple(a + b for a, b in zip(self.histogram, other.histogram, strict=True)))


def pooled(counters: Iterable[Counters], *, steps: int) -> Counters:
    """The sum. An AL over many requests comes from it, never from a mean of their ALs."""
    total = Counters.none(steps)
    for one in counters:
        total = total + one
    return total


def bootstrap_interval(
    requests: Sequence[Counters], *, seed: int, resamples: int = 2000, level: float = 0.95
) -> tuple[float, float] | None:
    """Percentile bootstrap of the pooled AL. Whole requests are redrawn: their rounds depend on
    each other. None where nothing was verified.
    """
    counted = [(one.verifications, one.correct_drafts) for one in requests if one.verifications]
    if not counted:
        return None
    sums = np.array(counted, dtype=np.int64)
    drawn = np.random.default_rng(seed).integers(len(sums), size=(resamples, len(sums)))
    verifications, correct = sums[drawn].sum(axis=1).T
    low, high = np.quantile(1.0 + correct / verifications, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def ngram_acceptance(
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    *,
    steps: int,
    emitted: int | None = None,
    longest: int = 4,
    shortest: int = 1,
) -> Counters:
    """What prompt look-up, the draft without a model, would have been accepted on this output.

    Greedy verification changes no token, so its rounds follow from the greedy output alone. Each
    round finds the longest suffix (`longest` down to `shortest` tokens) that occurred before, its
    latest occurrence, and drafts the `steps` tokens that came after; a copy that reaches the end
    of the text goes on into what it drafted. No match is a round without a draft, and counts.

    The first output token is the prefill's. Rounds start while fewer than `emitted` tokens are out
    (default: all of them); tokens of `output_ids` past that only judge the last round's drafts, as
    a server does that verifies a whole round before it cuts the answer.
    """
    end = len(output_ids) if emitted is None else min(emitted, len(output_ids))
    text = list(prompt_ids)
    lookup = _Lookup(longest, shortest)
    for position in range(1, len(text) + 1):
        lookup.saw(text, position)
    histogram = [0] * (steps + 1)
    out = 0
    accepted = 0
    while out < end:
        fresh = output_ids[out : out + accepted + 1]
        for token in fresh:
            text.append(token)
            lookup.saw(text, len(text))
        out += len(fresh)
        if out >= end:
            break
        drafted = lookup.draft(text, steps)
        accepted = 0
        for guess, token in zip(drafted, output_ids[out:], strict=False):
            if guess != token:
                break
            accepted += 1
        histogram[accepted] += 1
    return Counters(tuple(histogram))


class _Lookup:
    """Where each n-gram of a growing text last ended, and where it ended before that."""

    def __init__(self, longest: int, shortest: int) -> None:
        assert longest >= shortest >= 1
        self._sizes = range(longest, shortest - 1, -1)
        self._ends: dict[tuple[int, ...], tuple[int, int | None]] = {}

    def saw(self, text: Sequence[int], end: int) -> None:
        """Take in the n-grams that end at `end`; called for every end, in order."""
        for size in self._sizes:
            if size <= end:
                gram = tuple(text[end - size : end])
                latest = self._ends[gram][0] if gram in self._ends else None
                self._ends[gram] = (end, latest)

    def draft(self, text: Sequence[int], steps: int) -> list[int]:
        for size in self._sizes:
            if size > len(text):
                continue
            earlier = self._ends[tuple(text[-size:])][1]
            if earlier is not None:
                copied = list(text[earlier : earlier + steps])
                while len(copied) < steps:  # the copy overlaps its own source
                    copied.append(copied[len(copied) - (len(text) - earlier)])
                return copied
        return []
