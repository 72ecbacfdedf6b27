"""What this very machine says of itself can be read, and what a driver says is understood."""

import os

import pytest

from pipelines import doctor_machine
from pipelines.doctor_machine import (
    Gpu,
    look_at_machine,
    normalised,
    parse_gpus,
    promised_packages,
)


def test_this_machine_is_looked_at_as_it_is():
    seen = look_at_machine()
    assert seen.packages["pyarrow"]
    assert seen.torch is not None
    assert 1 <= seen.threads <= (os.cpu_count() or 1)
    assert 0 < seen.memory.free_bytes <= seen.memory.total_bytes
    assert seen.loopback_fault is None
    assert seen.newest_source <= seen.now


def test_the_limits_of_a_container_are_those_of_the_machine(tmp_path, monkeypatch):
    for name, text in {
        "cpu.max": "100000 100000\n",
        "memory.max": "300000000\n",
        "memory.current": "100000000\n",
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(doctor_machine, "_CGROUP", tmp_path)
    seen = look_at_machine()
    assert seen.threads == 1
    assert (seen.memory.total_bytes, seen.memory.free_bytes) == (300_000_000, 200_000_000)


def test_a_container_without_limits_is_the_machine(tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    free = look_at_machine()
    monkeypatch.setattr(doctor_machine, "_CGROUP", tmp_path)
    assert look_at_machine().memory.total_bytes >= free.memory.total_bytes


def test_gpus_are_read_from_the_drivers_own_words():
    assert parse_gpus("NVIDIA H200, 143771, 143000, 580.65.06\n") == (
        Gpu("NVIDIA H200", 143771 << 20, 143000 << 20, "580.65.06"),
    )
    with pytest.raises(ValueError, match="N/A"):
        parse_gpus("NVIDIA GB10, [N/A], [N/A], 580.95\n")


@pytest.mark.parametrize(
    ("program", "count", "words"),
    [
        ("echo 'Hawk, 10, 9, 580.1'; echo 'Hawk, 10, 9, 580.1'", 2, None),
        ("echo 'Failed to initialize NVML'; exit 18", 0, "ends with 18: Failed to initialize"),
        ("echo 'No devices were found'", 0, "No devices were found"),
    ],
)
def test_a_driver_that_does_not_answer_is_no_machine_without_gpus(
    tmp_path, monkeypatch, program, count, words
):
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{program}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    seen = look_at_machine()
    assert len(seen.gpus) == count
    assert (seen.gpu_fault is None) == (words is None)
    assert (words or "") in (seen.gpu_fault or "")


def test_the_requirements_are_those_of_the_project():
    python_range, requirements = promised_packages()
    assert ">=3.10" in python_range
    assert any(one.startswith("ray[") for one in requirements)
    assert not any("pytest" in one for one in requirements)


def test_a_package_has_one_name_however_it_is_spelt():
    assert normalised("Some_Package.X") == "some-package-x"
