"""Which rows teach, in which order they come, and how they are packed. Pure functions only.

The order of an epoch depends on the seed, the epoch and the sample ids alone, so it is the same
for every number of workers and however the features are sharded.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from training.features import FeatureFault, FeatureRow

# For each rank: its micro-batches, each the indices of the rows packed into one forward.
StepPlan = tuple[tuple[tuple[int, ...], ...], ...]


def is_heldout(sample_id: str, share: float) -> bool:
    """Does a sample belong to the held-out split? Decided by its id alone, for ever."""
    return _uniform("heldout", sample_id) < share


@dataclass(frozen=True)
class Split:
    """Rows of a feature store: the training split, and the held-out one."""

    train: tuple[int, ...]
    heldout: tuple[int, ...]


def split_rows(sample_ids: Sequence[str], heldout_share: float) -> Split:
    """Which rows are held out, by their ids alone. Raises `FeatureFault` if none are left."""
    held = [is_heldout(sample_id, heldout_share) for sample_id in sample_ids]
    split = Split(
        tuple(row for row, out in enumerate(held) if not out),
        tuple(row for row, out in enumerate(held) if out),
    )
    if not split.train:
        raise FeatureFault(
            f"{len(sample_ids)} captured samples leave none to train on (heldout_share "
            f"{heldout_share}): capture more, or hold out less"
        )
    return split


def steps_per_epoch(samples: int, batch_samples: int) -> int:
    """Optimiser steps of one epoch; the last one may hold fewer samples."""
    return -(-samples // batch_samples)


def plan_epoch(
    sample_ids: Sequence[str],
    lengths: Sequence[int],
    costs: Sequence[int],
    *,
    seed: int,
    epoch: int,
    batch_samples: int,
    micro_batch_tokens: int,
    workers: int,
) -> list[StepPlan]:
    """Every optimiser step of one epoch. Indices are positions in `sample_ids`.

    Each step holds the next `batch_samples` of the epoch's order (the last step what is left),
    dealt out to the ranks by cost. All ranks get the same number of micro-batches, some maybe
    empty: a rank that skipped one would leave the others waiting in a collective.
    """
    order = sorted(range(len(sample_ids)), key=lambda i: _uniform(seed, epoch, sample_ids[i]))
    return [
        deal(order[at : at + batch_samples], lengths, costs, micro_batch_tokens, workers)
        for at in range(0, len(order), batch_samples)
    ]


def deal(
    rows: Sequence[int],
    lengths: Sequence[int],
    costs: Sequence[int],
    micro_batch_tokens: int,
    workers: int,
) -> StepPlan:
    """Share rows out over the ranks, dearest first to the least loaded, and cut micro-batches."""
    shares: list[list[int]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for row in sorted(rows, key=lambda row: (-costs[row], row)):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += costs[row]
    cut = [_first_fit(share, lengths, micro_batch_tokens) for share in shares]
    most = max(len(batches) for batches in cut)
    return tuple(tuple(batches + [()] * (most - len(batches))) for batches in cut)


def _first_fit(rows: Sequence[int], lengths: Sequence[int], limit: int) -> list[tuple[int, ...]]:
    batches: list[list[int]] = []
    for row in rows:
        assert lengths[row] <= limit, "the config refuses samples longer than a micro-batch"
        for batch in batches:
            if sum(lengths[other] for other in batch) + lengths[row] <= limit:
                batch.append(row)
                break
        else:
            batches.append([row])
    return [tuple(batch) for batch in batches]


def _uniform(*parts: object) -> float:
    """A number in [0, 1) that depends on its arguments only, on every machine and version."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def counted_rows(
    loss_mask: torch.Tensor,  # [T] bool, of one document
    steps: int,
) -> torch.Tensor:  # [T, K] bool
    """Which rows count at which TTT step: `m[p+1] and m[p+2+k]`.

    Row p starts from x_{p+1}, which serving only ever takes from the target, and its label at step
    k is x_{p+2+k}. Both must be tokens that the target produced, inside this document.
    """
    tokens = len(loss_mask)
    counted = torch.zeros(tokens, steps, dtype=torch.bool)
    for k in range(steps):
        rows = max(0, tokens - 2 - k)
        counted[:rows, k] = loss_mask[1 : 1 + rows] & loss_mask[2 + k :]
    return counted


