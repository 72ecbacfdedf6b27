"""Attention of the TTT steps: causal over step 0, plus each row's own entries of later steps.

The causal part works through blocks of queries and recomputes its probabilities in the backward
pass, so memory grows with the block and not with T x T; the diagonal part is merged by log-sum-exp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from training.fused import add_product, operands
from training.packing import Span

_SCORES_PER_BLOCK = {"cpu": 1 << 20, "cuda": 1 << 27}  # a block fits the caches, or fills the GPU


@dataclass(frozen=True)
class Block:
    """Some teaching rows of one document, and the keys up to its last row."""

    rows: slice
    keys: slice  # packed
    all_see: int  # so many of these keys, from the first, lie ahead of no row


class TTTAttention:
    """What the queries of a packed batch may see, step by step. One object serves one forward.

    Row p of step k attends the step-0 keys of rows <= p of its document, and its own keys of steps
    1 to k. Keys of step 0 come for every packed token, later ones for the teaching rows only.
    """

    def __init__(self, rows: torch.Tensor, spans: Sequence[Span]) -> None:
        self._rows, self._spans = rows, spans
        self._blocks: list[Block] | None = None
        self._causal: tuple[torch.Tensor, torch.Tensor] | None = None
        self._own_keys: list[torch.Tensor] = []
        self._own_values: list[torch.Tensor] = []

    def __call__(
        self,
        query: torch.Tensor,  # [R, heads, d]
        key: torch.Tensor,  # [N, kv_heads, d] at step 0, [R, kv_heads, d] after it
        value: torch.Tensor,  # as key
    ) -> torch.Tensor:  # [R, heads, d]
        if self._causal is None or self._blocks is None:
            self._causal = (key, value)
            self._blocks = _blocks(self._rows, self._spans, query.shape[1])
        else:
            self._own_keys.append(key)
            self._own_values.append(value)
        mixed, lse = _CausalAttention.apply(query, *self._causal, self._rows, self._blocks)
        if not self._own_keys:
            return mixed
        return _merge_own(
            query, mixed, lse, torch.stack(self._own_keys, 1), torch.stack(self._own_values, 1)
        )


def _merge_own(
    query: torch.Tensor,  # [R, heads, d]
    mixed: torch.Tensor,  # [R, heads, d], the causal part's result
    lse: torch.Tensor,  # [R, heads], its log-sum-exp
    keys: torch.Tensor,  # [R, j, kv_heads, d], the row's own of steps 1..j
    values: torch.Tensor,  # [R, j, kv_heads, d]
) -> torch.Tensor:  # [R, heads, d]
    count, heads, size = query.shape
    by_key = (count * keys.shape[2], heads // keys.shape[2])  # one small product for each key head
    own_keys, own_values = (x.transpose(1, 2).flatten(0, 1) for x in (keys, values))  # [R*kv, j, d]
    scores = query.reshape(*by_key, size) @ own_keys.transpose(1, 2)  # [R*kv, groups, j]
    scores = scores.to(lse.dtype) / math.sqrt(size)
    weights = torch.cat([lse.view(*by_key, 1), scores], -1).softmax(-1)  # [R*kv, groups, 1 + j]
    drafted = (weights[..., 1:].to(values.dtype) @ own_values).view(count, heads, size)
    causal = weights[..., 0].view(count, heads, 1)
    return (causal * mixed + drafted).to(query.dtype)


class _CausalAttention(torch.autograd.Function):
    """Softmax attention over step-0 keys, with its log-sum-exp as a second, differentiable result.

    The gradient of a score is P * (dP - rowsum(dO * O) + dLSE): exact also when both results are
    used, as the merge does.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: torch.Tensor,  # [R, heads, d]
        key: torch.Tensor,  # [N, kv_heads, d]
        value: torch.Tensor,  # [N, kv_heads, d]
        rows: torch.Tensor,  # [R]
        blocks: Sequence[Block],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        heads, kv_heads = query.shape[1], key.shape[1]
        mixed = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=wide, device=query.device)
        ctx.save_for_backward(query, key, value, rows, mixed)
        ctx.blocks = blocks  # type: ignore[attr-defined]
        q, k, v = operands(query, key, value)
        for block in blocks:
            scores = _scores(_group(q[block.rows], kv_heads), k, rows, block)
            probabilities = scores.softmax(-1)
            # The largest score has probability exp(top - lse). Neither logsumexp nor exp is used
            # here: MKL's exp is slow on the -inf of the keys that lie ahead.
            block_lse = scores.amax(-1) - probabilities.amax(-1).log()  # [kv, n * groups]
            mixed[block.rows] = _ungroup(
                probabilities.to(v.dtype) @ v[block.keys].transpose(0, 1), heads
            )
            lse[block.rows] = _ungroup(block_lse[..., None], heads)[..., 0]
        return mixed, lse

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx,
        grad_mixed: torch.Tensor,  # [R, heads, d]
        grad_lse: torch.Tensor,  # [R, heads]
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, rows, mixed = ctx.saved_tensors  # type: ignore[attr-defined]
        heads, kv_heads = query.shape[1], key.shape[1]
        wide = grad_lse.dtype
        # [R, heads]: what every score of a row shares
        shared = grad_lse - torch.linalg.vecdot(grad_mixed.to(wide), mixed.to(wide))
        grad_query = torch.empty_like(query)
        grad_key, grad_value = (  # [kv_heads, N, d]
            torch.zeros_like(key, dtype=wide).transpose(0, 1).contiguous() for _ in range(2)
        )
        q, k, v, g = operands(query, key, value, grad_mixed)
        for block in ctx.blocks:  # type: ignore[attr-defined]
            asking, grad = _group(q[block.rows], kv_heads), _group(g[block.rows], kv_heads)
            probabilities = _scores(asking, k, rows, block).softmax(-1)
            add_product(grad_value[:, block.keys], probabilities.to(g.dtype).transpose(1, 2), grad)
            grad_scores = (grad @ v[block.keys].permute(1, 2, 0)).to(wide)
            grad_scores.add_(_group(shared[block.rows, :, None], kv_heads)).mul_(probabilities)
            narrow = grad_scores.to(q.dtype)
            scale = 1 / math.sqrt(query.shape[-1])
            block_query = (narrow @ k[block.keys].transpose(0, 1)).mul_(scale)
            grad_query[block.rows] = _ungroup(block_query, heads)
            add_product(grad_key[:, block.keys], narrow.transpose(1, 2), asking * scale)
        grads = (one.transpose(0, 1).to(key.dtype) for one in (grad_key, grad_value))
        return grad_query, *grads, None, None


