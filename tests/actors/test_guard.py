"""Whoever owns a server may die in any way: its process group ends with it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

GUARD = [sys.executable, "-I", str(Path(__file__).parents[2] / "actors" / "guard.py"), "--"]
# Starts a grandchild, says both pids, and waits for ever.
FAMILY = (
    "import subprocess, sys, os, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(os.getpid(), child.pid, flush=True)\n"
    "time.sleep(600)\n"
)
OWNER = (
    "import subprocess, sys, time\n"
    "guard = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\n"
    "time.sleep(600)\n"
)


# As FAMILY, but the grandchild leaves the group, and its parent ends before it.
PARENT = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],\n"
    "    start_new_session=True, stdout=subprocess.DEVNULL)\n"
    "print(child.pid, flush=True)\n"
)
LEAVER = (
    "import subprocess, sys, os, time\n"
    "pid = subprocess.check_output([sys.executable, '-c', sys.argv[1]])\n"
    "print(os.getpid(), int(pid), flush=True)\n"
    "time.sleep(600)\n"
)


def wait_until_gone(pids):
    processes = []
    for pid in pids:
        try:
            processes.append(psutil.Process(pid))
        except psutil.NoSuchProcess:
            continue
    _, alive = psutil.wait_procs(processes, timeout=20)
    # A zombie has ended; only its parent, which may be the test's own init, has not looked yet.
    return [one for one in alive if one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def family():
    """A guarded family and the pipe that keeps it alive."""
    process = subprocess.Popen(
        [*GUARD, sys.executable, "-c", FAMILY], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    pids = [int(one) for one in process.stdout.readline().split()]
    yield process, pids
    process.stdin.close()
    process.wait(20)
    process.stdout.close()


def test_the_group_ends_when_its_owner_is_killed():
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *GUARD, sys.executable, "-c", FAMILY], stdout=subprocess.PIPE
    )
    pids = [int(one) for one in owner.stdout.readline().split()]
    assert len(pids) == 2
    owner.send_signal(signal.SIGKILL)
    owner.wait(20)
    assert wait_until_gone(pids) == []
    owner.stdout.close()


def test_the_group_ends_when_the_owner_closes_the_pipe(family):
    process, pids = family
    process.stdin.close()
    assert process.wait(20) == 128 + signal.SIGTERM
    assert wait_until_gone(pids) == []


def test_the_group_ends_on_sigterm(family):
    process, pids = family
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 128 + signal.SIGTERM
    assert wait_until_gone(pids) == []


def test_the_group_ends_when_what_the_owner_waits_for_is_killed(family):
    process, pids = family
    process.send_signal(signal.SIGKILL)
    process.wait(20)
    assert wait_until_gone(pids) == []


def test_the_commands_exit_code_is_the_guards():
    command = [*GUARD, sys.executable, "-c", "raise SystemExit(7)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert process.wait(20) == 7


def test_what_the_command_leaves_behind_ends_too():
    leaver = FAMILY.rsplit("time.sleep", 1)[0]
    with subprocess.Popen(
        [*GUARD, sys.executable, "-c", leaver], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        pids = [int(one) for one in process.stdout.readline().split()]
        assert process.wait(20) == 0
    assert wait_until_gone(pids) == []


@pytest.mark.skipif(sys.platform != "linux", reason="orphans can be found on Linux only")
def test_a_grandchild_that_left_the_group_and_lost_its_parent_ends_too():
    with subprocess.Popen(
        [*GUARD, sys.executable, "-c", LEAVER, PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        pids = [int(one) for one in process.stdout.readline().split()]
        assert os.getpgid(pids[1]) not in (os.getpgid(pids[0]), os.getpgid(process.pid))
        process.stdin.close()
        process.wait(20)
    assert wait_until_gone(pids) == []


def test_without_a_command_it_says_how_it_is_used():
    result = subprocess.run(GUARD[:-1], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "usage" in result.stderr
