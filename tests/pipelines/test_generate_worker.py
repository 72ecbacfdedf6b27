"""What one worker does with a batch, without Ray."""

import dataclasses
import json
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.durable_rows import DurableRows
from pipelines.errors import StorageFailed
from pipelines.generate_worker import (
    GenerateWorker,
    prompt_rows,
    row_seed,
    target_vocab_size,
)
from pipelines.recipe import load_recipe
from pipelines.schema import PROMPT_SCHEMA
from pipelines.segments import commit, durable_ids, durable_reports
from pipelines.store import RunFolder
from tests.support.fake_server import FakeServer, Hang, Raw, Reply, good_reply
from tests.support.generate_run import Always, by_number, plan_of, prompt_row, recipe_for
from tests.support.road import write_recipe


@pytest.fixture
def plan_for(tmp_path, tiny_target):
    def make(url, *overrides, **changes):
        recipe = recipe_for(tmp_path, tiny_target, url, *overrides)
        return plan_of(recipe, RunFolder(tmp_path / "run"), url, **changes)

    return make


@pytest.fixture
def serving(tiny_target):
    return lambda script=by_number: FakeServer(script, model_path=str(tiny_target))


@pytest.fixture
def working():
    workers = []

    def start(plan):
        workers.append(GenerateWorker(plan))
        return workers[-1]

    yield start
    for one in workers:
        one.close()


def batch(*numbers):
    return pa.Table.from_pylist([prompt_row(one) for one in numbers], schema=PROMPT_SCHEMA)


def statuses(plan):
    return {one.sample_id: one.status for one in durable_reports(plan.run, "chat")}


def test_rows_are_durable_and_reported_when_the_call_returns(plan_for, serving, working):
    with serving() as server:
        plan = plan_for(server.url)
        assert working(plan).answer(batch(0, 3, 9)) == 3
    rows = [prompt_row(number)["sample_id"] for number in (0, 3, 9)]
    expected = dict(zip(rows, ["ok", "rejected:empty_content", "failed:http_400"], strict=True))
    assert statuses(plan) == expected
    assert {one.sample_id: one.status for one in plan.report.reports} == expected
    assert sorted(one.output_tokens for one in plan.report.reports) == [0, 1, 4]


def test_a_restarted_worker_does_not_ask_again_for_what_is_durable(plan_for, serving, working):
    with serving() as server:
        plan = plan_for(server.url)
        working(plan).answer(batch(0, 1))
        assert working(plan).answer(batch(0, 1, 2)) == 1
    assert sorted(http["input_ids"][1] for http in server.requests) == [0, 1, 2]


def test_a_row_of_a_segment_that_the_driver_saw_is_not_looked_up(plan_for, serving, working):
    with serving() as server:
        plan = plan_for(server.url)
        working(plan).answer(batch(0, 1))
        names = frozenset(path.name for path in plan.run.segments.rglob("*.arrow"))
    known = DurableRows(plan.run, ["chat"], skip=names, also=["chat-000000000001"])
    assert "chat-000000000000" not in known
    assert known.row("chat-000000000001")["output_ids"] == [40, 41, 42, 2]


def test_a_committed_row_is_found_and_one_that_no_server_took_is_not(plan_for, serving, working):
    with serving() as server:
        plan = plan_for(server.url)
        working(plan).answer(batch(0, 9))
        commit(plan.run, "chat", ["chat-000000000000", "chat-000000000009"])
    known = DurableRows(plan.run, ["chat"], also=["chat-000000000000", "chat-000000000009"])
    assert known.row("chat-000000000000")["status"] == "ok"
    assert known.row("chat-000000000009")["status"] == "failed:http_400"  # it would be so again
    broken = Raw(b"<html>", 502)
    with serving(lambda *_: broken) as server:
        lost = plan_for(server.url, "generate.pool={attempts: 1}")
        working(lost).answer(batch(5))
    assert statuses(lost)["chat-000000000005"] == "failed:http_502"
    assert "chat-000000000005" not in DurableRows(lost.run, ["chat"])


