"""The engine as a process: real HTTP, read by our own client half and by the errors' shapes."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp.test_utils import TestClient, TestServer
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.capture_file import take
from actors.config import Sampling
from actors.protocol import (
    GenerateRequest,
    parse_completion,
    parse_loads,
    parse_model_info,
    parse_server_info,
    sampling_params,
)
from actors.reference import ServeOptions, _Server, main, serve
from actors.reference_engine import Engine
from actors.reference_model import Target
from tests.support.draft_folder import random_draft
from tests.support.tiny_target import AUX_LAYER_IDS, EOS_ID

ROOT = Path(__file__).parents[2]
GREEDY = Sampling.greedy(480)


class Served:
    """One engine in a process of its own."""

    def __init__(self, target, folder, *extra, slots=4):
        ready = folder / "ready"
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "actors.reference"),
                    *("--target", str(target)),
                    *("--port", "0", "--ready-file", str(ready), "--dtype", "float32"),
                    *("--device", "cpu", "--threads", "1", "--max-running-requests", str(slots)),
                    *extra,
                ],
                cwd=ROOT,
                stderr=log,
            )
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)
        self.url = ready.read_text()

    def get(self, path):
        return self.send(urllib.request.Request(self.url + path))

    def post(self, path, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.send(urllib.request.Request(self.url + path, data=data))

    def send(self, request):
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def generate(self, **body):
        status, reply = self.post("/generate", {"sampling_params": {"temperature": 0}, **body})
        return status, json.loads(reply)

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        return self.process.wait(timeout=30)


@pytest.fixture(scope="module")
def server(tiny_target, tmp_path_factory):
    server = Served(tiny_target, tmp_path_factory.mktemp("server"))
    yield server
    if server.process.poll() is None:
        assert server.end() == 0


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    return AutoTokenizer.from_pretrained(tiny_target)


def test_our_own_client_half_accepts_every_reply_of_many_at_once(server, tiny_target, tokenizer):
    plain = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    requests = [
        GenerateRequest(
            f"row/{n}",
            tuple(tokenizer(f"question {n}" * (n % 3 + 1))["input_ids"]),
            sampling_params(GREEDY, max_new_tokens=5 + n, seed=n, stop_token_ids=[EOS_ID]),
        )
        for n in range(10)
    ]
    with ThreadPoolExecutor(10) as pool:
        replies = list(pool.map(lambda one: server.post("/generate", one.body()), requests))
    for request, (status, body) in zip(requests, replies, strict=True):
        completion = parse_completion(request, status, body, vocab_size=259)
        ids = torch.tensor([request.input_ids])
        out = plain.generate(
            ids, do_sample=False, max_new_tokens=request.max_new_tokens, pad_token_id=0
        )
        assert list(completion.output_ids) == out[0, ids.shape[1] :].tolist()
        assert completion.text == tokenizer.decode(completion.output_ids)
        assert completion.weight_version == "default"
        assert completion.speculation is None
        assert json.loads(body)["prompt_token_ids"] == list(request.input_ids)


def test_what_the_server_says_of_itself_is_read_by_our_client_half(server, tiny_target):
    model = parse_model_info(*server.get("/model_info"))
    assert (model.model_path, model.weight_version) == (str(tiny_target), "default")
    assert model.preferred_sampling_params is None
    info = parse_server_info(*server.get("/server_info"))
    assert (info.context_length, info.max_running_requests) == (512, 4)
    assert (info.allow_auto_truncate, info.speculative_algorithm) == (False, None)
    load = parse_loads(*server.get("/v1/loads?include=core"))
    assert (load.running, load.waiting, load.used_tokens) == (0, 0, 0)
    assert server.get("/health")[0] == server.get("/ready")[0] == 200
    assert json.loads(server.get("/v1/models")[1])["data"][0]["max_model_len"] == 512


def test_an_unknown_key_at_the_top_is_ignored_as_sglang_does(server):
    status, reply = server.generate(input_ids=[5, 6], max_new_tokens=3)
    assert status == 200
    assert reply["meta_info"]["finish_reason"]["type"] in ("length", "stop")
    assert reply["meta_info"]["completion_tokens"] == len(reply["output_ids"]) != 3


def test_the_text_hides_the_stop_and_special_tokens_unless_told_otherwise(server, tokenizer):
    ids = [5, 6, 7]
    free = server.generate(
        input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    )[1]["output_ids"]
    stop = {"temperature": 0, "max_new_tokens": 6, "stop_token_ids": [free[-1]]}
    cut = free[: free.index(free[-1]) + 1]
    _, trimmed = server.generate(input_ids=ids, sampling_params=stop)
    _, whole = server.generate(input_ids=ids, sampling_params={**stop, "no_stop_trim": True})
    assert trimmed["output_ids"] == whole["output_ids"] == cut
    assert trimmed["text"] == tokenizer.decode(cut[:-1], skip_special_tokens=True)
    assert whole["text"] == tokenizer.decode(cut, skip_special_tokens=True)
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": free[-1]}


def test_a_refused_request_gets_the_message_and_the_server_goes_on(server):
    status, reply = server.generate(input_ids=[5] * 512)
    assert status == 400
    assert "The input (512 tokens) is longer than the model's context" in reply["error"]["message"]
    status, reply = server.generate(input_ids=[5], sampling_params={"max_tokens": 5})
    assert status == 400
    assert "unknown field `max_tokens`" in reply["error"]
    assert server.generate(input_ids=[5, 6])[0] == 200


def long_request(rid):
    params = {"temperature": 0, "max_new_tokens": 500, "ignore_eos": True}
    return {"rid": rid, "input_ids": [5, 6, 7], "sampling_params": params}


def test_a_live_rid_is_refused_a_second_time_and_an_abort_goes_by_its_beginning(server):
    with ThreadPoolExecutor(3) as pool:
        both = [pool.submit(server.post, "/generate", long_request(f"twin{n}")) for n in ("", "-2")]
        while parse_loads(*server.get("/v1/loads")).running < 2:
            time.sleep(0.005)
        status, reply = server.post("/generate", long_request("twin"))
        assert status == 400
        assert "Duplicate request ID detected" in json.loads(reply)["error"]["message"]
        assert server.post("/abort_request", {"rid": "twi"})[0] == 200  # names nobody
        assert server.post("/abort_request", {"rid": "twin"})[0] == 200
        replies = [one.result() for one in both]
    for status, reply in replies:
        assert status == 200
        meta = json.loads(reply)["meta_info"]
        assert meta["finish_reason"]["type"] == "abort"
        assert 0 < meta["completion_tokens"] < 500


def test_a_client_that_goes_away_takes_its_request_back(server):
    async def ask_and_leave():
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(
                session.post(server.url + "/generate", json=long_request("leaver"))
            )
            while await asyncio.to_thread(running):
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def running():
        return parse_loads(*server.get("/v1/loads")).running == 0

    asyncio.run(ask_and_leave())
    # Far sooner than 500 tokens; and its rid is free again.
    status, reply = server.post(
        "/generate",
        {**long_request("leaver"), "sampling_params": {"max_new_tokens": 1, "temperature": 0}},
    )
    assert status == 200
    assert json.loads(reply)["meta_info"]["completion_tokens"] == 1


def test_a_capturing_server_writes_before_it_answers_and_ends_on_ctrl_c(tiny_target, tmp_path):
    folder = tmp_path / "captures"
    layers = [str(layer) for layer in AUX_LAYER_IDS]
    server = Served(
        tiny_target, tmp_path, "--capture-folder", str(folder), "--capture-layer-ids", *layers
    )
    try:
        body = {"rid": "row-1", "input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 0}}
        status, reply = server.generate(**body)
        assert (status, reply["output_ids"], reply["text"]) == (200, [], "")
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
        states = take(folder, "row-1", expected_ids=[5, 6, 7], aux_width=192, width=64)
        assert states.aux_layer_ids == AUX_LAYER_IDS
        status, reply = server.generate(**{**body, "rid": "../row-1"})
        assert status == 400
        assert "cannot name a capture file" in reply["error"]["message"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["captures", "log", "ready"]
    finally:
        assert server.end(signal.SIGINT) == 0
    assert "Traceback" not in server.log.read_text()


def test_a_drafting_server_counts_and_refuses_to_sample(tiny_target, tmp_path):
    draft = random_draft(tmp_path / "draft", vocab_size=259)
    server = Served(tiny_target, tmp_path, "--draft", str(draft), "--speculative-num-steps", "2")
    try:
        status, reply = server.generate(
            input_ids=[5, 6],
            sampling_params={"temperature": 0, "max_new_tokens": 9, "ignore_eos": True},
        )
        meta = reply["meta_info"]
        assert status == 200
        rounds, correct = meta["spec_verify_ct"], meta["spec_num_correct_drafts"]
        assert rounds == sum(meta["spec_correct_drafts_histogram"])
        assert rounds + correct >= 8
        assert meta["spec_accept_length"] == 9 / rounds
        assert meta["spec_accept_rate"] == correct / (2 * rounds)
        status, reply = server.generate(input_ids=[5], sampling_params={"temperature": 0.7})
        assert status == 400
        assert "verifies drafts greedily" in reply["error"]["message"]
        info = parse_server_info(*server.get("/server_info"))
        assert info.speculative_algorithm == "EAGLE3"
        # Told to end with a request in flight, it answers that one too.
        with ThreadPoolExecutor(1) as pool:
            last = pool.submit(server.post, "/generate", long_request("last"))
            while parse_loads(*server.get("/v1/loads")).running == 0:
                time.sleep(0.005)
            assert server.end() == 0
            status, reply = last.result()
        assert status == 503
        assert "shutting down" in json.loads(reply)["message"]
    finally:
        if server.process.poll() is None:
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()


def test_openmp_is_told_how_to_wait_before_it_is_loaded():
    program = "import sys, actors.reference; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def options(target, **changes):
    return ServeOptions(
        **{
            "target": target,
            "dtype": "float32",
            "device": "cpu",
            "threads": 1,
            "max_running_requests": 2,
            **changes,
        }
    )


def test_a_port_in_use_is_said_before_anything_is_loaded(tiny_target, caplog):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve(options(tiny_target, port=port)) == 3
    assert f"port {port}" in caplog.text
    assert "Address already in use" in caplog.text


def test_a_folder_that_is_no_target_is_said(tmp_path, caplog):
    assert serve(options(tmp_path / "lost")) == 3
    assert "is no folder" in caplog.text


def test_a_draft_that_does_not_fit_is_said(tiny_target, tmp_path, caplog):
    draft = random_draft(tmp_path / "draft", vocab_size=200, draft_vocab_size=100)
    assert serve(options(tiny_target, draft=draft)) == 3
    assert "vocab_size is 200, the target's 259" in caplog.text


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--capture-folder", "x"], "go together"),
        (["--capture-folder", "x", "--capture-layer-ids", "1", "--draft", "y"], "not both"),
        (["--threads", "0"], "--threads is below 1"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(extra, message, capsys):
    needed = ["--target", "t", "--port", "0", "--dtype", "float32", "--device", "cpu"]
    needed += ["--threads", "1", "--max-running-requests", "1"]
    with pytest.raises(SystemExit) as ended:
        main([*needed, *extra])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_failed_engine_says_so_at_every_door(tiny_target):
    target = Target(tiny_target, dtype="float32", device="cpu", slots=1)
    engine = Engine(target, slots=1, threads=1)

    def broken(*_):
        raise RuntimeError("no more memory")

    target.extend = broken
    server = _Server(options(tiny_target), target, engine)

    async def ask():
        engine.start()
        async with TestClient(TestServer(server.application())) as client:
            assert (await client.get("/health")).status == 200
            for _ in range(2):
                reply = await client.post("/generate", json={"input_ids": [5], "rid": "r"})
                assert reply.status == 500
                assert "no more memory" in (await reply.json())["message"]
            assert (await client.get("/health")).status == 503
        await asyncio.to_thread(engine.stop)

    asyncio.run(ask())
