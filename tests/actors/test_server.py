"""Server processes: started, awaited, checked, ended on every path."""

import sys
from pathlib import Path

import psutil
import pytest

from actors.config import AttachedServers, EmbeddedServers
from actors.errors import ServerFailed, ServerUnfit
from actors.launch import EngineOptions
from actors.server import ServerProcess, check_servers, running_servers
from tests.support.fake_server import FakeServer

CONFIG = EmbeddedServers(
    kind="embedded",
    count=2,
    dtype="float32",
    device="cpu",
    threads_per_server=1,
    max_running_requests=2,
)
SERVES = (
    "import os, sys, time, pathlib\n"
    "path = pathlib.Path(sys.argv[1])\n"
    "path.with_suffix('.tmp').write_text('http://127.0.0.1:1')\n"
    "path.with_suffix('.tmp').rename(path)\n"
    "time.sleep(600)\n"
)
TARGET = Path("/models/tiny")


def process(tmp_path, program):
    ready, log = tmp_path / "ready", tmp_path / "logs" / "log"
    command = [sys.executable, "-m", "actors.guard", "--", sys.executable, "-c", program]
    return ServerProcess([*command, str(ready)], CONFIG, ready, log)


def test_it_is_ready_when_it_says_where_it_serves_and_gone_after_close(tmp_path):
    server = process(tmp_path, SERVES)
    assert server.wait_until_ready(60.0) == "http://127.0.0.1:1" == server.url()
    assert server.alive()
    family = psutil.Process(server._process.pid).children(recursive=True)
    server.close()
    assert not server.alive()
    assert psutil.wait_procs(family, timeout=20)[1] == []


def test_a_server_that_ends_early_fails_with_the_end_of_its_log(tmp_path):
    server = process(tmp_path, "raise SystemExit('no such model')")
    with pytest.raises(ServerFailed, match="no such model"):
        server.wait_until_ready(60.0)


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    server = process(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(ServerFailed, match="not ready"):
        server.wait_until_ready(0.3)
    assert not server.alive()


def test_attached_servers_are_borrowed(tmp_path):
    with FakeServer() as server:
        config = AttachedServers(kind="attach", urls=(server.url,))
        with running_servers(
            config, target=TARGET, options=EngineOptions(), logs=tmp_path, label="x"
        ) as urls:
            assert urls == (server.url,)
        checked = check_servers(urls, target=TARGET, need_context_tokens=512)  # it still runs
    assert checked[0].server.version == "0.5.23"


def test_a_server_in_another_folder_but_of_the_same_name_is_the_target():
    with FakeServer(model_path="/elsewhere/tiny") as server:
        check_servers([server.url], target=TARGET, need_context_tokens=1)


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        ({"model_path": "/models/other"}, "serves /models/other"),
        ({"server_info": {"allow_auto_truncate": True}}, "auto-truncate"),
        ({"server_info": {"context_length": 100}}, "context_length 100"),
        ({"server_info": {"max_total_num_tokens": 100}}, "max_total_num_tokens 100"),
        ({"model_info": {"preferred_sampling_params": '{"top_p": 0.9}'}}, "top_p"),
        ({"model_info": {"weight_version": None}}, "weight_version"),
    ],
)
def test_a_server_that_would_change_the_data_is_unfit(fake, words):
    with FakeServer(**fake) as server, pytest.raises(ServerUnfit, match=words):
        check_servers([server.url], target=TARGET, need_context_tokens=512)


def test_without_a_length_of_its_own_the_server_has_the_models(tiny_target):
    with FakeServer(model_path=str(tiny_target), server_info={"context_length": None}) as server:
        check_servers([server.url], target=tiny_target, need_context_tokens=512)
        with pytest.raises(ServerUnfit, match="context_length 512"):
            check_servers([server.url], target=tiny_target, need_context_tokens=513)


def processes_of(config, target):
    """Running engines of this target, started by anyone."""
    words = ["actors.reference", str(target)]
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if all(word in (one.info["cmdline"] or []) for word in words)
        and config.dtype in one.info["cmdline"]
    ]


@pytest.mark.usefixtures("local_ray")
def test_embedded_servers_serve_the_target_and_end_with_their_user(tiny_target, tmp_path):
    def use():
        with running_servers(
            CONFIG, target=tiny_target, options=EngineOptions(), logs=tmp_path, label="x"
        ) as urls:
            assert len(set(urls)) == CONFIG.count
            check_servers(urls, target=tiny_target, need_context_tokens=512)
            engines.extend(processes_of(CONFIG, tiny_target))
            raise ZeroDivisionError  # the user's own trouble

    engines: list[psutil.Process] = []
    with pytest.raises(ZeroDivisionError):
        use()
    assert len(engines) >= CONFIG.count
    assert psutil.wait_procs(engines, timeout=20)[1] == []
    assert {path.name for path in tmp_path.iterdir()} == {"x-0.log", "x-1.log"}


@pytest.mark.usefixtures("local_ray")
def test_an_embedded_server_that_cannot_start_shows_its_log(tmp_path):
    with (
        pytest.raises(ServerFailed, match=r"the end of its log .*x-0\.log"),
        running_servers(
            CONFIG.model_copy(update={"count": 1}),
            target=tmp_path / "no-such-target",
            options=EngineOptions(),
            logs=tmp_path,
            label="x",
        ),
    ):
        pass


def test_a_silent_server_is_unfit():
    with FakeServer() as server:
        url = server.url
    with pytest.raises(ServerUnfit, match="does not answer"):
        check_servers([url], target=TARGET, need_context_tokens=1)
