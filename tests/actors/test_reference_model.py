"""The target's passes over slots are the model's own, or the target is refused."""

import json
import shutil

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.reference_model import Target, TargetRefused
from tests.support.tiny_target import AUX_LAYER_IDS, EOS_ID

PROMPTS = [[5, 6, 7, 8, 9], [10], list(range(20, 61))]


def opened(folder, **changes):
    return Target(folder, **{"dtype": "float32", "device": "cpu", "slots": 4, **changes})


@pytest.fixture(scope="module")
def target(tiny_target):
    return opened(tiny_target, aux_layer_ids=AUX_LAYER_IDS)


@pytest.fixture(scope="module")
def plain(tiny_target):
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


@torch.inference_mode()
def own(plain, ids):
    return plain(input_ids=torch.tensor([ids]), output_hidden_states=True)


def near(seen, expected, tolerance=1e-4):
    torch.testing.assert_close(seen, expected, rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def test_prompts_of_different_lengths_read_together_are_each_as_if_alone(target, plain):
    states = target.prefill(PROMPTS, first_slot=0)
    for row, prompt in enumerate(PROMPTS):
        near(target.logits(states.last[row, : len(prompt)]), own(plain, prompt).logits[0])


@torch.inference_mode()
def test_slots_go_on_by_one_or_many_tokens_and_may_take_tokens_back(target, plain):
    target.prefill(PROMPTS, first_slot=0)
    rows = [list(prompt) for prompt in PROMPTS]
    for added in ([[30], [31], [32]], [[40, 41, 42], [50, 51, 52], [60, 61, 62]]):
        states = target.extend(torch.tensor(added), [len(row) for row in rows])
        for row, new in zip(rows, added, strict=True):
            row += new
    for number, row in enumerate(rows):
        near(target.logits(states.last[number]), own(plain, row).logits[0, -3:])
    # The last two tokens of each are replaced by another one.
    states = target.extend(torch.tensor([[70], [71], [72]]), [len(row) - 2 for row in rows])
    for number, row in enumerate(rows):
        near(
            target.logits(states.last[number]), own(plain, [*row[:-2], 70 + number]).logits[0, -1:]
        )


@torch.inference_mode()
def test_a_slot_that_grows_or_moves_keeps_what_it_holds(target, plain):
    target.cache.clear()
    target.prefill([PROMPTS[0], PROMPTS[2]], first_slot=0)
    target.prefill([list(range(3, 253)) + list(range(3, 103))], first_slot=2)  # buffers grow
    target.cache.move(1, 0, len(PROMPTS[2]))
    states = target.extend(torch.tensor([[99]]), [len(PROMPTS[2])])
    near(target.logits(states.last[0]), own(plain, [*PROMPTS[2], 99]).logits[0, -1:])
    target.cache.clear()


@torch.inference_mode()
def test_aux_is_the_output_of_the_named_layers_and_last_is_after_the_norm(target, plain):
    states = target.prefill(PROMPTS, first_slot=None)
    for row, prompt in enumerate(PROMPTS):
        hidden = own(plain, prompt).hidden_states
        expected = torch.cat([hidden[layer + 1][0] for layer in AUX_LAYER_IDS], dim=-1)
        near(states.aux[row, : len(prompt)], expected)
        near(states.last[row, : len(prompt)], hidden[-1][0])


def test_what_the_target_says_of_itself(target):
    assert target.eos_ids == {EOS_ID}
    assert (target.vocab_size, target.hidden_size, target.layers) == (259, 64, 6)
    assert target.context_length == 512


def saved(model, folder, tiny_target):
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_target / name, folder)
    return folder


SMALL = {
    "vocab_size": 259,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


@torch.inference_mode()
def test_another_family_of_models_takes_the_same_road(tmp_path, tiny_target):
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL, head_dim=16)).eval()
    target = opened(saved(model, tmp_path / "qwen3", tiny_target))
    parts = [target.prefill([[5, 6, 7]], first_slot=0), target.extend(torch.tensor([[8, 9]]), [3])]
    near(
        target.logits(torch.cat([part.last for part in parts], dim=1)),
        model(input_ids=torch.tensor([[5, 6, 7, 8, 9]])).logits,
    )


def test_a_target_that_scales_its_logits_is_refused(tmp_path, tiny_target):
    model = GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=8.0))
    with pytest.raises(TargetRefused, match="differ from the model's own"):
        opened(saved(model, tmp_path / "granite", tiny_target))


def test_a_target_that_cannot_run_here_is_refused_in_one_sentence(tmp_path, tiny_target):
    model = BloomForCausalLM(BloomConfig(vocab_size=259, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(TargetRefused, match="BloomForCausalLM has no max_position_embeddings"):
        opened(saved(model, tmp_path / "bloom", tiny_target))


def test_learned_positions_and_ungrouped_heads_are_served(tmp_path, tiny_target):
    sizes = {"vocab_size": 259, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    assert opened(saved(model, tmp_path / "gpt2", tiny_target)).context_length == 128


def test_sliding_attention_is_refused_unless_the_window_holds_the_context(tmp_path, tiny_target):
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=64))
    folder = saved(model, tmp_path / "mistral", tiny_target)
    with pytest.raises(TargetRefused, match="--context-length 64"):
        opened(folder)
    assert opened(folder, context_length=64).context_length == 64


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "no folder"),
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json"),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "no tokenizer"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no \*\.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot load"),
    ],
)
def test_a_folder_that_is_no_target_is_refused_by_what_it_lacks(
    tmp_path, tiny_target, spoil, message
):
    folder = tmp_path / "spoilt"
    shutil.copytree(tiny_target, folder)
    spoil(folder)
    with pytest.raises(TargetRefused, match=message):
        opened(folder)


def test_weights_that_lack_a_tensor_are_refused_not_filled_with_random_numbers(
    tmp_path, tiny_target
):
    folder = tmp_path / "deep"
    shutil.copytree(tiny_target, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 7}))
    with pytest.raises(TargetRefused, match="do not fit"):
        opened(folder)


@pytest.mark.parametrize("ids", [(3, 1), (1, 1), (1, 5), (-1,)])
def test_aux_layers_that_sglang_would_take_otherwise_are_refused(tiny_target, ids):
    with pytest.raises(TargetRefused, match="aux layer ids"):
        opened(tiny_target, aux_layer_ids=ids)


def test_a_context_beyond_the_targets_is_refused(tiny_target):
    with pytest.raises(TargetRefused, match="513"):
        opened(tiny_target, context_length=513)
