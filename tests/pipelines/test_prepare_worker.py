"""What a process makes of a chunk, without other rows, and that none outlives its parent."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from pipelines.prepare_worker import (
    PromptMaker,
    SetRules,
    Task,
    asked_text,
    is_ready,
    said_by,
    start_worker,
)
from pipelines.recipe import Selection, load_recipe
from pipelines.sources.files import Chunk
from pipelines.sources.row import SourceRow
from pipelines.template import ChatTemplate, load_tokenizer
from tests.support.road import NO_SELECTION, write_recipe

ROOT = Path(__file__).parents[2]


def chunk(*rows: object) -> Chunk:
    lines = [json.dumps(row).encode() for row in rows]
    ends, at = [], 0
    for line in lines:
        ends.append(at + len(line))
        at = ends[-1] + 1
    payload = b"\n".join(lines)
    return Chunk("x.jsonl", 1, len(rows), "lines", payload, tuple(ends), len(payload))


def ask(text: str, answer: str = "") -> dict:
    messages = [{"role": "user", "content": text}]
    if answer:
        messages.append({"role": "assistant", "content": answer})
    return {"messages": messages}


def selection(**changes) -> Selection:
    return Selection(**{**NO_SELECTION, **changes})


def rules(given: Selection | None, held_out: Path | None) -> SetRules:
    return SetRules("birds", "chat", "messages", "last", given, held_out)


@pytest.fixture
def make(tmp_path, tiny_target):
    """A function that works a chunk through."""
    recipe = load_recipe(write_recipe(tmp_path, tiny_target))
    template = ChatTemplate(load_tokenizer(recipe.target), recipe.target.profile)

    def run(one: Chunk, given: Selection | None = None, *, below=None, held_out=None):
        return PromptMaker(recipe, template).make(Task(one, rules(given, held_out), below))

    return run


def test_every_row_is_a_prompt_or_named_in_order(make):
    worked = make(chunk(ask("one"), 3, ask(" "), ask("two", "an answer"), {"messages": []}))
    assert worked.rows == 5
    assert [row["line"] for row in worked.prompts.to_pylist()] == [1, 4]
    assert [(bad.line, bad.reason) for bad in worked.rejected] == [
        (2, "not_an_object"),
        (3, "empty_content"),
        (5, "bad_messages"),
    ]
    assert worked.answer_characters == len("an answer")
    assert worked.signatures is None


def test_signatures_are_made_for_training_sets_that_look_for_copies(make):
    worked = make(chunk(ask("one"), ask("two")), selection(near_duplicates=0.8))
    assert worked.signatures is not None
    assert worked.signatures.shape == (2, 128)


def test_a_key_that_cannot_be_drawn_is_not_tokenised(make):
    whole = make(chunk(*(ask(f"question {n}") for n in range(20))), selection())
    keys = sorted(whole.prompts["draw_key"].to_pylist())
    some = make(chunk(*(ask(f"question {n}") for n in range(20))), selection(), below=keys[5])
    assert sorted(some.prompts["draw_key"].to_pylist()) == keys[:5]
    assert {bad.reason for bad in some.rejected} == {"not_drawn"}
    assert len(some.rejected) == 15


def test_a_passage_of_the_evaluation_is_looked_for_in_what_users_say(make, tmp_path):
    texts = tmp_path / "texts.json"
    texts.write_text(json.dumps({"e-1": "one two three four five six"}))
    worked = make(
        chunk(ask("now: One, two - three four FIVE."), ask("one two three four")),
        selection(shared_words=5),
        held_out=texts,
    )
    assert worked.prompts.num_rows == 1
    (bad,) = worked.rejected
    assert (bad.reason, bad.line) == ("contaminated", 1)
    assert "e-1" in bad.detail


def test_what_is_asked_and_what_is_said():
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "two"},
    )
    row = SourceRow("x", 1, messages, (), "", "")
    assert asked_text(row) == "One\ntwo"
    louder = SourceRow("y", 2, (*messages[:3], {"role": "user", "content": " TWO "}), (), "", "")
    assert said_by(row, by_turn=False) == said_by(louder, by_turn=False)
    assert len(said_by(row, by_turn=True)) == 2
    assert said_by(row, by_turn=True)[0] not in said_by(row, by_turn=False)


def test_a_process_gets_ready_without_torch(tmp_path, tiny_target):
    recipe = load_recipe(write_recipe(tmp_path, tiny_target))
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=start_worker, initargs=(recipe,)) as pool:
        assert pool.submit(is_ready).result()
        assert pool.submit(find_spec, "torch").result() is None


def test_processes_end_with_a_parent_that_was_killed(tmp_path, tiny_target):
    recipe = write_recipe(tmp_path, tiny_target)
    program = (
        "import sys, time\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "from pathlib import Path\n"
        "from pipelines.prepare_worker import start_worker\n"
        "from pipelines.recipe import load_recipe\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(2, mp_context=get_context('spawn'),\n"
        "        initializer=start_worker, initargs=(load_recipe(Path(sys.argv[1])),))\n"
        "    for one in [pool.submit(time.sleep, 0.5) for _ in range(2)]: one.result()\n"
        "    print('ready', flush=True)\n"
        "    time.sleep(600)\n"
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, str(script), str(recipe)], stdout=subprocess.PIPE, env=environment
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"ready\n"
    children = psutil.Process(parent.pid).children(recursive=True)
    workers = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
    assert len(workers) >= 1
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive
