"""The peer: a step of speculators' EAGLE-3. `python -m benchmarks.peer_speculators CASE_JSON`.

Its package lies on PYTHONPATH; its reader of data sets, which asks for further packages, needs only
to be importable. On a CPU it runs with PyTorch's attention and its own losses in plain torch.

It takes one document. It masks no label outside the draft vocabulary, and weighs each step by its
own count of rows: losses agree to about a hundredth, where all labels are inside.
"""

import sys
import types

import torch

from benchmarks import train_case
from benchmarks.train_case import BETAS, CLIP, DRAFT, RATE, STEP_DECAY, STEPS, Case, Step


class _Absent(types.ModuleType):
    """A module that is imported, and of which nothing is used."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return Exception


def main(case: Case) -> Step:
    """The step of its model with AdamW on the same document, from the same weights."""
    sys.modules["speculators.train.data"] = _Absent("speculators.train.data")
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    (row,) = train_case.make_rows(case)
    dtype = train_case.dtype_of(case)
    layer = LlamaConfig(
        **DRAFT.model_dump(
            include={
                "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "head_dim", "vocab_size", "rms_norm_eps", "max_position_embeddings",
            }
        ),
        num_hidden_layers=1,
        rope_parameters={"rope_type": "default", "rope_theta": DRAFT.rope_theta},
    )  # fmt: skip
    layer._attn_implementation = "sdpa"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(DRAFT.aux_layer_ids),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    model = Eagle3DraftModel(config)
    head, used = train_case.target_head()
    weights = train_case.make_weights() | {
        "verifier_lm_head.weight": head[used],
        "verifier_norm.weight": torch.ones(DRAFT.hidden_size),
        "t2d": torch.zeros(len(head), dtype=torch.bool).index_fill(0, used, True),
        "d2t": used - torch.arange(len(used)),
    }
    model.load_state_dict(weights)
    model = model.to(dtype)
    model.lm_head.weight.requires_grad_(True)
    # The states come after the target's norm: its own copy of that norm has nothing left to do.
    model.verifier_norm = torch.nn.Identity()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.AdamW(learning, lr=RATE, betas=BETAS, weight_decay=0.0)
    tokens = len(row.input_ids) - 1
    may = torch.cat([row.loss_mask[2:], row.loss_mask.new_zeros(1)])
    batch = {
        "hidden_states": row.aux[None, :-1].to(dtype),
        "input_ids": row.input_ids[None, 1:],
        "document_ids": torch.zeros(1, tokens, dtype=torch.int64),
        "loss_mask": may[None],
        "position_ids": torch.arange(1, tokens + 1)[None],
        "verifier_last_hidden_states": row.last[None, 1:].to(dtype),
        "ttt_steps": STEPS,
        "ttt_step_loss_decay": STEP_DECAY,
        "loss_config": resolve_loss_config("kl_div", "eager"),
    }

    def step() -> tuple[float, float]:
        _, loss, _ = model(**batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(learning, CLIP)
        adam.step()
        adam.zero_grad()
        return float(loss.detach()), float(norm)

    return step


if __name__ == "__main__":
    train_case.answer(main)
