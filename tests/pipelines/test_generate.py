"""The whole verb on a real Ray against a server that keeps and breaks the contract."""

import itertools
import json
import threading

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.errors import PreflightFailed, QualityStop, VerificationFailed
from pipelines.generate import generate
from pipelines.generate_worker import GenerateWorker, WorkerPlan
from pipelines.schema import PROMPT_SCHEMA, RESPONSE_SCHEMA
from pipelines.segments import committed_files, durable_reports
from pipelines.store import RunFolder, write_parquet
from pipelines.telemetry import EventLog
from tests.support.fake_server import FakeServer, Reply, good_reply
from tests.support.generate_run import (
    ANSWER,
    by_number,
    prompt_row,
    recipe_for,
    refuse_all,
    write_prompts,
)

pytestmark = pytest.mark.usefixtures("local_ray")
COUNT = 60


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def asked_numbers(server):
    return sorted(http["input_ids"][1] for http in server.requests)


def answer(recipe, run, numbers):
    """Have a worker make rows durable, as an earlier session did."""
    worker = GenerateWorker(WorkerPlan.of(recipe, run, recipe.generate.servers.urls))
    rows = [prompt_row(number) for number in numbers]
    worker(pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA))


def read(folder):
    return pq.read_table(folder, partitioning=None)


def test_every_prompt_becomes_one_row_and_a_second_run_asks_nothing(run, tmp_path, tiny_target):
    ids = write_prompts(run, COUNT)
    with FakeServer(by_number, model_path=str(tiny_target)) as server:
        recipe = recipe_for(tmp_path, tiny_target, server.url)
        counts = generate(recipe, run, EventLog(run))
    assert counts["sets"]["chat"] == {
        "prompts": 60,
        "ok": 48,
        "rejected": {"empty_content": 6},
        "failed": {"http_400": 6},
        "prompt_tokens": 48 * 3,
        "output_tokens": 48 * 4,
    }
    assert counts["asked"] == COUNT
    assert asked_numbers(server) == list(range(COUNT))
    ok, aside = read(run.responses / "chat"), read(run.rejected_responses / "chat")
    assert sorted(ok["sample_id"].to_pylist() + aside["sample_id"].to_pylist()) == ids
    assert ok.schema.equals(RESPONSE_SCHEMA, check_metadata=True)
    assert ok["output_ids"][0].as_py() == [*ANSWER, 2]
    assert not (run.segments / "chat").exists()
    events = [json.loads(line)["event"] for line in run.events.read_text().splitlines()]
    assert events == ["server_checked", "canary_passed"]

    before = {path: path.read_bytes() for path in run.responses.rglob("*.parquet")}
    again = generate(recipe, run, EventLog(run))  # the server is gone, and nobody notices
    assert again["asked"] == 0
    assert again["sets"] == counts["sets"]
    assert {path: path.read_bytes() for path in run.responses.rglob("*.parquet")} == before


def test_a_stop_in_the_canary_asks_nobody_else(run, tmp_path, tiny_target):
    write_prompts(run, COUNT)
    with FakeServer(refuse_all, model_path=str(tiny_target)) as server:
        recipe = recipe_for(tmp_path, tiny_target, server.url)
        with pytest.raises(QualityStop, match="canary: 8 of 8 rows"):
            generate(recipe, run, EventLog(run))
    assert asked_numbers(server) == list(range(8))
    assert len(durable_reports(run, "chat")) == 8


