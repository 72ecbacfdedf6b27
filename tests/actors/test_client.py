"""One attempt, one typed outcome, over real HTTP."""

import asyncio
import gzip
import json
import socket
import threading
import time

import pytest

from actors.client import Client
from actors.errors import BadReply, Overloaded, Refused, ServerUnfit, Unreachable, Unserved
from actors.protocol import GenerateRequest
from tests.support.fake_server import (
    Cut,
    FakeServer,
    Hang,
    Huge,
    Raw,
    Reply,
    Reset,
    aborted_while_waiting,
    good_reply,
)

REQUEST = GenerateRequest("rid-1", (5, 6), {"max_new_tokens": 8})


def ask(url, *, deadline=30.0, request=REQUEST):
    async def once():
        async with Client(url, vocab_size=100) as client:
            return await client.generate(request, deadline_seconds=deadline)

    return asyncio.run(once())


class Listening(FakeServer):
    """Keeps the headers of what comes in."""

    async def _generate(self, http):
        self.headers = dict(http.headers)
        return await super()._generate(http)


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
        (lambda *_: Cut(b""), Unreachable, "cut_body"),
        (lambda *_: Reply({}, 408), Unreachable, "http_408"),
        (lambda *_: Reply({}, 504), Unreachable, "http_504"),
        (lambda *_: Raw(b"<html>bad gateway</html>", 502), Unreachable, "http_502"),
        (lambda *_: Reply({"error": "dead"}, 500), Unreachable, "http_500"),
        (lambda *_: Reply({"message": "full"}, 503), Overloaded, "http_503"),
        (lambda *_: Reply({}, 429), Overloaded, "http_429"),
        (lambda *_: Reply({"error": {"message": "too long"}}, 400), Refused, "http_400"),
        (lambda *_: Reply({"error": "no key"}, 401), Unserved, "http_401"),
        (lambda *_: Reply({"error": "not you"}, 403), Unserved, "http_403"),
        (lambda *_: Reply({"detail": "Not Found"}, 404), Unserved, "http_404"),
        (lambda *_: Reply({}, 409), BadReply, "http_409"),
        (lambda *_: Raw(b"too large", 413), Refused, "http_413"),
        (lambda *_: Reply({"message": "what?", "code": 422}, 422), Refused, "http_422"),
        (lambda *_: Raw(b"", 302, headers={"Location": "/model_info"}), BadReply, "http_302"),
        (lambda *_: Raw(b"", 204), BadReply, "http_204"),
        (lambda *_: Raw(b""), BadReply, "not_json"),
        (lambda *_: Raw(b'{"text": "\\ud83d"}'), BadReply, "not_json"),
        (lambda *_: Raw(b'{"text": "\xff"}'), BadReply, "not_json"),
        (lambda *_: Raw(gzip.compress(b"{}")), BadReply, "not_json"),
        (lambda *_: Raw(b"<html>welcome</html>"), BadReply, "not_json"),
        (lambda *_: Reply({"error": {"message": "x"}}), BadReply, "error_in_200"),
        (changed(id="other"), BadReply, "foreign_rid"),
        (changed(completion_tokens=4), BadReply, "completion_tokens"),
        (changed(prompt_tokens=3), BadReply, "prompt_tokens"),
        (changed(finish={"type": "abort", "message": "gone"}), Overloaded, "abort"),
        (lambda one, _: Reply(aborted_while_waiting(one)), Overloaded, "abort"),
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


@pytest.mark.parametrize("odd", [-1, 100])
def test_a_prompt_with_an_id_that_the_target_lacks_reaches_no_server(odd):
    async def once(url):
        async with Client(url, vocab_size=100) as client:
            request = GenerateRequest("r", (5, odd), {"max_new_tokens": 8})
            return await client.generate(request, deadline_seconds=30.0)

    with FakeServer() as server:
        with pytest.raises(Refused, match=f"id {odd}") as caught:
            asyncio.run(once(server.url))
        assert server.requests == []
    assert caught.value.fault == "prompt_id_out_of_vocabulary"


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


