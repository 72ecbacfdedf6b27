"""The EAGLE-3 Llama draft: SGLang's modules, names and arithmetic (`LlamaForCausalLMEagle3`).

The state dict's names are the checkpoint's names without SGLang's `model.` prefix. No weight is
read outside the forward of the module that owns it, so that ZeRO-3 may gather it there.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from torch import nn

from training.config import DraftConfig, DraftShape
from training.fused import gated, product, rms_norm, rotate

FROZEN = ("embed_tokens.weight",)  # the target's, copied; serving shares the target's own

_Result = TypeVar("_Result")
# Queries [R, heads, head_dim], keys and values [N, kv_heads, head_dim] -> [R, heads, head_dim].
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TargetFault(ValueError):
    """A target folder that a draft cannot be built for. The message says what was expected."""


class DraftModel(nn.Module):
    """One decoder layer over (embedding of the next token, hidden state), and a small head."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        if config.hidden_size != config.target_hidden_size:
            raise TargetFault(
                f"the draft's hidden_size is {config.hidden_size}, the target's "
                f"{config.target_hidden_size}: the draft shares the target's embedding, so set "
                f"draft.hidden_size to {config.target_hidden_size}"
            )
        self.config = config
        size, aux = config.hidden_size, len(config.aux_layer_ids) * config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = Linear(aux, size)
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.lm_head = DraftHead(size, config.draft_vocab_size)

    def given(self, embedded: torch.Tensor, asked: torch.Tensor | None = None) -> "Given":
        """What the embeddings [N, D] of tokens put in. Only tokens `asked` [G] get queries."""
        layer = self.layers[0]
        assert isinstance(layer, DraftLayer)
        return layer.self_attn.given(layer.input_layernorm(embedded), asked)

    def advance(
        self,
        given: "Given",
        hidden: torch.Tensor,  # [N, D] fc output at step 0, the recycled state after it
        positions: torch.Tensor,  # [N] int64, for RoPE
        attend: Attend,
        rows: torch.Tensor | None = None,  # [R] int64: those that need more than keys and values
    ) -> torch.Tensor:
        """The recycled state [R, D] (before the final norm) of one draft step."""
        return self.layers[0](given, hidden, positions, attend, rows)

    def step(
        self,
        embedded: torch.Tensor,  # [N, D] embeddings of the tokens that the rows are given
        hidden: torch.Tensor,  # [N, D]
        positions: torch.Tensor,  # [N]
        attend: Attend,
    ) -> torch.Tensor:  # [N, D]
        """One draft step by itself."""
        return self.advance(self.given(embedded), hidden, positions, attend)


@dataclass(frozen=True, eq=False)
class Given:
    """The embedding's half of queries, keys and values before RoPE. It depends on the token alone,
    so the steps share it: a row that is given token j takes row j."""

    query: torch.Tensor  # [R, heads * d]
    key: torch.Tensor  # [N, kv_heads * d]
    value: torch.Tensor  # [N, kv_heads * d]

    def take(self, asked: torch.Tensor, tokens: torch.Tensor) -> "Given":
        """Queries of rows `asked` [R], keys and values of rows `tokens` [N]."""
        return Given(
            self.query.index_select(0, asked),
            self.key.index_select(0, tokens),
            self.value.index_select(0, tokens),
        )


