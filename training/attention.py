"""Attention of the TTT steps: causal over step 0, plus each row's own entries of later steps.

The causal part works through blocks of queries and recomputes its probabilities in the backward
pass, so memory grows with the block and not with T x T; the diagonal part is merged by log-sum-exp.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from training.packing import Span

_SCORES_PER_BLOCK = {"cpu": 1 << 21, "cuda": 1 << 27}  # a block fits the caches, or fills the GPU


class TTTAttention:
    """What the queries of a packed batch may see, step by step. One object serves one forward.

    Row p of step k attends the step-0 keys of rows <= p of its document, and its own keys of steps
    1 to k. Keys of step 0 come for every packed token, later ones for the teaching rows only.
    """

    def __init__(self, rows: torch.Tensor, spans: Sequence[Span]) -> None:
        self._rows, self._spans = rows, spans
        self._causal: tuple[torch.Tensor, torch.Tensor] | None = None
        self._own_keys: list[torch.Tensor] = []
        self._own_values: list[torch.Tensor] = []

    def __call__(
        self,
        query: torch.Tensor,  # [R, heads, d]
        key: torch.Tensor,  # [N, kv_heads, d] at step 0, [R, kv_heads, d] after it
        value: torch.Tensor,  # as key
    ) -> torch.Tensor:  # [R, heads, d]
        if self._causal is None:
            self._causal = (key, value)
        else:
            self._own_keys.append(key)
            self._own_values.append(value)
        mixed, lse = _CausalAttention.apply(query, *self._causal, self._rows, self._spans)
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
        spans: Sequence[Span],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(query.dtype, torch.float32)
        mixed = torch.empty_like(query)
        lse = torch.empty(query.shape[:2], dtype=wide, device=query.device)
        for row, keys in _blocks(query, spans):
            scores = _scores(query[row], key[keys], rows[row], keys.start)
            probabilities = scores.softmax(-1)
            # The largest score has probability exp(top - lse). Neither logsumexp nor exp is used
            # here: MKL's exp is slow on the -inf of the keys that lie ahead.
            block_lse = scores.amax(-1) - probabilities.amax(-1).log()  # [kv, n * groups]
            block = probabilities.to(query.dtype) @ value[keys].transpose(0, 1)
            mixed[row] = _ungroup(block, query.shape[1])
            lse[row] = _ungroup(block_lse[..., None], query.shape[1])[..., 0]
        ctx.save_for_backward(query, key, value, rows, mixed)
        ctx.spans = spans  # type: ignore[attr-defined]
        return mixed, lse

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx,
        grad_mixed: torch.Tensor,  # [R, heads, d]
        grad_lse: torch.Tensor,  # [R, heads]
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, rows, mixed = ctx.saved_tensors  # type: ignore[attr-defined]
        kv_heads = key.shape[1]
        wide = grad_lse.dtype
        # [R, heads]: what every score of a row shares
        shared = grad_lse - (grad_mixed.to(wide) * mixed).sum(-1)
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(key, dtype=wide)
        for row, keys in _blocks(query, ctx.spans):  # type: ignore[attr-defined]
            scores = _scores(query[row], key[keys], rows[row], keys.start)
            probabilities = scores.softmax(-1)
            grad = _group(grad_mixed[row], kv_heads)  # [kv, n * groups, d]
            grad_value[keys] += (probabilities.to(grad.dtype).transpose(1, 2) @ grad).transpose(
                0, 1
            )
            grad_scores = (grad @ value[keys].permute(1, 2, 0)).to(wide)
            grad_scores.add_(_group(shared[row, :, None], kv_heads)).mul_(probabilities)
            narrow = grad_scores.mul_(1 / math.sqrt(query.shape[-1])).to(query.dtype)
            grad_query[row] = _ungroup(narrow @ key[keys].transpose(0, 1), query.shape[1])
            grad_key[keys] += (narrow.transpose(1, 2) @ _group(query[row], kv_heads)).transpose(
                0, 1
            )
        return grad_query, grad_key.to(key.dtype), grad_value.to(key.dtype), None, None


def _blocks(
    query: torch.Tensor,  # [R, heads, d]
    spans: Sequence[Span],
) -> Iterator[tuple[slice, slice]]:
    """Slices of rows and of the keys they may see, small enough for their scores to be held."""
    limit = _SCORES_PER_BLOCK["cuda" if query.is_cuda else "cpu"]
    for span in spans:
        keys = slice(span.first_token, span.last_key + 1)
        count = max(1, limit // (query.shape[1] * (keys.stop - keys.start)))
        for first in range(span.first_row, span.end_row, count):
            yield slice(first, min(first + count, span.end_row)), keys


def _scores(
    query: torch.Tensor,  # [n, heads, d]
    key: torch.Tensor,  # [m, kv_heads, d]
    rows: torch.Tensor,  # [n], packed
    first_key: int,
) -> torch.Tensor:  # [kv_heads, n * groups, m], at least fp32, -inf where a key lies ahead
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = (_group(query, key.shape[1]) @ key.permute(1, 2, 0)).to(wide)
    scores.mul_(1 / math.sqrt(query.shape[-1]))
    ahead = torch.arange(first_key, first_key + len(key), device=rows.device) > rows[:, None]
    scores.view(key.shape[1], len(rows), -1, len(key)).masked_fill_(ahead[:, None], -math.inf)
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
