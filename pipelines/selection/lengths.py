"""How long the prompts of a set are: exact, in memory that the context bounds."""

import numpy as np

_LEVELS = "▁▂▃▄▅▆▇█"


class LengthProfile:
    """Counts prompts by their tokens, 0 to `context`."""

    def __init__(self, context: int) -> None:
        self._counts = np.zeros(context + 1, np.int64)

    def add(self, tokens: np.ndarray) -> None:
        """Take in integers [N]. Raises ValueError for a length outside of the context."""
        if not len(tokens):
            return
        if tokens.min() < 0 or tokens.max() >= len(self._counts):
            seen = f"{tokens.min()} to {tokens.max()} tokens"
            raise ValueError(f"{seen}, expected 0 to {len(self._counts) - 1}")
        self._counts += np.bincount(tokens, minlength=len(self._counts))

    @property
    def count(self) -> int:
        """Prompts."""
        return int(self._counts.sum())

    @property
    def total(self) -> int:
        """Tokens of all prompts."""
        return int(self._counts @ np.arange(len(self._counts)))

    @property
    def min(self) -> int:
        """Tokens of the shortest prompt. Raises ValueError where there is none, as do the next."""
        return self._at(0)

    @property
    def max(self) -> int:
        """Tokens of the longest prompt."""
        return self._at(self.count - 1)

    def quantile(self, share: float) -> int:
        """The length at place `count * share` of the sorted ones, from 0; `share` is below 1."""
        return self._at(int(self.count * share))

    def sparkline(self, width: int = 16) -> str:
        """Prompts per bin from the shortest to the longest, in bins of equal ratio of lengths.

        Blank where a bin is empty, and the lowest bar where it holds anything.
        """
        lengths = np.flatnonzero(self._counts)
        if not len(lengths):
            return " " * width
        logs = np.log(np.maximum(lengths, 1))
        span = max(logs[-1] - logs[0], 1e-9)
        places = np.minimum((logs - logs[0]) / span * width, width - 1).astype(np.int64)
        bins = np.bincount(places, self._counts[lengths], minlength=width)
        heights = np.ceil(bins / bins.max() * len(_LEVELS)).astype(int)
        return "".join(_LEVELS[height - 1] if height else " " for height in heights)

    def _at(self, place: int) -> int:
        if not 0 <= place < self.count:
            raise ValueError(f"place {place} of {self.count} prompts")
        return int(np.searchsorted(np.cumsum(self._counts), place, side="right"))