class DraftLayer(nn.Module):
    """The Llama layer whose attention reads twice the width: embedding first, then hidden."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)  # of the embedding half
        self.hidden_norm = RMSNorm(size, eps)  # of the hidden half
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = DraftMLP(config)

    def forward(
        self,
        given: Given,
        hidden: torch.Tensor,  # [N, D]
        positions: torch.Tensor,  # [N]
        attend: Attend,
        rows: torch.Tensor | None,  # [R]
    ) -> torch.Tensor:  # [R, D]
        normed = self.hidden_norm(hidden)
        residual = hidden if rows is None else hidden.index_select(0, rows)  # raw, un-normed
        residual = residual + self.self_attn(given, normed, positions, attend, rows)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class DraftAttention(nn.Module):
    """Projections and RoPE; which keys a query may see is the caller's `attend`."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(2 * config.hidden_size, width)
        self.k_proj = Linear(2 * config.hidden_size, kv_width)
        self.v_proj = Linear(2 * config.hidden_size, kv_width)
        self.o_proj = Linear(width, config.hidden_size)

    def given(self, embedded: torch.Tensor, asked: torch.Tensor | None) -> Given:
        """The embedding's half [N, D], normed, through the first columns of the projections."""
        of_queries = embedded if asked is None else embedded.index_select(0, asked)
        return Given(self.q_proj(of_queries), self.k_proj(embedded), self.v_proj(embedded))

    def forward(
        self,
        given: Given,
        hidden: torch.Tensor,  # [N, D], normed
        positions: torch.Tensor,  # [N]
        attend: Attend,
        rows: torch.Tensor | None,  # [R]
    ) -> torch.Tensor:  # [R, D]
        config, half = self.config, self.config.hidden_size
        cos, sin = rope(positions, config.head_dim, config.rope_theta, hidden.dtype)
        key = (given.key + self.k_proj(hidden, half)).unflatten(-1, (-1, config.head_dim))
        value = (given.value + self.v_proj(hidden, half)).unflatten(-1, (-1, config.head_dim))
        key = rotate(key, cos, sin)
        if rows is not None:
            hidden, cos, sin = hidden.index_select(0, rows), cos[rows], sin[rows]
        query = (given.query + self.q_proj(hidden, half)).unflatten(-1, (-1, config.head_dim))
        return self.o_proj(attend(rotate(query, cos, sin), key, value).flatten(1))


class DraftMLP(nn.Module):
    """Llama's gated MLP."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [R, D] -> [R, D]
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x)))


class Linear(nn.Linear):
    """Without bias. Reads rows of the whole width, or those of a part that starts at `first`."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__(size, width, bias=False)

    def forward(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        return product(x, self.weight, first)


class DraftHead(nn.Module):
    """`lm_head`: logits, or whatever a fused loss makes of the states and the weight."""

    def __init__(self, size: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, size))

    def forward(
        self,
        states: torch.Tensor,  # [M, D], after the final norm
        use: Callable[[torch.Tensor, torch.Tensor], _Result] = product,  # type: ignore[assignment]
    ) -> _Result:
        return use(states, self.weight)


class RMSNorm(nn.Module):
    """Llama's norm: the mean of squares in fp32, whatever the dtype of the states."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [N, D] -> [N, D]
        return rms_norm(x, self.weight, self.eps)


def rope(
    positions: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [N, 1, d / 2] of Llama's rotary embedding. Angles never below fp32."""
    wide = torch.promote_types(dtype, torch.float32)
    steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=wide)
    angles = positions.to(wide)[:, None, None] * theta ** (-steps / head_dim)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def draft_config(
    target_folder: Path, shape: DraftShape, aux_layer_ids: Sequence[int]
) -> DraftConfig:
    """The draft for a target: its own shape, and what it must share with the target's config.

    Raises `TargetFault` where the target needs something the draft's arithmetic does not have.
    """
    path = target_folder / "config.json"
    try:
        target: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise TargetFault(f"{path} cannot be read: {error}") from error
    # A multimodal target keeps its language model's numbers one level down.
    target = target.get("text_config", target)
    theta = _rope_theta(target, path)
    eos = _required(target, "eos_token_id", path)
    return DraftConfig(
        **shape.model_dump(),
        vocab_size=_required(target, "vocab_size", path),
        target_hidden_size=_required(target, "hidden_size", path),
        target_num_layers=_required(target, "num_hidden_layers", path),
        aux_layer_ids=tuple(aux_layer_ids),
        rms_norm_eps=_required(target, "rms_norm_eps", path),
        rope_theta=theta,
        rope_scaling=None,
        max_position_embeddings=_required(target, "max_position_embeddings", path),
        bos_token_id=target.get("bos_token_id"),
        eos_token_id=eos[0] if isinstance(eos, list) else eos,
    )


