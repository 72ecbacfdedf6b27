"""The command: exit codes, data, two paths beside each other, looking again and again."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from pipelines import glance_command
from pipelines.commands import app
from pipelines.glance_command import asked_plainly
from tests.support.faulty_files import HEALTHY, answer, lines

ROOT = Path(__file__).parents[2]


@pytest.fixture
def healthy(tmp_path) -> Path:
    path = tmp_path / "healthy.jsonl"
    path.write_bytes(lines(HEALTHY))
    return path


@pytest.fixture
def sick(tmp_path) -> Path:
    path = tmp_path / "sick.jsonl"
    rows = [answer(n, reasoning="", content=f"<think>so {n}</think> {n}") for n in range(20)]
    path.write_bytes(lines(rows))
    return path


def run(*arguments: object):
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, ["glance", *map(str, arguments)])


def test_strict_ends_with_4_where_there_is_a_fault_and_only_there(healthy, sick):
    assert run(healthy, "--strict").exit_code == 0
    assert run(sick).exit_code == 0
    assert run(sick, "--strict").exit_code == 4
    assert run(healthy, sick, "--strict").exit_code == 4


def test_json_is_one_object_with_everything_that_the_screen_says(sick):
    done = run(sick, "--json")
    data = json.loads(done.stdout)
    (one,) = data["sets"]
    assert not data["is_healthy"]
    assert one["findings"][0]["name"] == "reasoning_inside_content"
    assert one["alive"]["writers"] == []
    assert one["responses"]["usage"] == {"ok": 20}
    assert data["comparison"] is None


def test_the_screen_answers_in_order_within_80_columns(sick):
    shown = run(sick).stdout.splitlines()
    assert max(map(cell_len, shown)) <= 80
    starts = [line.split(" ")[0] for line in shown]
    places = [
        starts.index(word) for word in ("verdict", "alive", "what", "field", "tokens", "FAULT")
    ]
    assert places == sorted(places)


def test_two_paths_stand_beside_each_other(healthy, sick):
    done = run(healthy, sick)
    rows = {line[:32].strip(" *"): line for line in done.stdout.splitlines()}
    assert rows["with reasoning"].split()[-2:] == ["100%", "0%"]
    assert rows["with reasoning"].startswith("*")
    assert "reasoning_inside_content" in done.stdout
    beside = json.loads(run(healthy, sick, "--json").stdout)["comparison"]
    assert {"what": "rows", "first": "40", "second": "20"} in beside
    assert max(map(cell_len, done.stdout.splitlines())) <= 80


def test_one_field_is_looked_into(healthy):
    text = run(healthy, "--field", "usage.completion_tokens").stdout
    assert "p50 37" in text
    assert "nowhere" in text
    assert "#" in text


def test_no_text_of_a_row_is_shown_unless_it_is_asked_for(healthy):
    for arguments in ((), ("--json",), ("--full",), ("--field", "content")):
        assert "First I think about" not in run(healthy, *arguments).stdout
        assert "The answer is" not in run(healthy, *arguments).stdout
    shown = run(healthy, "--show", "2").stdout
    assert shown.count("[reasoning]") == shown.count("[content]") == shown.count("[tokens]") == 2


def test_watching_looks_again_and_tells_the_speed(healthy, monkeypatch):
    looks = []

    def grow(_seconds: float) -> None:
        looks.append(True)
        if len(looks) == 2:
            raise KeyboardInterrupt
        with healthy.open("ab") as handle:
            handle.write(lines([answer(n) for n in range(100, 150)]))

    monkeypatch.setattr(time, "sleep", grow)
    done = run(healthy, "--watch")
    assert done.exit_code == 130
    assert "40 rows" in done.stdout
    assert "90 rows" in done.stdout
    assert "growing by" in done.stdout
    assert "rows/s" in done.stdout


def test_languages_are_told_by_a_full_look_only(tmp_path):
    path = tmp_path / "rows.jsonl"
    said = "The weather is fine today, and so we walk along the river to the old mill. "
    path.write_bytes(lines([answer(n, content=f"{said}{n}") for n in range(12)]))
    assert "en 100%" not in run(path).stdout
    assert "en 100%" in run(path, "--full").stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["a.jsonl"],
        ["a.jsonl", "--json", "b.jsonl"],
        ["--full", "a.jsonl", "--show", "3", "--strict"],
        ["--field", "usage.completion_tokens", "a.jsonl", "--watch"],
        ["--show", "1", "--show", "2", "a.jsonl"],
    ],
    ids=" ".join,
)
def test_usual_arguments_mean_what_the_parser_of_all_commands_says(arguments, monkeypatch):
    asked = []
    monkeypatch.setattr(glance_command, "run_glance", lambda one: asked.append(one) or 0)
    assert run(*arguments).exit_code == 0
    assert asked == [asked_plainly(arguments)]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [""],
        ["--json"],
        ["a.jsonl", "--help"],
        ["a.jsonl", "--show"],
        ["a.jsonl", "--show", "many"],
        ["a.jsonl", "--show", "-1"],
        ["a.jsonl", "--show=2"],
        ["a.jsonl", "--field"],
        ["a.jsonl", "--field", "--json"],
        ["a.jsonl", "--fast"],
        ["--", "a.jsonl"],
        ["-"],
    ],
    ids=" ".join,
)
def test_what_is_wrong_or_unusual_is_left_to_the_parser_of_all_commands(arguments):
    assert asked_plainly(arguments) is None


def test_a_look_waits_for_no_library_that_it_does_not_need(healthy):
    heavy = [
        "ray",
        "torch",
        "transformers",
        "pyarrow",
        "numpy",
        "pydantic",
        "typer",
        "rich",
        "yaml",
    ]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({heavy}))\n"
        f"import pipelines.cli as cli; sys.argv = ['eyas', 'glance', {str(healthy)!r}, '--json']\n"
        "cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["sets"][0]["rows"] == 40


def test_the_command_ends_with_the_code_that_its_parser_gives(healthy, sick):
    def code(*arguments: object) -> int:
        command = [sys.executable, "-m", "pipelines.cli", "glance", *map(str, arguments)]
        return subprocess.run(command, cwd=ROOT, capture_output=True).returncode

    assert code(sick, "--strict") == 4
    assert code(healthy, "--strict", "--json") == 0
    assert code(healthy, "--fast") == 2
    assert code(healthy.parent / "nothing") == 2
