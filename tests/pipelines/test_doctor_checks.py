"""Each thing that may be wrong with a machine is seen, and nothing is said of a good one."""

import pytest

from actors.config import LaunchedServers
from pipelines.doctor_checks import (
    check_machine,
    check_plan,
    clocks_agree,
    disk_suffices,
    sglang_fits,
)
from pipelines.doctor_machine import Machine, Space, TorchBuild
from pipelines.doctor_plan import Disk, Sizes
from pipelines.recipe import Recipe, load_recipe
from tests.support.machines import GB, gpus, machine
from tests.support.road import write_recipe

SIZES = Sizes(
    target_numbers=8 * GB,
    target_bytes=16 * GB,
    target_hidden_size=4096,
    draft_numbers=GB // 2,
    frozen_numbers=GB // 2,
    prompts=100,
)
CUDA = TorchBuild("2.13.0+cu130", "13.0", 8)


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return load_recipe(write_recipe(tmp_path, tmp_path / "target"))


def changed(recipe: Recipe, part: str, **changes) -> Recipe:
    """The recipe with other values of one of its parts."""
    return recipe.model_copy(update={part: getattr(recipe, part).model_copy(update=changes)})


def launching(recipe: Recipe, count: int, each: int) -> Recipe:
    """The recipe with launched servers on GPUs for generate."""
    servers = LaunchedServers(
        kind="launch", count=count, python="python", tensor_parallel_size=each, device="cuda"
    )
    return changed(recipe, "generate", servers=servers)


def findings(one: Machine, recipe: Recipe | None = None, sizes: Sizes | None = None, nodes=None):
    every = [*check_machine(one), *check_plan(one, recipe, sizes, nodes)]
    return {finding.name: finding for finding in every if finding.outcome != "pass"}


def test_a_good_machine_passes_with_and_without_a_recipe(recipe):
    assert findings(machine()) == {}
    assert findings(machine(), recipe) == {}


@pytest.mark.parametrize(
    ("changes", "name", "outcome", "words"),
    [
        ({"python": "3.9.1"}, "python", "fail", "3.9.1"),
        ({"python": "3.14.0"}, "python", "fail", "3.14.0"),
        ({"packages": {"torch": "2.13.0"}}, "package ray", "fail", "not installed"),
        ({"packages": {"torch": "2.7.1", "ray": "2.60.0"}}, "package torch", "fail", "2.7.1"),
        ({"packages": {"torch": "2.13.0", "ray": "2.61.0"}}, "package ray", "fail", "2.61.0"),
        ({"torch": None}, "torch", "fail", "cannot be imported"),
        ({"torch": CUDA}, "torch", "warn", "no GPU driver"),
        ({"gpus": gpus(2)}, "torch", "warn", "sees none of 2"),
        ({"gpu_fault": "nvidia-smi ends with 18"}, "gpus", "warn", "ends with 18"),
        ({"shared_memory": None}, "shared memory", "warn", "no /dev/shm"),
        ({"shared_memory": Space(GB, GB)}, "shared memory", "warn", "1 GB free"),
        ({"open_files": 256, "open_files_hard": 4096}, "open files", "warn", "4,096 (now 256)"),
        ({"loopback_fault": "no such device"}, "loopback", "fail", "no such device"),
        ({"now": 0.0}, "clock", "fail", "before the newest file"),
    ],
)
def test_what_is_wrong_with_a_machine_is_named_and_mended(changes, name, outcome, words):
    found = findings(machine(**changes))
    assert list(found) == [name]
    assert found[name].outcome == outcome
    assert words in found[name].seen
    assert found[name].expected
    assert found[name].change


def test_a_limit_that_ray_raises_by_itself_is_no_fault():
    assert findings(machine(open_files=1024, open_files_hard=65536)) == {}


def test_every_server_times_its_requests_in_flight_is_a_file_handle(recipe):
    servers = recipe.generate.servers.model_copy(update={"count": 64})
    found = findings(machine(threads=64), changed(recipe, "generate", servers=servers))
    assert found == {}
    found = findings(
        machine(threads=64, open_files=4096, open_files_hard=4096),
        changed(recipe, "generate", servers=servers),
    )
    assert list(found) == ["open files"]
    assert found["open files"].expected.startswith("5,120")


