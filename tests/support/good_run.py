"""A small finished run folder that keeps every promise, made in a second without Ray or servers.

The stages' own pure parts write it; only what servers and optimisers would give is made up.
"""

import json
import math
import random
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from actors.config import Sampling
from actors.pool import Completed, Failed
from actors.protocol import Completion, Finish, sampling_params
from pipelines.capture_plan import read_responses
from pipelines.evaluate import (
    Answer,
    Measured,
    Phase,
    prompts_of,
    read_prompts,
    summarise,
)
from pipelines.evaluate_samples import AnswerSample, write_samples
from pipelines.generate_worker import row_seed
from pipelines.prepare import prepare
from pipelines.recipe import Recipe, dump_recipe, fingerprint, load_recipe
from pipelines.response_row import RowMaker, decoder_of
from pipelines.schema import response_loss_mask
from pipelines.segments import SegmentWriter, commit
from pipelines.store import RunFolder, record_stage, write_json, write_parquet
from pipelines.telemetry import EventLog
from pipelines.template import load_tokenizer
from pipelines.witness import Witness
from tests.support.road import write_recipe
from tests.support.tiny_target import EOS_ID, LAYERS
from training import draft_vocab
from training.acceptance import Counters
from training.checkpoint import Snapshot
from training.checkpoint import save as save_checkpoint
from training.config import DraftConfig
from training.export import draft_shapes, write_draft
from training.features import FeatureRow, FeatureStore, write_shard
from training.model import target_weights
from training.packing import is_heldout
from training.tally import Tally

STEPS = 20
FAILED_PROMPTS, REJECTED_PROMPTS = 1, 2
_LETTERS = range(3, 97)  # ids of printable ASCII in the tiny tokenizer


def make_good_run(
    folder: Path, target: Path, *overrides: str, until: str = "evaluate"
) -> RunFolder:
    """Write recipe and run into `folder`, up to and with the stage `until`; return the run."""
    recipe = load_recipe(write_recipe(folder, target), overrides)
    run = RunFolder(Path(recipe.run_folder))
    run.create()
    run.recipe.write_text(dump_recipe(recipe))
    events = EventLog(run)
    for stage, make in _STAGES.items():
        events.append("stage_started", stage=stage)
        counts = make(recipe, run, events)
        record_stage(run, stage, fingerprint=fingerprint(recipe, stage), counts=counts, seconds=2.0)
        events.append("stage_finished", stage=stage, seconds=2.0)
        if stage == until:
            break
    return run


def write_segments(recipe: Recipe, run: RunFolder) -> None:
    """Make every training prompt's response durable, and commit nothing."""
    tokenizer = load_tokenizer(recipe.target)
    maker = RowMaker(recipe.target.profile, recipe.generate.gates, decoder_of(tokenizer))
    chooser = random.Random(1)
    for one in recipe.prompts.train:
        writer = SegmentWriter(run, one.name, flush_rows=16)
        prompts = pq.read_table(run.prompts / one.name, partitioning=None).to_pylist()
        for number, prompt in enumerate(prompts):
            writer.add(_row(maker, recipe.generate.sampling, prompt, number, chooser))
        writer.flush()


def _generate(recipe: Recipe, run: RunFolder, _events: EventLog) -> dict:
    write_segments(recipe, run)
    sets = {}
    for one in recipe.prompts.train:
        ids = pq.read_table(run.prompts / one.name, partitioning=None)["sample_id"].to_pylist()
        commit(run, one.name, ids)
        rows = pq.read_table(run.responses / one.name, partitioning=None).to_pylist()
        sets[one.name] = {
            "prompts": len(ids),
            "ok": len(rows),
            "rejected": {"empty_content": REJECTED_PROMPTS},
            "failed": {"deadline": FAILED_PROMPTS},
            "prompt_tokens": sum(row["usage"]["prompt_tokens"] for row in rows),
            "output_tokens": sum(row["usage"]["completion_tokens"] for row in rows),
        }
    asked = sum(one["prompts"] for one in sets.values())
    return {
        "headline": f"{asked} prompts answered",
        "sets": sets,
        "asked": asked,
        "seconds": 2.0,
        "output_tokens_per_second": 300.0,
    }


