"""A draft for the tiny target, untrained: shapes, weights and a vocabulary with gaps."""

import torch

from tests.support.tiny_target import AUX_LAYER_IDS, EOS_ID, LAYERS
from training.config import DraftConfig
from training.model import initial_weights

TINY_DRAFT = DraftConfig(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=259,
    draft_vocab_size=128,
    target_hidden_size=64,
    target_num_layers=LAYERS,
    aux_layer_ids=AUX_LAYER_IDS,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    rope_scaling=None,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=EOS_ID,
)


def tiny_vocabulary() -> tuple[torch.Tensor, torch.Tensor]:
    """`d2t` and `t2d` of every other target id: no offset is what a plain range would give."""
    used = 2 * torch.arange(TINY_DRAFT.draft_vocab_size) + 1
    t2d = torch.zeros(TINY_DRAFT.vocab_size, dtype=torch.bool)
    t2d[used] = True
    return used - torch.arange(len(used)), t2d


def tiny_weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """What training would hand over: every weight but the embedding, fp32."""
    table = torch.randn(
        TINY_DRAFT.vocab_size, TINY_DRAFT.hidden_size, generator=torch.Generator().manual_seed(seed)
    )
    used = 2 * torch.arange(TINY_DRAFT.draft_vocab_size) + 1
    return initial_weights(TINY_DRAFT, table, used, seed=seed)
