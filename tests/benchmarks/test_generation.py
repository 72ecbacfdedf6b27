"""The pure parts of the generation benchmark, and its fake fleet over real HTTP."""

import json
import statistics
import time
import urllib.request
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from actors.protocol import GenerateRequest, parse_completion
from benchmarks.bare_loop import request_body
from benchmarks.fake_fleet import CLASSES, WORDS, FakeServer, ServerLog, Work, read_log, serving
from benchmarks.generation import idle_shares, tail_excess
from benchmarks.stage import prompts_of, role_of, write_run
from benchmarks.worker_profile import summary
from pipelines.recipe import load_recipe
from pipelines.run import done_stages
from pipelines.schema import PROMPT_SCHEMA
from tests.support.tiny_target import make_tiny_target

WORK = Work(prompt_tokens=50, answer_tokens=40, latency_seconds=0.01)


def test_prompts_differ_and_keep_their_mean_length():
    prompts = [WORK.prompt_ids(number) for number in range(3000)]
    assert len({tuple(one) for one in prompts}) == 3000
    assert statistics.mean(map(len, prompts)) == pytest.approx(50, rel=0.02)
    assert WORK.prompt_ids(26**4 - 1) != WORK.prompt_ids(0)


def test_latencies_are_lognormal_with_the_mean_that_was_asked_for():
    seconds = Work().latencies()
    assert len(seconds) == CLASSES
    assert statistics.mean(seconds) == pytest.approx(0.5, rel=0.01)
    assert statistics.median(seconds) == pytest.approx(0.5 * 2.718281828**-0.125, rel=0.01)


def test_a_fake_server_keeps_the_contract_and_answers_as_its_tokenizer_decodes(tmp_path: Path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(make_tiny_target(tmp_path, words=WORDS))
    with serving(WORK, [FakeServer(), FakeServer(slowness=20)], model_path="/m/tiny") as urls:
        for number, url in ((5, urls[0]), (5 + CLASSES, urls[0]), (5, urls[1])):
            ids = WORK.prompt_ids(number)
            body = request_body("some-rid", ids)
            reply = _post(url, body)
            request = GenerateRequest("some-rid", tuple(ids), body["sampling_params"])
            completion = parse_completion(request, 200, reply, vocab_size=len(tokenizer))
            assert list(completion.output_ids) == WORK.answer_ids(5)
            assert completion.text == tokenizer.decode(
                completion.output_ids, clean_up_tokenization_spaces=False
            )
        fast, slow = (read_log(url) for url in urls)
    assert (len(fast.answers), len(slow.answers)) == (2, 1)
    ((arrived, answered),) = slow.answers
    assert answered - arrived >= 20 * WORK.latencies()[5]


def test_a_short_answer_is_the_start_of_the_long_one_and_says_so():
    ids = WORK.prompt_ids(9)
    body = request_body("r", ids)
    body["sampling_params"] |= {"max_new_tokens": 16}
    with serving(WORK, [FakeServer()], model_path="/m/tiny") as urls:
        reply = _post(urls[0], body)
    request = GenerateRequest("r", tuple(ids), body["sampling_params"])
    completion = parse_completion(request, 200, reply, vocab_size=200_000)
    assert list(completion.output_ids) == WORK.answer_ids(9)[:16]
    assert (completion.finish.kind, len(completion.text)) == ("length", 16 * 4)


def test_a_late_server_opens_after_so_many_requests():
    with serving(
        WORK, [FakeServer(), FakeServer(opens_after_requests=2)], model_path="/m/tiny"
    ) as urls:
        _post(urls[0], request_body("r", WORK.prompt_ids(1)))
        time.sleep(0.2)
        with pytest.raises(OSError, match="refused"):
            read_log(urls[1])
        _post(urls[0], request_body("r", WORK.prompt_ids(2)))
        second = read_log(urls[0]).answers[1][0]
        assert _once_open(urls[1]).opened >= second


def test_a_tail_is_measured_in_longest_answers():
    logs = [ServerLog(0.0, ((0.0, 4.0),)), ServerLog(0.0, ((0.0, 1.0), (1.0, 2.0)))]
    finished = [*(second / 100 for second in range(198)), 5.0, 7.97]
    assert tail_excess(finished, logs) == pytest.approx((7.97 - 1.97) / 4.0)


def test_an_empty_place_counts_from_a_tenth_of_the_answers_while_prompts_wait():
    first = ServerLog(0.0, ((0.0, 1.0), (0.5, 2.0), (2.0, 10.0), (2.0, 4.0), (10.0, 12.0)))
    late = ServerLog(2.0, ((4.0, 20.0),))
    never = ServerLog(0.0, ())
    shares = idle_shares([first, late, never], 2, joining_seconds=1.5)
    # Six answers: from the first, at second 1, to second 10, when the last prompt is taken; the
    # servers that were there from the start are looked at from 1.5 on, the late one from 3.5.
    busy = (0.5 + 8.0 + 2.0, 6.0, 0.0)
    seconds = (8.5, 6.5, 8.5)
    assert shares == pytest.approx([1 - b / (2 * s) for b, s in zip(busy, seconds, strict=True)])


def test_a_run_folder_has_its_prompts_and_a_prepare_that_is_done(tmp_path: Path, tiny_target: Path):
    recipe = write_run(tmp_path / "run", tiny_target, ["http://127.0.0.1:1"], WORK, 30, 128)
    (prepared,) = done_stages(load_recipe(recipe))
    table = pq.read_table(prompts_of(tmp_path / "run"))
    assert prepared.stage == "prepare"
    assert table.schema.equals(PROMPT_SCHEMA)
    assert table["prompt_ids"].to_pylist() == [WORK.prompt_ids(number) for number in range(30)]
    assert load_recipe(recipe).generate.pool.max_in_flight_per_server == 128


def test_roles_are_told_apart_by_their_command_lines():
    assert role_of(["python", "-m", "pipelines.cli", "generate", "r.yaml"]) == "driver"
    assert role_of(["ray::MapWorker(MapBatches(GenerateWorker)).submit()"]) == "generate_worker"
    assert role_of(["ray::IDLE"]) == "other_workers"
    assert role_of(["/x/raylet/raylet", "--port=0"]) is None


def test_a_profile_counts_a_recursive_function_once():
    text = summary("worker", ["f (a.py:1);g (a.py:2);f (a.py:3) 3", "f (a.py:1) 1"])
    alone, whole = text.split("with callees")
    assert "100.0%  f (a.py)" in alone
    assert "100.0%  f (a.py)" in whole
    assert " 75.0%  g (a.py)" in whole


def _post(url: str, body: dict[str, Any]) -> bytes:
    request = urllib.request.Request(f"{url}/generate", json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10) as reply:
        content: bytes = reply.read()
    return content


def _once_open(url: str) -> ServerLog:
    for _ in range(200):
        try:
            return read_log(url)
        except OSError:
            time.sleep(0.05)
    raise AssertionError("it never opened")
