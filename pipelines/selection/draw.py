"""How many rows of each set are taken, and which: by a seed, whatever the order of the rows.

A row's key is a hash of the seed, the set's name and the row's content. The rows with the least
keys are taken, so that a draw of more rows holds every row of a draw of fewer.
"""

import hashlib
from collections.abc import Mapping
from fractions import Fraction
from heapq import heappush, heappushpop


def draw_key(seed: int, set_name: str, content_sha256: str) -> int:
    """Uniform below 2^64."""
    said = f"{seed}\0{set_name}\0{content_sha256}".encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest(), "big")


class Draw:
    """The `cap` least keys among those offered so far; it holds no others."""

    def __init__(self, cap: int) -> None:
        self._cap = cap
        self._heap: list[int] = []  # negated: the greatest key is first

    def offer(self, key: int) -> None:
        """Take a row's key in, where it is among the least."""
        if len(self._heap) < self._cap:
            heappush(self._heap, -key)
        else:
            heappushpop(self._heap, -key)

    @property
    def below(self) -> int | None:
        """Rows with keys below this are drawn, and no other row ever will be. None: all are."""
        if len(self._heap) < self._cap:
            return None
        return 1 - self._heap[0] if self._heap else 0


def quotas(
    rows: int | None, weights: Mapping[str, float], caps: Mapping[str, int | None]
) -> dict[str, int | None]:
    """How many rows of each set make `rows` together, by weight; None for all there are.

    Shares are rounded by the largest remainder, the earlier set first where two are equal. No set
    gets more than its cap (None: it has none); what it leaves goes to the others, by weight. The
    sum is `rows`, or that of the caps if they are less. Without `rows`, each gets its cap.
    Raises ValueError for a weight that is not above zero, and for two lists of different sets.
    """
    if weights.keys() != caps.keys() or not all(weight > 0 for weight in weights.values()):
        raise ValueError("each set needs a cap and a weight above zero")
    if rows is None:
        return dict(caps)
    given: dict[str, int | None] = {}
    left, sharing = rows, {name: Fraction(weight) for name, weight in weights.items()}
    while sharing:
        one = Fraction(left) / sum(sharing.values())
        full = {
            name: cap
            for name in sharing
            if (cap := caps[name]) is not None and cap <= one * sharing[name]
        }
        if not full:
            return {name: (given | _rounded(left, sharing))[name] for name in weights}
        given |= full
        left -= sum(full.values())
        sharing = {name: weight for name, weight in sharing.items() if name not in full}
    return {name: given[name] for name in weights}


def _rounded(rows: int, weights: Mapping[str, Fraction]) -> dict[str, int]:
    total = sum(weights.values())
    shares = {name: rows * weight / total for name, weight in weights.items()}
    whole = {name: int(share) for name, share in shares.items()}
    by_remainder = sorted(shares, key=lambda name: whole[name] - shares[name])
    for name in by_remainder[: rows - sum(whole.values())]:
        whole[name] += 1
    return whole