def test_a_closed_tap_ends_the_call_tells_the_server_and_keeps_what_came(
    plan_for, serving, working
):
    def script(request, _):
        return Hang() if request["input_ids"][1] == 7 else Reply(good_reply(request))

    with serving(script) as server:
        plan = plan_for(server.url)
        worker = working(plan)
        call = threading.Thread(target=worker.answer, args=(batch(1, 7),))
        call.start()
        assert server.hanging.wait(20)
        plan.report.is_open = False
        call.join(20)
        assert not call.is_alive()
        assert server.abort_came.wait(20)
        assert worker.answer(batch(2)) == 0
    assert statuses(plan) == {"chat-000000000001": "ok"}


def test_a_server_that_joins_later_is_used(plan_for, serving, working):
    with serving() as server:
        reports = []
        plan = plan_for("http://127.0.0.1:1", servers=lambda: tuple(reports))
        worker = working(plan)
        call = threading.Thread(target=worker.answer, args=(batch(0, 1),))
        call.start()
        call.join(0.5)
        assert call.is_alive()
        reports += Always((server.url,))()
        call.join(20)
        assert not call.is_alive()
    assert set(statuses(plan).values()) == {"ok"}


def test_rows_of_a_server_that_became_another_model_are_not_kept(plan_for, serving, working):
    """Its replies keep the contract; only what it says of itself tells that they are foreign."""

    def exchanged(request, _):
        server.model_info["model_path"] = "/models/other"
        server.server_info["random_seed"] = 2
        return Reply(good_reply(request))

    with serving(exchanged) as server, serving() as other:
        server.server_info["random_seed"] = 1
        plan = plan_for(server.url, servers=Always((server.url,)))
        plan = dataclasses.replace(plan, servers=Always((server.url, other.url)))
        working(plan).answer(batch(*(one for one in range(40) if one % 10 not in (3, 9))))
    rows = durable_reports(plan.run, "chat")
    assert server.requests
    assert len(rows) == 32
    assert {one.server for one in rows} == {other.url}


def test_a_disk_that_takes_no_more_ends_the_call_with_its_reason(
    plan_for, serving, working, monkeypatch
):
    def full(*_):
        raise StorageFailed("the disk is full", expected="room", change="make room")

    monkeypatch.setattr("pipelines.ledger._FLUSH_SECONDS", 0.01)
    with serving() as server:
        worker = working(plan_for(server.url))
        worker.answer(batch(0))
        monkeypatch.setattr("pipelines.segments.write_segment", full)
        with pytest.raises(StorageFailed, match="the disk is full"):
            worker.answer(batch(1, 2))
        with pytest.raises(StorageFailed):
            worker.answer(batch(4))


def test_a_conversation_is_answered_turn_by_turn_with_the_models_own_answers(
    plan_for, serving, working
):
    prompt = {
        **prompt_row(1),
        "messages": json.dumps([{"role": "user", "content": one} for one in "abc"]),
        "history": [[1, 1, 5], [2, 6]],
        "continuations": [[2, 6, 7], [2, 6, 7]],
    }

    def script(request, _):
        turn = 1 + request["input_ids"].count(2)
        return Reply(good_reply(request, [40 + turn, 60 + turn, 2]))

    with serving(script) as server:
        plan = plan_for(server.url, "generate.samples_per_prompt=2", "prompts.turns=every")
        table = pa.Table.from_pylist([prompt], schema=PROMPT_SCHEMA)
        assert working(plan).answer(table) == 6
        again = working(plan)
        assert again.answer(table) == 0
    asked = sorted(tuple(http["input_ids"]) for http in server.requests)
    assert asked[::2] == asked[1::2]  # two samples
    assert asked[::2] == [
        (1, 1, 5),
        (1, 1, 5, 41, 61, 2, 6, 7),
        (1, 1, 5, 41, 61, 2, 6, 42, 62, 2, 6, 7),
    ]
    names = [f"chat-000000000001.t{turn}.s{sample}" for turn in (1, 2, 3) for sample in (1, 2)]
    assert durable_ids(plan.run, "chat") == {"chat-000000000001", *names[1:]}
    seeds = [http["sampling_params"]["sampling_seed"] for http in server.requests]
    assert len(set(seeds)) == 6
    commit(plan.run, "chat", ["chat-000000000001", *names[1:]])
    rows = pq.read_table(plan.run.responses / "chat", partitioning=None).to_pylist()
    by_turn = {(row["turn"], row["sample"]): row for row in rows}
    assert [one["role"] for one in json.loads(by_turn[3, 2]["messages"])] == [
        *("user", "assistant", "user", "assistant", "user")
    ]
    assert json.loads(by_turn[2, 1]["messages"])[1]["content"] == by_turn[1, 1]["content"]
    assert by_turn[2, 1]["prompt_id"] == "chat-000000000001"


