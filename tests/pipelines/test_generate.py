"""The whole verb on a real Ray against a server that keeps and breaks the contract."""

import itertools
import json
import threading
from contextlib import closing

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.errors import PreflightFailed, QualityStop, VerificationFailed
from pipelines.generate import generate
from pipelines.generate_worker import GenerateWorker
from pipelines.schema import PROMPT_SCHEMA, RESPONSE_SCHEMA
from pipelines.segments import committed_files, durable_reports
from pipelines.store import RunFolder, write_parquet
from pipelines.telemetry import EventLog
from tests.support.fake_server import STOP_ID, FakeServer, Reply, good_reply
from tests.support.generate_run import (
    ANSWER,
    after_the_probe,
    by_number,
    plan_of,
    prompt_row,
    recipe_for,
    refuse_all,
    write_prompts,
)

FEW_PERMITS = "generate.pool={max_in_flight_per_server: 2}"
AT_ONCE = "generate.gates.canary_rows=60"  # one pool of workers, not a second after the canary
pytestmark = pytest.mark.usefixtures("local_ray")
COUNT = 60


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def asked_numbers(server):
    return sorted(http["input_ids"][1] for http in server.requests)


def numbers_of_rows(server):
    """Without the preflight's question."""
    return sorted(
        http["input_ids"][1]
        for http in server.requests
        if http["sampling_params"]["max_new_tokens"] == 32
    )


def answer(recipe, run, numbers):
    """Have a worker make rows durable, as an earlier session did."""
    rows = [prompt_row(number) for number in numbers]
    with closing(GenerateWorker(plan_of(recipe, run, *recipe.generate.servers.urls))) as worker:
        worker.answer(pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA))


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
    assert numbers_of_rows(server) == list(range(COUNT))
    ok, aside = read(run.responses / "chat"), read(run.rejected_responses / "chat")
    assert sorted(ok["sample_id"].to_pylist() + aside["sample_id"].to_pylist()) == ids
    assert ok.schema.equals(RESPONSE_SCHEMA, check_metadata=True)
    assert ok["output_ids"][0].as_py() == [*ANSWER, 2]
    assert not (run.segments / "chat").exists()
    events = [json.loads(line)["event"] for line in run.events.read_text().splitlines()]
    assert events == ["server_checked", "server_joined", "canary_passed"]

    before = {path: path.read_bytes() for path in run.responses.rglob("*.parquet")}
    again = generate(recipe, run, EventLog(run))  # the server is gone, and nobody notices
    assert again["asked"] == 0
    assert again["sets"] == counts["sets"]
    assert {path: path.read_bytes() for path in run.responses.rglob("*.parquet")} == before


def test_a_stop_in_the_canary_asks_nobody_else_and_the_cure_lets_the_run_go_on(
    run, tmp_path, tiny_target
):
    write_prompts(run, COUNT)
    with FakeServer(after_the_probe(refuse_all), model_path=str(tiny_target)) as server:
        recipe = recipe_for(tmp_path, tiny_target, server.url)
        with pytest.raises(QualityStop, match=r"canary: .* of them failed:http_400"):
            generate(recipe, run, EventLog(run))
    assert set(numbers_of_rows(server)) <= set(range(8))

    with FakeServer(by_number, model_path=str(tiny_target)) as server:
        recipe = recipe_for(tmp_path, tiny_target, server.url, AT_ONCE)
        counts = generate(recipe, run, EventLog(run))
    assert numbers_of_rows(server) == list(range(COUNT))
    assert counts["sets"]["chat"]["ok"] == 48


def test_a_stop_in_a_window_loses_nothing_and_only_the_bad_window_is_asked_again(
    run, tmp_path, tiny_target
):
    write_prompts(run, COUNT)
    count, lock = itertools.count(), threading.Lock()

    def breaks_later(request, nth):
        with lock:
            good = next(count) < 30
        return by_number(request, nth) if good else Reply(good_reply(request, [STOP_ID]))

    with FakeServer(breaks_later, model_path=str(tiny_target)) as server:
        recipe = recipe_for(tmp_path, tiny_target, server.url, FEW_PERMITS)
        answer(recipe, run, range(10))  # the canary is over, and two rows more
        with pytest.raises(QualityStop, match=r"window: .*empty_content"):
            generate(recipe, run, EventLog(run))
    held = {one.sample_id for one in durable_reports(run, "chat") if one.is_settled}
    suspects = json.loads((run.responses / "_quality_stop.json").read_text())["suspects"]["chat"]
    assert len(suspects) >= 8
    assert set(suspects) <= held

    with FakeServer(by_number, model_path=str(tiny_target)) as server:
        recipe = recipe_for(tmp_path, tiny_target, server.url, FEW_PERMITS, AT_ONCE)
        counts = generate(recipe, run, EventLog(run))
    again = {f"chat-{number:012x}" for number in numbers_of_rows(server)}
    assert set(suspects) <= again
    assert not again & (held - set(suspects))
    assert counts["sets"]["chat"]["prompts"] == COUNT
    aside = read(run.root / "suspect")
    assert sorted(aside["sample_id"].to_pylist()) == sorted(suspects)
    assert not (run.responses / "_quality_stop.json").exists()


def test_a_target_whose_reasoning_is_never_seen_stops_within_its_canary(run, tmp_path, tiny_target):
    write_prompts(run, COUNT)
    with FakeServer(by_number, model_path=str(tiny_target)) as server:
        recipe = recipe_for(
            tmp_path, tiny_target, server.url, "generate.gates.min_reasoning_share=0.5"
        )
        with pytest.raises(QualityStop, match=r"0 of . replies hold reasoning"):
            generate(recipe, run, EventLog(run))
    assert len(numbers_of_rows(server)) <= 8
    assert committed_files(run, "chat") == []


def test_replies_without_counts_are_a_failed_preflight(run, tmp_path, tiny_target):
    def without_counts(request, _):
        reply = good_reply(request)
        del reply["meta_info"]["completion_tokens"]
        return Reply(reply)

    write_prompts(run, 3)
    with (
        FakeServer(without_counts, model_path=str(tiny_target)) as server,
        pytest.raises(PreflightFailed, match="missing_completion_tokens"),
    ):
        generate(recipe_for(tmp_path, tiny_target, server.url), run, EventLog(run))


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
        recipe = recipe_for(tmp_path, tiny_target, server.url, FEW_PERMITS)
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
