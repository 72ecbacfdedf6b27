"""What the driver saw last of its servers, GPUs and Ray: `RUN/servers.json`, with its age."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pipelines.errors import BadRecipe
from pipelines.store import RunFolder


@dataclass(frozen=True)
class ServerSeen:
    """One server. What it did not say is null."""

    name: str
    url: str  # "" until it is known
    state: str
    running: int | None  # requests
    queue: int | None  # requests
    kv_usage: float | None  # share of its KV memory, 0 to 1
    tokens_per_second: float | None
    restarts: int
    error: str  # why it is not ready, or was not the last time


@dataclass(frozen=True)
class GpuSeen:
    """One GPU of the driver's machine. What it does not say is null."""

    index: int
    name: str
    memory_used_mib: int | None
    memory_mib: int | None
    load: float | None  # 0 to 1


@dataclass(frozen=True)
class RaySeen:
    """Ray's logical resources."""

    nodes: int  # alive
    dead_nodes: int
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True)
class LastSeen:
    """All of it, at one moment of the driver's clock."""

    at: float  # seconds since the epoch
    host: str
    pid: int
    stage: str
    servers: tuple[ServerSeen, ...]
    gpus: tuple[GpuSeen, ...]
    ray: RaySeen


def place_of(run: RunFolder) -> Path:
    """Where it is written while a stage runs on Ray, and left by a driver that was killed."""
    return run.root / "servers.json"


def write_last_seen(run: RunFolder, seen: LastSeen) -> None:
    """Replace what was there. Not synced: who finds it lost has lost nothing. Raises `OSError`."""
    temporary = run.root / f".servers.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(asdict(seen), allow_nan=False))
    temporary.replace(place_of(run))


def read_last_seen(run: RunFolder) -> LastSeen | None:
    """What a driver wrote, or None. Raises `BadRecipe` for what no driver writes."""
    try:
        content = place_of(run).read_bytes()
    except FileNotFoundError:
        return None
    try:
        fields: dict[str, Any] = json.loads(content)
        return LastSeen(
            **{
                **fields,
                "servers": tuple(ServerSeen(**one) for one in fields["servers"]),
                "gpus": tuple(GpuSeen(**one) for one in fields["gpus"]),
                "ray": RaySeen(**fields["ray"]),
            }
        )
    except (ValueError, TypeError, KeyError) as error:
        raise BadRecipe(
            f"{place_of(run)} is not what a driver writes: {error!r}",
            expected="the file as a driver of this version left it",
            change="remove it: a driver that runs writes it again within seconds",
        ) from error


def gpus_of(text: str) -> tuple[GpuSeen, ...]:
    """From the lines of `nvidia-smi --query-gpu=index,name,memory.used,memory.total,utilization.gpu
    --format=csv,noheader,nounits`: MiB and percent; what is no number is not known."""
    gpus = []
    for line in text.splitlines():
        index, name, used, total, load = (cell.strip() for cell in line.split(","))
        share = _count(load)
        gpus.append(
            GpuSeen(
                index=int(index),
                name=name,
                memory_used_mib=_count(used),
                memory_mib=_count(total),
                load=None if share is None else share / 100,
            )
        )
    return tuple(gpus)


def _count(cell: str) -> int | None:
    return int(cell) if cell.isdigit() else None
