"""One attempt, one typed outcome, over real HTTP."""

import asyncio
import json
import socket

import pytest

from actors.client import Client
from actors.errors import BadReply, Overloaded, Refused, Unreachable
from actors.protocol import GenerateRequest
from tests.support.fake_server import Cut, FakeServer, Hang, Raw, Reply, Reset, good_reply

REQUEST = GenerateRequest("rid-1", (5, 6), {"max_new_tokens": 8})


def ask(url, *, deadline=30.0):
    async def once():
        async with Client(url, vocab_size=100) as client:
            return await client.generate(REQUEST, deadline_seconds=deadline)

    return asyncio.run(once())


def changed(**meta):
    return lambda request, _: Reply(good_reply(request, **meta))


def test_a_good_reply_becomes_a_completion():
    with FakeServer() as server:
        completion = ask(server.url)
    assert completion.output_ids == (7, 8, 2)
    assert completion.finish.matched == 2
    assert server.requests[0]["input_ids"] == [5, 6]
    assert server.requests[0]["stream"] is False


@pytest.mark.parametrize(
    ("script", "kind", "fault"),
    [
        (lambda *_: Reset(), Unreachable, "disconnected"),
        (lambda *_: Cut(), Unreachable, "cut_body"),
        (lambda *_: Reply({}, 504), Unreachable, "http_504"),
        (lambda *_: Reply({"error": "dead"}, 500), Unreachable, "http_500"),
        (lambda *_: Reply({"message": "full"}, 503), Overloaded, "http_503"),
        (lambda *_: Reply({}, 429), Overloaded, "http_429"),
        (lambda *_: Reply({"error": {"message": "too long"}}, 400), Refused, "http_400"),
        (lambda *_: Raw(b"", 302), BadReply, "http_302"),
        (lambda *_: Raw(b"<html>welcome</html>"), BadReply, "not_json"),
        (lambda *_: Reply({"error": {"message": "x"}}), BadReply, "error_in_200"),
        (changed(id="other"), BadReply, "foreign_rid"),
        (changed(completion_tokens=4), BadReply, "completion_tokens"),
        (changed(prompt_tokens=3), BadReply, "prompt_tokens"),
        (changed(finish={"type": "abort", "message": "gone"}), Overloaded, "abort"),
        (changed(finish={"type": "stop", "matched": "NaN happened"}), BadReply, "nan"),
        (changed(output_ids=[7, 100, 2]), BadReply, "id_out_of_vocabulary"),
    ],
)
def test_every_broken_answer_is_its_own_fault(script, kind, fault):
    with FakeServer(script) as server, pytest.raises(kind) as caught:
        ask(server.url)
    assert caught.value.fault == fault


def test_a_closed_port_is_refused():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(Unreachable, match="refused"):
        ask(f"http://127.0.0.1:{port}")


def test_garbage_instead_of_http_is_a_transport_fault():
    async def story():
        async def gibberish(_, writer):
            writer.write(b"SSH-2.0-server\r\n")
            writer.close()

        server = await asyncio.start_server(gibberish, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, Client(f"http://127.0.0.1:{port}", vocab_size=9) as client:
            await client.generate(REQUEST, deadline_seconds=30.0)

    with pytest.raises(Unreachable):
        asyncio.run(story())


def test_at_the_deadline_the_server_is_told_to_stop():
    with FakeServer(lambda *_: Hang()) as server:
        with pytest.raises(Unreachable, match="deadline"):
            ask(server.url, deadline=0.2)
        assert server.aborted == ["rid-1"]


def test_a_cancelled_request_is_aborted_on_the_server():
    async def story(server):
        async with Client(server.url, vocab_size=100) as client:
            task = asyncio.create_task(client.generate(REQUEST, deadline_seconds=30.0))
            await asyncio.to_thread(server.hanging.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with FakeServer(lambda *_: Hang()) as server:
        asyncio.run(story(server))
        assert server.aborted == ["rid-1"]


def test_a_server_says_what_it_is():
    async def story(url):
        async with Client(url, vocab_size=100) as client:
            await client.health()
            return await client.model_info(), await client.server_info(), await client.loads()

    with FakeServer() as server:
        model, info, load = asyncio.run(story(server.url))
    assert model.model_path == "/models/tiny"
    assert info.context_length == 512
    assert (load.running, load.waiting, load.used_tokens) == (2, 4, 6)


def test_the_environments_proxy_is_not_used(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    with FakeServer() as server:
        assert ask(server.url).completion_tokens == 3


def test_the_wire_carries_every_field_that_is_stored():
    params = {"max_new_tokens": 1, "temperature": 0.5}
    body = json.loads(GenerateRequest("r", (1,), params).body())
    assert body["sampling_params"] == params
    assert body["rid"] == "r"
