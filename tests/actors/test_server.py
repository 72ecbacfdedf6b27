"""One server's life: started, watched, restarted with limits, ended on every path; or borrowed."""

import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import actors.server
from actors.config import EmbeddedServers
from actors.launch import EngineOptions, StartPlan
from actors.server import ServerProcess, Supervisor
from tests.support.fake_server import FakeServer
from tests.support.fake_sglang import fake_at, fake_servers, gone, pids_of

TARGET = Path("/models/tiny")
SECONDS = 30.0


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(actors.server, "_POLL_SECONDS", 0.05)
    monkeypatch.setattr(actors.server, "_LOOK_SECONDS", 0.1)


def plan_for(folder, **changes):
    config = fake_servers(folder, **changes)
    return StartPlan("x-0", config, TARGET, EngineOptions(), folder / "logs")


class Watched:
    """A supervisor, and everything that it has published."""

    def __init__(self, source, **options):
        self.seen = []
        self.supervisor = Supervisor("x-0", source, self.seen.append, **options)

    def wait_for(self, state, *, after=""):
        """The first status in this state of another incarnation than `after`."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for one in list(self.seen):
                if one.state == state and (not after or one.incarnation != after):
                    return one
            time.sleep(0.02)
        raise AssertionError(f"never {state}: {[(s.state, s.error) for s in self.seen][-3:]}")

    def make_ready(self, *, after=""):
        answering = self.wait_for("checking", after=after)
        self.supervisor.admit(answering.incarnation)
        return self.wait_for("ready", after=after)


@contextmanager
def watched(source, **options):
    one = Watched(source, **options)
    try:
        yield one
    finally:
        one.supervisor.close()


def test_a_process_ends_with_all_its_children_on_close(tmp_path):
    with watched(plan_for(tmp_path)) as server:
        server.make_ready()
        ((pid, child),) = pids_of(tmp_path)
        assert psutil.pid_exists(pid)
        assert psutil.pid_exists(child)
    assert gone([pid, child])


def test_a_server_is_ready_only_once_it_was_admitted_and_then_says_its_load(tmp_path):
    with watched(plan_for(tmp_path)) as server:
        answering = server.wait_for("checking")
        server.supervisor.admit("another incarnation")
        time.sleep(0.3)
        assert all(one.state != "ready" for one in server.seen)
        server.supervisor.admit(answering.incarnation)
        ready = server.wait_for("ready")
        assert ready.url == answering.url
        time.sleep(0.3)
    loads = [one for one in server.seen if one.state == "ready" and one.load is not None]
    assert loads[-1].load.running == 2
    assert abs(loads[-1].seen_at - time.time()) < 10


def test_a_killed_server_comes_back_on_its_port_and_is_checked_again(tmp_path):
    with watched(plan_for(tmp_path)) as server:
        first = server.make_ready()
        psutil.Process(pids_of(tmp_path)[0][0]).kill()
        died = server.wait_for("restarting")
        assert "code 137" in died.error
        assert "start 1 of the fake" in died.error
        second = server.make_ready(after=first.incarnation)
    assert second.url == first.url
    assert (second.starts, second.restarts) == (2, 1)
    assert gone(pid for pids in pids_of(tmp_path) for pid in pids)
    assert server.seen[-1].state in ("ready", "checking")


def test_a_server_that_dies_too_often_is_given_up(tmp_path):
    with watched(plan_for(tmp_path, restarts_per_hour=1)) as server:
        first = server.make_ready()
        psutil.Process(pids_of(tmp_path)[0][0]).kill()
        server.make_ready(after=first.incarnation)
        psutil.Process(pids_of(tmp_path)[1][0]).kill()
        failed = server.wait_for("failed")
        assert "start 2 of the fake" in failed.error
        assert "start 1 of the fake" not in failed.error  # the tail is of the last start
        time.sleep(0.3)
        assert len(pids_of(tmp_path)) == 2


def test_a_first_start_that_fails_is_tried_once_more(tmp_path):
    with watched(plan_for(tmp_path, arguments={"fake-fail-starts": 1})) as server:
        assert server.make_ready().starts == 2
    with watched(plan_for(tmp_path / "b", arguments={"fake-fail-starts": 9})) as server:
        assert "no such model" in server.wait_for("failed").error
        assert len(pids_of(tmp_path / "b")) == 2


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    plan = plan_for(
        tmp_path, ready_seconds=8.0, restarts_per_hour=0, arguments={"fake-never-ready": True}
    )
    with watched(plan) as server:
        failed = server.wait_for("failed")
        assert "not ready after 8 s" in failed.error
        assert gone(pids_of(tmp_path)[0])


def test_a_server_that_does_not_fit_is_ended_for_good(tmp_path):
    with watched(plan_for(tmp_path)) as server:
        server.supervisor.admit(server.wait_for("checking").incarnation, "another model")
        assert server.wait_for("unfit").error == "another model"
        assert gone(pids_of(tmp_path)[0])
        time.sleep(0.3)
        assert len(pids_of(tmp_path)) == 1


def test_a_running_server_that_is_not_well_for_long_counts_as_dead(tmp_path, monkeypatch):
    with watched(plan_for(tmp_path, unhealthy_seconds=0.5)) as server:
        first = server.make_ready()
        psutil.Process(pids_of(tmp_path)[0][0]).suspend()  # a stuck process answers nobody
        monkeypatch.setattr(actors.server, "_HEALTH_SECONDS", 0.3)
        monkeypatch.setattr(actors.server, "_POLL_DEADLINE_SECONDS", 0.3)
        assert "no healthy answer" in server.wait_for("restarting").error
        server.make_ready(after=first.incarnation)
    assert gone(pids_of(tmp_path)[0])


def test_the_log_has_a_line_per_start_and_no_value_of_the_environment(tmp_path):
    plan = plan_for(tmp_path, arguments={"fake-fail-starts": 1})
    environment = {**plan.config.environment, "HF_HOME": "a-private-folder"}
    plan = replace(plan, config=plan.config.model_copy(update={"environment": environment}))
    with watched(plan) as server:
        server.make_ready()
    headers = [line for line in plan.log.read_text().splitlines() if line.startswith("==== ")]
    assert [line.split()[2] for line in headers] == ["1,", "2,"]
    assert "sglang.launch_server --model-path /models/tiny" in headers[0]
    assert "a-private-folder" not in plan.log.read_text()


def test_the_embedded_engine_says_its_own_port_and_keeps_it(tmp_path, tiny_target):
    config = EmbeddedServers(
        kind="embedded",
        count=1,
        dtype="float32",
        device="cpu",
        threads_per_server=1,
        max_running_requests=2,
        restart_seconds=0.05,
    )
    plan = StartPlan("x-0", config, tiny_target, EngineOptions(), tmp_path)
    with watched(plan) as server:
        first = server.make_ready()
        (engine,) = (
            one
            for one in psutil.Process().children(recursive=True)
            if one.cmdline()[1:3] == ["-m", "actors.reference"]  # not a guard of it
        )
        engine.kill()
        second = server.make_ready(after=first.incarnation)
        assert second.url == first.url
    assert [path.name for path in tmp_path.iterdir()] == ["x-0.log"]


def test_closing_twice_or_judging_after_the_end_does_nothing(tmp_path):
    server = Watched(plan_for(tmp_path))
    incarnation = server.make_ready().incarnation
    server.supervisor.close()
    server.supervisor.close()
    server.supervisor.admit(incarnation)


def test_a_process_that_does_not_listen_to_its_guard_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(actors.server, "_CLOSE_SECONDS", 0.2)
    process = ServerProcess(plan_for(tmp_path), "127.0.0.1", 1, start=1)
    psutil.Process(process._process.pid).suspend()  # the guard itself
    process.close()
    assert process.exit_code() is not None


def test_an_attached_server_is_watched_and_not_ended():
    with FakeServer() as fake:
        with watched(fake.url) as server:
            ready = server.make_ready()
            assert ready.url == fake.url
            assert ready.borrowed
        assert all(not one.error for one in server.seen)
        with watched(fake.url) as server:
            server.make_ready()  # it still serves


def test_an_attached_server_may_come_leave_and_come_back():
    with FakeServer() as fake:
        port = int(fake.url.rpartition(":")[2])
    with watched(f"http://127.0.0.1:{port}") as server:
        assert "refused" in wait_for_error(server)
        with fake_at(port):
            first = server.make_ready()
        assert "refused" in server.wait_for("left").error
        with fake_at(port):
            server.make_ready(after=first.incarnation)


def wait_for_error(server):
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if server.seen and server.seen[-1].error:
            assert server.seen[-1].state == "starting"
            return server.seen[-1].error
        time.sleep(0.02)
    raise AssertionError("no error")


def test_another_process_behind_an_attached_url_is_checked_again():
    with FakeServer() as fake, watched(fake.url) as server:
        first = server.make_ready()
        fake.random_seed += 1
        assert "another process" in server.wait_for("left").error
        server.make_ready(after=first.incarnation)


def test_of_a_gateway_neither_load_nor_identity_is_known():
    with FakeServer() as fake, watched(fake.url, gateway=True) as server:
        server.make_ready()
        fake.random_seed += 1
        time.sleep(0.5)
    assert all(one.load is None for one in server.seen)
    assert all(one.state != "left" for one in server.seen)
