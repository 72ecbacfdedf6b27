"""The draft's names, its config, and what it takes from the target."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.tiny_draft import TINY_DRAFT
from training.config import DraftShape
from training.model import (
    FROZEN,
    DraftModel,
    TargetFault,
    draft_config,
    initial_weights,
    target_weights,
)

SHAPE = DraftShape(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    draft_vocab_size=128,
)


def test_names_and_shapes_are_those_that_sglang_loads():
    shapes = {name: tuple(t.shape) for name, t in DraftModel(TINY_DRAFT).state_dict().items()}
    assert shapes == {
        "embed_tokens.weight": (259, 64),
        "fc.weight": (64, 192),
        "layers.0.input_layernorm.weight": (64,),
        "layers.0.hidden_norm.weight": (64,),
        "layers.0.self_attn.q_proj.weight": (64, 128),
        "layers.0.self_attn.k_proj.weight": (32, 128),
        "layers.0.self_attn.v_proj.weight": (32, 128),
        "layers.0.self_attn.o_proj.weight": (64, 64),
        "layers.0.post_attention_layernorm.weight": (64,),
        "layers.0.mlp.gate_proj.weight": (128, 64),
        "layers.0.mlp.up_proj.weight": (128, 64),
        "layers.0.mlp.down_proj.weight": (64, 128),
        "norm.weight": (64,),
        "lm_head.weight": (128, 64),
    }


def test_the_config_comes_from_the_target(tiny_target: Path):
    config = draft_config(tiny_target, SHAPE, (1, 2, 3))
    assert (config.vocab_size, config.target_num_layers) == (259, 6)
    assert (config.rope_theta, config.rope_scaling) == (10_000.0, None)
    assert (config.eos_token_id, config.bos_token_id) == (2, 1)


def change(folder: Path, target: Path, **values) -> Path:
    config = json.loads((target / "config.json").read_text())
    config.pop("rope_parameters", None)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config | values))
    return folder


def test_rope_is_read_in_both_spellings(tmp_path: Path, tiny_target: Path):
    old = change(tmp_path / "old", tiny_target, rope_theta=5e5, rope_scaling=None)
    new = change(
        tmp_path / "new", tiny_target, rope_parameters={"rope_theta": 5e5, "rope_type": "default"}
    )
    assert draft_config(old, SHAPE, (1, 2, 3)).rope_theta == 5e5
    assert draft_config(new, SHAPE, (1, 2, 3)).rope_theta == 5e5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "yarn"),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}, "linear"),
        ({}, "rope_theta"),
    ],
)
def test_a_rope_that_the_draft_does_not_have_is_refused(
    tmp_path: Path, tiny_target: Path, values: dict, message: str
):
    with pytest.raises(TargetFault, match=message):
        draft_config(change(tmp_path, tiny_target, **values), SHAPE, (1, 2, 3))


def test_another_width_than_the_targets_is_refused():
    config = TINY_DRAFT.model_copy(update={"hidden_size": 32})
    with pytest.raises(TargetFault, match=r"set draft\.hidden_size to 64"):
        DraftModel(config)


def test_embedding_and_head_are_read_without_the_model(tmp_path: Path, tiny_target: Path):
    embedding, head = target_weights(tiny_target)
    stored = load_file(tiny_target / "model.safetensors")
    assert torch.equal(embedding, stored["model.embed_tokens.weight"])
    assert torch.equal(head, embedding)  # tied
    own_head = torch.randn_like(embedding)
    save_file({**stored, "lm_head.weight": own_head}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny_target / "config.json").read_text())
    assert torch.equal(target_weights(tmp_path)[1], own_head)


def test_a_head_that_is_neither_there_nor_tied_is_refused(tmp_path: Path, tiny_target: Path):
    folder = change(tmp_path, tiny_target, tie_word_embeddings=False)
    (folder / "model.safetensors").write_bytes((tiny_target / "model.safetensors").read_bytes())
    with pytest.raises(TargetFault, match="no lm_head"):
        target_weights(folder)


def test_an_untrained_draft_is_the_same_for_the_same_seed():
    head, used = torch.randn(259, 64), torch.arange(128) * 2
    one, again = (initial_weights(TINY_DRAFT, head, used, seed=4) for _ in range(2))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert torch.equal(one["lm_head.weight"], head[used])
    states = torch.randn(3, 192)
    assert torch.equal(states @ one["fc.weight"].T, states[:, -64:])
    assert set(one) == set(DraftModel(TINY_DRAFT).state_dict()) - set(FROZEN)
    other = initial_weights(TINY_DRAFT, head, used, seed=5)
    name = "layers.0.mlp.up_proj.weight"
    assert not torch.equal(one[name], other[name])