def _blocks(rows: torch.Tensor, spans: Sequence[Span], heads: int) -> list[Block]:
    """Rows in blocks small enough for their scores to be held, each with the keys it may see."""
    limit = _SCORES_PER_BLOCK["cuda" if rows.is_cuda else "cpu"]
    at, blocks = rows.tolist(), []
    for span in spans:
        count = max(1, limit // (heads * (span.last_key + 1 - span.first_token)))
        for first in range(span.first_row, span.end_row, count):
            end = min(first + count, span.end_row)
            keys = slice(span.first_token, at[end - 1] + 1)
            blocks.append(Block(slice(first, end), keys, at[first] + 1 - span.first_token))
    return blocks


def _scores(
    query: torch.Tensor,  # [kv_heads, n * groups, d], of the block
    key: torch.Tensor,  # [N, kv_heads, d], of the batch
    rows: torch.Tensor,  # [R]
    block: Block,
) -> torch.Tensor:  # [kv_heads, n * groups, m], at least fp32, -inf where a key lies ahead
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = torch.baddbmm(
        query.new_empty(1, 1, 1),
        query,
        key[block.keys].permute(1, 2, 0),
        beta=0,
        alpha=1 / math.sqrt(query.shape[-1]),
    ).to(wide)
    some_see = torch.arange(block.keys.start + block.all_see, block.keys.stop, device=rows.device)
    ahead = some_see > rows[block.rows, None]  # [n, m - all_see]
    by_row = scores.view(len(scores), len(ahead), -1, scores.shape[-1])
    by_row[..., block.all_see :].masked_fill_(ahead[:, None], -math.inf)
    return scores


def _group(
    x: torch.Tensor,  # [n, heads, d]
    kv_heads: int,
) -> torch.Tensor:
    """[n, heads, d] -> [kv_heads, n * groups, d]: the queries that share a key lie together."""
    count, _, size = x.shape
    return x.view(count, kv_heads, -1, size).transpose(0, 1).reshape(kv_heads, -1, size)


def _ungroup(
    x: torch.Tensor,  # [kv_heads, n * groups, d]
    heads: int,
) -> torch.Tensor:
    """The inverse of `_group`: [kv_heads, n * groups, d] -> [n, heads, d]."""
    kv_heads, _, size = x.shape
    grouped = x.view(kv_heads, -1, heads // kv_heads, size)
    return grouped.transpose(0, 1).reshape(-1, heads, size)
