"""`eyas` as a process that can be killed: its descendants are known, and none of them is left."""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.harness import ROOT

logger = logging.getLogger(__name__)

# How long Ray's daemons and workers may take to notice that their driver died.
_ORPHAN_SECONDS = 45.0
_PATIENCE_SECONDS = 600.0  # for a busy machine: a calm one needs a tenth
_TICK_SECONDS = 0.02


class Stuck(Exception):
    """Something that must happen did not happen in time."""


@dataclass
class Driver:
    """One call of the command, its output in `log`."""

    arguments: Sequence[str]
    log: Path
    _family: list[psutil.Process] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.cli", *self.arguments],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A loopback cluster that lives for one run.
                env={"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", **os.environ},
            )

    @property
    def has_ended(self) -> bool:
        """Whether the command has ended, by itself or not."""
        return self._process.poll() is not None

    def wait(self, seconds: float = _PATIENCE_SECONDS) -> int:
        """The exit code. Raises `Stuck` with the end of the log."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise Stuck(
                f"{self.arguments} still runs after {seconds:g} s\n{self.tail()}"
            ) from error

    def wait_for(self, moment: Callable[[], bool], what: str) -> bool:
        """Wait until `moment` holds; False if the command ended first. Raises `Stuck`."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not moment():
            if self.has_ended:
                return False
            if time.monotonic() > deadline:
                raise Stuck(f"{what}: did not come\n{self.tail()}")
            time.sleep(_TICK_SECONDS)
        return not self.has_ended

    def kill(self) -> None:
        """SIGKILL the driver alone; what it started finds out by itself."""
        if self.has_ended:
            return
        self._process.send_signal(signal.SIGSTOP)  # no child is born between the look and the kill
        self._family = _descendants(self._process.pid)
        self._process.kill()
        self._process.wait()

    def kill_worker(self, name: str) -> int:
        """SIGKILL a Ray worker by what it does; return its process id. Raises `Stuck`."""
        for one in _descendants(self._process.pid):
            try:
                command = " ".join(one.cmdline())
                if command.startswith("ray::") and name in command:
                    one.kill()
                    return one.pid
            except psutil.NoSuchProcess:
                continue
        raise Stuck(f"no Ray worker that does {name}\n{self.tail()}")

    def wait_for_orphans(self) -> None:
        """Wait until everything that a killed driver left has ended.

        Ray's agents of a node may outlive it by minutes. They touch no row, and are ended.
        """
        agents = [one for one in self._family if _is_agent(one)]
        others = [one for one in self._family if one not in agents]
        _, alive = psutil.wait_procs(others, timeout=_ORPHAN_SECONDS)
        for one in alive:
            logger.warning("%s outlived its driver by %g s", one, _ORPHAN_SECONDS)
        for one in (*alive, *agents):
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs([*alive, *agents], timeout=_ORPHAN_SECONDS)

    def tail(self) -> str:
        """The end of the log."""
        lines = self.log.read_text(errors="replace").splitlines()[-40:]
        return f"the end of {self.log}:\n" + "\n".join(lines)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _is_agent(one: psutil.Process) -> bool:
    try:
        return one.name().startswith("ray::") and one.name().endswith("Agent")
    except psutil.NoSuchProcess:
        return False
