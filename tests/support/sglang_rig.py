"""Starts the two engines that conformance compares: the embedded one and the stock SGLang server.

Both run under the guard, which ends them when this process ends, however it ends.
"""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.sglang_cpu.set_up import stock_environment, stock_python

ROOT = Path(__file__).parents[2]
SLOTS = 8
# The stock server's options without their dashes, as a recipe's `arguments` has them.
STOCK_ON_A_CPU: dict[str, bool | str | int | float] = {
    "device": "cpu",
    "dtype": "float32",
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "grammar-backend": "none",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
    "disable-overlap-schedule": True,
    "sleep-on-idle": True,
    "skip-server-warmup": True,
    "mem-fraction-static": 0.2,
    "max-total-tokens": 16384,
    "max-running-requests": SLOTS,
}
_TICK_SECONDS = 0.2
_END_SECONDS = 30.0


@dataclass(frozen=True)
class Started:
    """A server's process that may not serve yet."""

    name: str
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path

    def wait_until_ready(self, seconds: float) -> str:
        """Return the URL once it serves. Raises `AssertionError` with the end of the log."""
        deadline = time.monotonic() + seconds
        while not _is_ready(self.url):
            code = self.process.poll()
            assert code is None, f"{self.name} ended with code {code}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{self.name} is not ready:\n{self.tail()}"
            time.sleep(_TICK_SECONDS)
        return self.url

    def tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


@contextmanager
def started(
    name: str, command: Sequence[str], environment: Mapping[str, str], port: int, folder: Path
) -> Iterator[Started]:
    """Start one server under its guard; end its whole process group on every path."""
    log = folder / f"{name}-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "actors.guard", "--", *command],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield Started(name, f"http://127.0.0.1:{port}", process, log)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(_END_SECONDS)


def embedded(target: Path, folder: Path) -> AbstractContextManager[Started]:
    """The embedded engine on `target`, in fp32."""
    port = free_port()
    command = [sys.executable, "-m", "actors.reference", "--target", str(target)]
    command += ["--port", str(port), "--dtype", "float32", "--device", "cpu"]
    command += ["--threads", "1", "--max-running-requests", str(SLOTS)]
    return started("embedded", command, {**os.environ, "OMP_NUM_THREADS": "1"}, port, folder)


def stock(target: Path, folder: Path, *arguments: str) -> AbstractContextManager[Started]:
    """The stock server on `target`, in fp32, with its prefix cache."""
    port = free_port()
    command = [str(stock_python()), "-m", "sglang.launch_server", "--model-path", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    for name, value in STOCK_ON_A_CPU.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return started("stock", [*command, *arguments], stock_environment(), port, folder)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False
