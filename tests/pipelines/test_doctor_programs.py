"""Other programs are asked by a process of their own; what they cannot say is a finding."""

import sys
from pathlib import Path

import pytest

from actors.config import LaunchedServers
from pipelines import doctor_programs
from pipelines.doctor_programs import check_sglang, check_token, join_cluster
from pipelines.recipe import Recipe, load_recipe
from tests.support.road import write_recipe

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return load_recipe(write_recipe(tmp_path, tmp_path / "target"))


def launching(recipe: Recipe, python: str, folder: Path) -> Recipe:
    """The recipe with launched servers, whose packages are those of `folder`."""
    servers = LaunchedServers(
        kind="launch",
        count=1,
        python=python,
        tensor_parallel_size=1,
        device="cpu",
        environment={"PYTHONPATH": str(folder)},
    )
    generate = recipe.generate.model_copy(update={"servers": servers})
    return recipe.model_copy(update={"generate": generate})


@pytest.mark.parametrize(("version", "outcome"), [("0.5.23", "pass"), ("0.5.9", "fail")])
def test_the_version_is_that_of_the_recipes_own_environment(tmp_path, recipe, version, outcome):
    facts = tmp_path / "packages" / f"sglang-{version}.dist-info" / "METADATA"
    facts.parent.mkdir(parents=True)
    facts.write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (found,) = check_sglang(launching(recipe, sys.executable, tmp_path / "packages"))
    assert found.outcome == outcome
    assert version in found.seen


def test_an_environment_without_sglang_and_one_that_is_not_there_are_named(tmp_path, recipe):
    (found,) = check_sglang(launching(recipe, sys.executable, tmp_path))
    assert "has none" in found.seen
    (found,) = check_sglang(launching(recipe, "/no/such/python", tmp_path))
    assert "cannot be asked" in found.seen
    assert found.outcome == "fail"


def test_recipes_without_launched_servers_need_no_sglang(recipe):
    assert list(check_sglang(recipe)) == []


@pytest.mark.parametrize(
    ("address", "environment", "outcome", "words"),
    [
        (None, {}, "pass", "makes one"),
        (None, {"RAY_AUTH_MODE": "disabled"}, "pass", "this machine only"),
        (None, {"RAY_AUTH_TOKEN_PATH": "/no/such/file"}, "fail", "/no/such/file"),
        ("10.0.0.1:6379", {}, "fail", "auth_token"),
        ("10.0.0.1:6379", {"RAY_AUTH_MODE": "disabled"}, "warn", "may run code"),
        ("10.0.0.1:6379", {"RAY_AUTH_TOKEN": TOKEN}, "pass", "from RAY_AUTH_TOKEN"),
        ("10.0.0.1:6379", {"RAY_AUTH_TOKEN": ""}, "fail", "auth_token"),
    ],
)
def test_the_token_is_looked_for_where_ray_looks(tmp_path, address, environment, outcome, words):
    found = check_token(address, environment, tmp_path)
    assert found.outcome == outcome
    assert words in found.seen
    assert TOKEN not in f"{found}"


def test_a_token_file_is_named_and_not_shown(tmp_path):
    path = tmp_path / ".ray" / "auth_token"
    path.parent.mkdir()
    path.write_text(TOKEN)
    found = check_token("10.0.0.1:6379", {}, tmp_path)
    assert found.outcome == "pass"
    assert str(path) in found.seen
    assert TOKEN not in f"{found}"


@pytest.mark.usefixtures("local_ray")
def test_a_cluster_is_joined_and_its_nodes_are_counted():
    import ray

    found, nodes = join_cluster(ray.get_runtime_context().gcs_address)
    assert found.outcome == "pass", found
    assert nodes is not None
    assert list(nodes.values()) == [0]


def test_an_address_where_no_cluster_is_fails(monkeypatch):
    monkeypatch.setattr(doctor_programs, "_PROGRAM_SECONDS", 5.0)
    found, nodes = join_cluster("127.0.0.1:9")
    assert (found.outcome, nodes) == ("fail", None)
    assert "127.0.0.1:9" in found.seen


def test_what_ray_says_is_shown_without_its_token(monkeypatch):
    monkeypatch.setattr(doctor_programs, "_JOIN", f"raise SystemExit('refused {TOKEN}')")
    found, _ = join_cluster("127.0.0.1:9")
    assert found.seen == "127.0.0.1:9: refused ..."
