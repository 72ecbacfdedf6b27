"""A program that is started as if it were SGLang: its options, its routes, and a few vices.

`environment_for(folder)` makes `python -m sglang.launch_server` mean this file.
"""

import argparse
import asyncio
import contextlib
import functools
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

from actors.config import LaunchedServers
from tests.support.fake_server import Answer, Die, FakeServer, ScriptedServer, always_good

ROOT = Path(__file__).parents[2]
SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def fake_servers(folder: Path, **changes: Any) -> LaunchedServers:
    """The config of one such server. Each start appends its pids to `folder/starts`."""
    arguments = {"fake-starts": str(folder / "starts"), **changes.pop("arguments", {})}
    return LaunchedServers.model_validate(
        {
            "kind": "launch",
            "count": 1,
            "python": sys.executable,
            "tensor_parallel_size": 1,
            "device": "cpu",
            "ready_seconds": 30.0,
            "restart_seconds": 0.05,
            "arguments": arguments,
            "environment": environment_for(folder),
            **changes,
        }
    )


def environment_for(folder: Path) -> dict[str, str]:
    """Variables under which this file is SGLang."""
    package = folder / "as-sglang" / "sglang"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").touch()
    program = "from tests.support.fake_sglang import main\nmain()\n"
    (package / "launch_server.py").write_text(program)
    return {"PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT)])}


def pids_of(folder: Path) -> list[list[int]]:
    """Of every start, the pid of the server and that of its child in a session of its own."""
    path = folder / "starts"
    lines = path.read_text().splitlines() if path.exists() else []
    return [[int(word) for word in line.split()] for line in lines]


def gone(pids: Iterable[int]) -> bool:
    """Whether all of these processes end soon."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(found, timeout=30.0)
    # A zombie has ended; only its parent, which may be the test's own init, has not looked yet.
    return all(one.status() == psutil.STATUS_ZOMBIE for one in alive)


def fake_at(port: int) -> FakeServer:
    """A server of somebody else's on this port, between `with` and its end."""
    fake = FakeServer()
    fake.start = functools.partial(fake.start, port)  # type: ignore[method-assign]
    return fake


def main() -> None:
    """Serve until the end."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in ("--model-path", "--host", "--device", "--fake-starts"):
        parser.add_argument(name, required=True)
    for name in ("--port", "--tp-size"):
        parser.add_argument(name, type=int, required=True)
    parser.add_argument("--context-length", type=int, default=512)
    parser.add_argument("--fake-fail-starts", type=int, default=0)
    parser.add_argument("--fake-die-at-request", type=int, default=None)
    parser.add_argument("--fake-model-from-start-2")
    parser.add_argument("--fake-never-ready", action="store_true")
    options = parser.parse_args()
    child = subprocess.Popen(SLEEPER, start_new_session=True)
    with Path(options.fake_starts).open("a") as starts:
        starts.write(f"{os.getpid()} {child.pid}\n")
    nth = len(Path(options.fake_starts).read_text().splitlines())
    sys.stdout.write(f"start {nth} of the fake\n")
    sys.stdout.flush()
    if nth <= options.fake_fail_starts:
        raise SystemExit("no such model")
    asyncio.run(_serve(options, nth))


async def _serve(options: argparse.Namespace, nth: int) -> None:
    if options.fake_never_ready:
        await asyncio.Event().wait()
    model = options.fake_model_from_start_2 if nth > 1 else None

    def script(request: dict[str, Any], before: int) -> Answer:
        if options.fake_die_at_request == len(server.requests):
            return Die()
        return always_good(request, before)

    server = ScriptedServer(
        script,
        model_path=model or options.model_path,
        server_info={"context_length": options.context_length},
    )
    await server.start(options.port)
    await asyncio.Event().wait()
