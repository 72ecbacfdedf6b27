"""How the embedded engine is called."""

import os
from pathlib import Path

import pytest

from actors.config import EmbeddedServers
from actors.launch import EngineOptions, embedded_command, embedded_environment

CONFIG = EmbeddedServers(
    kind="embedded",
    count=1,
    dtype="float32",
    device="cpu",
    threads_per_server=2,
    max_running_requests=8,
)


def options_of(command):
    """The engine's options, as pairs of a name and its values."""
    found: dict[str, list[str]] = {}
    for word in command[command.index("actors.reference") + 1 :]:
        if word.startswith("--"):
            found[word] = []
        else:
            found[list(found)[-1]].append(word)
    return found


def test_a_plain_server_gets_what_the_recipe_says():
    command = embedded_command(CONFIG, Path("/t"), EngineOptions(), Path("/logs/r"))
    assert command[1:4] == ["-m", "actors.guard", "--"]
    assert options_of(command) == {
        "--target": ["/t"],
        "--host": ["127.0.0.1"],
        "--port": ["0"],
        "--ready-file": ["/logs/r"],
        "--dtype": ["float32"],
        "--device": ["cpu"],
        "--threads": ["2"],
        "--max-running-requests": ["8"],
    }


def test_draft_and_capture_are_passed_on():
    options = EngineOptions(
        draft=Path("/d"),
        draft_steps=3,
        capture_folder=Path("/dev/shm/x"),
        capture_layer_ids=(1, 14, 26),
        context_length=99,
    )
    found = options_of(embedded_command(CONFIG, Path("/t"), options, Path("/r")))
    assert found["--draft"] == ["/d"]
    assert found["--speculative-num-steps"] == ["3"]
    assert found["--capture-folder"] == ["/dev/shm/x"]
    assert found["--capture-layer-ids"] == ["1", "14", "26"]
    assert found["--context-length"] == ["99"]


@pytest.mark.parametrize(
    "half", [{"draft": Path("/d")}, {"draft_steps": 3}, {"capture_folder": Path("/c")}]
)
def test_half_an_option_is_a_bug(half):
    with pytest.raises(AssertionError):
        EngineOptions(**half)


def test_threads_are_bounded_and_actors_is_found_from_anywhere():
    inherited = {"PYTHONPATH": "/other", "OMP_NUM_THREADS": "64", "HOME": "/h"}
    environment = embedded_environment(CONFIG, inherited)
    assert environment["OMP_NUM_THREADS"] == "2"
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["HOME"] == "/h"
    paths = environment["PYTHONPATH"].split(os.pathsep)
    assert (Path(paths[0]) / "actors" / "guard.py").exists()
    assert paths[1] == "/other"
