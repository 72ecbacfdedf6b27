"""Contamination: a passage of n words that a training prompt shares with an evaluation prompt."""

from collections.abc import Mapping, Sequence

import numpy as np

from pipelines.selection.words import grams, words_of_letters

_BITS = 16
_REST = np.uint64(64 - _BITS)


class EvaluationPassages:
    """Every passage of n words of the evaluation prompts.

    Case, punctuation and spacing say nothing; in scripts without spaces a character is a word.
    Whoever builds it leaves system messages out: two sets may share those.
    """

    def __init__(self, texts: Mapping[str, str], n: int) -> None:
        """Takes the text of each prompt by its name. Raises ValueError if `n` is below 1."""
        if n < 1:
            raise ValueError(f"passages of {n} words, expected 1 or more")
        self.n = n
        words = words_of_letters(list(texts.values()))
        found = grams(words, n, whole_if_shorter=False)
        order = np.argsort(found.hashes, kind="stable")  # of equal passages, the first prompt's
        self._hashes = found.hashes[order]
        self._begun = np.zeros(1 << _BITS, bool)  # by a hash's first bits: most are not there
        self._begun[self._hashes >> _REST] = True
        said = [word for text in range(len(texts)) for word in words.spelled(text)]
        self._said = "".join(f"{word} " for word in said)
        begins = np.cumsum([0, *(len(word) + 1 for word in said)])  # characters of `_said`
        self._begins = begins[found.firsts[order]]  # of the passages
        self._ends = begins[words.offsets[1:]]  # of the prompts
        self._names = list(texts)
        # Prompts without any passage: they are not found in anything.
        self.too_short = int((np.diff(found.offsets) == 0).sum())

    def overlap(self, text: str) -> tuple[str, str] | None:
        """The first shared passage: the evaluation prompt's name, and the words in common."""
        return self.overlaps([text])[0]

    def overlaps(self, texts: Sequence[str]) -> list[tuple[str, str] | None]:
        """`overlap` of each text, in a fraction of the time."""
        words = words_of_letters(texts)
        wanted = grams(words, self.n, whole_if_shorter=False)
        hits = np.flatnonzero(self._begun[wanted.hashes >> _REST])
        begins = np.searchsorted(self._hashes, wanted.hashes[hits])
        ends = np.searchsorted(self._hashes, wanted.hashes[hits], side="right")
        owners = np.searchsorted(wanted.offsets, hits, side="right") - 1
        found: list[tuple[str, str] | None] = [None] * len(texts)
        for hit, text, begin, end in zip(hits, owners.tolist(), begins, ends, strict=True):
            if begin < end and found[text] is None:
                first = wanted.firsts[hit] - words.offsets[text]
                passage = " ".join(words.spelled(text)[first : first + self.n])
                found[text] = self._confirmed(passage, range(begin, end))
        return found

    def _confirmed(self, passage: str, places: range) -> tuple[str, str] | None:
        """Equal hashes prove nothing: the words decide."""
        for place in places:
            begin = int(self._begins[place])
            if self._said.startswith(f"{passage} ", begin):
                return self._names[np.searchsorted(self._ends, begin, side="right")], passage
        return None
