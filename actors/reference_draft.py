"""An EAGLE-3 draft as SGLang's `LlamaForCausalLMEagle3` reads it, and its inference.

Shares no code with the trainer: it is the second witness of what an exported folder means.
Where SGLang 0.5.23 drops an unknown key or leaves a missing one random, this reader refuses.
Shapes: `n` rows, `q` tokens, `H` target hidden size, `A` aux layers, `D` draft hidden size,
`V` target vocabulary, `U` draft vocabulary.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional

from actors.reference_cache import SlotCache, slot_attention

_INTEGERS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "num_hidden_layers",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)
# Extensions that change the arithmetic. Served without them, the draft would be another model.
_UNSUPPORTED = ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "bias")
_EMBEDDING = "embed_tokens.weight"


class DraftRefused(Exception):
    """A folder that SGLang would load as another draft than it claims to be."""


@dataclass(frozen=True)
class DraftHeader:
    """What `config.json` says, as far as it decides shapes and arithmetic."""

    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    aux_layer_ids: tuple[int, ...]  # "output of target layer j", ascending

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight and its shape, named as in a checkpoint."""
        width, inner = self.hidden_size, self.intermediate_size
        queries = self.num_attention_heads * self.head_dim
        keys = self.num_key_value_heads * self.head_dim
        layer = {
            "input_layernorm": (width,),
            "hidden_norm": (width,),
            "post_attention_layernorm": (width,),
            "self_attn.q_proj": (queries, 2 * width),
            "self_attn.k_proj": (keys, 2 * width),
            "self_attn.v_proj": (keys, 2 * width),
            "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        return {
            _EMBEDDING: (self.vocab_size, width),
            "fc.weight": (width, len(self.aux_layer_ids) * self.target_hidden_size),
            **{f"layers.0.{name}.weight": shape for name, shape in layer.items()},
            "norm.weight": (width,),
            "lm_head.weight": (self.draft_vocab_size, width),
        }


@dataclass(frozen=True, eq=False)
class TargetFacts:
    """What a draft must fit."""

    layers: int
    hidden_size: int
    vocab_size: int
    embedding: torch.Tensor  # [V, H], stands in where the draft brings none


