"""The whole examination: of this very machine, in 80 columns, as JSON, with its exit code."""

import io
import json

import pytest
from rich.console import Console

from pipelines.doctor import doctor, render
from pipelines.recipe import load_recipe
from tests.support.machines import machine
from tests.support.road import ask_eyas, write_recipe


@pytest.fixture
def recipe_path(tmp_path, tiny_target):
    return write_recipe(tmp_path, tiny_target)


def shown(report) -> str:
    console = Console(file=io.StringIO(), width=80, record=True, no_color=True)
    render(report, console)
    return console.export_text()


def test_a_good_machine_is_ready_for_the_run_and_nothing_of_it_was_begun(tmp_path, recipe_path):
    before = sorted(tmp_path.rglob("*"))
    report = doctor(load_recipe(recipe_path), machine())
    assert [one for one in report.findings if one.outcome != "pass"] == []
    assert report.is_ready
    names = {one.name for one in report.findings}
    assert {"python", "packages", "profile", "prompts: chat", "run folder", "disk"} <= names
    assert sorted(tmp_path.rglob("*")) == before


def test_warnings_let_a_run_start_and_failures_do_not(recipe_path):
    recipe = load_recipe(recipe_path)
    assert doctor(recipe, machine(shared_memory=None)).is_ready
    assert not doctor(recipe, machine(python="3.9.0")).is_ready


def test_the_table_reads_in_80_columns_and_says_what_mends_it(recipe_path):
    report = doctor(
        load_recipe(recipe_path),
        machine(packages={"torch": "2.1.0"}, shared_memory=None, gpu_fault="x" * 300),
    )
    text = shown(report)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "FAIL package torch" in text
    assert "  change:   python -m pip install" in text
    assert "not ready: " in text
    assert "2 failed, 2 warn" in text
    assert shown(doctor(None, machine())).splitlines()[-1].startswith("ready: ")


def test_the_report_is_json():
    data = json.loads(json.dumps(doctor(None, machine(torch=None)).to_json(), allow_nan=False))
    assert data["is_ready"] is False
    assert data["recipe"] is None
    assert {"name", "outcome", "seen", "expected", "change"} == set(data["findings"][0])


def test_a_recipe_whose_target_and_prompts_are_gone_is_examined_to_its_end(tmp_path):
    path = write_recipe(tmp_path, tmp_path / "no-target")
    (tmp_path / "train.jsonl").unlink()
    report = doctor(load_recipe(path), machine())
    failures = {one.name for one in report.findings if one.outcome == "fail"}
    assert failures == {"target", "prompts: chat"}


def test_the_command_examines_this_machine_and_says_so_by_its_exit_code(tmp_path, recipe_path):
    ready = ask_eyas("doctor", recipe_path, "--json")
    assert ready.returncode == 0, ready.stdout + ready.stderr
    assert json.loads(ready.stdout)["is_ready"]
    broken = ask_eyas("doctor", recipe_path, "--set", f"target.path={tmp_path / 'none'}")
    assert broken.returncode == 3
    assert "FAIL target" in broken.stdout
    assert ask_eyas("doctor", tmp_path / "none.yaml").returncode == 2
