"""The servers of a stage under Ray: they come, go and come back, and every process is told."""

import threading
import time
from pathlib import Path

import psutil
import pytest
import ray

from actors.config import AttachedServers, EmbeddedServers
from actors.errors import ServerFailed, ServerUnfit
from actors.fit import Expectation
from actors.fleet import Directory, running_servers
from actors.launch import EngineOptions
from actors.preflight import Admission
from actors.supervision import ServerStatus
from tests.support.fake_server import FakeServer
from tests.support.fake_sglang import fake_at, fake_servers, gone, pids_of

pytestmark = pytest.mark.usefixtures("local_ray")
TARGET = Path("/models/tiny")
ADMISSION = Admission(Expectation(TARGET, 512), vocab_size=100)
SECONDS = 60.0


class Told(list):
    """The events that the driver was told."""

    def __call__(self, name, fields):
        self.append((name, fields))

    def names(self):
        return [name for name, _ in self]


def servers(config, tmp_path, told=None, **changes):
    options = {"admission": ADMISSION, "on_event": told, "wait_for": "first", **changes}
    return running_servers(
        config, target=TARGET, options=EngineOptions(), logs=tmp_path / "logs", label="g", **options
    )


def attached(*urls, **changes):
    return AttachedServers(kind="attach", urls=urls, **changes)


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def dead_url():
    with FakeServer() as fake:
        pass
    return fake.url


def test_launched_servers_are_told_to_any_process_and_end_with_the_stage(tmp_path):
    told = Told()

    @ray.remote(num_cpus=0)
    def elsewhere(subscription):
        return subscription()

    def use():
        with servers(fake_servers(tmp_path, count=2), tmp_path, told, wait_for="all") as fleet:
            assert len(set(fleet.urls)) == 2
            reports = ray.get(elsewhere.remote(fleet.subscription))
            assert {one.url for one in reports} == set(fleet.urls)
            assert all(one.ready for one in reports)
            wait_until(lambda: all(one.load is not None for one in fleet.subscription()))
            raise ZeroDivisionError  # the user's own trouble

    with pytest.raises(ZeroDivisionError):
        use()
    assert gone(pid for pids in pids_of(tmp_path) for pid in pids)
    assert (
        sorted(told.names())
        == ["server_checked"] * 2 + ["server_ready"] * 2 + ["server_started"] * 2
    )
    checked = next(fields for name, fields in told if name == "server_checked")
    assert checked["version"] == "0.5.23"
    assert {one.name for one in (tmp_path / "logs").iterdir()} == {"g-0.log", "g-1.log"}


def test_a_server_that_dies_comes_back_behind_its_url(tmp_path):
    told = Told()
    with servers(fake_servers(tmp_path), tmp_path, told) as fleet:
        (url,) = fleet.urls
        psutil.Process(pids_of(tmp_path)[0][0]).kill()
        wait_until(lambda: told.names().count("server_ready") == 2)
        assert fleet.urls == (url,)
        (state,) = fleet.states()
        assert (state.state, state.restarts) == ("ready", 1)
    died = next(fields for name, fields in told if name == "server_died")
    assert "code 137" in died["error"]


def test_a_server_that_comes_back_with_another_model_is_not_used(tmp_path):
    told = Told()
    config = fake_servers(tmp_path, arguments={"fake-model-from-start-2": "/models/other"})
    with servers(config, tmp_path, told) as fleet:
        psutil.Process(pids_of(tmp_path)[0][0]).kill()
        wait_until(lambda: "server_unfit" in told.names())
        assert fleet.urls == ()
        assert not any(one.ready for one in fleet.subscription())
        with pytest.raises(ServerFailed, match="/models/other"):
            fleet.check()


def test_the_death_of_its_actor_ends_the_server_and_another_takes_its_place(tmp_path):
    with servers(fake_servers(tmp_path), tmp_path) as fleet:
        (keeper,) = fleet._keepers.values()
        ray.kill(keeper, no_restart=False)
        assert gone(pids_of(tmp_path)[0])
        wait_until(lambda: len(pids_of(tmp_path)) == 2 and fleet.urls)
    assert gone(pids_of(tmp_path)[1])


