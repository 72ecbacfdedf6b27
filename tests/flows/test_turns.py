"""Conversations and several samples through the real command, and what verify says of them."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.store import RunFolder
from pipelines.verify import verify
from tests.support.fake_server import FakeServer, Reply
from tests.support.road import ask_eyas, write_recipe
from tests.support.scripted_answers import ScriptedTarget

TURNS = (1, 2, 3)
EACH = 4


def write_conversations(path):
    with path.open("w") as lines:
        for turns in TURNS:
            for number in range(EACH):
                messages = []
                for turn in range(turns):
                    messages.append({"role": "user", "content": f"ask {turns}.{number}.{turn}"})
                    messages.append({"role": "assistant", "content": "somebody else's answer"})
                record = {"messages": messages, "source": "made for the tests", "license": "MIT"}
                lines.write(json.dumps(record) + "\n")


@pytest.mark.usefixtures("local_ray")
def test_every_turn_is_answered_after_the_targets_own_answers(tmp_path, tiny_target):
    recipe = write_recipe(tmp_path, tiny_target)
    write_conversations(tmp_path / "train.jsonl")
    scripted = ScriptedTarget.of(tiny_target, "one")
    changes = ["prompts.turns=every", "generate.samples_per_prompt=2"]
    changes += ["generate.gates.canary_rows=40"]  # one pool of workers
    changes += ["generate.sampling.max_new_tokens=80", "generate.sampling.temperature=1.0"]
    answers = FakeServer(lambda http, _: Reply(scripted.reply(http)), model_path=str(tiny_target))
    with answers as server:
        changes.append(f"generate.servers={{kind: attach, urls: ['{server.url}']}}")
        settings = [word for one in changes for word in ("--set", one)]
        outcome = ask_eyas("run", recipe, "--until", "generate", *settings)
    assert outcome.returncode == 0, outcome.stderr[-3000:]
    run = RunFolder(tmp_path / "run")
    rows = read(run.responses / "chat")
    wanted = sum(TURNS) * EACH * 2
    assert len(rows) == wanted
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert len({json.loads(row["params"])["sampling_seed"] for row in rows.values()}) == wanted
    for row in rows.values():
        if row["turn"] > 1:
            follows(row, rows)
    assert [one for one in verify(run).checks if one.outcome == "failed"] == []


def follows(row, rows):
    """A later turn's prompt holds the whole earlier answer, and its messages say the same."""
    name = (row["prompt_id"], row["turn"] - 1, row["sample"])
    earlier = next(
        one for one in rows.values() if (one["prompt_id"], one["turn"], one["sample"]) == name
    )
    said = earlier["output_ids"][:-1]  # without its stop id, which the template writes itself
    ids = row["prompt_ids"]
    assert any(ids[at : at + len(said)] == said for at in range(len(ids)))
    before = json.loads(row["messages"])
    assert before[-2] == {"role": "assistant", "content": earlier["content"]}
    assert "somebody else" not in row["messages"]


def read(folder):
    tables = [pq.read_table(path, partitioning=None) for path in sorted(folder.glob("*.parquet"))]
    return {row["sample_id"]: row for row in pa.concat_tables(tables).to_pylist()}