@dataclass(frozen=True)
class Span:
    """One document of a packed batch: its rows are `[first_row, end_row)` of the teaching rows."""

    first_row: int
    end_row: int
    first_token: int
    last_key: int  # packed index of the last teaching row: no query looks further


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """Documents one after the other, and what a forward must know of them. `R` rows may teach."""

    sample_ids: tuple[str, ...]
    input_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64, within each document
    aux: torch.Tensor  # [N, A*H]
    last: torch.Tensor  # [N, H]
    rows: torch.Tensor  # [R] int64, packed index of each row that counts at some step
    counted: torch.Tensor  # [R, K] bool
    documents: torch.Tensor  # [R] int64, the document of each row
    labels: torch.Tensor  # [Q] int64, ascending packed index of each position whose teacher counts
    label_of: torch.Tensor  # [R, K] int64 into `labels`; 0 where not counted
    given: torch.Tensor  # [G] int64, ascending packed index of each token that a row is given
    given_of: (
        torch.Tensor
    )  # [R, K] int64 into `given`: x_{p+1+k}, the batch's last token at its end
    spans: tuple[Span, ...]

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch on another device."""
        tensors = {
            one.name: getattr(self, one.name).to(device, non_blocking=True)
            for one in fields(self)
            if isinstance(getattr(self, one.name), torch.Tensor)
        }
        return replace(self, **tensors)


def pack(rows: Sequence[FeatureRow], *, steps: int, aux_size: int, last_size: int) -> PackedBatch:
    """Put rows one after the other. No rows make an empty batch, which a forward accepts."""
    counted, teaching, documents, spans = [], [], [], []
    start = seen = 0
    for number, row in enumerate(rows):
        of_row = counted_rows(row.loss_mask, steps)
        some = of_row.any(-1).nonzero().flatten()
        if len(some):
            spans.append(Span(seen, seen + len(some), start, start + int(some[-1])))
        counted.append(of_row[some])
        teaching.append(some + start)
        documents.append(torch.full_like(some, number))
        start, seen = start + len(row.input_ids), seen + len(some)
    none = torch.zeros(0, dtype=torch.int64)
    rows_at = torch.cat([none, *teaching])
    flags = torch.cat([torch.zeros(0, steps, dtype=torch.bool), *counted])
    label_at = rows_at[:, None] + torch.arange(1, steps + 1)  # [R, K]: teacher of x_{p+2+k}
    labels, label_of = label_at[flags].unique(return_inverse=True)
    given, given_of = label_at.clamp(max=max(0, start - 1)).unique(return_inverse=True)
    return PackedBatch(
        sample_ids=tuple(row.sample_id for row in rows),
        input_ids=torch.cat([none, *(row.input_ids for row in rows)]),
        positions=torch.cat([none, *(torch.arange(len(row.input_ids)) for row in rows)]),
        aux=_joined([row.aux for row in rows], aux_size),
        last=_joined([row.last for row in rows], last_size),
        rows=rows_at,
        counted=flags,
        documents=torch.cat([none, *documents]),
        labels=labels,
        label_of=torch.zeros_like(label_at).masked_scatter(flags, label_of),
        given=given,
        given_of=given_of,
        spans=tuple(spans),
    )


def _joined(states: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """States below each other, in new memory.

    numpy asks the system for large pages and torch does not: the faults of small ones can take
    longer than what is copied there.
    """
    if not states:
        return torch.zeros(0, size, dtype=torch.bfloat16)
    dtype, tokens = states[0].dtype, sum(len(one) for one in states)
    memory = torch.from_numpy(np.empty(tokens * size * dtype.itemsize, np.uint8))
    return torch.cat(list(states), out=memory.view(dtype).view(tokens, size))
