"""Failed rows are kept with their fault, and asked again by one option of the command."""

import json

import pyarrow.parquet as pq
import pytest

from pipelines.store import RunFolder
from tests.support.fake_server import FakeServer, Reply
from tests.support.road import TRAIN_PROMPTS, ask_eyas, write_recipe
from tests.support.scripted_answers import ScriptedTarget

REFUSED = 5


@pytest.mark.usefixtures("local_ray")
def test_failed_rows_are_asked_again_when_told_so_and_only_they(tmp_path, tiny_target):
    recipe = write_recipe(tmp_path, tiny_target)
    scripted = ScriptedTarget.of(tiny_target, "one")
    refused: set[tuple[int, ...]] = set()

    def refuses_some(request, _):
        is_row = not request["rid"].startswith("probe-")
        if is_row and (len(refused) < REFUSED or tuple(request["input_ids"]) in refused):
            refused.add(tuple(request["input_ids"]))
            return Reply({"error": {"message": "too long"}}, 400)
        return Reply(scripted.reply(request))

    def generate(script, *options):
        with FakeServer(script, model_path=str(tiny_target)) as server:
            attach = f"generate.servers={{kind: attach, urls: ['{server.url}']}}"
            more = ["--set", attach, "--set", "generate.gates.canary_rows=40", "--json"]
            outcome = ask_eyas("run", recipe, "--until", "generate", *more, *options)
        assert outcome.returncode == 0, outcome.stderr[-3000:]
        asked = [one for one in server.requests if not one["rid"].startswith("probe-")]
        stages = json.loads(outcome.stdout)["stages"]
        counts = next(one["counts"] for one in stages if one["stage"] == "generate")
        return counts["sets"]["chat"], asked

    counts, _ = generate(refuses_some)
    assert counts["failed"] == {"http_400": REFUSED}
    run = RunFolder(tmp_path / "run")
    letters = pq.read_table(run.rejected_responses / "chat", partitioning=None).to_pylist()
    assert [row["status"] for row in letters] == ["failed:http_400"] * REFUSED
    assert all("too long" in row["detail"] for row in letters)

    counts, asked = generate(lambda http, _: Reply(scripted.reply(http)))
    assert (counts["ok"], asked) == (TRAIN_PROMPTS - REFUSED, [])  # nobody said so

    counts, asked = generate(lambda http, _: Reply(scripted.reply(http)), "--retry-failed")
    assert counts["ok"] == TRAIN_PROMPTS
    assert counts["failed"] == {}
    assert {tuple(one["input_ids"]) for one in asked} == refused
    assert len(asked) == REFUSED