@pytest.mark.parametrize(
    ("have", "count", "each", "ends"),
    [(8, 1, 8, "pass"), (8, 2, 4, "pass"), (8, 2, 8, "fail"), (0, 1, 1, "fail"), (7, 2, 4, "fail")],
)
def test_gpus_are_counted_for_each_process(recipe, have, count, each, ends):
    one = machine(gpus=gpus(have), torch=CUDA if have else TorchBuild("2.13.0+cpu", None, 0))
    found = findings(one, launching(recipe, count, each))
    assert ("gpus" in found) == (ends == "fail")
    assert all(finding.outcome == "fail" for finding in found.values())


def test_the_gpus_of_one_process_lie_on_one_node_of_a_cluster(recipe):
    planned = launching(changed(recipe, "ray", address="10.0.0.1:6379"), 2, 8)
    assert findings(machine(), planned, SIZES, {"a": 8, "b": 8}) == {}
    assert "gpus" in findings(machine(), planned, SIZES, {"a": 12, "b": 4})


def test_weights_that_no_gpu_holds_fail(recipe):
    planned = launching(recipe, 1, 1)
    for total, free, outcome in ((80, 80, None), (80, 10, "warn"), (12, 12, "fail")):
        one = machine(gpus=gpus(1, total=total * GB, free=free * GB), torch=CUDA)
        found = findings(one, planned, SIZES).get("gpu memory")
        assert (found and found.outcome) == outcome


def test_training_on_gpus_needs_a_torch_that_sees_them(recipe):
    found = findings(machine(gpus=gpus(1)), changed(recipe, "train", gpus_per_worker=1))
    assert found["torch"].outcome == "fail"


def test_memory_and_threads_are_compared_with_the_stage_that_needs_most(recipe):
    assert findings(machine(), recipe, SIZES) == {}  # 32 GB of fp32 weights
    assert findings(machine(memory=Space(64 * GB, 20 * GB)), recipe, SIZES)["memory"].outcome == (
        "warn"
    )
    found = findings(machine(memory=Space(16 * GB, 16 * GB)), recipe, SIZES)
    assert found["memory"].outcome == "fail"
    assert "32.1 GB" in found["memory"].seen
    found = findings(machine(threads=2), changed(recipe, "train", workers=3))
    assert "train keeps 3 busy" in found["cpu threads"].seen


def test_a_dashboard_that_is_asked_for_needs_its_port(recipe):
    taken = machine(dashboard_port_is_free=False)
    assert findings(taken, recipe) == {}
    assert list(findings(taken, changed(recipe, "ray", dashboard=True))) == ["dashboard"]


@pytest.mark.parametrize(
    ("free", "written", "outcome"),
    [(100, 0, "pass"), (40, 0, "warn"), (20, 0, "fail"), (20, 20, "warn"), (20, 60, "pass")],
)
def test_the_disk_holds_what_is_still_to_be_written(free, written, outcome):
    disk = Disk(responses=30, states=20, checkpoints=10)
    found = disk_suffices(disk, Space(1000, free), written=written, where="/run")
    assert found.outcome == outcome


def test_responses_that_nobody_can_count_yet_are_said_to_be_unknown():
    disk = Disk(responses=None, states=20, checkpoints=10)
    found = disk_suffices(disk, Space(1000, 100), written=0, where="/run")
    assert found.outcome == "pass"
    assert "responses are not known" in found.seen


@pytest.mark.parametrize(
    ("version", "outcome"),
    [
        ("0.5.23", "pass"),
        ("0.5.23.post1", "pass"),
        ("0.10.0", "pass"),
        ("0.5.22", "fail"),
        ("0.4.99", "fail"),
        ("main-abc", "warn"),
    ],
)
def test_an_sglang_that_was_not_verified_is_named(version, outcome):
    assert sglang_fits("/opt/sglang/bin/python", version).outcome == outcome


def test_clocks_may_differ_by_two_minutes():
    assert clocks_agree("store", -119.0) is None
    late = clocks_agree("store", -600.0)
    assert late is not None
    assert "-600 s" in late.seen
