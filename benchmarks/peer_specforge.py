"""The peer: a step of SpecForge's EAGLE-3 trainer. `python -m benchmarks.peer_specforge CASE_JSON`.

Its package lies on PYTHONPATH. On a CPU its Triton loss cannot run, and its own reference in torch
takes its place; Triton itself needs only to be importable. Documents are padded to the longest.
"""

import importlib
import importlib.machinery
import sys
import types
from typing import Any

import torch

from benchmarks import train_case
from benchmarks.train_case import BETAS, CLIP, DRAFT, RATE, STEP_DECAY, STEPS, Case, Step
from training.packing import counted_rows


def main(case: Case) -> Step:
    """The step of SpecForge's model and optimiser on the same batch, from the same weights."""
    import_triton_stub()
    from specforge.algorithms.eagle3 import model as trainer
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.core import loss as losses
    from specforge.core.eagle3_adapters import SdpaLikeAdapter
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.optimizer import BF16Optimizer
    from transformers import LlamaConfig

    class TorchLoss:
        apply = staticmethod(losses._compute_loss)

    trainer.LogSoftmaxLoss = TorchLoss
    dtype = train_case.dtype_of(case)
    values = DRAFT.model_dump(exclude={"aux_layer_ids", "target_num_layers", "rope_theta"})
    values |= {"num_hidden_layers": 1, "tie_word_embeddings": False, "hidden_act": "silu"}
    values |= {"rope_parameters": {"rope_type": "default", "rope_theta": DRAFT.rope_theta}}
    del values["rope_scaling"]
    draft = LlamaForCausalLMEagle3(LlamaConfig(**values, pad_token_id=None))
    head, used = train_case.target_head()
    weights = {
        name.replace("layers.0.", "midlayer."): weight
        for name, weight in train_case.make_weights().items()
    }
    t2d = torch.zeros(len(head), dtype=torch.bool)
    t2d[used] = True
    weights |= {"t2d": t2d, "d2t": used - torch.arange(len(used))}
    draft.load_state_dict(weights)
    assert draft.midlayer.self_attn.rotary_emb.base == DRAFT.rope_theta
    draft = draft.to(dtype)
    draft.embed_tokens.weight.requires_grad_(False)
    model = OnlineEagle3Model(draft, length=STEPS, attention_backend="sdpa")
    optimizer = BF16Optimizer(draft, RATE, max_grad_norm=CLIP, warmup_ratio=0.0)
    optimizer.optimizer.param_groups[0]["betas"] = BETAS
    head = head.to(dtype)
    batch = padded(case, dtype)

    class SameRows(SdpaLikeAdapter):
        """Its mask also counts rows that start from a token of the prompt; ours does not."""

        def step_view(self, *, idx: int, **more: Any) -> Any:
            state = super().step_view(idx=idx, **more)
            state.position_mask = state.position_mask * batch["counted"][..., idx, None]
            return state

    model._make_adapter = lambda: SameRows(model)
    rows = int(batch["counted"].any(-1).sum())

    def step() -> tuple[float, float]:
        with torch.no_grad():
            target = batch["last"] @ head.T  # its trainer's target head, made in every step
        losses_by_step, *_ = model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            target=target,
            loss_mask=batch["loss_mask"],
            hidden_states=batch["aux"],
        )
        del target
        mean = sum(STEP_DECAY**k * one for k, one in enumerate(losses_by_step))
        loss = mean * batch["input_ids"].numel() / rows  # it divides by all rows of the batch
        loss.backward()
        return float(loss.detach()), float(optimizer.step())

    return step


def padded(case: Case, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The batch as its collator makes it: row p holds token and teacher's state of p + 1."""
    rows, longest = train_case.make_rows(case), max(case.lengths)

    def stack(tensors: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(
            [torch.cat([one, one.new_zeros(longest - len(one), *one.shape[1:])]) for one in tensors]
        )

    after = [torch.arange(1, len(row.input_ids) + 1) for row in rows]
    after = [at.clamp(max=len(at) - 1) for at in after]
    may = [torch.cat([row.loss_mask[2:], row.loss_mask.new_zeros(2)]).long() for row in rows]
    return {
        "input_ids": stack([row.input_ids[at] for row, at in zip(rows, after, strict=True)]),
        "last": stack([row.last[at].to(dtype) for row, at in zip(rows, after, strict=True)]),
        "aux": stack([row.aux.to(dtype) for row in rows]),
        "loss_mask": stack(may)[..., None],
        "counted": stack([counted_rows(row.loss_mask, STEPS) for row in rows]),
        "attention_mask": stack([torch.ones_like(row.input_ids) for row in rows]),
    }


def import_triton_stub() -> None:
    """Make `import triton` work. Whatever would be launched is decorated and never called."""
    importlib.import_module(
        "torch._dynamo"
    )  # before the stub: torch would take it for the real one

    for name in ("triton", "triton.language"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    triton: Any = sys.modules["triton"]
    triton.jit = lambda function: function
    triton.language = sys.modules["triton.language"]
    triton.language.constexpr = int


if __name__ == "__main__":
    train_case.answer(main)
