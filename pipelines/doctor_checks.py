"""What `eyas doctor` asks of a machine, with a recipe or without. Pure: values in, findings out."""

import re
from collections.abc import Iterator, Mapping

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from pipelines.doctor_finding import Finding, failed, passed, size, warned
from pipelines.doctor_machine import DASHBOARD_PORT, Machine, Space, normalised
from pipelines.doctor_plan import (
    Disk,
    Sizes,
    gpu_bytes_needed,
    gpus_needed,
    memory_needed,
    open_files_needed,
    threads_needed,
)
from pipelines.recipe import Recipe

SGLANG_VERSION = "0.5.23"  # the first whose replies were verified
_RAY_OPEN_FILES = 8192  # below 4,096 Ray itself warns, and asks for these
_RAY_STORE_SHARE = 0.3  # of the memory, where a recipe does not say how large the object store is
_LONGEST_SKEW_SECONDS = 120.0


def check_machine(machine: Machine) -> Iterator[Finding]:
    """What holds for every recipe."""
    yield python_fits(machine)
    yield from packages_fit(machine)
    yield loopback_works(machine)
    yield clock_is_sane(machine)


def check_plan(
    machine: Machine, recipe: Recipe | None, sizes: Sizes | None, nodes: Mapping[str, int] | None
) -> Iterator[Finding]:
    """What depends on the planned run, as far as it is known.

    `nodes` are the GPUs of each node of the cluster that the recipe names; None: this machine's.
    """
    yield gpus_suffice(machine, recipe, nodes)
    yield torch_fits(machine, recipe)
    yield threads_suffice(machine, recipe)
    yield memory_suffices(machine, recipe, sizes)
    yield shared_memory_suffices(machine, recipe)
    yield open_files_suffice(machine, recipe)
    if recipe is not None and recipe.ray.address is None and recipe.ray.dashboard:
        yield dashboard_port_is_free(machine)
    if recipe is not None and sizes is not None and nodes is None:
        yield from gpu_memory_suffices(machine, recipe, sizes)


def python_fits(machine: Machine) -> Finding:
    """The interpreter is one that Eyas runs on."""
    if machine.python in SpecifierSet(machine.python_range):
        return passed("python", machine.python)
    return failed(
        "python",
        machine.python,
        expected=machine.python_range,
        change="rm -r .venv; make install PYTHON=python3.11",
    )


def packages_fit(machine: Machine) -> Iterator[Finding]:
    """Every package that Eyas needs is there, in a version that it was made for."""
    fitting = 0
    for text in machine.requirements:
        needed = Requirement(text)
        if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
            continue
        seen = machine.packages.get(normalised(needed.name))
        if seen is not None and needed.specifier.contains(seen, prereleases=True):
            fitting += 1
            continue
        wanted = str(needed.specifier) or "any version"
        yield failed(
            f"package {needed.name}",
            "not installed" if seen is None else seen,
            expected=wanted,
            change=f"python -m pip install -c constraints.txt '{text}'",
        )
    if fitting:
        yield passed("packages", f"{fitting} of those that Eyas needs")


def loopback_works(machine: Machine) -> Finding:
    """A server may listen on this machine's loopback address."""
    if machine.loopback_fault is None:
        return passed("loopback", "a port of 127.0.0.1 was bound and released")
    return failed(
        "loopback",
        f"no port of 127.0.0.1 can be bound: {machine.loopback_fault}",
        expected="free ports on the loopback device",
        change="ip link set lo up; in a container, allow sockets",
    )


def clock_is_sane(machine: Machine) -> Finding:
    """The clock is not before the moment that Eyas was written to this disk."""
    behind = machine.newest_source - machine.now
    if behind <= _LONGEST_SKEW_SECONDS:
        return passed("clock", "after the newest file of Eyas")
    return failed(
        "clock",
        f"{behind:,.0f} s before the newest file of Eyas was written",
        expected="a clock that is right: leases and freshness are told by it",
        change="have NTP set it, as `timedatectl set-ntp true` does",
    )


