"""How servers are called: the embedded engine, and SGLang."""

import os
from pathlib import Path

import pytest

from actors.config import EmbeddedServers
from actors.launch import (
    EngineOptions,
    StartPlan,
    embedded_command,
    embedded_environment,
    launched_command,
    launched_environment,
)
from actors.launch_capture import CaptureOptions, hook_home
from tests.support.fake_sglang import fake_servers

CONFIG = EmbeddedServers(
    kind="embedded",
    count=1,
    dtype="float32",
    device="cpu",
    threads_per_server=2,
    max_running_requests=8,
)
READY = Path("/logs/r")


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
    command = embedded_command(CONFIG, Path("/t"), EngineOptions(), READY, port=7)
    assert options_of(command) == {
        "--target": ["/t"],
        "--host": ["127.0.0.1"],
        "--port": ["7"],
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
        capture=CaptureOptions(Path("/dev/shm/x"), (1, 14, 26)),
        context_length=99,
    )
    found = options_of(embedded_command(CONFIG, Path("/t"), options, READY, port=0))
    assert found["--draft"] == ["/d"]
    assert found["--speculative-num-steps"] == ["3"]
    assert found["--capture-folder"] == ["/dev/shm/x"]
    assert found["--capture-layer-ids"] == ["1", "14", "26"]
    assert found["--context-length"] == ["99"]


@pytest.mark.parametrize("half", [{"draft": Path("/d")}, {"draft_steps": 3}])
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


def test_sglang_is_called_with_ours_first_and_then_the_recipes(tmp_path):
    arguments = {"sleep-on-idle": True, "cuda-graph-bs-decode": (1, 2), "mem-fraction-static": 0.8}
    config = fake_servers(tmp_path, arguments=arguments, tensor_parallel_size=4)
    options = EngineOptions(context_length=99)
    command = launched_command(config, Path("/t"), options, "10.0.0.5", 31000)
    assert command[1:] == [
        *("-m", "sglang.launch_server"),
        *("--model-path", "/t"),
        *("--host", "10.0.0.5"),
        *("--port", "31000"),
        *("--tp-size", "4"),
        *("--device", "cpu"),
        *("--context-length", "99"),
        *("--fake-starts", str(tmp_path / "starts")),
        "--sleep-on-idle",
        *("--cuda-graph-bs-decode", "1", "2"),
        *("--mem-fraction-static", "0.8"),
    ]


def test_sglang_lives_in_its_own_environment(tmp_path):
    config = fake_servers(tmp_path, environment={"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": "/s"})
    inherited = {
        "PYTHONPATH": "/ours",
        "VIRTUAL_ENV": "/ours/.venv",
        "RAY_ADDRESS": "x",
        "EYAS_API_KEY": "x",
        "CUDA_VISIBLE_DEVICES": "3",
        "HF_TOKEN": "theirs",
    }
    assert launched_environment(config, inherited) == {
        "CUDA_VISIBLE_DEVICES": "3",
        "HF_TOKEN": "theirs",
        "PYTHONUNBUFFERED": "1",
        "SGLANG_USE_CPU_ENGINE": "1",
        "PYTHONPATH": "/s",
    }


def test_drafts_are_not_for_launched_servers(tmp_path):
    options = EngineOptions(draft=Path("/d"), draft_steps=3)
    with pytest.raises(ValueError, match="embedded"):
        launched_command(fake_servers(tmp_path), Path("/t"), options, "127.0.0.1", 1)


def test_a_launched_server_that_captures_finds_the_hook_before_all_else_and_nothing_of_ours(
    tmp_path,
):
    capture = CaptureOptions(tmp_path, (1, 2, 3), (1, 2, 3), nonce="n")
    options = EngineOptions(capture=capture, context_length=99)
    config = fake_servers(tmp_path, environment={"PYTHONPATH": "/s"})
    found = launched_environment(config, {"PYTHONPATH": "/ours"}, options)
    assert found["PYTHONPATH"].split(os.pathsep) == [str(hook_home(tmp_path)), "/s"]
    assert found["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
    bare = launched_environment(fake_servers(tmp_path, environment={}), {}, options)
    assert bare["PYTHONPATH"] == str(hook_home(tmp_path))
    command = launched_command(config, Path("/t"), options, "127.0.0.1", 1)
    # The recipe's options follow ours, and none of them was refused.
    assert command.index("--forward-hooks") < command.index("--fake-starts")


def test_both_run_under_a_guard_that_sees_nothing_of_their_environment(tmp_path):
    for config in (CONFIG, fake_servers(tmp_path)):
        plan = StartPlan("generate-0", config, Path("/t"), EngineOptions(), tmp_path)
        command = plan.command("127.0.0.1", 7)
        assert command[1] == "-I"
        assert Path(command[2]).samefile(Path(__file__).parents[2] / "actors" / "guard.py")
        assert command[3] == "--"
        assert plan.log == tmp_path / "generate-0.log"
        assert (plan.ready_file is None) == (config is not CONFIG)
        assert "PYTHONPATH" in plan.environment({})
