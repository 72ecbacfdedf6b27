"""The training-time-test loss, plainly: one document at a time, explicit masks, no shared code.

The oracle of the tests. It shares neither modules nor masks with the fast version.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from training.config import DraftConfig


@dataclass(frozen=True, eq=False)
class DenseOutcome:
    """One document's loss (summed, steps weighted) and [T, K] flags of what counted."""

    loss: torch.Tensor
    counted: torch.Tensor
    speakable: torch.Tensor
    correct: torch.Tensor


def dense_loss(
    weights: Mapping[str, torch.Tensor],
    config: DraftConfig,
    input_ids: torch.Tensor,  # [T] int64
    loss_mask: torch.Tensor,  # [T] bool
    aux: torch.Tensor,  # [T, A*H]
    last: torch.Tensor,  # [T, H]
    head: torch.Tensor,  # [V, H]
    used: torch.Tensor,  # [U] int64
    *,
    steps: int,
    step_decay: float,
) -> DenseOutcome:
    """Unroll the draft over one document as the EAGLE-3 paper's code does, with exact masks."""
    tokens = len(input_ids)
    in_draft_vocab = torch.zeros(len(head), dtype=torch.bool)
    in_draft_vocab[used] = True
    counted = torch.zeros(tokens, steps, dtype=torch.bool)
    speakable, correct = torch.zeros_like(counted), torch.zeros_like(counted)
    loss = torch.zeros((), dtype=last.dtype)
    hidden = aux @ weights["fc.weight"].T
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for k in range(steps):
        given = torch.tensor([int(input_ids[min(p + 1 + k, tokens - 1)]) for p in range(tokens)])
        hidden = _layer(
            weights, config, weights["embed_tokens.weight"][given], hidden, k, keys, values
        )
        logits = _norm(hidden, weights["norm.weight"], config) @ weights["lm_head.weight"].T
        for p in range(tokens):
            label = p + 2 + k
            if label >= tokens or not (loss_mask[p + 1] and loss_mask[label]):
                continue
            counted[p, k] = True
            teacher = head @ last[label - 1]  # the target's logits of x_label
            best = int(teacher.argmax())
            if not in_draft_vocab[best]:
                continue
            speakable[p, k] = True
            correct[p, k] = int(used[logits[p].argmax()]) == best
            wanted = teacher[used].softmax(-1)
            loss = loss - step_decay**k * (wanted * logits[p].log_softmax(-1)).sum()
    return DenseOutcome(loss, counted, speakable, correct)


def _layer(
    weights: Mapping[str, torch.Tensor],
    config: DraftConfig,
    embedded: torch.Tensor,  # [T, D]
    hidden: torch.Tensor,  # [T, D]
    k: int,
    keys: list[torch.Tensor],  # of the steps before, each [T, kv, d]; this step's is appended
    values: list[torch.Tensor],
) -> torch.Tensor:  # [T, D]
    layer = {
        name.removeprefix("layers.0."): weight
        for name, weight in weights.items()
        if name.startswith("layers.0.")
    }
    tokens, size = len(hidden), config.head_dim
    x = torch.cat(
        [
            _norm(embedded, layer["input_layernorm.weight"], config),
            _norm(hidden, layer["hidden_norm.weight"], config),
        ],
        -1,
    )  # [T, 2D]
    query, key, value = (
        (x @ layer[f"self_attn.{name}_proj.weight"].T).view(tokens, -1, size) for name in "qkv"
    )
    positions = torch.arange(tokens) + k
    query, key = _rotate(query, positions, config), _rotate(key, positions, config)
    keys.append(key)
    values.append(value)
    seen = torch.zeros(tokens, len(keys) * tokens, dtype=torch.bool)
    for p in range(tokens):
        seen[p, : p + 1] = True  # step 0, causal
        for step in range(1, len(keys)):
            seen[p, step * tokens + p] = True  # later steps: its own entry only
    groups = config.num_attention_heads // config.num_key_value_heads
    all_keys = torch.cat(keys).repeat_interleave(groups, 1)  # [(k+1) * T, heads, d]
    all_values = torch.cat(values).repeat_interleave(groups, 1)
    scores = torch.einsum("phd,shd->hps", query, all_keys) / math.sqrt(size)
    scores = scores.masked_fill(~seen, -math.inf)
    mixed = torch.einsum("hps,shd->phd", scores.softmax(-1), all_values).flatten(1)
    hidden = hidden + mixed @ layer["self_attn.o_proj.weight"].T
    x = _norm(hidden, layer["post_attention_layernorm.weight"], config)
    gated = F.silu(x @ layer["mlp.gate_proj.weight"].T) * (x @ layer["mlp.up_proj.weight"].T)
    return hidden + gated @ layer["mlp.down_proj.weight"].T


def _norm(x: torch.Tensor, weight: torch.Tensor, config: DraftConfig) -> torch.Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps)


def _rotate(x: torch.Tensor, positions: torch.Tensor, config: DraftConfig) -> torch.Tensor:
    """Rotate the pair (i, i + d/2) by position * theta^(-2i/d)."""
    half = config.head_dim // 2
    frequencies = torch.tensor(
        [config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)], dtype=x.dtype
    )
    angles = (positions[:, None] * frequencies)[:, None]  # [T, 1, d/2]
    low, high = x[..., :half], x[..., half:]
    return torch.cat(
        [low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1
    )
