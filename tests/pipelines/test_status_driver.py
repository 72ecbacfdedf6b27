"""A driver is known by its lock here, and elsewhere by what it keeps writing."""

import json
import os
import socket
from dataclasses import asdict

import pytest

from pipelines.last_seen import LastSeen, RaySeen
from pipelines.lease import EXPIRES_SECONDS, Lease
from pipelines.status_driver import Driver, find_driver, last_pid, lock_holder
from pipelines.store import RunFolder

HERE = socket.gethostname()


def seen(host: str, at: float = 1000.0, pid: int = 7) -> LastSeen:
    return LastSeen(at, host, pid, "generate", (), (), RaySeen(1, 0, {}, {}))


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run", store=str(tmp_path / "store"))


def hold_store(run: RunFolder, owner: str, heartbeat: float = 1000.0) -> None:
    run.responses.mkdir(parents=True)
    run.lease.write_bytes(json.dumps(asdict(Lease(owner, 9, "nonce", heartbeat))).encode())


def test_without_a_lock_file_nobody_holds_the_folder(run):
    assert lock_holder(run) is None
    assert last_pid(run) is None
    assert find_driver(run, None, 1000.0) is None


def test_whoever_held_the_lock_last_is_remembered(tmp_path):
    run = RunFolder(tmp_path)
    with run.lock():
        assert lock_holder(run) == os.getpid()
        assert find_driver(run, None, 1000.0) == Driver(os.getpid(), HERE)
    assert lock_holder(run) is None
    assert last_pid(run) == os.getpid()


def test_a_lock_that_reaches_over_machines_has_the_writers_host(tmp_path):
    run = RunFolder(tmp_path)
    with run.lock():
        away = seen("elsewhere", pid=os.getpid())
        assert find_driver(run, away, 1001.0) == Driver(os.getpid(), "elsewhere")
        assert find_driver(run, away, 5000.0) == Driver(os.getpid(), HERE)


def test_a_driver_elsewhere_lives_while_it_writes(run):
    assert find_driver(run, seen("elsewhere"), 1030.0) == Driver(7, "elsewhere")
    assert find_driver(run, seen("elsewhere"), 1100.0) is None


def test_what_was_written_here_proves_nothing_without_the_lock(run):
    assert find_driver(run, seen(HERE), 1001.0) is None


def test_a_lease_of_another_machine_is_a_sign_of_life_until_it_runs_out(run):
    hold_store(run, "user@elsewhere")
    assert find_driver(run, None, 1001.0) == Driver(9, "elsewhere")
    assert find_driver(run, None, 1001.0 + EXPIRES_SECONDS) is None


def test_a_lease_of_a_dead_driver_here_is_none(run):
    hold_store(run, f"user@{HERE}")
    assert find_driver(run, None, 1001.0) is None
