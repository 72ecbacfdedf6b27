"""Words and word n-grams of texts as 64-bit hashes, the same in every process and run. Pure."""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

_BLOCK = 1 << 17  # characters that are hashed together: the arrays of a block fit in the cache
_CODES = 0x110000
_BREAK, _LETTER, _ALONE = 0, 1, 2
# Scripts without spaces between words: a character stands for a word.
_UNSPACED = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Myanmar
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x4DBF),  # Chinese characters, as are the next
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)
_ODD = tuple(np.uint64(one) for one in (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F))


@dataclass(frozen=True)
class Words:
    """The words of N texts in order, W in all. Those of text i are `offsets[i]:offsets[i + 1]`."""

    folded: tuple[str, ...]  # [N] the texts in case-folded form
    starts: np.ndarray  # [W] int64, the first character in its folded text
    ends: np.ndarray  # [W] int64, one past the last
    hashes: np.ndarray  # [W] uint64
    offsets: np.ndarray  # [N + 1] int64

    def spelled(self, text: int) -> list[str]:
        """The words of one text."""
        of = slice(self.offsets[text], self.offsets[text + 1])
        folded = self.folded[text]
        spans = zip(self.starts[of].tolist(), self.ends[of].tolist(), strict=True)
        return [folded[start:end] for start, end in spans]


@dataclass(frozen=True)
class Grams:
    """The n-grams of N texts in order, G in all, laid out as `Words` are."""

    hashes: np.ndarray  # [G] uint64
    firsts: np.ndarray  # [G] int64, the first word of each, counted over all texts
    offsets: np.ndarray  # [N + 1] int64


def words_between_spaces(texts: Sequence[str]) -> Words:
    """Words with the punctuation on them: `x + 1` and `x - 1` differ."""
    return _words(texts, _space_kinds())


def words_of_letters(texts: Sequence[str]) -> Words:
    """Runs of letters, digits and the marks on them; punctuation says nothing."""
    return _words(texts, _letter_kinds())


def grams(words: Words, n: int, *, whole_if_shorter: bool) -> Grams:
    """Every n words in a row. A text of fewer has none, or itself as its only one."""
    counts = np.diff(words.offsets)
    # n empty words after each text: no n-gram reaches into the next one.
    shifts = np.arange(len(counts)) * n
    padded = np.zeros(len(words.hashes) + len(counts) * n, np.uint64)
    padded[np.arange(len(words.hashes)) + np.repeat(shifts, counts)] = words.hashes
    rolled = np.zeros(max(len(padded) - n + 1, 0), np.uint64)
    for k in range(n):
        rolled *= _ODD[0]
        rolled += padded[k : k + len(rolled)]
    sizes = np.maximum(counts - n + 1, int(whole_if_shorter))
    offsets = _running(sizes)
    firsts = np.arange(offsets[-1]) + np.repeat(words.offsets[:-1] - offsets[:-1], sizes)
    return Grams(mixed(rolled[firsts + np.repeat(shifts, sizes)]), firsts, offsets)


def mixed(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 whose every output bit depends on every input bit. In place."""
    for shift, odd in ((32, _ODD[1]), (29, _ODD[2])):
        values ^= values >> np.uint64(shift)
        values *= odd
    values ^= values >> np.uint64(32)
    return values


def _words(texts: Sequence[str], kinds: np.ndarray) -> Words:
    folded = tuple(text.casefold() for text in texts)
    parts = [_hash_block(folded[cut], kinds) for cut in _blocks(folded)]
    starts, ends, hashes, counts = (
        np.concatenate([np.zeros(0, kind), *(part[at] for part in parts)])
        for at, kind in enumerate((np.int64, np.int64, np.uint64, np.int64))
    )
    return Words(folded, starts, ends, hashes, _running(counts))


def _blocks(folded: Sequence[str]) -> Iterator[slice]:
    """Cuts into pieces of at most `_BLOCK` characters, or of one text that is longer."""
    start = size = 0
    for at, text in enumerate(folded):
        if size and size + len(text) > _BLOCK:
            yield slice(start, at)
            start, size = at, 0
        size += len(text) + 1
    if size:
        yield slice(start, len(folded))


def _hash_block(
    folded: Sequence[str], kinds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Starts, ends and hashes of the words, and how many each text has.

    A word's hash is the sum of one hash per character and place in the word.
    """
    codes = np.frombuffer("\n".join([*folded, ""]).encode("utf-32-le"), "<u4")  # newline: a break
    kind = kinds[codes]
    before = np.concatenate([[_BREAK], kind[:-1]])
    inside = np.flatnonzero(kind)
    opens = (before != _LETTER) | (kind == _ALONE)
    firsts = np.flatnonzero(opens[inside])
    lengths = np.diff(np.append(firsts, len(inside)))
    starts = inside[firsts]
    values = (inside - np.repeat(starts, lengths)).astype(np.uint64)
    values *= _ODD[1]
    values += codes[inside] * _ODD[0]
    hashes = mixed(np.add.reduceat(mixed(values), firsts)) if len(firsts) else values
    begins = _running(np.array([len(text) + 1 for text in folded]))
    counts = np.diff(np.searchsorted(starts, begins))
    starts = starts - np.repeat(begins[:-1], counts)
    return starts, starts + lengths, hashes, counts


def _running(sizes: np.ndarray) -> np.ndarray:
    """Offsets of pieces of these sizes: one more than there are pieces."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)])


@cache
def _space_kinds() -> np.ndarray:
    kinds = np.full(_CODES, _LETTER, np.uint8)
    kinds[[code for code in range(0x3001) if chr(code).isspace()]] = _BREAK
    return _with_unspaced(kinds)


@cache
def _letter_kinds() -> np.ndarray:
    kinds = np.full(_CODES, _BREAK, np.uint8)
    kinds[[code for code in range(0x20000) if unicodedata.category(chr(code))[0] in "LMN"]] = (
        _LETTER
    )
    return _with_unspaced(kinds)


def _with_unspaced(kinds: np.ndarray) -> np.ndarray:
    for low, high in _UNSPACED:
        kinds[low : high + 1][kinds[low : high + 1] == _LETTER] = _ALONE
    kinds[0x20000:0x40000] = _ALONE
    return kinds
