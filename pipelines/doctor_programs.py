"""What other programs say: the interpreter that SGLang lives in, and the Ray cluster to join.

Each is asked by a process of its own, which may hang or die as it likes.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from actors.config import LaunchedServers
from actors.launch import launched_environment
from pipelines.doctor_checks import sglang_fits
from pipelines.doctor_finding import Finding, failed, passed, warned
from pipelines.doctor_plan import stage_servers
from pipelines.recipe import Recipe

_PROGRAM_SECONDS = 60.0
_SGLANG = "from importlib.metadata import version; print(version('sglang'))"
# Joining is what the run itself will do. Ray compares the versions, and ends with what differs.
_JOIN = """
import json, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
nodes = [(one["NodeID"], one["Resources"]) for one in ray.nodes() if one["Alive"]]
print(json.dumps({name: int(has["GPU"]) if "GPU" in has else 0 for name, has in nodes}))
"""


# --- SGLang


def check_sglang(recipe: Recipe) -> Iterator[Finding]:
    """The environment of the launched servers holds an SGLang whose replies were verified."""
    seen = set[str]()
    for servers, _ in stage_servers(recipe).values():
        if isinstance(servers, LaunchedServers) and servers.python not in seen:
            seen.add(servers.python)
            yield _sglang(servers)


def _sglang(servers: LaunchedServers) -> Finding:
    python, environment = servers.python, launched_environment(servers, os.environ)
    try:
        said = _run([python, "-c", _SGLANG], environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        return failed(
            "sglang",
            f"{python} cannot be asked: {error}",
            expected="the interpreter of the environment that SGLang is installed in",
            change="correct servers.python in the recipe",
        )
    if said.returncode != 0:
        return failed(
            "sglang",
            f"{python} has none: {_last_line(said.stderr)}",
            expected="SGLang in that environment",
            change=f"{python} -m pip install sglang",
        )
    return sglang_fits(python, said.stdout.strip())


# --- Ray


def check_token(address: str | None, environment: Mapping[str, str], home: Path) -> Finding:
    """The token that Ray's processes show each other is where they look. It is never read.

    Ray 2.60 asks for one unless RAY_AUTH_MODE says otherwise, and makes one for a local Ray.
    """
    name, mode = "ray token", environment.get("RAY_AUTH_MODE", "token").lower()
    if mode != "token":
        seen = f"RAY_AUTH_MODE is {mode}"
        if address is None:
            return passed(name, f"{seen}; a local Ray listens on this machine only")
        return warned(
            name,
            f"{seen}: whoever reaches the cluster may run code on it",
            expected="RAY_AUTH_MODE=token on every node",
            change="unset RAY_AUTH_MODE here and where `ray start` runs",
        )
    if environment.get("RAY_AUTH_TOKEN"):
        return passed(name, "from RAY_AUTH_TOKEN")
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    path = home / ".ray" / "auth_token" if named is None else Path(named)
    if path.is_file() and path.stat().st_size:
        return passed(name, f"from {path}")
    if address is None and named is None:
        return passed(name, "Ray makes one when it starts here")
    return failed(
        name,
        f"there is none at {path}",
        expected="the token of the cluster's nodes"
        if address is not None
        else "the file that RAY_AUTH_TOKEN_PATH names",
        change=f"copy ~/.ray/auth_token of the head node to {path}"
        if address is not None
        else "unset RAY_AUTH_TOKEN_PATH, or `ray get-auth-token --generate` and copy it there",
    )


def join_cluster(address: str) -> tuple[Finding, dict[str, int] | None]:
    """Join the cluster as a run does, and leave it; the GPUs of each node, by the node's name."""
    mend = {
        "expected": "a cluster that runs, with this Ray and Python and the same token",
        "change": f"start it (`ray start --head`), correct ray.address, or install what the "
        f"message names; `ray status --address {address}` asks the same",
    }
    try:
        said = _run([sys.executable, "-c", _JOIN, address], os.environ)
    except subprocess.TimeoutExpired:
        seen = f"{address} did not answer within {_PROGRAM_SECONDS:.0f} s"
        return failed("ray", seen, **mend), None
    if said.returncode != 0:
        return failed("ray", f"{address}: {_without_token(_last_line(said.stderr))}", **mend), None
    nodes: dict[str, int] = json.loads(said.stdout.splitlines()[-1])
    gpus = sum(nodes.values())
    return passed("ray", f"{address} was joined: {len(nodes)} node(s), {gpus} GPU(s)"), nodes


def _run(command: list[str], environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        command,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=_PROGRAM_SECONDS,
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def _without_token(text: str) -> str:
    """Tokens are long words of hex digits; no message needs one."""
    return re.sub(r"[0-9A-Fa-f-]{32,}", "...", text)
