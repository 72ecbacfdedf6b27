"""A trained draft as SGLang loads it: names, shapes, completeness, all checked on the way out.

SGLang 0.5.23 drops unknown keys and leaves random weights where a key is missing, both in silence
(`models/llama_eagle3.py`), so nothing leaves here that was not compared with what it reads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from training.config import DraftConfig

WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"


class ExportFault(ValueError):
    """Weights or a vocabulary mapping that SGLang would load wrongly. The message names the key."""


def write_draft(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    *,
    config: DraftConfig,
    d2t: torch.Tensor,  # [U] int64, offsets: target id = draft id + d2t[draft id]
    t2d: torch.Tensor,  # [V] bool
    embedding: torch.Tensor,  # [V, D], the target's
    dtype: torch.dtype,
) -> None:
    """Write `config.json` and `model.safetensors` into `folder`, which is made.

    `weights` are the trained ones, without the embedding. Raises `ExportFault`.
    """
    tensors = {**weights, "embed_tokens.weight": embedding}
    _check_weights(tensors, config)
    _check_vocabulary(d2t, t2d, config)
    stored = {name: tensor.detach().to(dtype).contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True)
    text = json.dumps(sglang_config(config, dtype), indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n")
    save_file(
        {**stored, "d2t": d2t.contiguous(), "t2d": t2d.contiguous()},
        folder / WEIGHTS_FILE,
        metadata={"format": "pt"},
    )


def draft_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every weight that SGLang's `LlamaForCausalLMEagle3` holds, and its shape.

    Written down from SGLang's source rather than taken from our model: two witnesses, not one.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return {
        "embed_tokens.weight": (config.vocab_size, hidden),
        "fc.weight": (hidden, len(config.aux_layer_ids) * config.target_hidden_size),
        "layers.0.input_layernorm.weight": (hidden,),
        "layers.0.hidden_norm.weight": (hidden,),
        "layers.0.self_attn.q_proj.weight": (queries, 2 * hidden),
        "layers.0.self_attn.k_proj.weight": (keys, 2 * hidden),
        "layers.0.self_attn.v_proj.weight": (keys, 2 * hidden),
        "layers.0.self_attn.o_proj.weight": (hidden, queries),
        "layers.0.post_attention_layernorm.weight": (hidden,),
        "layers.0.mlp.gate_proj.weight": (inner, hidden),
        "layers.0.mlp.up_proj.weight": (inner, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab_size, hidden),
    }


def sglang_config(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """`config.json`, with every key that SGLang 0.5.23 reads for this class of draft."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.target_hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        # true would make the head the embedding, and the trained head would be dropped.
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": config.max_position_embeddings,
        # The form of transformers 4, which the server's own configuration classes translate.
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "num_aux_hidden_states": len(config.aux_layer_ids),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        },
    }


def _check_weights(tensors: Mapping[str, torch.Tensor], config: DraftConfig) -> None:
    expected = draft_shapes(config)
    missing, unknown = sorted(expected.keys() - tensors), sorted(tensors.keys() - expected)
    if missing:
        raise ExportFault(f"{', '.join(missing)} is missing: SGLang would leave it random")
    if unknown:
        raise ExportFault(f"{', '.join(unknown)} is unknown: SGLang would drop it in silence")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name]:
            raise ExportFault(f"{name} is {tuple(tensor.shape)}, SGLang reads {expected[name]}")
        if not bool(torch.isfinite(tensor).all()):
            raise ExportFault(f"{name} holds a value that is not finite")
    if len(config.aux_layer_ids) * config.target_hidden_size == config.hidden_size:
        # SGLang decides by width whether a state comes from the target and needs fc.
        raise ExportFault(
            f"{len(config.aux_layer_ids)} aux states of {config.target_hidden_size} are as wide as "
            f"the draft's own {config.hidden_size}: SGLang would skip fc"
        )


def _check_vocabulary(d2t: torch.Tensor, t2d: torch.Tensor, config: DraftConfig) -> None:
    draft, target = config.draft_vocab_size, config.vocab_size
    if d2t.dtype != torch.int64 or tuple(d2t.shape) != (draft,):
        raise ExportFault(f"d2t is {d2t.dtype} {tuple(d2t.shape)}, SGLang reads int64 ({draft},)")
    if t2d.dtype != torch.bool or tuple(t2d.shape) != (target,):
        raise ExportFault(f"t2d is {t2d.dtype} {tuple(t2d.shape)}, expected bool ({target},)")
    used = d2t + torch.arange(draft)
    if int(used.min()) < 0 or int(used.max()) >= target:
        raise ExportFault(
            f"d2t leads to ids {int(used.min())} to {int(used.max())} of a vocabulary of {target}: "
            "it must hold offsets (target id - draft id), not ids"
        )
    if not bool((used.diff() > 0).all()):
        raise ExportFault("d2t does not lead to strictly ascending target ids")
    if not torch.equal(t2d.nonzero().flatten(), used):
        raise ExportFault(
            "t2d does not mark the ids that d2t leads to; d2t must hold offsets (target id - draft "
            "id), not ids"
        )
