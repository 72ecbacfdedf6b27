"""The target run by transformers in this process, where it is small enough: an independent witness.

Capture asks it which layer a captured state comes from; evaluation, how near two tokens were.
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from pipelines.recipe import Target

MAX_TARGET_BYTES = 2_000_000_000


def can_witness(target: Target) -> bool:
    """Whether the target's weights are small enough to be loaded beside everything else."""
    return sum(file.stat().st_size for file in Path(target.path).glob("*.safetensors")) < (
        MAX_TARGET_BYTES
    )


class Witness:
    """The target as transformers runs it, on this machine's CPU."""

    def __init__(self, target: Target, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            target.path, dtype=dtype, trust_remote_code=target.trust_remote_code
        ).eval()

    @torch.inference_mode()
    def states(self, input_ids: Sequence[int]) -> list[torch.Tensor]:
        """The embedding, then each layer's output; the last entry is after the final norm.

        Entry j + 1 is the output of layer j, [T, H], for every layer but the last.
        """
        out = self._model(torch.tensor([list(input_ids)]), output_hidden_states=True)
        return [state[0] for state in out.hidden_states]

    @torch.inference_mode()
    def next_logits(self, input_ids: Sequence[int]) -> torch.Tensor:
        """The logits [V] fp32 of the token after `input_ids`."""
        logits: torch.Tensor = self._model(torch.tensor([list(input_ids)])).logits[0, -1]
        return logits.float()