def _row(
    maker: RowMaker, sampling: Sampling, prompt: dict, number: int, chooser: random.Random
) -> dict:
    cap = sampling.max_new_tokens
    seed = row_seed(sampling.seed, prompt["sample_id"])
    params = sampling_params(sampling, max_new_tokens=cap, seed=seed, stop_token_ids=[EOS_ID])
    place = {"server": "http://127.0.0.1:1", "attempt": 1, "queued_ms": 3, "latency_ms": 90}
    if number < FAILED_PROMPTS:
        outcome = Failed("deadline", "no reply within 330 s", **place)
    else:
        length = cap if number % 5 == 0 else chooser.randrange(8, cap)
        ids = chooser.sample(_LETTERS, length)
        finish = Finish("length", None, length)
        if number < FAILED_PROMPTS + REJECTED_PROMPTS:
            ids = []  # stops at once
        if length < cap:
            ids, finish = [*ids, EOS_ID], Finish("stop", EOS_ID, None)
        reply = Completion(
            rid=prompt["sample_id"],
            output_ids=tuple(ids),
            text=maker.decode(ids),
            finish=finish,
            prompt_tokens=len(prompt["prompt_ids"]),
            completion_tokens=len(ids),
            cached_tokens=0,
            weight_version="default",
            speculation=None,
        )
        outcome = Completed(reply, None, **place)
    at = datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=number)
    return maker.response_row(prompt, params, outcome, finished_at=at)


def _capture(recipe: Recipe, run: RunFolder, _events: EventLog) -> dict:
    profile = recipe.target.profile
    witness = Witness(recipe.target, torch.float32)
    table = read_responses(run, [one.name for one in recipe.prompts.train])
    parts, tokens = [], 0
    size = recipe.capture.samples_per_shard
    for number, start in enumerate(range(0, table.num_rows, size)):
        rows = []
        for row in table.slice(start, size).to_pylist():
            ids = row["prompt_ids"] + row["output_ids"]
            tokens += len(ids)
            mask = response_loss_mask(len(row["prompt_ids"]), len(row["output_ids"]))
            states = [state.bfloat16() for state in witness.states(ids)]
            aux = torch.cat([states[layer + 1] for layer in profile.aux_layer_ids], dim=1)
            rows.append(
                FeatureRow(
                    row["sample_id"],
                    row["dataset"],
                    row["domain"],
                    torch.tensor(ids),
                    torch.tensor(mask),
                    aux,
                    states[-1],
                )
            )
        name = f"shard-{number:05d}.safetensors"
        parts.append(
            write_shard(
                run.features,
                name,
                rows,
                aux_layer_ids=profile.aux_layer_ids,
                storage=recipe.capture.storage,
            )
        )
    write_parquet(run.features / "index.parquet", pa.concat_tables(parts))
    return {"headline": f"{table.num_rows} samples", "samples": table.num_rows, "tokens": tokens}


def _train(recipe: Recipe, run: RunFolder, _events: EventLog) -> dict:
    config = _draft_config(recipe)
    store = FeatureStore(run.features, aux_layer_ids=config.aux_layer_ids)
    rows = [
        at
        for at, sample_id in enumerate(store.sample_ids)
        if not is_heldout(sample_id, recipe.train.heldout_share)
    ]
    cut = recipe.train.max_tokens_per_sample
    counts = draft_vocab.count_tokens(store, rows, max_tokens=cut, vocab_size=config.vocab_size)
    vocab = draft_vocab.choose(counts, config.draft_vocab_size, fingerprint="made-up")
    draft_vocab.save(vocab, run.draft_vocab)
    noise = torch.Generator().manual_seed(4)
    weights = {
        # Large enough that a draft which computes otherwise says something else.
        name: (len(shape) == 1) + 0.2 * torch.randn(shape, generator=noise)
        for name, shape in draft_shapes(config).items()
        if name != "embed_tokens.weight"
    }
    moments = {name: torch.full_like(one, 1e-3) for name, one in weights.items()}
    for step in (STEPS - 5, STEPS):
        made = Snapshot(step, "made-up", 0.1 * step, weights, moments, moments, weights)
        save_checkpoint(run.checkpoints, made, kept=2)
    run.training.mkdir()
    save_file(weights, run.training / "weights.safetensors")
    (run.training / "draft_config.json").write_text(config.model_dump_json())
    heldout = _heldout_figures()
    with (run.training / "metrics.jsonl").open("w") as lines:
        for step in range(1, STEPS + 1):
            lines.write(json.dumps(_train_figures(step, recipe.train.ttt_steps)) + "\n")
        lines.write(json.dumps({"kind": "heldout", "step": STEPS, **heldout}) + "\n")
    tokens = sum(store.lengths[row] for row in rows)
    taught = sum(store.loss_tokens[row] for row in rows)
    write_json(
        run.training / "summary.json",
        {
            "steps": STEPS,
            "epochs": recipe.train.epochs,
            "samples": len(rows),
            "heldout_samples": len(store) - len(rows),
            "tokens": tokens,
            "rows": taught,
            "cut_samples": 0,
            "cut_tokens": 0,
            "rows_trained": taught * recipe.train.epochs,
            "tokens_trained": tokens * recipe.train.epochs,
            "seconds": 2.0,
            "averaged": True,
            "draft_vocab_coverage": vocab.coverage,
            "heldout": heldout,
        },
    )
    return {"headline": f"{STEPS} steps", "steps": STEPS}


