"""Exact duplicates: the first row that said the same, in arrays of 30 bytes a row."""

from array import array

import numpy as np

ID_BYTES = 6  # of a hash: what a sample id holds
_DIGEST_BYTES = 16
_RECENT_ROWS = 8192


class Seen:
    """Rows by the hash of their content. Rows are numbered from 0 as they are taken in."""

    def __init__(self) -> None:
        self._keys = np.empty(0, np.uint64)  # ascending
        self._numbers = np.empty(0, np.int32)  # of the same rows
        self._recent: dict[int, int] = {}  # not yet merged into the two
        self._digests = bytearray()

    def __len__(self) -> int:
        return len(self._digests) // _DIGEST_BYTES

    def offer(self, digest: bytes) -> tuple[int | None, bool]:
        """Take a row in, and return `(None, False)`; or the earlier row with the same id.

        The flag says whether that one is the same row, or another whose hash begins alike.
        """
        key = int.from_bytes(digest[:ID_BYTES], "big")
        earlier = self._find(key)
        if earlier is not None:
            start = earlier * _DIGEST_BYTES
            return earlier, self._digests[start : start + _DIGEST_BYTES] == digest[:_DIGEST_BYTES]
        self._recent[key] = len(self)
        self._digests += digest[:_DIGEST_BYTES]
        if len(self._recent) >= _RECENT_ROWS:
            self._merge()
        return None, False

    def _find(self, key: int) -> int | None:
        if key in self._recent:
            return self._recent[key]
        at = int(np.searchsorted(self._keys, np.uint64(key)))
        found = at < len(self._keys) and int(self._keys[at]) == key
        return int(self._numbers[at]) if found else None

    def _merge(self) -> None:
        keys = np.concatenate([self._keys, np.fromiter(self._recent, np.uint64)])
        numbers = np.concatenate(
            [self._numbers, np.frombuffer(array("i", self._recent.values()), np.int32)]
        )
        order = np.argsort(keys, kind="stable")
        self._keys, self._numbers, self._recent = keys[order], numbers[order], {}
