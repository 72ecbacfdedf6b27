"""Keys and values of many requests, one slot each, and the attention that reads them.

Slots are compact: the rows of a batch are slots 0..n-1, so a layer's keys are a view, never a
gather. Buffers grow in steps, so attention covers the longest running request, not the context.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

SLOT_ATTENTION = "eyas_slots"
_GROWTH_TOKENS = 256
# Attention over a length that is a multiple of this meets the same kernels again and again.
_USED_TOKENS_STEP = 32


@dataclass(frozen=True, eq=False)
class _Prefill:
    first: int | None  # first slot; None: nothing is kept
    count: int
    tokens: int


@dataclass(frozen=True, eq=False)
class _Extend:
    slots: torch.Tensor  # [n, 1]
    positions: torch.Tensor  # [n, q]
    used: int
    indices: dict[int, torch.Tensor]  # KV heads -> flat rows of a buffer


class SlotCache:
    """Keys and values per layer, [slots, kv_heads, capacity, head_dim].

    Stands where a transformers `Cache` stands: a model calls `update` once a layer. Before each
    forward pass, `plan_prefill` or `plan_extend` says what that pass is.
    """

    def __init__(self, layers: int, slots: int) -> None:
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self._slots = slots
        self._capacity = 0
        self._plan: _Prefill | _Extend | None = None

    def plan_prefill(self, first: int | None, count: int, tokens: int) -> None:
        """The next pass reads `count` whole prompts into slots from `first` on, right-padded."""
        self._plan = _Prefill(first, count, tokens)
        if first is not None:
            self._reserve(tokens)

    def plan_extend(self, starts: torch.Tensor, tokens: int) -> int:
        """The next pass adds `tokens` to each of slots 0..n-1, from position `starts` [n] on.

        Returns how many positions attention will cover; the mask must be as wide.
        """
        positions = starts[:, None] + torch.arange(tokens, device=starts.device)
        longest = int(starts.max()) + tokens
        self._reserve(longest)
        used = min(-(-longest // _USED_TOKENS_STEP) * _USED_TOKENS_STEP, self._capacity)
        slots = torch.arange(len(starts), device=starts.device)[:, None]
        self._plan = _Extend(slots, positions, used, {})
        return used

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's new keys and values [n, kv, q, d]; return those to attend to."""
        plan = self._plan
        assert plan is not None, "a pass without a plan"
        if isinstance(plan, _Prefill):
            if plan.first is not None:
                rows = slice(plan.first, plan.first + plan.count)
                self._buffer(self._keys, layer, keys)[rows, :, : plan.tokens] = keys
                self._buffer(self._values, layer, values)[rows, :, : plan.tokens] = values
            return keys, values
        key_buffer = self._buffer(self._keys, layer, keys)
        value_buffer = self._buffer(self._values, layer, values)
        index = self._flat_index(plan, keys.shape[1])
        for buffer, new in ((key_buffer, keys), (value_buffer, values)):
            buffer.view(-1, new.shape[-1]).index_copy_(0, index, new.reshape(-1, new.shape[-1]))
        rows = slice(0, len(plan.slots))
        return key_buffer[rows, :, : plan.used], value_buffer[rows, :, : plan.used]

    def move(self, source: int, destination: int, tokens: int) -> None:
        """Give the first `tokens` positions of one slot to another."""
        for buffer in (*self._keys, *self._values):
            if buffer is not None:
                buffer[destination, :, :tokens] = buffer[source, :, :tokens]

    def clear(self) -> None:
        """Give the memory back. Only when no request runs."""
        self._keys = [None] * len(self._keys)
        self._values = [None] * len(self._values)
        self._capacity = 0

    def _reserve(self, tokens: int) -> None:
        if tokens > self._capacity:
            self._capacity = -(-tokens // _GROWTH_TOKENS) * _GROWTH_TOKENS

    def _buffer(
        self, buffers: list[torch.Tensor | None], layer: int, like: torch.Tensor
    ) -> torch.Tensor:
        old = buffers[layer]
        if old is not None and old.shape[2] == self._capacity:
            return old
        new = like.new_zeros(self._slots, like.shape[1], self._capacity, like.shape[3])
        if old is not None:
            new[:, :, : old.shape[2]] = old
        buffers[layer] = new
        return new

    def _flat_index(self, plan: _Extend, kv_heads: int) -> torch.Tensor:
        if kv_heads not in plan.indices:
            heads = torch.arange(kv_heads, device=plan.slots.device)
            rows = plan.slots * kv_heads + heads  # [n, kv]
            flat = rows[:, :, None] * self._capacity + plan.positions[:, None, :]  # [n, kv, q]
            plan.indices[kv_heads] = flat.reshape(-1)
        return plan.indices[kv_heads]


def causal_mask(
    starts: torch.Tensor,  # [n] first query position of each row
    queries: int,
    used: int,
    groups: int,
    dtype: torch.dtype,
) -> torch.Tensor:  # [n, 1, groups * queries, used]
    """The additive mask of an extension, tiled for the query heads that share a KV head."""
    device = starts.device
    positions = starts[:, None] + torch.arange(queries, device=device)  # [n, q]
    seen = torch.arange(used, device=device) <= positions[:, :, None]  # [n, q, used]
    mask = torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, float("-inf"))
    return mask.repeat(1, groups, 1)[:, None]


def slot_attention(
    module: torch.nn.Module | None,  # noqa: ARG001 - the attention interface of transformers
    query: torch.Tensor,  # [n, heads, q, d]
    key: torch.Tensor,  # [n, kv_heads, t, d]
    value: torch.Tensor,  # [n, kv_heads, t, d]
    attention_mask: torch.Tensor | None,  # None: causal from position 0
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - inference only
    **extras: Any,
) -> tuple[torch.Tensor, None]:  # [n, q, heads, d]
    """Attend without repeating keys and values for grouped heads.

    Raises `ValueError` for a target whose attention is another one: it would be served wrongly, so
    the engine refuses it when it is loaded.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if name in extras and extras[name] is not None:
            raise ValueError(f"its attention has {name}, which this engine does not compute")
    rows, heads, queries, _ = query.shape
    kv_heads = key.shape[1]
    if attention_mask is None:
        out = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            scale=scaling,
            is_causal=queries > 1,
            enable_gqa=heads != kv_heads,
        )
    else:
        grouped = query.reshape(rows, kv_heads, heads // kv_heads * queries, query.shape[-1])
        out = functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=scaling
        ).reshape(rows, heads, queries, value.shape[-1])
    return out.transpose(1, 2).contiguous(), None
