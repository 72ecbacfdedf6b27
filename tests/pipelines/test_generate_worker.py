"""What one worker does with a batch, without Ray."""

import threading

import pyarrow as pa
import pytest

from actors.errors import BadReply
from actors.protocol import Completion, Finish, GenerateRequest
from pipelines.generate_worker import (
    GenerateWorker,
    WorkerPlan,
    check_counts,
    row_seed,
    target_vocab_size,
)
from pipelines.recipe import load_recipe
from pipelines.schema import PROMPT_SCHEMA
from pipelines.segments import durable_ids
from pipelines.store import RunFolder
from tests.support.fake_server import FakeServer, Reply, good_reply
from tests.support.generate_run import by_number, prompt_row, recipe_for
from tests.support.road import write_recipe


@pytest.fixture
def plan_for(tmp_path, tiny_target):
    def make(url, *overrides):
        recipe = recipe_for(tmp_path, tiny_target, url, *overrides)
        return WorkerPlan.of(recipe, RunFolder(tmp_path / "run"), (url,))

    return make


def batch(*numbers):
    return pa.Table.from_pylist([prompt_row(one) for one in numbers], schema=PROMPT_SCHEMA)


def test_a_batch_is_durable_when_its_reports_come_back(plan_for):
    with FakeServer(by_number) as server:
        plan = plan_for(server.url)
        reports = GenerateWorker(plan)(batch(0, 3, 9)).to_pylist()
    assert [one["status"] for one in reports] == [
        "ok",
        "rejected:empty_content",
        "failed:http_400",
    ]
    assert [one["output_tokens"] for one in reports] == [4, 1, 0]
    assert durable_ids(plan.run, "chat") == {one["sample_id"] for one in reports}


def test_a_restarted_worker_does_not_ask_again_for_what_is_durable(plan_for):
    with FakeServer(by_number) as server:
        plan = plan_for(server.url)
        first = GenerateWorker(plan)(batch(0, 1)).to_pylist()
        again = GenerateWorker(plan)(batch(0, 1, 2)).to_pylist()
    assert again[:2] == first
    assert [http["input_ids"][1] for http in sorted(server.requests, key=str)].count(0) == 1
    assert len(server.requests) == 3


def test_calls_at_once_share_the_permits(plan_for):
    with FakeServer(by_number) as server:
        worker = GenerateWorker(plan_for(server.url, "generate.pool={max_in_flight_per_server: 2}"))
        calls = [
            threading.Thread(target=worker, args=(batch(*range(start, start + 3)),))
            for start in range(0, 200, 20)
        ]
        for one in calls:
            one.start()
        for one in calls:
            one.join()
    assert len(server.requests) == 30
    assert server.most_in_flight <= 2


def test_the_room_of_a_row_is_what_the_context_leaves_less_one(plan_for):
    def script(request, _):
        return Reply(good_reply(request))

    row = prompt_row(1)
    with FakeServer(script) as server:
        worker = GenerateWorker(plan_for(server.url))  # context 256, cap 32
        for length in (3, 240, 255, 300):
            prompt = {
                **row,
                "sample_id": f"chat-{length}",
                "prompt_ids": [1, length % 250] + [5] * (length - 2),
            }
            table = pa.Table.from_pylist([prompt], schema=PROMPT_SCHEMA)
            status = worker(table)["status"][0].as_py()
            assert status == ("ok" if length <= 240 else "failed:no_room")
    sent = [http["sampling_params"] for http in server.requests]
    assert [one["max_new_tokens"] for one in sent] == [32, 15]


def test_every_sampling_field_is_sent_and_each_row_has_its_own_seed(plan_for):
    with FakeServer(by_number) as server:
        GenerateWorker(plan_for(server.url))(batch(0, 1))
    one, two = (http["sampling_params"] for http in server.requests)
    assert one["sampling_seed"] != two["sampling_seed"]
    assert {**one, "sampling_seed": 0} == {**two, "sampling_seed": 0}
    assert one["skip_special_tokens"] is False
    assert one["stop_token_ids"] == [2]


def test_a_seed_is_a_function_of_recipe_and_row_alone():
    assert row_seed(1, "a") == row_seed(1, "a")
    assert len({row_seed(1, "a"), row_seed(2, "a"), row_seed(1, "b")}) == 3
    assert 0 <= row_seed(1, "a") < 2**31


def test_workers_share_the_permits_of_a_server(plan_for):
    pool = "generate.pool={max_in_flight_per_server: 8}"
    assert plan_for("http://x", pool).pool.max_in_flight_per_server == 8
    shared = plan_for("http://x", pool, "generate.workers=3")
    assert shared.pool.max_in_flight_per_server == 2
    assert shared.rows_per_call == 8  # never less


def test_an_embedded_server_is_asked_for_little_more_than_it_runs(tmp_path, tiny_target):
    recipe = load_recipe(write_recipe(tmp_path, tiny_target))  # runs 8 at once
    plan = WorkerPlan.of(recipe, RunFolder(tmp_path / "run"), ("http://x",))
    assert plan.pool.max_in_flight_per_server == 11


def test_a_count_that_no_column_can_hold_is_a_bad_reply():
    completion = Completion("r", (2,), "", Finish("stop", 2, None), 1, 1, 2**31, "v", None)
    with pytest.raises(BadReply, match="cached_tokens"):
        check_counts(completion, GenerateRequest("r", (1,), {"max_new_tokens": 1}))


def test_the_vocabulary_is_the_targets_own(tiny_target):
    assert target_vocab_size(tiny_target) == 259