def gpus_suffice(
    machine: Machine, recipe: Recipe | None, nodes: Mapping[str, int] | None
) -> Finding:
    """The GPUs that the recipe's stages need are there, those of one process on one node."""
    needed = {} if recipe is None else gpus_needed(recipe)
    rooms = {"this machine": len(machine.gpus)} if nodes is None else nodes
    where = "this machine has" if nodes is None else "the cluster's nodes have"
    seen = f"{where} {', '.join(map(str, rooms.values())) or 'no'} GPU(s)"
    if machine.gpu_fault is not None and nodes is None:
        broken = {
            "expected": "a driver that answers, or none",
            "change": "mend the NVIDIA driver until nvidia-smi lists the GPUs; often a reboot",
        }
        seen = machine.gpu_fault[:200]
        return failed("gpus", seen, **broken) if needed else warned("gpus", seen, **broken)
    for stage, (count, each) in needed.items():
        if sum(room // each for room in rooms.values()) < count:
            return failed(
                "gpus",
                seen,
                expected=f"{count} x {each} for {stage}, the {each} of one process on one node",
                change="set count, tensor_parallel_size or gpus_per_worker to what is there, or "
                "join a cluster with ray.address",
            )
    drivers = sorted({gpu.driver for gpu in machine.gpus})
    names = f": {machine.gpus[0].name}, driver {', '.join(drivers)}" if machine.gpus else ""
    unneeded = "; the recipe needs none" if recipe is not None and not needed else ""
    return passed("gpus", seen + names * (nodes is None) + unneeded)


def gpu_memory_suffices(machine: Machine, recipe: Recipe, sizes: Sizes) -> Iterator[Finding]:
    """The target's weights fit into the memory of one GPU, or of those that share them."""
    needed = gpu_bytes_needed(recipe, sizes)
    if not needed or not machine.gpus:
        return
    stage = max(needed, key=lambda one: needed[one])
    smallest = min(machine.gpus, key=lambda gpu: gpu.total_bytes)
    seen = f"{size(needed[stage])} of weights for each GPU in {stage}"
    if needed[stage] >= smallest.total_bytes:
        yield failed(
            "gpu memory",
            f"{seen}, {smallest.name} has {size(smallest.total_bytes)}",
            expected="the weights, and room for the KV pool",
            change="raise tensor_parallel_size, or take a quantized target",
        )
    elif needed[stage] >= smallest.free_bytes:
        yield warned(
            "gpu memory",
            f"{seen}, {size(smallest.free_bytes)} are free on {smallest.name}",
            expected="GPUs that nobody else uses",
            change="nvidia-smi names the processes; end those that are not needed",
        )
    else:
        yield passed("gpu memory", f"{seen} of {size(smallest.total_bytes)}")


def torch_fits(machine: Machine, recipe: Recipe | None) -> Finding:
    """The build of torch is that of the machine."""
    torch = machine.torch
    if torch is None:
        return failed(
            "torch",
            "it cannot be imported",
            expected="a build for this machine",
            change="make install; `python -c 'import torch'` says more",
        )
    seen = f"{torch.version}, {'for CPUs' if torch.cuda is None else f'for CUDA {torch.cuda}'}"
    if not machine.gpus and torch.cuda is not None:
        return warned(
            "torch",
            f"{seen}; there is no GPU driver",
            expected="the build for CPUs, or a driver",
            change="install the driver; without GPUs it works as it is, and is smaller from an "
            "index of CPU wheels: `python -m pip install --index-url INDEX torch`",
        )
    if machine.gpus and not torch.visible_gpus:
        drivers = ", ".join(sorted({gpu.driver for gpu in machine.gpus}))
        own_gpus = recipe is not None and _torch_needs_gpus(recipe)
        return (failed if own_gpus else warned)(
            "torch",
            f"{seen}; it sees none of {len(machine.gpus)} GPU(s), driver {drivers}",
            expected="a build for CUDA, no newer than the driver knows",
            change="python -m pip install --force-reinstall torch from an index with that build, "
            "or update the driver; and see that CUDA_VISIBLE_DEVICES is not empty",
        )
    return passed("torch", seen)


def _torch_needs_gpus(recipe: Recipe) -> bool:
    """Whether this environment's torch computes on GPUs; launched servers have one of their own."""
    servers = (recipe.generate.servers, recipe.capture.servers, recipe.evaluate.servers)
    embedded = any(one.kind == "embedded" and one.device == "cuda" for one in servers)
    return embedded or recipe.train.gpus_per_worker > 0


def threads_suffice(machine: Machine, recipe: Recipe | None) -> Finding:
    """No stage keeps more threads busy than may run at once."""
    needed = {} if recipe is None else threads_needed(recipe)
    for stage, count in needed.items():
        if count > machine.threads:
            return warned(
                "cpu threads",
                f"{machine.threads}; {stage} keeps {count} busy",
                expected=f"at least {count}: threads that wait for each other cost more than they "
                "bring",
                change="lower count, threads_per_server, workers or threads_per_worker",
            )
    most = max(needed.values(), default=None)
    return passed(
        "cpu threads", f"{machine.threads}" + (f", {most} are needed" if most is not None else "")
    )


def memory_suffices(machine: Machine, recipe: Recipe | None, sizes: Sizes | None) -> Finding:
    """Weights, optimiser states and Ray's objects fit into memory."""
    memory = machine.memory
    seen = f"{size(memory.free_bytes)} free of {size(memory.total_bytes)}"
    if recipe is None or sizes is None:
        return passed("memory", seen)
    weights = memory_needed(recipe, sizes)
    store = _object_store(machine, recipe) if machine.shared_memory is not None else 0
    stage = max(weights, key=lambda one: weights[one], default=None)
    need = store + (weights[stage] if stage is not None else 0)
    seen += f"; weights and Ray's objects take {size(need)}" + (f" in {stage}" if stage else "")
    mend = {
        "expected": "room for these, and for activations and caches",
        "change": "lower count, workers or ray.object_store_bytes, take dtype bfloat16, or end "
        "other programs",
    }
    if need > memory.total_bytes:
        return failed("memory", seen, **mend)
    if need > memory.free_bytes:
        return warned("memory", seen, **mend)
    return passed("memory", seen)


def shared_memory_suffices(machine: Machine, recipe: Recipe | None) -> Finding:
    """Ray's object store and captured states live in /dev/shm, or more slowly on the disk."""
    seen, need = machine.shared_memory, _object_store(machine, recipe)
    if recipe is not None and recipe.ray.address is not None:
        need = 0  # a cluster's nodes were started with a store of their own
    if seen is not None and seen.free_bytes >= need:
        return passed("shared memory", f"{size(seen.free_bytes)} free in /dev/shm")
    have = "there is no /dev/shm" if seen is None else f"{size(seen.free_bytes)} free in /dev/shm"
    return warned(
        "shared memory",
        have,
        expected=f"{size(need)} for Ray's objects: on a disk they are many times slower",
        change="mount -o remount,size=... /dev/shm, `docker run --shm-size=...`, or lower "
        "ray.object_store_bytes",
    )


def _object_store(machine: Machine, recipe: Recipe | None) -> int:
    given = None if recipe is None else recipe.ray.object_store_bytes
    return int(machine.memory.total_bytes * _RAY_STORE_SHARE) if given is None else given


def open_files_suffice(machine: Machine, recipe: Recipe | None) -> Finding:
    """Every request in flight is a socket, and every socket a file handle."""
    need = _RAY_OPEN_FILES if recipe is None else open_files_needed(recipe)
    # Ray raises the limit by itself, up to 65,536 or as far as it may.
    have = max(machine.open_files, min(machine.open_files_hard, 65536))
    seen = f"{have:,}" + ("" if have == machine.open_files else f" (now {machine.open_files:,})")
    if have >= need:
        return passed("open files", seen + ("" if recipe is None else f", {need:,} are needed"))
    return (warned if recipe is None else failed)(
        "open files",
        seen,
        expected=f"{need:,}"
        + ("" if recipe is None else ": servers x requests in flight, and Ray's own"),
        change=f"ulimit -n {max(need, 65536)} before `eyas run`, or before `ray start`; or lower "
        "pool.max_in_flight_per_server",
    )


def dashboard_port_is_free(machine: Machine) -> Finding:
    """Nobody else has the port of Ray's dashboard."""
    if machine.dashboard_port_is_free:
        return passed("dashboard", f"port {DASHBOARD_PORT} is free")
    return warned(
        "dashboard",
        f"port {DASHBOARD_PORT} is taken",
        expected="a free port: Ray takes the next one, and another Ray may run here",
        change="set ray.dashboard to false, or end the other Ray",
    )


def disk_suffices(disk: Disk, space: Space, *, written: int, where: str) -> Finding:
    """The run folder's disk holds what the run will write; `written` bytes are there already."""
    rows = "responses are not known before the prompts are prepared"
    if disk.responses is not None:
        rows = f"responses at most {size(disk.responses)}"
    parts = f"states {size(disk.states)}, checkpoints {size(disk.checkpoints)}, {rows}"
    seen = f"{size(space.free_bytes)} free at {where}; {parts}"
    if written:
        seen += f"; {size(written)} are written already"
    mend = {
        "expected": "room for these",
        "change": "free space, set run_folder on a larger disk, or lower capture.max_bytes",
    }
    if disk.certain - written > space.free_bytes:
        return failed("disk", seen, **mend)
    if disk.whole - written > space.free_bytes:
        return warned("disk", seen, **mend)
    return passed("disk", seen)


def sglang_fits(python: str, version: str) -> Finding:
    """The SGLang of a recipe's environment is one whose replies were verified."""
    name = "sglang"
    numbers = re.match(r"\d+\.\d+\.\d+", version)
    if numbers is None:
        return warned(
            name,
            f"{version} in {python}",
            expected=f"a release, {SGLANG_VERSION} or later",
            change="check that this build is not older: its replies are checked all the same",
        )
    seen, least = (tuple(map(int, one.split("."))) for one in (numbers[0], SGLANG_VERSION))
    if seen >= least:
        return passed(name, f"{version} in {python}")
    return failed(
        name,
        f"{version} in {python}",
        expected=f"{SGLANG_VERSION} or later, whose replies were verified",
        change=f"{python} -m pip install 'sglang>={SGLANG_VERSION}'",
    )


def clocks_agree(name: str, skew: float) -> Finding | None:
    """A finding where the clock of a disk or store is `skew` seconds from ours, by too much."""
    if abs(skew) <= _LONGEST_SKEW_SECONDS:
        return None
    return warned(
        name,
        f"its clock is {skew:+,.0f} s from this machine's",
        expected=f"at most {_LONGEST_SKEW_SECONDS:.0f} s: leases and freshness are told by it",
        change="have both clocks set by NTP",
    )
