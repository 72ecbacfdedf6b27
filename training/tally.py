"""Counts of what the draft got right, step by step. Counts add up over batches and ranks; rates
are made from sums only."""

from dataclasses import dataclass
from typing import Any

import torch

FIELDS = ("rows", "speakable", "correct", "chain_rows", "chain_reached", "chain_correct")


@dataclass(frozen=True)
class Tally:
    """For each TTT step k, a number of rows. The `chain_` counts look at rows whose steps 0 to k
    all count, as a served draft of k + 1 tokens would."""

    rows: tuple[int, ...]  # counted at step k
    speakable: tuple[int, ...]  # of these: the target's choice is in the draft vocabulary
    correct: tuple[int, ...]  # of these: and the draft chose the same
    chain_rows: tuple[int, ...]  # steps 0..k all counted
    chain_reached: tuple[int, ...]  # of these: steps 0..k-1 all correct
    chain_correct: tuple[int, ...]  # of these: step k correct as well

    @staticmethod
    def empty(steps: int) -> "Tally":
        """Nothing counted yet."""
        return Tally(*[(0,) * steps] * len(FIELDS))

    @staticmethod
    def of(
        counted: torch.Tensor,  # [R, K] bool
        speakable: torch.Tensor,  # [R, K] bool
        correct: torch.Tensor,  # [R, K] bool
    ) -> "Tally":
        """Count flags."""
        chain, right = (flags.long().cumprod(-1).bool() for flags in (counted, correct))
        before = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1]], -1)
        counts = (counted, speakable, correct, chain, chain & before, chain & right)
        return Tally.from_vector(torch.stack([flags.sum(0) for flags in counts]))

    @staticmethod
    def from_vector(vector: torch.Tensor) -> "Tally":
        """From [6, K] int64, in the order of the fields: what travels between ranks."""
        return Tally(*(tuple(row) for row in vector.tolist()))

    def vector(self) -> torch.Tensor:
        """[6, K] int64."""
        return torch.tensor([getattr(self, name) for name in FIELDS])

    def __add__(self, other: "Tally") -> "Tally":
        return Tally.from_vector(self.vector() + other.vector())

    @property
    def accuracy(self) -> list[float | None]:
        """Correct share of the counted rows; a label outside the draft vocabulary is wrong."""
        return _shares(self.correct, self.rows)

    @property
    def acceptance_rate(self) -> list[float | None]:
        """P(step k accepted, given that all before it were)."""
        return _shares(self.chain_correct, self.chain_reached)

    @property
    def acceptance_length(self) -> float | None:
        """Simulated AL of greedy chain drafting with K tokens: 1 + P(0) + P(0 and 1) + ..."""
        if not self.rows[0]:
            return None
        return 1 + sum(share or 0.0 for share in _shares(self.chain_correct, self.chain_rows))

    def summary(self) -> dict[str, Any]:
        """Rates with the counts they came from, for JSON. A rate of nothing is null, not 0."""
        return {
            "acceptance_length": self.acceptance_length,
            "acceptance_rate": self.acceptance_rate,
            "accuracy": self.accuracy,
            "in_draft_vocab": _shares(self.speakable, self.rows),
            "counts": {name: list(getattr(self, name)) for name in FIELDS},
        }


def _shares(part: tuple[int, ...], whole: tuple[int, ...]) -> list[float | None]:
    return [a / b if b else None for a, b in zip(part, whole, strict=True)]
