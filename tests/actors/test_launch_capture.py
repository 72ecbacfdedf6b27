"""What a stock server is told so that it captures the layers that were asked for."""

import json

import pytest

from actors.capture_hook import Settings
from actors.launch_capture import (
    CaptureOptions,
    architecture_of,
    capture_arguments,
    hook_home,
    place_hook,
    served_layer_ids,
)


@pytest.mark.parametrize(
    ("architecture", "layers", "outputs", "told"),
    [
        ("LlamaForCausalLM", 6, (1, 2, 3), (1, 2, 3)),
        ("LlamaForCausalLM", 30, (0, 14, 26), (0, 14, 26)),
        ("Qwen3ForCausalLM", 36, (2, 17, 32), (2, 17, 32)),
        ("Qwen3MoeForCausalLM", 48, (1, 23, 44), (1, 23, 44)),
        ("GptOssForCausalLM", 24, (1, 11, 22), (1, 11, 22)),
        # One is added if the first id is 1, and only then: Kimi-K2 and K2.5, DeepSeek.
        ("DeepseekV3ForCausalLM", 61, (1, 29, 57), (1, 29, 57)),
        ("KimiK25ForConditionalGeneration", 61, (1, 29, 57), (1, 29, 57)),
        ("DeepseekV3ForCausalLM", 61, (2, 29, 57), (3, 30, 58)),
        ("KimiK25ForConditionalGeneration", 61, (28, 57), (29, 58)),
        ("Glm4MoeLiteForCausalLM", 47, (2, 22, 43), (3, 23, 44)),
    ],
)
def test_the_ids_are_those_that_give_the_outputs_of_the_layers(architecture, layers, outputs, told):
    assert served_layer_ids(architecture, layers, outputs) == told


@pytest.mark.parametrize(
    ("architecture", "outputs", "words"),
    [
        ("LlamaForCausalLM", (1, 2, 5), "from 0 to 4"),  # the server would die at a request
        ("LlamaForCausalLM", (), "from 0 to 4"),
        ("LlamaForCausalLM", (2, 1), "ascending"),
        ("LlamaForCausalLM", (1, 1), "distinct"),
        ("LlamaForCausalLM", (-1, 2), "from 0 to 4"),
        ("DeepseekV3ForCausalLM", (0, 2), "output of layer 0"),
        ("SomethingNewForCausalLM", (1, 2, 3), "not known for SomethingNew"),
    ],
)
def test_layers_that_would_be_others_without_a_word_are_refused(architecture, outputs, words):
    with pytest.raises(ValueError, match=words):
        served_layer_ids(architecture, 6, outputs)


def test_prefills_are_whole_eager_and_handed_to_the_hook(tmp_path):
    options = CaptureOptions(tmp_path, (2, 29, 57), (3, 30, 58), nonce="run1")
    words = capture_arguments(options)
    for flag in (
        "--enable-return-aux-hidden-states",
        "--disable-radix-cache",
        "--disable-prefill-cuda-graph",
    ):
        assert flag in words
    assert words[words.index("--speculative-algorithm") + 1] == "EAGLE3"
    ids = words.index("--return-aux-hidden-state-layer-ids")
    assert words[ids + 1 : ids + 5] == ["3", "30", "58", "--disable-radix-cache"]
    (hook,) = json.loads(words[words.index("--forward-hooks") + 1])
    settings = Settings(**hook["config"])
    assert (settings.folder, settings.nonce) == (str(tmp_path), "run1")
    assert list(settings.aux_layer_ids) == [2, 29, 57]  # "output of layer j", as it is written


def test_the_hooks_path_holds_the_hook_and_nothing_else_of_ours(tmp_path):
    place_hook(tmp_path)
    files = {path.relative_to(hook_home(tmp_path)).as_posix() for path in tmp_path.rglob("*.py")}
    assert files == {"actors/__init__.py", "actors/capture_file.py", "actors/capture_hook.py"}


def test_a_targets_architecture_is_read_from_where_its_layers_are():
    assert architecture_of({"architectures": ["A"], "num_hidden_layers": 6}) == ("A", 6)
    inside = {"architectures": ["K"], "text_config": {"num_hidden_layers": 61}}
    assert architecture_of(inside) == ("K", 61)


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 6},
        {"architectures": ["A"]},
        {"architectures": ["A", "B"], "num_hidden_layers": 6},
        {"architectures": "A", "num_hidden_layers": "6"},
    ],
)
def test_a_config_that_names_no_one_architecture_is_refused(config):
    with pytest.raises(ValueError, match="architectures"):
        architecture_of(config)
