"""What a plan says before any work: exact for small sets, marked and close for large ones."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from pipelines import prepare_plan as module
from pipelines.errors import BadRecipe
from pipelines.prepare import prepare
from pipelines.prepare_plan import plan, render
from pipelines.recipe import load_recipe
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog
from tests.support.road import write_recipe


def ask(text, answer=None):
    messages = [{"role": "user", "content": text}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def planned(tmp_path, tiny_target):
    """A function: the plan of a recipe whose sets are these rows, and the recipe."""

    def look(train, *, answer_tokens=None, overrides=(), evaluation=("held out",)):
        path = write_recipe(tmp_path, tiny_target)
        write(tmp_path / "train.jsonl", train)
        write(tmp_path / "eval.jsonl", [ask(text) for text in evaluation])
        recipe = load_recipe(path, ["prompts.on_bad_prompt=reject", *overrides])
        return plan(recipe, tokens_per_second=100.0, answer_tokens=answer_tokens), recipe

    return look


def test_a_small_set_is_planned_as_it_is_prepared(planned):
    rows = [ask(f"question {n} about hawks", "x" * 40) for n in range(30)]
    rows += [rows[0], {"messages": []}, ask("y" * 900)]
    found, recipe = planned(rows)
    run = RunFolder(Path(recipe.run_folder))
    assert not run.root.exists()  # a plan writes nothing
    run.create()
    counts = prepare(recipe, run, EventLog(run))["sets"]["chat"]
    chat = found.sets[0]
    assert (chat.name, chat.is_exact, chat.formats) == ("chat", True, ("messages",))
    for name in ("rows", "prompts", "turns", "rejected", "prompt_tokens", "tokens_p90"):
        assert getattr(chat, name) == counts[name], name


def test_what_it_costs_follows_from_answers_samples_and_the_target(planned):
    rows = [ask(f"question {n}", "x" * 20) for n in range(10)]
    found, recipe = planned(rows, answer_tokens=8, overrides=["generate.samples_per_prompt=3"])
    cap = recipe.generate.sampling.max_new_tokens
    assert found.responses == 30
    assert found.output_tokens == 30 * 8
    assert found.output_tokens_at_most == 30 * cap
    assert found.hours == pytest.approx(240 / 100 / 3600)
    tokens = 3 * found.sets[0].prompt_tokens + 240
    config = json.loads((Path(recipe.target.path) / "config.json").read_text())
    per_token = 4 * config["hidden_size"] * 2 + 5  # three layers and the last, bf16; id and mask
    assert found.hidden_state_bytes == tokens * per_token


def test_answers_of_the_set_tell_how_long_answers_are(planned):
    short, _ = planned([ask(f"question number {n}", "y" * 20) for n in range(10)])
    long, _ = planned([ask(f"question number {n}", "y" * 200) for n in range(10)])
    assert long.sets[0].answer_tokens == pytest.approx(10 * short.sets[0].answer_tokens, rel=0.1)
    none, recipe = planned([ask(f"question number {n}") for n in range(10)])
    assert none.sets[0].answer_tokens is None
    assert none.output_tokens == 10 * recipe.generate.sampling.max_new_tokens


def test_a_large_set_is_looked_at_in_part_and_says_so(planned, monkeypatch):
    monkeypatch.setattr(module, "_WHOLE_BYTES", 20_000)
    monkeypatch.setattr(module, "_CHUNK_BYTES", 5_000)
    rows = [ask(f"question {n:06d} about hawks") for n in range(4000)]
    found, _ = planned(rows)
    chat = found.sets[0]
    assert not chat.is_exact
    assert chat.rows_looked_at < 2000
    assert chat.rows == pytest.approx(4000, rel=0.02)
    assert chat.prompts == pytest.approx(4000, rel=0.02)


def test_a_cap_leaves_the_rest_of_a_set_undrawn(planned):
    path = "prompts.train=" + json.dumps(
        [{"name": "chat", "path": "train.jsonl", "domain": "chat", "cap": 4}]
    )
    found, _ = planned([ask(f"question {n}") for n in range(10)], overrides=[path])
    assert (found.sets[0].prompts, found.sets[0].rejected) == (4, {"not_drawn": 6})
    assert found.responses == 4


def test_a_set_without_a_usable_prompt_is_refused_with_what_was_seen(planned):
    with pytest.raises(BadRecipe, match=r"no usable prompt in the 2 rows looked at.*empty_content"):
        planned([ask(" "), ask("")])


def test_the_table_fits_a_narrow_terminal_without_colour(planned):
    found, _ = planned([ask(f"question {n}") for n in range(10)] + [{"messages": []}])
    text = io.StringIO()
    render(found, Console(file=text, width=80))
    said = text.getvalue()
    assert "bad_messages 1" in said
    assert "tokens to generate" in said
    assert max(map(len, said.splitlines())) <= 80
    assert "\x1b" not in said
    json.dumps(found.to_json(), allow_nan=False)
