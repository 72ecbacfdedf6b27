"""What capture says that it will take is what it takes, in every mode."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from typer.testing import CliRunner

from pipelines.capture_estimate import Volume, answers_at_most, estimate, plan, render
from pipelines.commands import app
from pipelines.errors import PreflightFailed
from pipelines.schema import PROMPT_SCHEMA
from pipelines.store import RunFolder, record_stage
from tests.support.road import write_recipe
from tests.support.tiny_draft import TINY_DRAFT
from tests.support.tiny_run import tiny_run, write_responses

KIMI = TINY_DRAFT.model_copy(update={"target_hidden_size": 7168, "aux_layer_ids": (1, 29, 57)})


def done(run: RunFolder, *stages: str) -> None:
    for stage in stages:
        record_stage(run, stage, fingerprint="x", counts={}, seconds=1.0)


def write_prompts(run: RunFolder, prompts: list[tuple[int, list[int]]]) -> None:
    """Prompts of so many tokens, and questions of so many after them."""
    rows = [
        {field.name: "" for field in PROMPT_SCHEMA}
        | {
            "sample_id": f"chat-{number:012x}",
            "prompt_ids": [5] * tokens,
            "history": [],
            "continuations": [[5] * more for more in later],
        }
        for number, (tokens, later) in enumerate(prompts)
    ]
    folder = run.prompts / "chat"
    folder.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA), folder / "part-0.parquet")


def test_with_responses_the_plan_is_exact_and_writes_nothing(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target, "capture.storage=int8")
    rows = write_responses(run, 20)
    done(run, "prepare", "generate")
    before = sorted(run.root.rglob("*"))
    found = plan(recipe, tokens_per_second=10.0)
    assert sorted(run.root.rglob("*")) == before
    answers = sum(len(row["output_ids"]) for row in rows)
    tokens = answers + sum(len(row["prompt_ids"]) for row in rows)
    assert found.is_exact
    assert (found.samples, found.tokens, found.answer_tokens) == (20, tokens, answers)
    assert found.longest == max(len(row["prompt_ids"] + row["output_ids"]) for row in rows)
    assert found.modes[0].hours == pytest.approx(tokens / 10 / 3600)
    small_change = 20 * 200 + -(-20 // recipe.capture.samples_per_shard) * 1000
    assert {one.storage: one.bytes - small_change for one in found.storages} == {
        "bfloat16": tokens * (3 * 64 * 2 + 5) + answers * 64 * 2,
        "float8_e4m3": tokens * (3 * (64 + 4) + 5) + answers * 64 * 2,
        "int8": tokens * (3 * (64 + 4) + 5) + answers * 64 * 2,
    }
    assert found.modes[0].disk_bytes == found.storages[2].bytes


def test_before_generate_every_answer_is_as_long_as_it_may_be(tmp_path, tiny_target):
    settings = ["generate.sampling.max_new_tokens=10", "prompts.context_tokens=40"]
    recipe, run = tiny_run(tmp_path, tiny_target, *settings, "generate.samples_per_prompt=2")
    write_prompts(run, [(5, []), (33, []), (6, [4])])
    done(run, "prepare")
    found = plan(recipe, tokens_per_second=None)
    assert not found.is_exact
    assert found.samples == 2 * 4
    assert found.tokens == 2 * (15 + 40 + 16 + 30)
    assert found.answer_tokens == 2 * (10 + 7 + 10 + 10)
    assert [mode.hours for mode in found.modes] == [None] * 3


@pytest.mark.parametrize("dice", range(50))
def test_no_conversation_comes_to_more_than_its_bound(dice):
    dice = np.random.default_rng(dice)
    prompt, most, context = (int(dice.integers(*span)) for span in ((1, 30), (1, 20), (20, 80)))
    later = [int(one) for one in dice.integers(1, 10, 3)]
    bounds = list(answers_at_most(prompt, later, most=most, context=context))
    tokens = prompt
    for turn, more in enumerate((0, *later)):
        tokens += more
        if tokens >= context:
            return
        answer = int(dice.integers(1, min(most, context - tokens) + 1))
        tokens += answer
        assert bounds[turn][0] >= tokens
        assert bounds[turn][1] >= answer


def test_kimi_k25_takes_what_its_config_says(tmp_path, tiny_target):
    settings = ["capture.max_bytes=1000000000", "train.epochs=3"]
    cut = ["train.max_tokens_per_sample=2000", "train.micro_batch_tokens=2000"]
    recipe, _ = tiny_run(tmp_path, tiny_target, *settings, *cut)
    volume = Volume(np.array([1000, 4000]), np.array([400, 3000]), is_exact=True)
    found = estimate(recipe, KIMI, volume, 1000.0)
    bf16 = found.storages[0]
    assert bf16.aux_bytes_per_token + bf16.last_bytes_per_token == 57_344
    offline, streaming, chunked = found.modes
    servers, pool = recipe.capture.servers, recipe.capture.pool
    in_flight = servers.count * pool.max_in_flight_per_server
    assert offline.memory_bytes == 2 * in_flight * 4000 * 57_344
    assert streaming.memory_bytes == 2 * in_flight * 2000 * 57_344
    assert (offline.tokens, streaming.tokens) == (5000, 3 * 3000)
    assert chunked.tokens == 5000  # one slice is all
    assert streaming.disk_bytes == 5000 * 5


def test_what_fits_no_slice_is_made_in_every_epoch_and_never_larger_than_the_quota(
    tmp_path, tiny_target
):
    recipe, _ = tiny_run(tmp_path, tiny_target, "capture.max_bytes=100000000", "train.epochs=3")
    volume = Volume(np.array([1000, 4000]), np.array([400, 3000]), is_exact=True)
    chunked = estimate(recipe, KIMI, volume, None).modes[2]
    assert chunked.tokens == 3 * 5000
    assert chunked.disk_bytes == 100_000_000 + 5000 * 5


def test_the_command_prints_a_table_or_one_object(tmp_path, tiny_target):
    path = write_recipe(tmp_path, tiny_target)
    _, run = tiny_run(tmp_path, tiny_target)
    write_responses(run, 5)
    done(run, "prepare", "generate")
    said = CliRunner().invoke(app, ["capture", str(path), "--plan", "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["samples"] == 5
    said = CliRunner().invoke(app, ["capture", str(path), "--plan", "--tokens-per-second", "9"])
    assert "chunked" in said.stdout


def test_the_table_says_what_is_unknown_and_stays_narrow(tmp_path, tiny_target):
    recipe, _ = tiny_run(tmp_path, tiny_target)
    volume = Volume(np.array([10**9]), np.array([10**8]), is_exact=False)
    console = Console(file=io.StringIO(), width=80)
    render(estimate(recipe, KIMI, volume, None), console)
    text = console.file.getvalue()
    assert "at most" in text
    assert "unknown" in text
    assert max(map(len, text.splitlines()[2:])) <= 80


def test_a_run_without_prompts_is_refused_with_its_cure(tmp_path, tiny_target):
    recipe, _ = tiny_run(tmp_path, tiny_target)
    with pytest.raises(PreflightFailed, match="eyas prepare RECIPE"):
        plan(recipe, tokens_per_second=None)