def test_a_stop_in_a_window_loses_nothing_and_is_gone_on_from(run, tmp_path, tiny_target):
    write_prompts(run, COUNT)
    count, lock = itertools.count(), threading.Lock()

    def breaks_later(request, nth):
        with lock:
            good = next(count) < 30
        return by_number(request, nth) if good else refuse_all(request, nth)

    with FakeServer(breaks_later, model_path=str(tiny_target)) as server:
        recipe = recipe_for(tmp_path, tiny_target, server.url)
        answer(recipe, run, range(10))  # the canary is over, and two rows more
        with pytest.raises(QualityStop, match="window"):
            generate(recipe, run, EventLog(run))
    kept = {one.sample_id for one in durable_reports(run, "chat") if one.has_reply}
    assert 9 <= len(kept) <= 30

    with FakeServer(by_number, model_path=str(tiny_target)) as server:
        recipe = recipe_for(tmp_path, tiny_target, server.url)
        counts = generate(recipe, run, EventLog(run))
    assert counts["sets"]["chat"]["ok"] == 48
    assert counts["sets"]["chat"]["failed"] == {"http_400": 6}
    # Fewer where the stopped worker still made rows durable after `kept` was read.
    assert len(server.requests) <= COUNT - len(kept)
    assert len(asked_numbers(server)) == len(set(asked_numbers(server)))
    assert not kept & {f"chat-{number:012x}" for number in asked_numbers(server)}


@pytest.mark.parametrize("count", [5, 8, 40])
def test_a_stop_that_the_held_rows_explain_is_repeated_and_asks_no_server(
    run, tmp_path, tiny_target, count
):
    write_prompts(run, count)
    with FakeServer(by_number, model_path=str(tiny_target)) as server:
        recipe = recipe_for(
            tmp_path, tiny_target, server.url, "generate.gates.min_reasoning_share=0.5"
        )
        answer(recipe, run, range(min(count, 8)))
    with pytest.raises(QualityStop, match="0% of the replies hold reasoning"):
        generate(recipe, run, EventLog(run))
    assert committed_files(run, "chat") == []


def test_a_bad_last_window_is_not_forgotten_when_all_rows_are_there(run, tmp_path, tiny_target):
    write_prompts(run, 20)
    with FakeServer(by_number, model_path=str(tiny_target)) as server:
        recipe = recipe_for(tmp_path, tiny_target, server.url)
        answer(recipe, run, range(9))
    with FakeServer(lambda http, _: Reply(good_reply(http, [2]))) as server:
        answer(recipe_for(tmp_path, tiny_target, server.url), run, range(9, 20))
    with pytest.raises(QualityStop, match="window: 8 of 8 rows are rejected"):
        generate(recipe, run, EventLog(run))


def test_a_worker_that_is_killed_is_started_again_and_no_row_is_lost(run, tmp_path, tiny_target):
    write_prompts(run, COUNT)
    killed = threading.Event()

    def kill_the_worker_once(request, nth):
        if request["input_ids"][1] == 45 and not killed.is_set():
            killed.set()
            for process in psutil.Process().children(recursive=True):  # of this test's own Ray
                if any(word.startswith("ray::MapWorker") for word in process.cmdline()):
                    process.kill()
        return by_number(request, nth)

    with FakeServer(kill_the_worker_once, model_path=str(tiny_target)) as server:
        recipe = recipe_for(
            tmp_path, tiny_target, server.url, "generate.pool={max_in_flight_per_server: 2}"
        )
        answer(recipe, run, range(8))
        counts = generate(recipe, run, EventLog(run))
    assert killed.is_set()
    assert counts["sets"]["chat"]["ok"] == 48
    assert len(server.requests) < 2 * COUNT - 20  # what was durable was not asked again


def test_a_server_that_does_not_fit_is_a_failed_preflight(run, tmp_path, tiny_target):
    write_prompts(run, 3)
    with FakeServer(model_path="/models/other") as server:
        recipe = recipe_for(tmp_path, tiny_target, server.url)
        with pytest.raises(PreflightFailed, match="serves /models/other"):
            generate(recipe, run, EventLog(run))
    assert server.requests == []


def test_prompts_that_are_not_there_or_come_twice_are_refused(run, tmp_path, tiny_target):
    recipe = recipe_for(tmp_path, tiny_target, "http://127.0.0.1:1")
    with pytest.raises(PreflightFailed, match="no prompts"):
        generate(recipe, run, EventLog(run))
    table = pa.Table.from_pylist([prompt_row(1), prompt_row(1)], schema=PROMPT_SCHEMA)
    write_parquet(run.prompts / "chat" / "part-00000.parquet", table)
    with pytest.raises(VerificationFailed, match="come twice"):
        generate(recipe, run, EventLog(run))
