"""The training-time-test loss, fast: only rows that may teach, vocabulary in pieces, packed.

`dense.py` says the same plainly and is the oracle in the tests. For row p at step k the draft is
given x_{p+1+k}, and learns the target's distribution of x_{p+2+k}, made from `last[p+1+k]`.
"""

import torch
from torch import nn

from training.attention import TTTAttention
from training.model import DraftModel
from training.packing import PackedBatch

_VOCAB_PIECE = 8192  # target tokens whose logits are held at once
_LOGITS_PER_PIECE = {"cpu": 1 << 19, "cuda": 1 << 27}  # draft logits held at once, in fp32


class TTTLoss(nn.Module):
    """The loss of a packed batch, and what the draft got right. Called through the engine."""

    head: torch.Tensor
    head_used: torch.Tensor
    draft_ids: torch.Tensor

    def __init__(
        self,
        draft: DraftModel,
        head: torch.Tensor,  # [V, H], the target's
        used: torch.Tensor,  # [U] int64, the draft vocabulary
        *,
        steps: int,
        step_decay: float,
    ) -> None:
        super().__init__()
        self.draft, self.steps, self.step_decay = draft, steps, step_decay
        draft_ids = torch.full((len(head),), -1, dtype=torch.int64)
        draft_ids[used] = torch.arange(len(used))
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("head_used", head[used], persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The summed loss, and [R, K] flags: label in the draft vocabulary, drafted right.

        The sum is over rows and steps, step k weighted by decay^k. Dividing by the number of rows
        that may teach is the caller's: only it knows all micro-batches and ranks of a step.
        """
        states = self._unroll(batch)
        last = batch.last[batch.labels].to(self.head.dtype)  # [Q, H]
        label_ids = self.draft_ids[teacher_ids(last, self.head)]  # [Q], -1 outside
        speakable = batch.counted & (label_ids[batch.label_of] >= 0)  # [R, K]
        row, step = speakable.nonzero(as_tuple=True)
        labels, by_label = torch.sort(batch.label_of[row, step], stable=True)
        row, step = row[by_label], step[by_label]  # [M]
        chosen = torch.cat(states).index_select(0, step * len(batch.rows) + row)  # [M, D]
        wide = torch.promote_types(chosen.dtype, torch.float32)
        weights = (self.step_decay ** step.to(torch.float64)).to(wide)  # [M]

        def fused(states: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return _SoftCrossEntropy.apply(
                states, weight, last, self.head_used, labels, label_ids[labels], weights,
                torch.is_grad_enabled(),
            )  # fmt: skip

        loss, right = self.draft.lm_head(self.draft.norm(chosen), fused)
        correct = torch.zeros_like(speakable)
        correct[row, step] = right
        return loss, speakable, correct

    def _unroll(self, batch: PackedBatch) -> list[torch.Tensor]:
        """The recycled state [R, D] of every step. Rows past their last step add nothing."""
        draft, rows = self.draft, batch.rows
        end = max(0, len(batch.input_ids) - 1)
        embedded = draft.embed_tokens(batch.input_ids)  # [N, D]
        attend = TTTAttention(rows, batch.spans)
        given = (torch.arange(len(embedded), device=rows.device) + 1).clamp(max=end)
        hidden = draft.fc(batch.aux.to(embedded.dtype))  # [N, D]
        state = draft.step(embedded[given], hidden, batch.positions, attend, rows)
        states = [state]
        for k in range(1, self.steps):
            given = (rows + 1 + k).clamp(max=end)
            state = draft.step(embedded[given], state, batch.positions[rows] + k, attend)
            states.append(state)
        return states


def teacher_ids(
    last: torch.Tensor,  # [Q, H]
    head: torch.Tensor,  # [V, H]
) -> torch.Tensor:  # [Q] int64
    """The target's most likely token over its whole vocabulary; the lowest id of equals."""
    best = torch.full((len(last),), -torch.inf, dtype=last.dtype, device=last.device)
    ids = torch.zeros(len(last), dtype=torch.int64, device=last.device)
    for start in range(0, len(head), _VOCAB_PIECE):
        top, at = (last @ head[start : start + _VOCAB_PIECE].T).max(-1)  # first of equals
        higher = top > best
        best, ids = torch.where(higher, top, best), torch.where(higher, at + start, ids)
    return ids


class _SoftCrossEntropy(torch.autograd.Function):
    """Head, soft cross-entropy and both gradients in one pass over pieces of rows.

    The loss is linear in itself alone, so its gradients can be made at once and scaled later.
    Rows come ordered by label: rows that share a teacher share its softmax.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        states: torch.Tensor,  # [M, D]
        weight: torch.Tensor,  # [U, D], the draft's head
        last: torch.Tensor,  # [Q, H]
        head_used: torch.Tensor,  # [U, H], the target's
        labels: torch.Tensor,  # [M] int64 into last, ascending
        label_ids: torch.Tensor,  # [M] int64, draft ids
        weights: torch.Tensor,  # [M]
        needs_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(states.dtype, torch.float32)
        losses = torch.zeros(len(states), dtype=wide, device=states.device)
        correct = torch.zeros(len(states), dtype=torch.bool, device=states.device)
        grad_states = torch.empty_like(states)
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_grad else None
        limit = _LOGITS_PER_PIECE["cuda" if states.is_cuda else "cpu"]
        count = max(1, limit // len(weight))
        for start in range(0, len(states), count):
            piece = slice(start, start + count)
            part = states[piece]
            logits = part @ weight.T  # [c, U]
            teacher = _teacher(last, head_used, labels[piece], wide)
            correct[piece] = logits.max(-1).indices == label_ids[piece]
            log_q = logits.log_softmax(-1, dtype=wide)
            losses[piece] = -torch.linalg.vecdot(teacher, log_q)
            if grad_weight is not None:
                # Not log_q.exp(): MKL's exp is slow where it underflows, as most of a sharp
                # distribution does; the softmax kernel is not.
                q = logits.softmax(-1, dtype=wide)
                grad = q.sub_(teacher).mul_(weights[piece, None]).to(states.dtype)
                grad_states[piece] = grad @ weight
                grad_weight += grad.T @ part
        if grad_weight is not None:
            ctx.save_for_backward(grad_states, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(correct)
        return (losses * weights).sum(), correct

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_loss: torch.Tensor, _correct: None
    ) -> tuple[torch.Tensor | None, ...]:
        grad_states, grad_weight = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = grad_loss.to(grad_states.dtype)
        return grad_states * scale, grad_weight * scale, None, None, None, None, None, None


def _teacher(
    last: torch.Tensor,  # [Q, H]
    head_used: torch.Tensor,  # [U, H]
    labels: torch.Tensor,  # [c] ascending
    wide: torch.dtype,
) -> torch.Tensor:  # [c, U], the target's distribution renormalised over the draft vocabulary
    first, end = int(labels[0]), int(labels[-1]) + 1
    probabilities = (last[first:end] @ head_used.T).to(wide).softmax(-1)
    return probabilities.index_select(0, labels - first)
