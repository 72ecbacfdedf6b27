"""A training job small enough to run in a second: random features of the tiny target's sizes."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tests.support.tiny_draft import TINY_DRAFT
from training import draft_vocab
from training.config import TrainConfig
from training.features import FeatureRow, FeatureStore, write_shard
from training.loop import TrainJob

DRAFT = TINY_DRAFT


def train_config(**changes: Any) -> TrainConfig:
    """Eight steps of four samples, fp32, one thread."""
    values: dict[str, Any] = {
        "seed": 3,
        "epochs": 2,
        "heldout_share": 0.2,
        "max_tokens_per_sample": 40,
        "batch_samples": 4,
        "micro_batch_tokens": 64,
        "ttt_steps": 3,
        "step_decay": 0.8,
        "learning_rate": 0.01,
        "warmup_share": 0.1,
        "final_learning_rate_share": 0.1,
        "adam_betas": (0.9, 0.95),
        "weight_decay": 0.01,
        "gradient_clip": 0.5,
        "ema_decay": 0.9,
        "dtype": "float32",
        "zero_stage": 1,
        "workers": 1,
        "threads_per_worker": 1,
        "gpus_per_worker": 0,
        "checkpoint_every_steps": 3,
        "checkpoints_kept": 2,
        "log_every_steps": 1,
    }
    return TrainConfig(**(values | changes))


def random_rows(
    count: int, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16, longest: int = 50
) -> list[FeatureRow]:
    """Rows with a prompt that does not teach and a response that does, of random length."""
    dice = torch.Generator().manual_seed(seed)
    size, aux = DRAFT.target_hidden_size, len(DRAFT.aux_layer_ids) * DRAFT.target_hidden_size
    rows = []
    for number in range(count):
        tokens = int(torch.randint(8, longest, (), generator=dice))
        prompt = int(torch.randint(1, tokens - 4, (), generator=dice))
        rows.append(
            FeatureRow(
                sample_id=f"chat-{number:04d}",
                dataset="chat",
                domain=("chat", "math")[number % 2],
                input_ids=torch.randint(0, DRAFT.vocab_size, (tokens,), generator=dice),
                loss_mask=torch.arange(tokens) >= prompt,
                aux=torch.randn(tokens, aux, generator=dice).to(dtype),
                last=torch.randn(tokens, size, generator=dice).to(dtype),
            )
        )
    return rows


def write_features(folder: Path, rows: list[FeatureRow]) -> None:
    """Two shards and their index."""
    half = len(rows) // 2
    parts = [
        write_shard(folder, f"shard-{n:05d}.safetensors", part, aux_layer_ids=DRAFT.aux_layer_ids)
        for n, part in enumerate((rows[:half], rows[half:]))
    ]
    pq.write_table(pa.concat_tables(parts), folder / "index.parquet")


def tiny_job(folder: Path, target: Path, *, samples: int = 18, **changes: Any) -> TrainJob:
    """Features, a draft vocabulary and a job in `folder`."""
    config = train_config(**changes)
    if not (folder / "features").exists():
        write_features(folder / "features", random_rows(samples))
    store = FeatureStore(folder / "features", aux_layer_ids=DRAFT.aux_layer_ids)
    counts = draft_vocab.count_tokens(
        store,
        range(len(store)),
        max_tokens=config.max_tokens_per_sample,
        vocab_size=DRAFT.vocab_size,
    )
    vocab = draft_vocab.choose(counts, DRAFT.draft_vocab_size, fingerprint="tiny")
    draft_vocab.save(vocab, folder / "draft_vocab.safetensors")
    return TrainJob(
        draft=DRAFT,
        train=config,
        features=str(folder / "features"),
        states="offline",
        target=str(target),
        draft_vocab=str(folder / "draft_vocab.safetensors"),
        checkpoints=str(folder / "checkpoints"),
        output=str(folder / "training"),
        fingerprint="tiny",
    )
