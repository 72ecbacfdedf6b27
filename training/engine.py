"""The optimiser's life: DeepSpeed with fp32 masters, one global denominator, averaged weights.

State goes in and out as full fp32 tensors by name, so neither a checkpoint nor an export knows the
ZeRO stage or the number of workers.
"""

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from training.config import TrainConfig
from training.model import FROZEN, DraftModel
from training.packing import PackedBatch
from training.tally import Tally
from training.ttt import TTTLoss

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingFault(RuntimeError):
    """Training cannot go on, and trying again would not help. The message names the samples."""


@dataclass(frozen=True)
class StepResult:
    """What one optimiser step saw. `loss` and `tally` are this rank's share of the step."""

    loss: float
    grad_norm: float
    tally: Tally


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """Linear warm-up, then a cosine down to the final share. `step` counts from 0."""
    warmup = max(1, round(config.warmup_share * total_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    floor = config.final_learning_rate_share
    return config.learning_rate * (floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2)


def ema_decay(updates: int, decay: float) -> float:
    """The decay of an average that holds `updates` updates: short at first, so that the initial
    weights fade. The rule is the usual min(decay, (1 + n) / (10 + n))."""
    return min(decay, (1 + updates) / (10 + updates))


class Engine:
    """Owns weights, masters and optimiser state of one rank, from the first step to the last."""

    def __init__(
        self,
        loss: TTTLoss,
        config: TrainConfig,
        weights: Mapping[str, torch.Tensor],
        *,
        device: torch.device,
        moments: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        ema: Mapping[str, torch.Tensor] | None = None,
        step: int = 0,
    ) -> None:
        """Start from fp32 `weights` by name; the rest where training goes on from `step`.

        The process group must exist. `loss.draft` must hold the frozen embedding already.
        """
        self._config, self._device = config, device
        self._dtype = DTYPES[config.dtype]
        self.loss = loss
        loss.draft.load_state_dict(dict(weights), strict=False)
        loss.to(device=device, dtype=self._dtype)
        self._parameters = {
            name: parameter
            for name, parameter in loss.draft.named_parameters()
            if name not in FROZEN
        }
        self._engine = _initialize(loss, list(self._parameters.values()), config, device)
        self._prepare_state(step)
        self._set_full(None, weights)
        for key in _MOMENTS if moments else ():
            self._set_full(key, moments[key])  # type: ignore[index]
        self._updates = step
        self._ema = [flat.detach().clone() for flat in self._flats] if config.ema_decay else []
        if ema:
            with self._masters_set_aside():
                self._set_full(None, ema)
                for average, flat in zip(self._ema, self._flats, strict=True):
                    average.copy_(flat)

    def step(self, batches: Sequence[PackedBatch], denominator: int, rate: float) -> StepResult:
        """One optimiser step over this rank's micro-batches.

        `denominator` is the number of rows that may teach, over all ranks and micro-batches: so the
        result depends neither on how the batch was cut nor on how many ranks share it.
        """
        import torch.distributed as dist

        total, tally = 0.0, Tally.empty(self.loss.steps)
        for number, batch in enumerate(batches):
            self._engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
            batch = batch.to(self._device)
            loss, speakable, correct = self._engine(batch)
            value = float(loss.detach()) / denominator
            total += value
            tally = tally + Tally.of(batch.counted, speakable, correct)
            # DeepSpeed averages over ranks; the denominator is already global.
            self._engine.backward(loss * (dist.get_world_size() / denominator))
        for group in self._engine.optimizer.param_groups:
            group["lr"] = rate
        # Stage 0 in fp32 is the one case where DeepSpeed keeps no norm; its gradients are whole.
        keeps_none = self._config.zero_stage == 0 and self._dtype == torch.float32
        grads = [p.grad for p in self._parameters.values() if p.grad is not None]
        own_norm = float(torch.nn.utils.get_total_norm(grads)) if keeps_none else 0.0
        self._engine.step()
        grad_norm = own_norm if keeps_none else float(self._engine.get_global_grad_norm())
        self._updates += 1
        if self._ema:
            decay = ema_decay(self._updates, self._config.ema_decay)
            torch._foreach_lerp_(self._ema, [flat.detach() for flat in self._flats], 1 - decay)
        return StepResult(total, grad_norm, tally)

    def weights(self) -> dict[str, torch.Tensor]:
        """The fp32 masters, whole, on the CPU. Every rank must call this together."""
        return self._get_full(None)

    def averaged_weights(self) -> dict[str, torch.Tensor]:
        """The averaged weights, or {} where none are kept. Every rank must call this together."""
        if not self._ema:
            return {}
        with self._masters_set_aside():
            for average, flat in zip(self._ema, self._flats, strict=True):
                flat.copy_(average)
            return self._get_full(None)

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """AdamW's two moments, whole, by name. Every rank must call this together."""
        return {key: self._get_full(key) for key in _MOMENTS}

    def evaluator(
        self, weights: Mapping[str, torch.Tensor], embedding: torch.Tensor, used: torch.Tensor
    ) -> TTTLoss:
        """A plain copy of the draft with other weights, outside DeepSpeed, for held-out rows."""
        draft = DraftModel(self.loss.draft.config)
        draft.load_state_dict({**weights, "embed_tokens.weight": embedding})
        decay = self.loss.step_decay
        copy = TTTLoss(draft, self.loss.head.cpu(), used, steps=self.loss.steps, step_decay=decay)
        return copy.to(device=self._device, dtype=self._dtype).eval()

    # State by name. Where a rank's share of the fp32 state lies depends on the ZeRO stage.

    @property
    def _flats(self) -> list[torch.Tensor]:
        """This rank's fp32 masters, as the optimiser holds them."""
        optimizer = self._engine.optimizer
        if self._config.zero_stage == 3:
            return list(optimizer.fp32_partitioned_groups_flat)
        return [flat for group in optimizer.param_groups for flat in group["params"]]

    @property
    def _adam(self) -> torch.optim.Optimizer:
        optimizer = self._engine.optimizer
        return optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer.optimizer

    def _prepare_state(self, step: int) -> None:
        """Make AdamW's state now rather than at its first step, so that it can be filled."""
        for flat in self._flats:
            state = self._adam.state[flat]
            for key in _MOMENTS:
                if key in state:
                    state[key].zero_()
                else:
                    state[key] = torch.zeros_like(flat, requires_grad=False)
            state["step"] = torch.tensor(float(step), device=flat.device)
        if self._config.zero_stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _get_full(self, key: str | None) -> dict[str, torch.Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        full = {}
        for index, (name, parameter) in enumerate(self._parameters.items()):
            if self._config.zero_stage == 0:
                value = self._whole(index, key)
            elif key is None:
                value = safe_get_full_fp32_param(parameter)
            else:
                value = safe_get_full_optimizer_state(parameter, key)
            full[name] = value.detach().float().cpu().clone().contiguous()
        return full

    def _set_full(self, key: str | None, values: Mapping[str, torch.Tensor]) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        for index, (name, parameter) in enumerate(self._parameters.items()):
            value = values[name].to(device=self._device, dtype=torch.float32)
            if self._config.zero_stage == 0:
                self._whole(index, key).copy_(value)
            elif key is None:
                safe_set_full_fp32_param(parameter, value)
            else:
                safe_set_full_optimizer_state(parameter, value, key)

    def _whole(self, index: int, key: str | None) -> torch.Tensor:
        """ZeRO stage 0: masters are whole, one for each parameter, in the parameters' order."""
        flat = self._flats[index]
        return flat.detach() if key is None else self._adam.state[flat][key]

    @contextmanager
    def _masters_set_aside(self) -> Iterator[None]:
        """Lend the masters' storage, which DeepSpeed can gather by name, and put them back."""
        with torch.no_grad():
            aside = [flat.detach().clone() for flat in self._flats]
            try:
                yield
            finally:
                for flat, master in zip(self._flats, aside, strict=True):
                    flat.copy_(master)


def _initialize(
    loss: TTTLoss,
    parameters: list[torch.nn.Parameter],
    config: TrainConfig,
    device: torch.device,
) -> Any:
    """`deepspeed.initialize` with torch's AdamW: no operator is compiled at start-up."""
    if device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"  # otherwise detected, with a warning
    import deepspeed
    import deepspeed.ops

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    if device.type == "cpu":
        # Without this the CPU backend compiles a shared-memory operator for a minute, and fails
        # where there is no compiler. gloo serves as well.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    optimizer = torch.optim.AdamW(
        parameters,
        lr=config.learning_rate,
        betas=config.adam_betas,
        weight_decay=config.weight_decay,
        fused=True,
    )
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # the boundary is set by hand, micro-batch by micro-batch
        "gradient_clipping": config.gradient_clip,
        "zero_optimization": {"stage": config.zero_stage},
        "bf16": {"enabled": config.dtype == "bfloat16"},
        "steps_per_print": 2**31,
    }
    if config.zero_stage:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    engine, *_ = deepspeed.initialize(model=loss, optimizer=optimizer, config=settings)
    return engine
