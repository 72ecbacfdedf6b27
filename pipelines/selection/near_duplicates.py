"""Near duplicates: rows that share most word 5-grams with an earlier row that was kept.

A MinHash signature stands for a text's set of 5-grams: two signatures agree in as many of their 128
places as the sets overlap, up to a standard deviation of 0.044. Signatures are cut into bands; rows
that agree in a whole band are candidates, and all 128 places decide. Of two rows of similarity s, b
bands of r places make a candidate with the probability 1 - (1 - s^r)^b. For a threshold of 0.8
(16 bands of 8) that is 0.95 at 0.8, more than 0.999 at 0.9, and 0.06 at 0.5.
"""

import os
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from rensa import RMinHash

from pipelines.selection.words import grams, mixed, words_between_spaces

PLACES = 128  # of a signature
_SHINGLE = 5  # words
_SEED = 20
_RECALL = 0.9  # of pairs at the threshold, at least
_CHUNK = 1024  # rows that are looked up together
_CROWD = 32  # rows of one band value: what more of them share is boilerplate
_CHECKED = 64  # candidates that are compared in all places, those with the most bands first
_NUMBER = np.uint64(32)  # bits of a kept row's number; the band's hash is above them
_NUMBER_MASK = np.uint64(0xFFFFFFFF)

Near = tuple[int, float]  # number of a kept row, and the similarity to it


def signatures(texts: Sequence[str]) -> np.ndarray:
    """[N, 128] uint32, the same in every process. A text of fewer than 5 words is one shingle.

    Words are what white space separates, case-folded; `x + 1` and `x - 1` differ.
    """
    if not texts:
        return np.zeros((0, PLACES), np.uint32)
    found = grams(words_between_spaces(texts), _SHINGLE, whole_if_shorter=True)
    offsets = found.offsets.astype(np.uint64)
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(found.hashes, offsets, PLACES, _SEED)
    return np.array(matrix.to_rows(), np.uint32)


def bands_for(threshold: float) -> tuple[int, int]:
    """Bands and places in each: as few bands as find 9 of 10 pairs at the threshold."""
    for places in range(PLACES, 0, -1):
        bands = PLACES // places
        if 1 - (1 - threshold**places) ** bands >= _RECALL:
            return bands, places
    raise ValueError(f"a threshold of {threshold} is too low to look for, expected 0.5 to 1")


