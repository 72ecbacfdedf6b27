"""One training step in a process of its own: `python -m benchmarks.train_case CASE_JSON`.

A case says all that a step needs, so that our process and a peer's build the same batch and the
same weights. Each line on stdin asks for one step; a line of JSON answers with what it cost.
"""

import ctypes
import dataclasses
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from training.config import DraftConfig, TrainConfig
from training.engine import DTYPES, Engine
from training.features import FeatureRow
from training.model import DraftModel, initial_weights
from training.packing import pack
from training.ttt import TTTLoss

STEPS, STEP_DECAY = 7, 0.8
BETAS, CLIP, RATE = (0.9, 0.95), 0.5, 1e-4
DRAFT = DraftConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    vocab_size=49_152,
    draft_vocab_size=4_096,
    target_hidden_size=576,
    target_num_layers=30,
    aux_layer_ids=(1, 14, 26),
    rms_norm_eps=1e-5,
    rope_theta=100_000.0,
    rope_scaling=None,
    max_position_embeddings=8_192,
    bos_token_id=1,
    eos_token_id=2,
)
_CERTAINTY = 12.0  # how far the target's logit of the next token stands out, in deviations


@dataclass(frozen=True)
class Case:
    """A batch: documents of so many tokens, the last `trainable` share of each in the loss."""

    lengths: tuple[int, ...]
    trainable: float
    dtype: Literal["float32", "bfloat16"]
    threads: int
    speakable: float = 0.95  # share of the tokens that the draft vocabulary holds

    @staticmethod
    def parse(text: str) -> "Case":
        """From the JSON of a command line."""
        values = json.loads(text)
        return Case(**values | {"lengths": tuple(values["lengths"])})

    def json(self) -> str:
        """For a command line."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class StepCost:
    """What one step took and gave."""

    cpu_seconds: float
    peak_bytes: int  # resident memory at its highest, over what was resident before the step
    loss: float  # summed over steps (weighted) and rows, over the number of rows
    grad_norm: float


def target_head() -> tuple[torch.Tensor, torch.Tensor]:
    """The target's head [V, H], which is its embedding too, and the draft vocabulary [U]."""
    dice = torch.Generator().manual_seed(1)
    head = torch.randn(DRAFT.vocab_size, DRAFT.hidden_size, generator=dice) * 0.05
    used = torch.randperm(DRAFT.vocab_size, generator=dice)[: DRAFT.draft_vocab_size]
    return head, used.sort().values


def make_rows(case: Case) -> list[FeatureRow]:
    """Documents whose tokens the target chose: the hidden state before a token points at it."""
    head, used = target_head()
    dice = torch.Generator().manual_seed(2)
    rows = []
    for number, tokens in enumerate(case.lengths):
        ids = used[torch.randint(len(used), (tokens + 1,), generator=dice)]
        strange = torch.rand(tokens + 1, generator=dice) >= case.speakable
        anywhere = torch.randint(DRAFT.vocab_size, (tokens + 1,), generator=dice)
        ids = torch.where(strange, anywhere, ids)
        noise = torch.randn(tokens, DRAFT.hidden_size, generator=dice)
        last = noise + _CERTAINTY * torch.nn.functional.normalize(head[ids[1:]], dim=-1)
        aux = torch.randn(tokens, 3 * DRAFT.hidden_size, generator=dice)
        rows.append(
            FeatureRow(
                sample_id=f"case-{number}",
                dataset="case",
                domain="chat",
                input_ids=ids[:-1],
                loss_mask=torch.arange(tokens) >= tokens - round(case.trainable * tokens),
                aux=aux.bfloat16(),
                last=last.bfloat16(),
            )
        )
    return rows


def make_weights() -> dict[str, torch.Tensor]:
    """fp32 weights of an untrained draft, its embedding included."""
    head, used = target_head()
    return {**initial_weights(DRAFT, head, used, seed=3), "embed_tokens.weight": head}


Step = Callable[[], tuple[float, float]]  # gives the loss and the gradient norm


def answer(prepare: Callable[[Case], Step]) -> None:
    """Prepare the case of the command line, and take a step of it for each line on stdin."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print, some of them while they are set up
    case = Case.parse(sys.argv[1])
    torch.set_num_threads(case.threads)
    step = prepare(case)
    for _ in sys.stdin:
        _give_memory_back()
        resting = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        started = time.process_time()
        loss, grad_norm = step()
        seconds = time.process_time() - started
        cost = StepCost(seconds, _resident("VmHWM") - resting, loss, grad_norm)
        output.write(json.dumps(dataclasses.asdict(cost)) + "\n")
        output.flush()


def _give_memory_back() -> None:
    """What the allocator keeps for itself is no one's, but would hide what a step takes."""
    ctypes.CDLL(None).malloc_trim(0)


def _resident(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def engine_step(case: Case) -> Step:
    """A step of the engine that trains, on one packed micro-batch."""
    config = TrainConfig(
        seed=0,
        epochs=1,
        heldout_share=0.0,
        max_tokens_per_sample=max(case.lengths),
        batch_samples=len(case.lengths),
        micro_batch_tokens=sum(case.lengths),
        ttt_steps=STEPS,
        step_decay=STEP_DECAY,
        learning_rate=RATE,
        warmup_share=0.0,
        final_learning_rate_share=1.0,
        adam_betas=BETAS,
        weight_decay=0.0,
        gradient_clip=CLIP,
        ema_decay=0.0,
        dtype=case.dtype,
        zero_stage=1,
        workers=1,
        threads_per_worker=case.threads,
        gpus_per_worker=0,
        checkpoint_every_steps=1,
    )
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # nobody connects
    store = dist.FileStore(tempfile.mkstemp()[1], 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    head, used = target_head()
    draft = DraftModel(DRAFT)
    weights = make_weights()
    draft.load_state_dict(weights)
    loss = TTTLoss(draft, head, used, steps=STEPS, step_decay=STEP_DECAY)
    del weights["embed_tokens.weight"]
    engine = Engine(loss, config, weights, device=torch.device("cpu"))
    batch = pack(
        make_rows(case), steps=STEPS, aux_size=3 * DRAFT.hidden_size, last_size=DRAFT.hidden_size
    )

    def step() -> tuple[float, float]:
        result = engine.step([batch], len(batch.rows), RATE)
        assert math.isfinite(result.loss)
        return result.loss, result.grad_norm

    return step


def dtype_of(case: Case) -> torch.dtype:
    """The dtype of the weights that a forward reads."""
    return DTYPES[case.dtype]


if __name__ == "__main__":
    answer(engine_step)
