"""A capture server at the edge that hands its states over through the hook, as SGLang does.

Prompts come to the hook in parts, two prompts to a batch where there are two, and their files
after the answers.
"""

from pathlib import Path
from types import SimpleNamespace

import torch

from actors.capture_hook import CaptureHook, Settings
from tests.support.capture_server import CaptureServer

PART_TOKENS = 16


class HookedServer(CaptureServer):
    """`hook_settings` change the hook's; close the hook when the server is gone."""

    def __init__(
        self, target, folder: Path, *, layer_ids, nonce: str, hook_settings=None, **faults
    ):
        super().__init__(target, folder, layer_ids=layer_ids, **faults)
        settings = {"max_bytes_in_flight": 1 << 20, "room_seconds": 10.0, **(hook_settings or {})}
        self.hook = CaptureHook(
            Settings(folder=str(folder), nonce=nonce, aux_layer_ids=layer_ids, **settings)
        )

    def hand_over(self, rid: str, ids: list[int], aux: torch.Tensor, last: torch.Tensor) -> None:
        """Let the hook see the prefill, part by part, each beside a row of somebody else."""
        layers = len(self._layer_ids)
        for first in range(0, len(ids), PART_TOKENS):
            rows = slice(first, first + PART_TOKENS)
            some = torch.tensor(ids[rows])
            batch = SimpleNamespace(
                forward_mode=SimpleNamespace(is_extend=lambda: True),
                rids=["somebody-else", rid],
                extend_seq_lens_cpu=[1, len(some)],
                extend_prefix_lens_cpu=[0, first],
            )
            beside = [torch.cat([one[:1] * 0, one[rows]]) for one in aux.chunk(layers, -1)]
            states = torch.cat([last[:1] * 0, last[rows]])
            self.hook(None, (torch.cat([some[:1], some]), states, None, batch, beside), None)
