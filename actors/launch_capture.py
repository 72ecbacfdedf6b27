"""How a stock SGLang server is started so that it captures. Verified against sglang 0.5.23.

The states leave the server through `capture_hook`, which its own interpreter has to find: the two
modules that it needs are copied into a folder of their own, which goes to PYTHONPATH. Nothing else
of ours, nor of our environment, is on that path.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parent
_INSIDE = ("__init__.py", "capture_file.py", "capture_hook.py")
_HOST_BYTES = 2 << 30  # states on their way from the device to their files

# `--return-aux-hidden-state-layer-ids` has a meaning of each model's own (`models/*.py`,
# set_eagle3_layers_to_capture). These capture the input of layer id + 1: "output of layer id".
_ADD_ONE = frozenset(
    {
        "Glm4MoeForCausalLM",
        "GptOssForCausalLM",  # unless an id is the number of layers, which is refused here
        "InternLM3ForCausalLM",
        "LlamaForCausalLM",
        "MiniMaxM2ForCausalLM",
        "MistralForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
    }
)
# These add one if the first id is 1, and capture the input of layer id otherwise. Kimi-K2 calls
# itself DeepseekV3ForCausalLM.
_ADD_ONE_AFTER_A_ONE = frozenset(
    {
        "DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "DeepseekV32ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "GlmMoeDsaForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MistralLarge3ForCausalLM",
    }
)
ARCHITECTURES = _ADD_ONE | _ADD_ONE_AFTER_A_ONE


@dataclass(frozen=True)
class CaptureOptions:
    """What a server is told that hands over its states."""

    folder: Path  # where the files appear
    layer_ids: tuple[int, ...]  # "output of layer j", ascending
    served_ids: tuple[int, ...] = ()  # the same in SGLang's words for this target
    nonce: str = ""  # with which the run's own rids begin


def served_layer_ids(architecture: str, layers: int, layer_ids: Sequence[int]) -> tuple[int, ...]:
    """The ids that make SGLang capture the outputs of `layer_ids` on a target of `layers` layers.

    Raises ValueError for layers that it cannot capture, and for an architecture that nobody has
    looked at: a wrong guess is one layer off, without a message.
    """
    wanted = list(layer_ids)
    if not wanted or wanted != sorted(set(wanted)) or not 0 <= wanted[0] <= wanted[-1] < layers - 1:
        # The last layer's output is never captured, and the server dies at its first request.
        raise ValueError(
            f"aux layer ids {wanted}: SGLang captures distinct layers in ascending order, from 0 "
            f"to {layers - 2} on this target"
        )
    if architecture in _ADD_ONE:
        return tuple(wanted)
    if architecture not in _ADD_ONE_AFTER_A_ONE:
        raise ValueError(f"what SGLang means by a layer's id is not known for {architecture}")
    if wanted[0] == 1:
        return tuple(wanted)
    if wanted[0] == 0:
        raise ValueError(
            f"SGLang cannot be told to capture the output of layer 0 of {architecture}"
        )
    return tuple(layer + 1 for layer in wanted)


def capture_arguments(capture: CaptureOptions) -> list[str]:
    """The part of SGLang's argument list that makes it capture whole prompts, in eager prefills."""
    hook = {
        "name": "capture",
        "target_modules": ["logits_processor", "*.logits_processor"],
        "hook_factory": "actors.capture_hook:factory",
        "config": {
            "folder": str(capture.folder),
            "nonce": capture.nonce,
            "aux_layer_ids": list(capture.layer_ids),
            "max_bytes_in_flight": _HOST_BYTES,
        },
    }
    return [
        "--enable-return-aux-hidden-states",
        *("--speculative-algorithm", "EAGLE3"),  # names the convention; there is no draft
        "--return-aux-hidden-state-layer-ids",
        *map(str, capture.served_ids),
        "--disable-radix-cache",  # rows from a cache would not be computed
        "--disable-prefill-cuda-graph",  # a replayed graph calls no hook
        *("--forward-hooks", json.dumps([hook])),
    ]


def hook_home(folder: Path) -> Path:
    """The entry of PYTHONPATH under which a server finds the hook."""
    return folder / "hook"


def place_hook(folder: Path) -> None:
    """Copy what runs inside a server to where `hook_home` says."""
    package = hook_home(folder) / _HERE.name
    package.mkdir(parents=True)
    for name in _INSIDE:
        shutil.copyfile(_HERE / name, package / name)


def architecture_of(config: Mapping[str, Any]) -> tuple[str, int]:
    """The architecture that a target's config.json names, and its number of layers.

    Raises ValueError where it names none, several, or no number.
    """
    text = config.get("text_config", config)
    match config.get("architectures"), text.get("num_hidden_layers"):
        case [str() as architecture], int() as layers:
            return architecture, layers
        case names, layers:
            raise ValueError(f"config.json has architectures {names}, num_hidden_layers {layers}")
