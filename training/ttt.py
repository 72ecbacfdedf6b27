"""The training-time-test loss, fast: only rows that may teach, vocabulary in pieces, packed.

`dense.py` says the same plainly and is the oracle in the tests. For row p at step k the draft is
given x_{p+1+k}, and learns the target's distribution of x_{p+2+k}, made from `last[p+1+k]`.
"""

from itertools import pairwise

import torch
from torch import nn

from training.attention import TTTAttention
from training.fused import add_product, operands
from training.model import DraftModel
from training.packing import PackedBatch

# A piece fits the caches, or fills the GPU.
_LABELS_PER_PIECE = {"cpu": 512, "cuda": 4096}  # teachers held at once
_VOCAB_PER_PIECE = {"cpu": 4096, "cuda": 32768}  # target tokens whose logits are held at once
_LOGITS_PER_PIECE = {"cpu": 1 << 20, "cuda": 1 << 27}  # draft logits held at once, in fp32


class TTTLoss(nn.Module):
    """The loss of a packed batch, and what the draft got right. Called through the engine."""

    head: torch.Tensor
    used: torch.Tensor
    draft_ids: torch.Tensor

    def __init__(
        self,
        draft: DraftModel,
        head: torch.Tensor,  # [V, H], the target's
        used: torch.Tensor,  # [U] int64, the draft vocabulary, ascending
        *,
        steps: int,
        step_decay: float,
    ) -> None:
        super().__init__()
        self.draft, self.steps, self.step_decay = draft, steps, step_decay
        assert bool((used[1:] > used[:-1]).all())  # the teacher takes the logits in this order
        draft_ids = torch.full((len(head),), -1, dtype=torch.int64)
        draft_ids[used] = torch.arange(len(used))
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("used", used, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The summed loss, and [R, K] flags: label in the draft vocabulary, drafted right.

        The sum is over rows and steps, step k weighted by decay^k. Dividing by the number of rows
        that may teach is the caller's: only it knows all micro-batches and ranks of a step.
        """
        states = torch.cat(self._unroll(batch))
        row, step = batch.counted.nonzero(as_tuple=True)
        labels, by_label = torch.sort(batch.label_of[row, step], stable=True)
        row, step = row[by_label], step[by_label]  # [M]
        chosen = self.draft.norm(states.index_select(0, step * len(batch.rows) + row))  # [M, D]
        wide = torch.promote_types(chosen.dtype, torch.float32)
        weights = (self.step_decay ** step.to(torch.float64)).to(wide)  # [M]
        last = batch.last[batch.labels].to(self.head.dtype)  # [Q, H]

        def fused(
            states: torch.Tensor, weight: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return _SoftCrossEntropy.apply(
                states, weight, last, self.head, self.used, self.draft_ids, labels, weights,
                torch.is_grad_enabled(),
            )  # fmt: skip

        loss, taught, right = self.draft.lm_head(chosen, fused)
        speakable, correct = torch.zeros_like(batch.counted), torch.zeros_like(batch.counted)
        speakable[row, step], correct[row, step] = taught, right
        return loss, speakable, correct

    def _unroll(self, batch: PackedBatch) -> list[torch.Tensor]:
        """The recycled state [R, D] of every step. Rows past their last step add nothing."""
        draft, rows = self.draft, batch.rows
        end = max(0, len(batch.input_ids) - 1)
        attend = TTTAttention(rows, batch.spans)
        given = draft.given(draft.embed_tokens(batch.input_ids), batch.given)
        after = (torch.arange(len(batch.input_ids), device=rows.device) + 1).clamp(max=end)
        hidden = draft.fc(batch.aux.to(draft.embed_tokens.weight.dtype))  # [N, D]
        first = given.take(batch.given_of[:, 0], after)
        states = [draft.advance(first, hidden, batch.positions, attend, rows)]
        for k in range(1, self.steps):
            part = given.take(batch.given_of[:, k], batch.given[batch.given_of[:, k]])
            states.append(draft.advance(part, states[-1], batch.positions[rows] + k, attend))
        return states


def teacher(
    last: torch.Tensor,  # [Q, H]
    head: torch.Tensor,  # [V, H]
    used: torch.Tensor,  # [U] int64, ascending
) -> tuple[torch.Tensor, torch.Tensor]:  # [Q] int64, [Q, U]
    """The target's most likely token of its whole vocabulary (the lowest id of equals), and its
    logits of the draft vocabulary."""
    (last,) = operands(last)
    best = torch.full((len(last),), -torch.inf, dtype=last.dtype, device=last.device)
    ids = torch.zeros(len(last), dtype=torch.int64, device=last.device)
    of_used = last.new_empty(len(last), len(used))
    piece = _VOCAB_PER_PIECE[last.device.type]
    starts = range(0, len(head), piece)
    edges = torch.searchsorted(used, torch.tensor([*starts, len(head)], device=used.device))
    for start, (first, end) in zip(starts, pairwise(edges.tolist()), strict=True):
        (part,) = operands(head[start : start + piece])  # never all of it at once
        logits = last @ part.T
        of_used[:, first:end] = logits.index_select(1, used[first:end] - start)
        top, at = logits.max(-1)  # first of equals
        higher = top > best
        best, ids = torch.where(higher, top, best), torch.where(higher, at + start, ids)
    return ids, of_used


class _SoftCrossEntropy(torch.autograd.Function):
    """Teacher, head, soft cross-entropy and both gradients in one pass over pieces of rows.

    The loss is linear in itself alone, so its gradients can be made at once and scaled later.
    Rows come ordered by label: rows that share a teacher share its logits and its softmax.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        states: torch.Tensor,  # [M, D]
        weight: torch.Tensor,  # [U, D], the draft's head
        last: torch.Tensor,  # [Q, H]
        head: torch.Tensor,  # [V, H], the target's
        used: torch.Tensor,  # [U] int64, ascending
        draft_ids: torch.Tensor,  # [V] int64, -1 outside the draft vocabulary
        labels: torch.Tensor,  # [M] int64 into last, ascending
        weights: torch.Tensor,  # [M]
        needs_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(states.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=states.device)
        taught = torch.zeros(len(states), dtype=torch.bool, device=states.device)
        right = torch.zeros_like(taught)
        grad_states = torch.zeros_like(states) if needs_grad else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad else None
        wide_states, wide_weight = operands(states, weight)
        limit = _LOGITS_PER_PIECE[states.device.type]
        count = _LABELS_PER_PIECE[states.device.type]
        for first in range(0, len(last), count):
            best, logits = teacher(last[first : first + count], head, used)
            label_ids = draft_ids[best]
            probabilities = logits.softmax(-1, dtype=wide)  # renormalised over the draft vocabulary
            edges = torch.tensor([first, first + count], device=labels.device)
            start, end = torch.searchsorted(labels, edges).tolist()
            own = labels[start:end] - first  # [m] into this piece
            rows = (label_ids[own] >= 0).nonzero().flatten()
            for piece in rows.split(max(1, limit // len(weight))):
                at, by = piece + start, own[piece]
                part = wide_states[at]
                losses, top, grad = _soft_cross_entropy(
                    part @ wide_weight.T, probabilities.index_select(0, by)
                )
                loss += torch.dot(losses, weights[at])
                taught[at], right[at] = True, top == label_ids[by]
                if grad_states is not None and grad_weight is not None:
                    scale, grad = weights[at, None], grad.to(part.dtype)
                    grad_states[at] = ((grad @ wide_weight) * scale).to(states.dtype)
                    add_product(grad_weight, grad.T, (part * scale).to(part.dtype))
        if grad_states is not None and grad_weight is not None:
            ctx.save_for_backward(grad_states, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(taught, right)
        return loss, taught, right

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_loss: torch.Tensor, *_flags: None
    ) -> tuple[torch.Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = grad_loss.to(grad_states.dtype)
        return grad_states * scale, grad_weight * scale, *(None,) * 7


def _soft_cross_entropy(
    logits: torch.Tensor,  # [c, U]
    teacher: torch.Tensor,  # [c, U], a distribution
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each row [c], its most likely draft id [c], and the gradient of its logits."""
    logits = logits.to(teacher.dtype)
    top, ids = logits.max(-1)
    draft = logits.softmax(-1)
    # As in attention: the largest logit has probability exp(top - lse), and no exp is needed.
    lse = top - draft.gather(-1, ids[:, None])[:, 0].log()
    return lse - torch.linalg.vecdot(teacher, logits), ids, draft.sub_(teacher)