def read_draft(
    folder: Path,
    *,
    target: TargetFacts | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> "Draft":
    """Read an exported folder; with `target`, check that it fits that target.

    Raises `DraftRefused`, which lists everything that is wrong with names and shapes.
    """
    header = _read_header(folder)
    tensors = _canonical(_read_tensors(folder))
    vocabulary = _vocabulary(tensors, header)
    if target is not None:
        _check_fit(header, target)
        if _EMBEDDING not in tensors:
            tensors[_EMBEDDING] = target.embedding
    _check_shapes(tensors, header)
    weights = {name: tensors[name].to(device, dtype) for name in header.shapes()}
    return Draft(header, weights, vocabulary.to(device))


class Draft:
    """The draft's weights and its one layer. Keys and values live with the caller."""

    def __init__(
        self,
        header: DraftHeader,
        weights: Mapping[str, torch.Tensor],
        vocabulary: torch.Tensor,  # [U] target id of each draft id
    ) -> None:
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.header = header
        self.vocabulary = vocabulary
        self._weights = weights
        self._rotary = LlamaRotaryEmbedding(config=_rotary_config(header)).to(vocabulary.device)

    def fuse(
        self,
        aux: torch.Tensor,  # [..., A*H]
    ) -> torch.Tensor:  # [..., D]
        """Fold the target's aux states into the draft's width. Recycled states skip this."""
        return functional.linear(aux, self._weights["fc.weight"])

    def layer(
        self,
        hidden: torch.Tensor,  # [n, q, D] fused aux states, or recycled states
        ids: torch.Tensor,  # [n, q] the token after each of them, as target ids
        positions: torch.Tensor,  # [n, q]
        cache: SlotCache | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:  # [n, q, D] before the final norm: the state that is recycled
        """Run the layer. Row i sees state i and token i+1, at position i."""
        embedded = functional.embedding(ids, self._weights[_EMBEDDING])
        both = torch.cat(
            [self._norm(embedded, "input_layernorm"), self._norm(hidden, "hidden_norm")], dim=-1
        )
        hidden = hidden + self._attention(both, positions, cache, mask)
        normed = self._norm(hidden, "post_attention_layernorm")
        gate = functional.silu(self._linear(normed, "mlp.gate_proj"))
        return hidden + self._linear(gate * self._linear(normed, "mlp.up_proj"), "mlp.down_proj")

    def logits(
        self,
        recycled: torch.Tensor,  # [..., D]
    ) -> torch.Tensor:  # [..., U] fp32
        """Score the draft vocabulary."""
        normed = _rms_norm(recycled, self._weights["norm.weight"], self.header.rms_norm_eps)
        return functional.linear(normed, self._weights["lm_head.weight"]).float()

    def best(
        self,
        recycled: torch.Tensor,  # [..., D]
    ) -> torch.Tensor:  # [...] target ids
        """The most likely token of the draft vocabulary, as a target id."""
        return self.vocabulary[self.logits(recycled).argmax(-1)]

    def _attention(
        self,
        both: torch.Tensor,  # [n, q, 2D]
        positions: torch.Tensor,  # [n, q]
        cache: SlotCache | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:  # [n, q, D]
        rows, queries, _ = both.shape
        query, key, value = (
            self._linear(both, f"self_attn.{name}_proj")
            .view(rows, queries, -1, self.header.head_dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        cos, sin = self._rotary(both, positions)  # [n, q, d]
        query, key = (_rotate(heads, cos[:, None], sin[:, None]) for heads in (query, key))
        if cache is not None:
            key, value = cache.update(key, value, 0)
        out, _ = slot_attention(None, query, key, value, mask)
        return self._linear(out.reshape(rows, queries, -1), "self_attn.o_proj")

    def _linear(self, states: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(states, self._weights[f"layers.0.{name}.weight"])

    def _norm(self, states: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[f"layers.0.{name}.weight"]
        return _rms_norm(states, weight, self.header.rms_norm_eps)


@torch.inference_mode()
def draft_logits(
    draft: Draft,
    input_ids: torch.Tensor,  # [T]
    aux: torch.Tensor,  # [T, A*H]
) -> torch.Tensor:  # [T-1, U] fp32
    """Logits of the first draft step over a sequence: row i sees (aux i, token i+1), for x_{i+2}.

    The last token has no next one, hence no row.
    """
    hidden = draft.fuse(aux[None, :-1].to(draft.vocabulary.device))
    positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
    ids = input_ids[None, 1:].to(hidden.device)
    return draft.logits(draft.layer(hidden, ids, positions, None, None))[0]


def _rms_norm(states: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = states.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(states.dtype)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def _rotary_config(header: DraftHeader) -> Any:
    from transformers import LlamaConfig

    scaling = {"rope_type": "default"} if header.rope_scaling is None else header.rope_scaling
    return LlamaConfig(
        hidden_size=header.hidden_size,
        num_attention_heads=header.num_attention_heads,
        head_dim=header.head_dim,
        max_position_embeddings=header.max_position_embeddings,
        rope_parameters={**scaling, "rope_theta": header.rope_theta},
    )


def _read_header(folder: Path) -> DraftHeader:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DraftRefused(f"{path} cannot be read: {error}") from error
    faults = _header_faults(config)
    if faults:
        raise DraftRefused(f"{path}: {'; '.join(faults)}")
    heads, width = config["num_attention_heads"], config["hidden_size"]
    return DraftHeader(
        hidden_size=width,
        # The two defaults that SGLang has.
        target_hidden_size=config.get("target_hidden_size", width),
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim", width // heads),
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_theta"],
        rope_scaling=config["rope_scaling"],
        aux_layer_ids=tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
    )


def _header_faults(config: Any) -> list[str]:
    if not isinstance(config, dict):
        return ["not a JSON object"]
    faults = [
        f"{key} is {config[key]!r}, expected a positive integer"
        if key in config
        else f"{key} is absent"
        for key in _INTEGERS
        if key not in config or type(config[key]) is not int or config[key] < 1
    ]
    faults += [
        f"{key} is absent"
        for key in ("architectures", "hidden_act", "tie_word_embeddings", "rms_norm_eps")
        if key not in config
    ]
    # transformers 5 would write rope_parameters; SGLang reads the older pair for this class.
    faults += [f"{key} is absent" for key in ("rope_theta", "rope_scaling") if key not in config]
    if faults:
        return faults
    if config["architectures"] != ["LlamaForCausalLMEagle3"]:
        faults.append(f"architectures is {config['architectures']}")
    if config["hidden_act"] != "silu":
        faults.append(f"hidden_act is {config['hidden_act']!r}, SGLang's class has silu")
    if config["tie_word_embeddings"] is not False:
        faults.append("tie_word_embeddings must be false: true drops the trained lm_head")
    if config["num_hidden_layers"] != 1:
        faults.append(f"num_hidden_layers is {config['num_hidden_layers']}, a draft has one")
    if config["draft_vocab_size"] > config["vocab_size"]:
        faults.append("draft_vocab_size is larger than vocab_size")
    faults += [f"{key} is not supported" for key in _UNSUPPORTED if config.get(key)]
    return faults + _aux_faults(config)


def _aux_faults(config: Mapping[str, Any]) -> list[str]:
    match config:
        case {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [*ids]} as eagle}:
            pass
        case _:
            return ["eagle_config.eagle_aux_hidden_state_layer_ids is absent"]
    faults = []
    if not ids or any(type(one) is not int or one < 0 for one in ids) or ids != sorted(set(ids)):
        faults.append(
            f"aux layer ids {ids} are not ascending and distinct: SGLang concatenates in "
            "ascending order whatever is written"
        )
    if "use_aux_hidden_state" in eagle and eagle["use_aux_hidden_state"] is not True:
        faults.append("eagle_config.use_aux_hidden_state is not true")
    faults += [f"eagle_config.{key} is not supported" for key in _UNSUPPORTED if eagle.get(key)]
    if "num_aux_hidden_states" in config and config["num_aux_hidden_states"] != len(ids):
        faults.append(f"num_aux_hidden_states is {config['num_aux_hidden_states']}, ids {ids}")
    return faults


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DraftRefused(f"{folder} has no *.safetensors")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            found = load_file(file)
        except (OSError, SafetensorError) as error:
            raise DraftRefused(f"{file} cannot be read: {error}") from error
        twice = sorted(found.keys() & tensors)
        if twice:
            raise DraftRefused(f"{', '.join(twice)} is in two files of {folder}")
        tensors |= found
    return tensors


def _canonical(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names without `model.` and with `layers.0.` for `midlayer.`, as SGLang understands both."""
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        if short in renamed:
            raise DraftRefused(f"{short} is there twice, under two names")
        renamed[short] = tensor
    return renamed


def _vocabulary(tensors: dict[str, torch.Tensor], header: DraftHeader) -> torch.Tensor:
    """Take d2t and t2d out of `tensors`, and return the target id of each draft id [U]."""
    size, draft_ids = header.vocab_size, torch.arange(header.draft_vocab_size)
    if "d2t" not in tensors:
        if header.draft_vocab_size < size:
            raise DraftRefused("d2t is missing: SGLang would take draft ids for target ids")
        return draft_ids
    d2t = tensors.pop("d2t")
    if d2t.dtype != torch.int64 or d2t.shape != draft_ids.shape:
        raise DraftRefused(
            f"d2t is {d2t.dtype} {tuple(d2t.shape)}, expected int64 {tuple(draft_ids.shape)}"
        )
    vocabulary = draft_ids + d2t
    if int(vocabulary.min()) < 0 or int(vocabulary.max()) >= size:
        raise DraftRefused(
            f"d2t leads to ids {int(vocabulary.min())} to {int(vocabulary.max())} of {size}: it "
            "must hold offsets (target id - draft id), not ids"
        )
    if not bool((vocabulary.diff() > 0).all()):
        raise DraftRefused("d2t does not lead to strictly ascending target ids")
    if "t2d" in tensors:
        marked = torch.zeros(size, dtype=torch.bool)
        marked[vocabulary] = True
        t2d = tensors.pop("t2d")
        if t2d.dtype != torch.bool or not torch.equal(t2d, marked):
            raise DraftRefused("t2d is not the bool mask of the ids that d2t leads to")
    return vocabulary


def _check_fit(header: DraftHeader, target: TargetFacts) -> None:
    faults = []
    if header.vocab_size != target.vocab_size:
        faults.append(f"vocab_size is {header.vocab_size}, the target's {target.vocab_size}")
    if header.target_hidden_size != target.hidden_size:
        faults.append(f"made for hidden size {header.target_hidden_size}, not {target.hidden_size}")
    if header.aux_layer_ids[-1] > target.layers - 2:
        faults.append(
            f"aux layer {header.aux_layer_ids[-1]} of a target with {target.layers} layers; the "
            f"last that can be captured is {target.layers - 2}"
        )
    if faults:
        raise DraftRefused(f"the draft does not fit the target: {'; '.join(faults)}")


def _check_shapes(tensors: Mapping[str, torch.Tensor], header: DraftHeader) -> None:
    shapes = header.shapes()
    faults = [f"{name} is missing" for name in sorted(shapes.keys() - tensors)]
    faults += [f"{name} is unknown" for name in sorted(tensors.keys() - shapes)]
    for name in sorted(shapes.keys() & tensors):
        seen = tensors[name]
        if tuple(seen.shape) != shapes[name]:
            faults.append(f"{name} is {tuple(seen.shape)}, expected {shapes[name]}")
        elif not seen.is_floating_point() or not bool(torch.isfinite(seen).all()):
            faults.append(f"{name} ({seen.dtype}) holds something else than finite numbers")
    if len(header.aux_layer_ids) * header.target_hidden_size == header.hidden_size:
        faults.append("the aux states are as wide as the draft: SGLang would skip fc")
    if faults:
        raise DraftRefused(f"weights: {'; '.join(faults)}")
