"""What this machine is, gathered once: the frozen value that the checks of `eyas doctor` read."""

import importlib.metadata
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from pipelines.errors import PreflightFailed

DASHBOARD_PORT = 8265  # Ray's own default
_ROOT = Path(__file__).resolve().parent.parent
_CGROUP = Path("/sys/fs/cgroup")
_SHARED_MEMORY = Path("/dev/shm")
_SMI = (
    "nvidia-smi",
    "--query-gpu=name,memory.total,memory.free,driver_version",
    "--format=csv,noheader,nounits",
)
_SMI_SECONDS = 30.0


@dataclass(frozen=True)
class Gpu:
    """One GPU, as its driver describes it."""

    name: str
    total_bytes: int
    free_bytes: int
    driver: str


@dataclass(frozen=True)
class TorchBuild:
    """Which torch is installed, and what it can reach."""

    version: str
    cuda: str | None  # the CUDA version that it was built for; None for a CPU build
    visible_gpus: int


@dataclass(frozen=True)
class Space:
    """Bytes of a memory or a disk."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Machine:
    """This machine, in this process's eyes: its limits are those of the container it may be in."""

    python: str
    python_range: str  # of Eyas, as in `>=3.10,<3.14`
    requirements: tuple[str, ...]  # of Eyas, without those of its extras
    packages: Mapping[str, str]  # installed version by normalised name; what is missing is absent
    torch: TorchBuild | None  # None: it cannot be imported
    gpus: tuple[Gpu, ...]
    gpu_fault: str | None  # why an installed driver does not say what GPUs there are
    threads: int
    memory: Space
    shared_memory: Space | None  # None: there is no /dev/shm
    open_files: int  # `ulimit -n`
    open_files_hard: int  # how far a process may raise it by itself
    loopback_fault: str | None  # why no port of 127.0.0.1 can be bound
    dashboard_port_is_free: bool
    now: float  # seconds since the epoch
    newest_source: float  # when the youngest file of Eyas was written; no clock can be before it


def look_at_machine() -> Machine:
    """Gather everything. Takes some seconds, since torch is imported; changes nothing."""
    python_range, requirements = promised_packages()
    gpus, gpu_fault = _gpus()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        python=".".join(map(str, sys.version_info[:3])),
        python_range=python_range,
        requirements=requirements,
        packages={
            normalised(one.metadata["Name"]): one.version
            for one in importlib.metadata.distributions()
            if one.metadata["Name"]
        },
        torch=_torch(),
        gpus=gpus,
        gpu_fault=gpu_fault,
        threads=_threads(),
        memory=_memory(),
        shared_memory=_space(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None,
        open_files=_files(soft),
        open_files_hard=_files(hard),
        loopback_fault=_port_fault(0),
        dashboard_port_is_free=_port_fault(DASHBOARD_PORT) is None,
        now=time.time(),
        newest_source=max(path.stat().st_mtime for path in (_ROOT / "pipelines").glob("*.py")),
    )


def promised_packages() -> tuple[str, tuple[str, ...]]:
    """The range of Python and the requirements of Eyas.

    From the checkout's own pyproject.toml where it can be read: what pip remembers of an editable
    install is as old as the install. Raises `PreflightFailed` where nobody says.
    """
    project = _ROOT / "pyproject.toml"
    if sys.version_info >= (3, 11) and project.is_file():
        import tomllib

        table: dict[str, Any] = tomllib.loads(project.read_text())["project"]
        return table["requires-python"], tuple(table["dependencies"])
    try:
        metadata = importlib.metadata.metadata("eyas")
    except importlib.metadata.PackageNotFoundError as error:
        raise PreflightFailed(
            "the package eyas is not installed here",
            expected="an environment that was made for it",
            change="make install",
        ) from error
    every = metadata.get_all("Requires-Dist") or []
    return metadata["Requires-Python"], tuple(one for one in every if "extra ==" not in one)


def normalised(name: str) -> str:
    """A package's name as all its spellings have it."""
    return name.lower().replace("_", "-").replace(".", "-")


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """What nvidia-smi says, one GPU a line: name, MiB in all, MiB free, driver.

    Raises `ValueError` with the line that says something else.
    """
    found = []
    for line in text.splitlines():
        name, *rest = (part.strip() for part in line.split(","))
        if len(rest) != 3 or not (rest[0].isdecimal() and rest[1].isdecimal()):
            raise ValueError(line.strip())
        found.append(Gpu(name, int(rest[0]) << 20, int(rest[1]) << 20, rest[2]))
    return tuple(found)


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """The GPUs of this machine, and why a driver that is installed does not say them."""
    try:
        said = subprocess.run(
            _SMI, capture_output=True, text=True, check=False, timeout=_SMI_SECONDS
        )
    except FileNotFoundError:
        return (), None
    except (OSError, subprocess.TimeoutExpired) as error:
        return (), f"nvidia-smi does not answer: {error}"
    if said.returncode != 0:
        return (), f"nvidia-smi ends with {said.returncode}: {(said.stdout + said.stderr).strip()}"
    try:
        return parse_gpus(said.stdout), None
    except ValueError as error:
        return (), f"nvidia-smi says {error}"


def _torch() -> TorchBuild | None:
    try:
        import torch
    except (ImportError, OSError):  # OSError: a shared library of CUDA is missing
        return None
    return TorchBuild(torch.__version__, torch.version.cuda, torch.cuda.device_count())


def _threads() -> int:
    """Threads that may run at once: the affinity of this process, and its container's share."""
    allowed = len(os.sched_getaffinity(0))
    quota, _, period = _cgroup("cpu.max").partition(" ")
    return min(allowed, max(1, int(quota) // int(period))) if quota.isdecimal() else allowed


def _memory() -> Space:
    seen = psutil.virtual_memory()
    limit = _cgroup("memory.max")
    if not limit.isdecimal() or int(limit) >= seen.total:
        return Space(seen.total, seen.available)
    used = _cgroup("memory.current")
    free = int(limit) - int(used) if used.isdecimal() else int(limit)
    return Space(int(limit), min(free, seen.available))


def _cgroup(name: str) -> str:
    """A limit of this process's container; empty where there is none."""
    path = _CGROUP / name
    return path.read_text().strip() if path.is_file() else ""


def _space(path: Path) -> Space:
    usage = shutil.disk_usage(path)
    return Space(usage.total, usage.free)


def _files(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def _port_fault(port: int) -> str | None:
    """Why a port of loopback cannot be bound; it is released at once. 0 is any free one."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error.strerror or str(error)
    return None
