"""Where rows end in a stream of bytes: lines, or elements of a JSON array. Nothing is parsed."""

from collections.abc import Iterable, Iterator
from typing import Protocol

import numpy as np

_QUOTE, _BACKSLASH, _COMMA, _CLOSING = b'"\\,]'
_MARKS = np.zeros(256, bool)
_MARKS[list(b'"\\[]{},')] = True
_STEP = np.zeros(256, np.int8)
_STEP[list(b"[{")], _STEP[list(b"]}")] = 1, -1
_NOWHERE = np.zeros(0, np.int64)
_PIECE_ROWS = 8192  # a place in a list is larger than the shortest rows


class BrokenFile(ValueError):
    """A file ends before its rows do, or goes on behind them."""


class RowEnds(Protocol):
    """Finds the byte that ends each row, block by block."""

    def of(self, block: bytes) -> np.ndarray:
        """Positions in the next block, ascending. Raises `BrokenFile`."""

    def finish(self) -> bool:
        """Whether bytes behind the last end are a row of their own. Raises `BrokenFile`."""


class LineEnds:
    """Lines end with a line feed; the last one may end with the file."""

    def of(self, block: bytes) -> np.ndarray:
        """Positions of the line feeds."""
        return np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))

    def finish(self) -> bool:
        """The last line may have no line feed."""
        return True


class ElementEnds:
    """Elements of an array end with its commas and its closing bracket.

    The first block starts behind the opening bracket. An element whose quotes and brackets balance
    keeps its neighbours whole, whatever else is wrong with it.
    """

    def __init__(self) -> None:
        self._depth = 1
        self._in_text = 0
        self._is_escaped = False  # the next block's first byte

    def of(self, block: bytes) -> np.ndarray:
        """Positions of the commas between elements, and of the bracket that closes the array."""
        if self._depth == 0:
            _check_blank(block)
            return _NOWHERE
        if self._is_escaped:
            self._is_escaped = False
            return self.of(b"\\" + block) - 1
        content = np.frombuffer(block, np.uint8)
        at = np.flatnonzero(_MARKS[content])
        if not at.size:
            return _NOWHERE
        marks = content[at]
        quotes = (marks == _QUOTE) & ~self._escaped(at, marks, len(block))
        in_text = (self._in_text + np.cumsum(quotes)) & 1  # from a quote to before the next
        steps = np.where(in_text, 0, _STEP[marks])
        depth = self._depth + np.cumsum(steps, dtype=np.int64)
        ends = (in_text == 0) & (marks == _COMMA) & (depth == 1)
        closed = np.flatnonzero(depth == 0)
        if closed.size:
            last = closed[0]
            if marks[last] != _CLOSING:
                raise BrokenFile("its array is closed by a brace")
            _check_blank(block[at[last] + 1 :])
            self._depth = 0
            ends[last] = True
            return at[: last + 1][ends[: last + 1]]
        self._depth, self._in_text = int(depth[-1]), int(in_text[-1])
        return at[ends]

    def finish(self) -> bool:
        """Nothing but white space follows the array."""
        if self._depth:
            raise BrokenFile("its array is not closed")
        return False

    def _escaped(self, at: np.ndarray, marks: np.ndarray, size: int) -> np.ndarray:
        """Which marks stand behind an odd number of backslashes."""
        slashes = marks == _BACKSLASH
        behind = np.zeros(len(at), bool)
        if not slashes.any():
            return behind
        behind[1:] = slashes[:-1] & (np.diff(at) == 1)
        order = np.arange(len(at))
        run = np.maximum.accumulate(np.where(slashes & ~behind, order, 0))
        escapes = slashes & ((order - run) % 2 == 0)
        self._is_escaped = bool(escapes[-1]) and at[-1] == size - 1
        behind[1:] &= escapes[:-1]
        return behind


def cut_rows(
    blocks: Iterable[bytes], ends_in: RowEnds, *, chunk_bytes: int, row_limit: int
) -> Iterator[tuple[bytes, tuple[int, ...]] | None]:
    """Whole rows in pieces of about `chunk_bytes`, and where each row ends in its piece.

    None stands for one row of more than `row_limit` bytes, which is not held; a row in a piece may
    be longer than that, too. Raises `BrokenFile`.
    """
    held: list[bytes] = []  # from the start of a row
    ends: list[int] = []
    size, is_skipping = 0, False
    for block in blocks:
        found = ends_in.of(block)
        if is_skipping:
            if not found.size:
                continue
            yield None
            is_skipping, start = False, int(found[0]) + 1
            block, found = block[start:], found[1:] - start
        ends += (found + size).tolist()
        held.append(block)
        size += len(block)
        begun = size - (ends[-1] + 1) if ends else size
        is_full = size >= chunk_bytes or len(ends) >= _PIECE_ROWS
        if ends and (is_full or begun > row_limit):
            whole = b"".join(held)
            yield whole[: ends[-1]], tuple(ends)
            held, size, ends = [whole[len(whole) - begun :]], begun, []
        if begun > row_limit:
            held, size, is_skipping = [], 0, True
    if ends_in.finish():
        if is_skipping:
            yield None
        elif size > (ends[-1] + 1 if ends else 0):
            ends.append(size)
    if ends:
        yield b"".join(held)[: ends[-1]], tuple(ends)


def _check_blank(rest: bytes) -> None:
    if rest.strip():
        raise BrokenFile(f"its array is followed by {rest.strip()[:20]!r}")
