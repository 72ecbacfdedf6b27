"""A made-up machine on which everything is well, for tests that break one thing of it."""

import time
from dataclasses import replace
from typing import Any

from pipelines.doctor_machine import Gpu, Machine, Space, TorchBuild

GB = 10**9


def machine(**changes: Any) -> Machine:
    """Eight threads, no GPU, room for everything; with what the test says instead."""
    now = time.time()
    well = Machine(
        python="3.11.7",
        python_range=">=3.10,<3.14",
        requirements=("torch<2.15,>=2.8", "ray[data]<2.61,>=2.60", "old; python_version<'3'"),
        packages={"torch": "2.13.0+cpu", "ray": "2.60.0"},
        torch=TorchBuild("2.13.0+cpu", None, 0),
        gpus=(),
        gpu_fault=None,
        threads=8,
        memory=Space(64 * GB, 60 * GB),
        shared_memory=Space(32 * GB, 32 * GB),
        open_files=65536,
        open_files_hard=65536,
        loopback_fault=None,
        dashboard_port_is_free=True,
        now=now,
        newest_source=now - 60,
    )
    return replace(well, **changes)


def gpus(count: int, *, total: int = 80 * GB, free: int = 80 * GB) -> tuple[Gpu, ...]:
    """So many equal GPUs."""
    return (Gpu("Hawk 80", total, free, "580.1"),) * count