def _train_figures(step: int, ttt_steps: int) -> dict:
    """A line of metrics as the loop writes it; the draft gets better with each step."""
    return {
        "kind": "train",
        "step": step,
        "epoch": 0,
        "total_steps": STEPS,
        "loss": 4.0 - 2 * (1 - math.exp(-step / 8)),
        "learning_rate": 0.001,
        "grad_norm": 0.4,
        "rows": 100,
        "tokens": 250,
        "seconds": 0.1,
        "rows_per_second": 1000.0,
        "tokens_per_second": 2500.0,
        "data_wait_share": 0.01,
        **_tally(ttt_steps, int(60 * (1 - math.exp(-step / 8)))).summary(),
    }


def _heldout_figures() -> dict:
    return {"overall": _tally(3, 50).summary(), "domains": {"chat": _tally(3, 50).summary()}}


def _tally(ttt_steps: int, right: int) -> Tally:
    """Of 100 rows, `right` are correct at step 0, and half as many at each later step."""
    correct = tuple(right >> k for k in range(ttt_steps))
    rows = (100,) * ttt_steps
    return Tally(rows, rows, correct, rows, (100, *correct[:-1]), correct)


def _export(recipe: Recipe, run: RunFolder, _events: EventLog) -> dict:
    vocab = draft_vocab.load(run.draft_vocab)
    write_draft(
        run.draft,
        load_file(run.training / "weights.safetensors"),
        config=_draft_config(recipe),
        d2t=vocab.d2t,
        t2d=vocab.t2d,
        embedding=target_weights(Path(recipe.target.path))[0],
        dtype=getattr(torch, recipe.train.dtype),
    )
    return {"headline": "exported", "bytes": (run.draft / "model.safetensors").stat().st_size}


def _evaluate(recipe: Recipe, run: RunFolder, _events: EventLog) -> dict:
    prompts, chooser = read_prompts(recipe, run), random.Random(5)

    def measured(phase: Phase, *histogram: int) -> Measured:
        answers = {
            one.sample_id: Answer(
                outputs[one.sample_id],
                Counters((histogram[0] + at, *histogram[1:])) if histogram else None,
            )
            for at, one in enumerate(prompts_of(phase, prompts))
        }
        return Measured(answers, seconds=1.5)

    outputs = {
        one.sample_id: tuple(chooser.choices(_LETTERS, k=one.max_new_tokens)) for one in prompts
    }
    phases: dict[Phase, Measured] = {
        "plain": measured("plain"),
        "trained": measured("trained", 4, 3, 3, 1),
        "untrained": measured("untrained", 20, 1, 0, 0),
    }
    result = summarise(recipe, run, prompts, phases, [])
    first = AnswerSample(prompts[0].sample_id, "eval", "chat", ("yes", "."), (1,))
    result |= {"samples": write_samples(run, [first], {})}
    write_json(run.evaluation, result)
    return {"headline": "measured", "prompts": len(prompts)}


def _target_config(recipe: Recipe) -> dict:
    return json.loads((Path(recipe.target.path) / "config.json").read_bytes())


def _draft_config(recipe: Recipe) -> DraftConfig:
    target = _target_config(recipe)
    return DraftConfig(
        **recipe.draft.model_dump(),
        vocab_size=target["vocab_size"],
        target_hidden_size=target["hidden_size"],
        target_num_layers=LAYERS,
        aux_layer_ids=recipe.target.profile.aux_layer_ids,
        rms_norm_eps=target["rms_norm_eps"],
        rope_theta=10000.0,
        rope_scaling=None,
        max_position_embeddings=target["max_position_embeddings"],
        bos_token_id=target["bos_token_id"],
        eos_token_id=EOS_ID,
    )


_STAGES = {
    "prepare": prepare,
    "generate": _generate,
    "capture": _capture,
    "train": _train,
    "export": _export,
    "evaluate": _evaluate,
}