def test_an_unfinished_conversation_goes_on_from_the_turns_that_are_durable(
    plan_for, serving, working
):
    prompt = {
        **prompt_row(1),
        "messages": json.dumps([{"role": "user", "content": one} for one in "ab"]),
        "history": [[1, 1, 5]],
        "continuations": [[2, 6, 7]],
    }
    with serving() as server:
        plan = plan_for(server.url)
        working(plan).answer(batch(1))
        seen = frozenset(path.name for path in plan.run.segments.rglob("*.arrow"))
        plan = dataclasses.replace(
            plan, seen_segments=seen, earlier_turns=frozenset({"chat-000000000001"})
        )
        table = pa.Table.from_pylist([prompt], schema=PROMPT_SCHEMA)
        assert working(plan).answer(table) == 1
    assert [http["input_ids"] for http in server.requests][1] == [1, 1, 5, 40, 41, 42, 2, 6, 7]


def test_a_turn_after_a_rejected_answer_is_not_asked(plan_for, serving, working):
    prompt = {
        **prompt_row(3),  # its answer has no content
        "messages": json.dumps([{"role": "user", "content": one} for one in "ab"]),
        "history": [[1, 3, 5]],
        "continuations": [[2, 6, 7]],
    }
    with serving() as server:
        plan = plan_for(server.url)
        working(plan).answer(pa.Table.from_pylist([prompt], schema=PROMPT_SCHEMA))
    assert len(server.requests) == 1
    assert statuses(plan)["chat-000000000003.t2.s1"] == "failed:earlier_turn"


def test_rows_come_out_of_a_slice_of_a_batch_as_they_are():
    table = batch(0, 1, 2, 3).slice(1, 2)
    rows = [{**one, "prompt_ids": list(one["prompt_ids"])} for one in prompt_rows(table)]
    assert rows == table.to_pylist()


def test_calls_at_once_share_the_permits(plan_for, serving, working):
    with serving() as server:
        worker = working(plan_for(server.url, "generate.pool={max_in_flight_per_server: 2}"))
        calls = [
            threading.Thread(target=worker.answer, args=(batch(*range(start, start + 3)),))
            for start in range(0, 200, 20)
        ]
        for one in calls:
            one.start()
        for one in calls:
            one.join()
    assert len(server.requests) == 30
    assert server.most_in_flight <= 2


def test_the_room_of_a_row_is_what_the_context_leaves_less_one(plan_for, serving, working):
    def script(request, _):
        return Reply(good_reply(request))

    row = prompt_row(1)
    with serving(script) as server:
        plan = plan_for(server.url)
        worker = working(plan)  # context 256, cap 32
        for length in (3, 240, 255, 300):
            prompt = {
                **row,
                "sample_id": f"chat-{length}",
                "prompt_ids": [1, length % 250] + [5] * (length - 2),
            }
            table = pa.Table.from_pylist([prompt], schema=PROMPT_SCHEMA)
            worker.answer(table)
            assert statuses(plan)[prompt["sample_id"]] == (
                "ok" if length <= 240 else "failed:no_room"
            )
    sent = [http["sampling_params"] for http in server.requests]
    assert [one["max_new_tokens"] for one in sent] == [32, 15]


def test_every_sampling_field_is_sent_and_each_row_has_its_own_seed(plan_for, serving, working):
    with serving() as server:
        working(plan_for(server.url)).answer(batch(0, 1))
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
    assert shared.share == pytest.approx(1 / 3)  # of a server's memory for keys and values


def test_an_embedded_server_is_asked_for_little_more_than_it_runs(tmp_path, tiny_target):
    recipe = load_recipe(write_recipe(tmp_path, tiny_target))  # runs 8 at once
    plan = plan_of(recipe, RunFolder(tmp_path / "run"), "http://x")
    assert plan.pool.max_in_flight_per_server == 11


def test_the_vocabulary_is_the_targets_own(tiny_target):
    assert target_vocab_size(tiny_target) == 259
