"""A running server is asked what it is and to answer, before rows are sent to it."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from actors.errors import Overloaded, ServerUnfit, Unreachable
from actors.fit import Expectation
from actors.preflight import (
    Admission,
    ProbePrompt,
    check_server,
    check_servers,
    model_context_tokens,
)
from tests.support.fake_server import STOP_ID, FakeServer, Reply, good_reply

TARGET = Path("/models/tiny")
PROBES = (ProbePrompt((1, 2, 3), (STOP_ID,)), ProbePrompt((1, 5), (STOP_ID,)))
PLAIN = Admission(Expectation(TARGET, 512), vocab_size=100)
PROBING = replace(PLAIN, probes=PROBES, decode=lambda ids: " ".join(map(str, ids)))


def check(server, admission=PROBING):
    return asyncio.run(check_server(server.url, admission))


def answers(ids, text=None, **meta):
    def script(request, nth):
        del nth
        shown = " ".join(map(str, ids)) if text is None else text
        return Reply(good_reply(request, ids, text=shown, **meta))

    return script


def refuses(body, status):
    def script(request, nth):
        del request, nth
        return Reply(body, status)

    return script


class Without(FakeServer):
    """A server that lacks some routes."""

    lacks: tuple[str, ...] = ()

    async def start(self, port=0):
        url = await super().start(port)
        for resource in self._runner.app.router.resources():
            if resource.canonical in self.lacks:
                for route in resource:
                    route._handler = self._not_found
        return url

    async def _not_found(self, _):
        return web.json_response({"detail": "Not Found"}, status=404)


def without(*lacks, **fields):
    server = Without(**fields)
    server.lacks = lacks
    return server


def test_a_fit_server_answers_every_probe_greedily():
    with FakeServer(answers([7, 8, STOP_ID])) as server:
        checked = check(server)
        asked = server.requests
    assert checked.server.version == "0.5.23"
    assert checked.not_checked == ()
    assert [one["input_ids"] for one in asked] == [[1, 2, 3], [1, 5]]
    assert all(one["sampling_params"]["temperature"] == 0.0 for one in asked)
    assert all(one["sampling_params"]["max_new_tokens"] == 16 for one in asked)
    assert all(one["rid"].startswith("probe-") for one in asked)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (answers([7, 8, STOP_ID], text="7 9 2"), r"writes \[7, 8, 2\] as '7 9 2'"),
        (answers([0] * 16), "token 0 only"),
        (answers([7, 100]), "id_out_of_vocabulary"),
        (answers([7, 8, STOP_ID], completion_tokens=9), "completion_tokens"),
        (
            answers([STOP_ID], finish={"type": "stop", "matched": "NaN happened"}),
            "breaks the contract",
        ),
        (refuses({"error": {"message": "no"}}, 400), "http_400"),
        (refuses({"error": "no key"}, 401), "EYAS_API_KEY"),
    ],
)
def test_a_server_that_answers_wrongly_is_unfit(script, words):
    with FakeServer(script) as server, pytest.raises(ServerUnfit, match=words):
        check(server)


def test_a_server_that_is_full_or_gone_is_neither_fit_nor_unfit():
    with (
        FakeServer(refuses({}, 503)) as server,
        pytest.raises(Overloaded),
    ):
        check(server)
    with pytest.raises(Unreachable):
        check(server)


def test_a_server_without_loads_is_too_old():
    with without("/v1/loads") as server, pytest.raises(ServerUnfit, match=r"/v1/loads"):
        check(server, PLAIN)


def test_a_gateway_need_not_say_what_it_is_and_that_is_written_down():
    admission = replace(PROBING, gateway=True)
    script = answers([7, 8, STOP_ID])
    with without("/v1/loads", "/model_info", "/server_info", script=script) as server:
        checked = check(server, admission)
        assert checked.model is None
        assert "identity" in checked.not_checked
        with pytest.raises(ServerUnfit, match="http_404"):
            check(server)
    with FakeServer(script, model_path="/models/other") as server, pytest.raises(ServerUnfit):
        check(server, admission)  # what it does say still has to fit


def test_markers_are_asked_where_the_server_can_be():
    admission = replace(PLAIN, markers={"<think>": 7, "</think>": 8})
    with FakeServer() as server:
        assert check(server, admission).not_checked == ("markers",)


def test_a_clock_that_is_far_off_is_unfit(monkeypatch):
    monkeypatch.setattr("actors.preflight.time", SimpleNamespace(time=lambda: 1_000_000.0))
    with FakeServer() as server, pytest.raises(ServerUnfit, match="clock"):
        check(server, PLAIN)


def test_a_server_in_another_folder_but_of_the_same_name_is_the_target():
    with FakeServer(model_path="/elsewhere/tiny") as server:
        (checked,) = check_servers([server.url], target=TARGET, need_context_tokens=1)
    assert checked.url == server.url


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        ({"model_path": "/models/other"}, "serves /models/other"),
        ({"server_info": {"context_length": 100}}, "context_length 100"),
        ({"model_info": {"weight_version": None}}, "weight_version"),
    ],
)
def test_a_server_that_would_change_the_data_is_unfit(fake, words):
    with FakeServer(**fake) as server, pytest.raises(ServerUnfit, match=words):
        check_servers([server.url], target=TARGET, need_context_tokens=512)


def test_without_a_length_of_its_own_the_server_has_the_models(tiny_target):
    assert model_context_tokens(tiny_target) == 512
    assert model_context_tokens(Path("/nowhere")) is None
    with FakeServer(model_path=str(tiny_target), server_info={"context_length": None}) as server:
        check_servers([server.url], target=tiny_target, need_context_tokens=512)
        with pytest.raises(ServerUnfit, match="context_length 512"):
            check_servers([server.url], target=tiny_target, need_context_tokens=513)


def test_a_silent_server_is_unfit():
    with FakeServer() as server:
        url = server.url
    with pytest.raises(ServerUnfit, match="does not answer"):
        check_servers([url], target=TARGET, need_context_tokens=1)