def test_the_death_of_the_directory_is_healed_within_seconds(tmp_path):
    with FakeServer() as fake, servers(attached(fake.url), tmp_path) as fleet:
        ray.kill(fleet._directory, no_restart=False)
        wait_until(lambda: [one.url for one in fleet.subscription()] == [fake.url])
        assert fleet.urls == (fake.url,)


def test_servers_that_cannot_start_show_their_log(tmp_path):
    config = fake_servers(tmp_path, count=2, arguments={"fake-fail-starts": 9})
    with (
        pytest.raises(ServerFailed, match=r"(?s)g-0: .*g-0\.log.*no such model.*g-1: "),
        servers(config, tmp_path),
    ):
        pass


def test_more_gpus_than_any_node_has_are_refused_at_once(tmp_path):
    config = fake_servers(tmp_path, device="cuda", tensor_parallel_size=999)
    with pytest.raises(ServerFailed, match="999 GPU"), servers(config, tmp_path):
        pass


def test_an_attached_server_may_join_late_and_is_never_ended(tmp_path, dead_url):
    told = Told()
    port = int(dead_url.rpartition(":")[2])
    with FakeServer() as fake, servers(attached(fake.url, dead_url), tmp_path, told) as fleet:
        assert fleet.urls == (fake.url,)
        with fake_at(port):
            wait_until(lambda: set(fleet.urls) == {fake.url, dead_url})
        wait_until(lambda: fleet.urls == (fake.url,))
        assert "server_left" in told.names()
        assert fake.requests == []  # nothing was asked of it that costs
    assert told.names().count("server_joined") == 2


def test_without_any_server_that_answers_there_is_no_run(tmp_path, dead_url):
    with (
        pytest.raises(ServerUnfit, match=r"1 of 1 attached servers do not answer.*refused"),
        servers(attached(dead_url), tmp_path),
    ):
        pass


def test_the_first_may_be_waited_for(tmp_path, dead_url):
    fake = fake_at(int(dead_url.rpartition(":")[2]))
    config = attached(dead_url, ready_seconds=SECONDS)
    timer = threading.Timer(2.0, fake.__enter__)
    timer.start()
    try:
        with servers(config, tmp_path) as fleet:
            assert fleet.urls == (dead_url,)
    finally:
        timer.join()
        fake.__exit__()


def test_one_attached_server_that_does_not_fit_refuses_the_run(tmp_path):
    with (
        FakeServer() as good,
        FakeServer(model_path="/models/other") as bad,
        pytest.raises(ServerUnfit, match="serves /models/other"),
        servers(attached(good.url, bad.url), tmp_path),
    ):
        pass


def test_embedded_servers_serve_the_target_and_end_with_their_user(tiny_target, tmp_path):
    config = EmbeddedServers(
        kind="embedded",
        count=1,
        dtype="float32",
        device="cpu",
        threads_per_server=1,
        max_running_requests=2,
    )
    admission = Admission(Expectation(tiny_target, 512), vocab_size=100)
    with running_servers(
        config,
        target=tiny_target,
        options=EngineOptions(),
        logs=tmp_path,
        label="x",
        admission=admission,
    ) as fleet:
        (checked,) = fleet.checked()
        assert checked.url == fleet.urls[0]
        engines = [
            one
            for one in psutil.process_iter(["cmdline"])
            if str(tmp_path / ".x-0.ready") in (one.info["cmdline"] or [])
        ]
        assert len(engines) == 3  # two of the guard, and the engine
    assert gone(one.pid for one in engines)
    assert [path.name for path in tmp_path.iterdir()] == ["x-0.log"]


def test_a_directory_knows_what_was_said_last_and_reports_what_has_a_url():
    directory = Directory()
    directory.put(ServerStatus("a", borrowed=True))
    directory.put(ServerStatus("b", borrowed=True))
    directory.put(ServerStatus("b", borrowed=True, url="http://b", state="ready"))
    assert [one.name for one in directory.statuses()] == ["a", "b"]
    assert [(one.url, one.ready) for one in directory.reports()] == [("http://b", True)]
