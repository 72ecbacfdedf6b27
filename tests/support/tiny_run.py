"""A run folder of the tiny target, filled up to the stage that a test is about."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file

from pipelines.recipe import Recipe, load_recipe
from pipelines.schema import PROMPT_SCHEMA, RESPONSE_SCHEMA
from pipelines.store import RunFolder
from tests.support.road import write_recipe
from tests.support.tiny_draft import TINY_DRAFT, tiny_vocabulary, tiny_weights


def tiny_run(folder: Path, target: Path, *overrides: str) -> tuple[Recipe, RunFolder]:
    """An empty run folder and its recipe."""
    recipe = load_recipe(write_recipe(folder, target), overrides)
    run = RunFolder(Path(recipe.run_folder))
    run.create()
    return recipe, run


def write_responses(run: RunFolder, count: int, *, seed: int = 0) -> list[dict[str, Any]]:
    """`count` ok rows of random ids in the set `chat`, not in order, and one that is not ok."""
    dice = random.Random(seed)
    rows = [_response(f"chat-{number:012x}", dice) for number in range(count)]
    rejected = {**_response("chat-ffffffffffff", dice), "status": "rejected:loop"}
    shuffled = [*rows, rejected]
    dice.shuffle(shuffled)
    folder = run.responses / "chat"
    folder.mkdir(parents=True)
    half = len(shuffled) // 2
    for number, part in enumerate((shuffled[:half], shuffled[half:])):
        table = pa.Table.from_pylist(part, schema=RESPONSE_SCHEMA)
        pq.write_table(table, folder / f"part-{number}.parquet")
    return rows


def write_evaluation_prompts(run: RunFolder, domains: list[str], *, seed: int = 0) -> None:
    """One prompt for each entry of `domains` in the set `eval`."""
    dice = random.Random(seed)
    rows = [
        {
            "sample_id": f"eval-{number:012x}",
            "dataset": "eval",
            "domain": domain,
            "messages": "[]",
            "tools": "[]",
            "tools_given": "null",
            "repairs": "[]",
            "format": "messages",
            "prompt_ids": _ids(dice, 5, 30),
            "history": [],
            "continuations": [],
            "source": "made for the tests",
            "license": "Apache-2.0",
        }
        for number, domain in enumerate(domains)
    ]
    folder = run.prompts / "eval"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA), folder / "part-0.parquet")


def write_training(run: RunFolder, weights: dict[str, torch.Tensor] | None = None) -> None:
    """What training leaves behind, of a draft that learned nothing."""
    run.training.mkdir(parents=True, exist_ok=True)
    save_file(tiny_weights() if weights is None else weights, run.training / "weights.safetensors")
    (run.training / "draft_config.json").write_text(TINY_DRAFT.model_dump_json())
    d2t, t2d = tiny_vocabulary()
    save_file(
        {"d2t": d2t, "t2d": t2d, "counts": t2d.to(torch.int64)},
        run.draft_vocab,
        metadata={"fingerprint": "test", "coverage": "1.0"},
    )


def _response(sample_id: str, dice: random.Random) -> dict[str, Any]:
    row: dict[str, Any] = {
        field.name: "" if pa.types.is_string(field.type) else 0 for field in RESPONSE_SCHEMA
    }
    counts = ("prompt_tokens", "completion_tokens", "reasoning_tokens", "cached_tokens")
    return row | {
        "sample_id": sample_id,
        "prompt_id": sample_id,
        "turn": 1,
        "sample": 1,
        "dataset": "chat",
        "domain": "chat",
        "status": "ok",
        "usage": dict.fromkeys((*counts, "total_tokens"), 0),
        "segments": [],
        "prompt_ids": _ids(dice, 3, 20),
        "output_ids": _ids(dice, 2, 40),
    }


def _ids(dice: random.Random, fewest: int, most: int) -> list[int]:
    return [dice.randrange(3, TINY_DRAFT.vocab_size) for _ in range(dice.randint(fewest, most))]
