"""The command as a user calls it, attached to the stock server."""

import json

import pyarrow.parquet as pq
import pytest

from tests.support.road import ROOT, eyas

pytestmark = pytest.mark.conformance

RECIPE = ROOT / "recipes" / "quickstart.yaml"
NEW_TOKENS = 24
QUESTIONS = 8


@pytest.fixture
def sources(tmp_path):
    """Some of the quick start's own prompts, as two sets."""
    sets = {}
    for name, count in (("train-chat", QUESTIONS), ("eval-chat", 2)):
        lines = (RECIPE.parent / "prompts" / f"{name}.jsonl").read_text().splitlines()[:count]
        sets[name] = tmp_path / f"{name}.jsonl"
        sets[name].write_text("\n".join(lines) + "\n")
    return sets


def test_generate_with_the_stock_server_keeps_every_promise(engines, sources, tmp_path):
    run = tmp_path / "run"
    changes = {
        "run_folder": str(run),
        "prompts.train": [{"name": "chat", "path": str(sources["train-chat"]), "domain": "chat"}],
        "prompts.evaluation": [
            {"name": "eval", "path": str(sources["eval-chat"]), "domain": "chat"}
        ],
        "generate.servers": {"kind": "attach", "urls": [engines["stock"].url]},
        "generate.sampling.max_new_tokens": NEW_TOKENS,
        "prompts.min_response_tokens": NEW_TOKENS,
        "generate.gates.canary_rows": 4,
    }
    options = [
        word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")
    ]
    done = eyas("run", RECIPE, "--until", "generate", "--json", *options)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [
        row
        for path in sorted((run / "responses").rglob("*.parquet"))
        for row in pq.read_table(path, partitioning=None).to_pylist()
    ]
    assert len(rows) == QUESTIONS
    assert [row["status"] for row in rows] == ["ok"] * QUESTIONS
    for row in rows:
        assert 0 < len(row["output_ids"]) == row["usage"]["completion_tokens"] <= NEW_TOKENS
    proved = eyas("verify", run, "--json")
    assert proved.returncode == 0, proved.stdout[-3000:]
    outcomes = {one["name"]: one["outcome"] for one in json.loads(proved.stdout)["checks"]}
    assert "failed" not in outcomes.values()
    assert sum(outcome == "passed" for outcome in outcomes.values()) >= 10