class NearDuplicates:
    """Decides about rows in their order; the first of a kind is kept.

    Holds 8 bytes per kept row and band in memory (128 at a threshold of 0.8, 256 at 0.6) and 512
    bytes per kept row in a nameless file of `spill_folder`, which ends with the process.
    """

    def __init__(self, threshold: float, spill_folder: Path) -> None:
        self.threshold = threshold
        self.kept = 0
        self.crowded = 0  # bands of kept rows that are not looked up, as too many rows have them
        bands, self._places = bands_for(threshold)
        self._bands = [_Band() for _ in range(bands)]
        self._spill = tempfile.TemporaryFile(dir=spill_folder)  # noqa: SIM115 - see __exit__

    def __enter__(self) -> "NearDuplicates":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spill.close()

    def first_of(self, signatures: np.ndarray) -> list[Near | None]:
        """For each row the kept row it is nearest to, with the similarity, or None: it is kept.

        Kept rows are numbered from 0, over all calls; how rows are cut into calls changes nothing.
        Takes [N, 128] uint32. Raises OSError where the file cannot be written.
        """
        assert signatures.dtype == np.uint32, "the file holds 512 bytes a row"
        found: list[Near | None] = []
        for start in range(0, len(signatures), _CHUNK):
            found += self._decide(signatures[start : start + _CHUNK])
        return found

    def _decide(self, chunk: np.ndarray) -> list[Near | None]:
        hashes = _band_hashes(chunk, len(self._bands), self._places)
        sizes, held = self._look_up(hashes)
        shared = (sizes > 0) | _repeated(hashes)
        added = np.ones(hashes.shape, bool)
        found: list[Near | None] = [None] * len(chunk)
        fresh: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # kept rows of the chunk
        signatures: dict[int, np.ndarray] = {}  # of the same rows
        copies = 0
        for i in np.flatnonzero(shared.any(axis=1)).tolist():
            keys = [(band, int(hashes[i, band])) for band in np.flatnonzero(shared[i]).tolist()]
            others = np.array([number for key in keys for number in fresh[key]], np.int64)
            found[i] = self._nearest(chunk[i], np.concatenate([held[i], others]), signatures)
            if found[i] is not None:
                copies += 1
                continue
            number = self.kept + i - copies
            signatures[number] = chunk[i]
            for key in keys:
                added[i, key[0]] = sizes[i, key[0]] + len(fresh[key]) < _CROWD
                if added[i, key[0]]:
                    fresh[key].append(number)
        self._keep(np.array([one is None for one in found]), chunk, hashes, added)
        return found

    def _keep(
        self, kept: np.ndarray, chunk: np.ndarray, hashes: np.ndarray, added: np.ndarray
    ) -> None:
        numbers = (self.kept + np.cumsum(kept) - 1).astype(np.uint64)
        for at, band in enumerate(self._bands):
            new = kept & added[:, at]
            band.add((hashes[new, at] << _NUMBER) | numbers[new])
        self.crowded += int((~added).sum())
        self._spill.write(chunk[kept].tobytes())
        self._spill.flush()
        self.kept += int(kept.sum())

    def _look_up(self, hashes: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
        """How many kept rows share each band [N, bands], and which do, per row."""
        sizes = np.zeros(hashes.shape, np.int64)
        rows, numbers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for at, band in enumerate(self._bands):
            for row, number in band.find(hashes[:, at]):
                sizes[:, at] += np.bincount(row, minlength=len(hashes))
                rows.append(row)
                numbers.append(number)
        order = np.argsort(np.concatenate(rows), kind="stable")
        cuts = np.cumsum(sizes.sum(axis=1))[:-1]
        return sizes, np.split(np.concatenate(numbers)[order], cuts)

    def _nearest(
        self, row: np.ndarray, candidates: np.ndarray, fresh: dict[int, np.ndarray]
    ) -> Near | None:
        """The most similar of the candidates, the earliest of equal ones, if it is near enough."""
        numbers, bands = np.unique(candidates, return_counts=True)
        if not len(numbers):
            return None
        if len(numbers) > _CHECKED:
            numbers = np.sort(numbers[np.argsort(-bands, kind="stable")[:_CHECKED]])
        compared = [fresh[n] if n >= self.kept else self._read(n) for n in numbers.tolist()]
        similar = (np.stack(compared) == row).mean(axis=1)
        best = int(similar.argmax())
        near = int(numbers[best]), float(similar[best])
        return near if near[1] >= self.threshold else None

    def _read(self, number: int) -> np.ndarray:
        size = PLACES * np.dtype(np.uint32).itemsize
        return np.frombuffer(os.pread(self._spill.fileno(), size, number * size), np.uint32)


class _Band:
    """Kept rows by the hash of one band: sorted runs, each at least twice as long as its next."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []  # uint64, the hash above the number

    def find(self, hashes: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of each run, indices into `hashes` [N], and the number of a row that has that hash."""
        found = []
        low = hashes << _NUMBER
        for run in self._runs:
            begin = np.searchsorted(run, low)
            hit = np.flatnonzero(run[np.minimum(begin, len(run) - 1)] >> _NUMBER == hashes)
            if len(hit):
                begin, end = begin[hit], np.searchsorted(run, low[hit] | _NUMBER_MASK, side="right")
                counts = end - begin
                steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
                numbers = run[np.repeat(begin, counts) + steps] & _NUMBER_MASK
                found.append((np.repeat(hit, counts), numbers.astype(np.int64)))
        return found

    def add(self, entries: np.ndarray) -> None:
        """Take in uint64, the hash above the number."""
        if not len(entries):
            return
        self._runs.append(np.sort(entries))
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            last = self._runs.pop()
            self._runs[-1] = np.sort(np.concatenate([self._runs[-1], last]))


def _band_hashes(chunk: np.ndarray, bands: int, places: int) -> np.ndarray:
    """[N, bands] uint64 below 2^32."""
    odd = np.arange(1, 2 * places, 2, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    cut = chunk[:, : bands * places].reshape(len(chunk), bands, places).astype(np.uint64)
    return mixed(mixed(cut + odd).sum(axis=2, dtype=np.uint64)) >> _NUMBER


def _repeated(hashes: np.ndarray) -> np.ndarray:
    """Whether another row of the chunk has the same hash in the same band."""
    order = np.argsort(hashes, axis=0)
    inorder = np.take_along_axis(hashes, order, axis=0)
    same = inorder[1:] == inorder[:-1]
    edge = np.zeros((1, hashes.shape[1]), bool)
    repeated = np.empty(hashes.shape, bool)
    np.put_along_axis(repeated, order, np.vstack([edge, same]) | np.vstack([same, edge]), axis=0)
    return repeated
