"""Bad input as a user meets it: a clear message, the documented exit code, nothing half-written."""

import json
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.support.road import ask_eyas, write_recipe


@pytest.fixture
def recipe(tmp_path, tiny_target) -> Path:
    return write_recipe(tmp_path, tiny_target)


def refused(outcome: subprocess.CompletedProcess[str], code: int, *names: str) -> None:
    assert outcome.returncode == code, outcome.stderr
    for name in (*names, "expected:", "change:"):
        assert name in outcome.stderr
    assert "Traceback" not in outcome.stderr


def append(path: Path, line: str) -> None:
    with path.open("a") as lines:
        lines.write(line + "\n")


def test_an_unknown_key(recipe):
    refused(ask_eyas("run", recipe, "--set", "train.epoch=2"), 2, "train.epoch")
    assert not (recipe.parent / "run").exists()


def test_a_wrong_type(recipe):
    refused(ask_eyas("run", recipe, "--set", "train.epochs=many"), 2, "train.epochs", "many")


def test_a_missing_recipe(tmp_path):
    refused(ask_eyas("run", tmp_path / "none.yaml"), 2, "none.yaml")


def test_a_missing_argument_is_a_usage_error():
    outcome = ask_eyas("run")
    assert outcome.returncode == 2
    assert "RECIPE" in outcome.stderr


def test_a_missing_source_file(recipe):
    (recipe.parent / "train.jsonl").unlink()
    refused(ask_eyas("prepare", recipe), 2, "train.jsonl")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [{"role": "user", ', "malformed_json"),
        ('{"messages": [{"role": "wizard", "content": "hi"}]}', "wizard"),
        (json.dumps({"messages": [{"role": "user", "content": "long " * 400}]}), "prompt_too_long"),
        ('{"messages": []}', "messages"),
    ],
    ids=["malformed", "unknown-role", "longer-than-the-context", "empty"],
)
def test_a_bad_prompt_is_named_by_file_and_line(recipe, line: str, reason: str):
    append(recipe.parent / "train.jsonl", line)
    refused(ask_eyas("prepare", recipe), 2, "train.jsonl", "41", reason)
    assert not (recipe.parent / "run" / "prompts").exists()


def test_bad_prompts_can_be_kept_aside_instead(recipe):
    append(recipe.parent / "train.jsonl", "{torn")
    outcome = ask_eyas("prepare", recipe, "--set", "prompts.on_bad_prompt=reject")
    assert outcome.returncode == 0, outcome.stderr
    assert (recipe.parent / "run" / "prompts" / "_rejected" / "chat.parquet").exists()


def test_an_unwritable_run_folder(recipe):
    (recipe.parent / "file").write_text("in the way")
    outcome = ask_eyas("run", recipe, "--set", f"run_folder={recipe.parent / 'file' / 'run'}")
    refused(outcome, 3, "cannot be written")


def test_a_target_without_a_tokenizer(recipe, tiny_target, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_target, bare)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (bare / name).unlink()
    refused(ask_eyas("run", recipe, "--set", f"target.path={bare}"), 3, "tokenizer")
    assert not (recipe.parent / "run" / "prompts").exists()


def test_a_missing_target(recipe, tmp_path):
    refused(ask_eyas("run", recipe, "--set", f"target.path={tmp_path / 'lost'}"), 3, "lost")


def test_a_stage_before_its_time(recipe):
    refused(ask_eyas("train", recipe), 3, "prepare")


def test_a_port_in_use(tiny_target):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = ask_eyas("serve", tiny_target, "--port", str(port))
    assert outcome.returncode == 3
    assert str(port) in outcome.stderr
    assert "Traceback" not in outcome.stderr