@pytest.mark.parametrize(
    ("status", "header", "least", "most"),
    [
        (503, "7", 7.0, 7.0),
        (429, "100000", 600.0, 600.0),
        (503, "Tue, 01 Jan 2999 00:00:00 GMT", 600.0, 600.0),
        (429, "Thu, 01 Jan 1970 00:00:00 GMT", 0.0, 0.0),
    ],
)
def test_a_full_server_may_say_when_to_come_back(status, header, least, most):
    answer = Reply({}, status, headers={"Retry-After": header})
    with FakeServer(lambda *_: answer) as server, pytest.raises(Overloaded) as caught:
        ask(server.url)
    assert least <= caught.value.retry_after_seconds <= most


@pytest.mark.parametrize("header", ["", "soon", "-5", "1e9999", "²"])
def test_a_time_to_come_back_that_is_none_is_left_out(header):
    with (
        FakeServer(
            lambda *_: Reply({}, 503, headers={"Retry-After": header.encode().decode("latin-1")})
        ) as server,
        pytest.raises(Overloaded) as caught,
    ):
        ask(server.url)
    assert caught.value.retry_after_seconds is None


@pytest.mark.parametrize("status", [200, 500])
def test_a_body_without_end_is_not_held_and_its_request_is_taken_back(status):
    class Pouring(FakeServer):
        async def _pour(self, http, mebibytes):
            if status == 200:
                return await super()._pour(http, mebibytes)
            from aiohttp import web

            return web.Response(body=b" " * 2**20 * mebibytes, status=status)

    with Pouring(lambda *_: Huge(80)) as server:
        with pytest.raises(BadReply) as caught:
            ask(server.url)
        assert server.aborted == ["rid-1"]
    assert caught.value.fault == "too_large"
    assert server.most_mebibytes < 40  # what the sockets hold, and not the whole


def test_a_large_reply_is_read_whole_and_outside_the_event_loops_thread(monkeypatch):
    from actors import protocol

    threads = []
    parse = protocol.parse_completion

    def watched(*args, **kwargs):
        threads.append(threading.current_thread())
        return parse(*args, **kwargs)

    monkeypatch.setattr(protocol, "parse_completion", watched)
    request = GenerateRequest("rid-1", (5, 6), {"max_new_tokens": 100_000})
    ids = [7] * 99_999 + [2]
    with FakeServer(lambda one, _: Reply(good_reply(one, ids, text="é" * 400_000))) as server:
        completion = ask(server.url, request=request)
    assert completion.output_ids == tuple(ids)
    assert threads != [threading.main_thread()]


def test_the_key_of_the_environment_goes_with_every_request_and_appears_nowhere(monkeypatch):
    monkeypatch.setenv("EYAS_API_KEY", "s3cret-key")
    with Listening(lambda *_: Reply({"error": "no"}, 401)) as server:
        with pytest.raises(Unserved) as caught:
            ask(server.url)
        assert "s3cret-key" not in repr(Client(server.url, vocab_size=9))
    assert server.headers["Authorization"] == "Bearer s3cret-key"
    assert "s3cret-key" not in f"{caught.value!r} {caught.value} {caught.value.detail}"
    assert "EYAS_API_KEY" in caught.value.detail


def test_without_a_key_no_key_is_sent(monkeypatch):
    monkeypatch.delenv("EYAS_API_KEY", raising=False)
    with Listening() as server:
        ask(server.url)
    assert "Authorization" not in server.headers
    assert server.headers["Accept-Encoding"] == "identity"


def test_a_key_that_no_header_holds_is_refused_without_showing_it(monkeypatch):
    monkeypatch.setenv("EYAS_API_KEY", "s3cret\n")
    with pytest.raises(ServerUnfit) as caught:
        ask("http://127.0.0.1:1")
    assert "s3cret" not in str(caught.value)


def test_a_server_says_what_time_it_is():
    async def story(url):
        async with Client(url, vocab_size=100) as client:
            return await client.server_time()

    with FakeServer() as server:
        assert abs(asyncio.run(story(server.url)) - time.time()) < 5.0


def test_the_time_of_a_dead_server_is_a_fault_and_not_none():
    async def story():
        async with Client("http://127.0.0.1:1", vocab_size=100) as client:
            await client.server_time()

    with pytest.raises(Unreachable, match="refused"):
        asyncio.run(story())
