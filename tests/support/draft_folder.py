"""EAGLE-3 draft folders for tests: a random one, and one that mostly knows a bigram target."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from tests.support.tiny_target import AUX_LAYER_IDS, make_tiny_target

TARGET_WIDTH = 64


def random_draft(
    folder: Path, *, vocab_size: int, draft_vocab_size: int = 120, seed: int = 0, **changes
) -> Path:
    """A random draft of the tiny target, with offsets that are not all zero."""
    generator = torch.Generator().manual_seed(seed)
    config = _config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
    )
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.3
        for name, shape in shapes(config).items()
    }
    for name in tensors:
        if "norm" in name:
            tensors[name] = 1 + 0.1 * tensors[name]
    kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    return _write(folder, {**config, **changes}, tensors, kept)


def bigram_target(folder: Path) -> Path:
    """A tiny target whose next token hangs mostly, but not only, on the token before."""
    make_tiny_target(folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 10
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.05
            layer.mlp.down_proj.weight *= 0.05
        head = torch.randn(model.lm_head.weight.shape, generator=generator) * 0.2
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(head)
    model.save_pretrained(folder)
    return folder


def knowing_draft(
    folder: Path, follows: torch.Tensor, *, draft_vocab_size: int, noise: float
) -> Path:
    """A draft that says `follows[x]` after token x, as far as the target's states let it.

    Its embedding is one-hot and its attention sharp, so a row's output is the one-hot of the token
    that it read: o(v) adds that and takes away what the recycled state held. `noise` is the weight
    of the target's states in it: with them misplaced, it would say other things.
    """
    vocab_size = len(follows)
    width, half = vocab_size, 2 * vocab_size
    config = _config(
        hidden_size=width,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=half,  # one-hots in the first half: rotation never mixes two tokens
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
    )
    generator = torch.Generator().manual_seed(3)
    eye, zero = torch.eye(width), torch.zeros(half, 2 * width)
    keys, values = zero.clone(), zero.clone()
    keys[:width, :width] = 2.0 * eye
    values[:width, :width], values[:width, width:] = eye, -eye
    output = torch.zeros(width, half)
    output[:, :width] = eye / width**0.5
    kept = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    tensors = {name: torch.zeros(shape) for name, shape in shapes(config).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] = torch.ones_like(tensors[name])
    fused = torch.randn(tensors["fc.weight"].shape, generator=generator)
    tensors |= {
        "embed_tokens.weight": eye.clone(),
        "fc.weight": noise * fused,
        "layers.0.self_attn.q_proj.weight": keys,
        "layers.0.self_attn.k_proj.weight": keys.clone(),
        "layers.0.self_attn.v_proj.weight": values,
        "layers.0.self_attn.o_proj.weight": output,
        "lm_head.weight": (follows[None, :] == kept[:, None]).float(),
    }
    return _write(folder, config, tensors, kept)


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Written out by hand: the reader has its own list."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    return {
        "embed_tokens.weight": (config["vocab_size"], width),
        "fc.weight": (width, 3 * TARGET_WIDTH),
        "layers.0.input_layernorm.weight": (width,),
        "layers.0.hidden_norm.weight": (width,),
        "layers.0.post_attention_layernorm.weight": (width,),
        "layers.0.self_attn.q_proj.weight": (queries, 2 * width),
        "layers.0.self_attn.k_proj.weight": (keys, 2 * width),
        "layers.0.self_attn.v_proj.weight": (keys, 2 * width),
        "layers.0.self_attn.o_proj.weight": (width, queries),
        "layers.0.mlp.gate_proj.weight": (inner, width),
        "layers.0.mlp.up_proj.weight": (inner, width),
        "layers.0.mlp.down_proj.weight": (width, inner),
        "norm.weight": (width,),
        "lm_head.weight": (config["draft_vocab_size"], width),
    }


def _config(**own) -> dict:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "target_hidden_size": TARGET_WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "max_position_embeddings": 512,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "num_aux_hidden_states": 3,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYER_IDS),
        },
        **own,
    }


def _write(folder: Path, config: dict, tensors: dict, kept: torch.Tensor) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    marked = torch.zeros(config["vocab_size"], dtype=torch.bool)
    marked[kept] = True
    offsets = kept - torch.arange(len(kept))
    save_file({**tensors, "d2t": offsets, "t2d": marked}, folder / "model.safetensors")
    return folder