def _required(target: Mapping[str, Any], key: str, path: Path) -> Any:
    if key not in target:
        raise TargetFault(f"{path} has no {key}; a draft cannot be built without it")
    return target[key]


def _rope_theta(target: Mapping[str, Any], path: Path) -> float:
    """From `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before it)."""
    rope_values = dict(target["rope_scaling"] or {}) if "rope_scaling" in target else {}
    if "rope_parameters" in target:
        rope_values |= target["rope_parameters"] or {}
    for key in ("rope_type", "type"):
        if key in rope_values and rope_values[key] != "default":
            raise TargetFault(
                f"{path} asks for RoPE of type {rope_values[key]!r}; the draft trains with the "
                "default one only, and a draft served with another RoPE loses acceptance silently"
            )
    theta = rope_values if "rope_theta" in rope_values else target
    return float(_required(theta, "rope_theta", path))


def target_weights(target_folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's embedding [V, H] and head [V, H], read from its safetensors without a model.

    Tied targets give the same tensor twice. Raises `TargetFault` where a weight is missing.
    """
    names = _weight_files(target_folder)
    embedding = _read_one(names, ("embed_tokens.weight",), target_folder)
    if embedding is None:
        raise TargetFault(f"{target_folder} holds no weight named model.embed_tokens.weight")
    head = _read_one(names, ("lm_head.weight",), target_folder)
    if head is None:
        config = json.loads((target_folder / "config.json").read_text())
        if "tie_word_embeddings" not in config or not config["tie_word_embeddings"]:
            raise TargetFault(
                f"{target_folder} holds no lm_head.weight and does not say tie_word_embeddings"
            )
        head = embedding
    return embedding, head


def _weight_files(folder: Path) -> dict[str, Path]:
    """Where each weight lies: by the index file, or by the files' own headers."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in weight_map.items()}
    names: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names |= dict.fromkeys(file.keys(), path)
    return names


def _read_one(
    names: Mapping[str, Path], ends: tuple[str, ...], folder: Path
) -> torch.Tensor | None:
    found = [name for name in names if name.endswith(ends)]
    if not found:
        return None
    if len(found) > 1:
        raise TargetFault(f"{folder} holds several weights for one role: {found}")
    with safe_open(names[found[0]], framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(found[0])
    return tensor


def initial_weights(
    config: DraftConfig,
    head: torch.Tensor,  # [V, H], the target's
    used: torch.Tensor,  # [U] int64, the draft vocabulary
    *,
    seed: int,
) -> dict[str, torch.Tensor]:
    """fp32 weights of an untrained draft, without the frozen embedding. Same seed, same weights.

    The head starts as the target's rows of the draft vocabulary, and `fc` passes the last aux state
    through: measured to help a little. The rest is normal with Llama's deviation of 0.02.
    """
    if tuple(head.shape) != (config.vocab_size, config.target_hidden_size):
        raise TargetFault(
            f"the target's head is {list(head.shape)}, its config.json says "
            f"{[config.vocab_size, config.target_hidden_size]}"
        )
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in DraftModel(config).state_dict().items()}
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape)
        if name.endswith("norm.weight")
        else torch.empty(shape).normal_(0.0, 0.02, generator=generator)
        for name, shape in shapes.items()
        if name not in FROZEN
    }
    weights["fc.weight"] = torch.zeros(shapes["fc.weight"])
    weights["fc.weight"][:, -config.hidden_size :] = torch.eye(config.hidden_size)
    weights["lm_head.weight"] = head[used].float()
    return weights
