"""A fault server as a child process: started, killed, started again on its port."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass
class FaultProcess:
    """One server's place: a port, a state file, and the process that serves there now, if any."""

    target: Path
    state: Path
    options: tuple[str, ...] = ()
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, *more: str) -> str:
        """Start a process in this place, with more options; return its URL once it serves."""
        assert self._process is None, "one process serves here already"
        command = [sys.executable, "-m", "tests.support.fault_server", "--target", str(self.target)]
        command += ["--state-file", str(self.state), "--port", str(self.port)]
        self._process = subprocess.Popen(
            [*command, *self.options, *more],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        url = self._process.stdout.readline().decode().strip()
        assert url, f"the fault server in {self.state} did not start"
        self.port = int(url.rpartition(":")[2])
        return url

    @property
    def url(self) -> str:
        """Where it serves, or served."""
        assert self.port, "never started"
        return f"http://127.0.0.1:{self.port}"

    def asked(self) -> int:
        """How many requests came, in all its lives."""
        return self.state.read_bytes().count(b"\n") if self.state.exists() else 0

    def met(self) -> list[str]:
        """What each request met: a fault's name, "good" or "refused"."""
        return [line.split()[1] for line in self.state.read_text().splitlines()]

    def kill(self) -> None:
        """SIGKILL, in the middle of whatever it does."""
        if self._process is not None:
            self._process.kill()
            self._end()

    def close(self) -> None:
        """End its stdin and wait: it closes its port first."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._end()

    def terminate(self) -> None:
        """SIGTERM, and wait: it closes its port first."""
        if self._process is not None:
            self._process.terminate()
            self._end()

    def wait(self) -> int:
        """Wait until it has ended by itself; its return code."""
        assert self._process is not None
        process = self._process
        process.wait(30)
        self._end()
        return process.returncode

    def _end(self) -> None:
        assert self._process is not None
        self._process.wait(30)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process = None
