"""States on disk, in a stream and slice by slice: the same rows in the same order, to the bit."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.road import ask_eyas, eyas, start_eyas

CLOCK = {"seconds", "rows_per_second", "tokens_per_second", "data_wait_share"}
# Of the states of all rows, which take about 1.4 MB.
SLICE = "capture.max_bytes=700000"


def lines_of(run: Path) -> list[dict]:
    lines = (run / "training" / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(one).items() if k not in CLOCK} for one in lines]


def learned(run: Path) -> bytes:
    return (run / "training" / "weights.safetensors").read_bytes()


def events_of(run: Path, kind: str) -> list[dict]:
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    return [one for one in lines if one["event"] == kind]


def steps_of(run: Path) -> int:
    path = run / "training" / "metrics.jsonl"
    return path.read_text().count('"kind": "train"') if path.exists() else 0


def kill_one(ancestor: int, words: str, *, when: Callable[[], bool]) -> None:
    """SIGKILL a descendant whose command line has these words, as soon as the time has come."""
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        family = psutil.Process(ancestor).children(recursive=True)
        found = [one for one in family if words in " ".join(command_of(one))]
        if found and when():
            found[0].kill()
            return
        time.sleep(0.05)
    raise AssertionError(f"nothing to kill that has {words} in its command line")


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def run_on(recipe: Path, run: Path, stage: str, *settings: str) -> None:
    """Train and export once more in a copy of the run, from a stage on."""
    words = [word for one in (f"run_folder={run}", *settings) for word in ("--set", one)]
    outcome = eyas("run", recipe, *words, "--from", stage, "--until", "export")
    assert outcome.returncode == 0, outcome.stderr[-4000:]


def assert_proved_without_shards(run: Path) -> None:
    assert not list((run / "features").glob("*.safetensors"))
    proved = ask_eyas("verify", run, "--json")
    assert proved.returncode == 0, proved.stdout
    checks = {one["name"]: one for one in json.loads(proved.stdout)["checks"]}
    assert checks["features: rows"]["outcome"] == "passed"
    assert "not kept" in checks["features: states"]["detail"]


def test_a_stream_teaches_the_same_though_its_worker_and_server_die(finished, tmp_path):
    recipe, _ = finished
    run = shutil.copytree(recipe.parent / "run", tmp_path / "run")
    shutil.rmtree(run / "training")
    settings = ("--set", f"run_folder={run}", "--set", "capture.mode=streaming")
    process = start_eyas("run", recipe, *settings, "--from", "capture", "--until", "export")
    try:
        kill_one(process.pid, "StreamWorker", when=lambda: steps_of(run) > 1)
        seen = steps_of(run)
        kill_one(process.pid, "actors.reference", when=lambda: steps_of(run) > seen)
        assert process.wait(timeout=300) == 0
    finally:
        process.kill()
        process.wait()
    assert learned(run) == learned(recipe.parent / "run")
    assert lines_of(run) == lines_of(recipe.parent / "run")
    assert_proved_without_shards(run)


def test_slices_teach_the_same(finished, tmp_path):
    recipe, _ = finished
    disk, run = (
        shutil.copytree(recipe.parent / "run", tmp_path / name) for name in ("disk", "slices")
    )
    run_on(recipe, disk, "train", "train.epochs=1")
    run_on(recipe, run, "capture", "train.epochs=1", "capture.mode=chunked", SLICE)
    assert learned(run) == learned(disk)
    assert len(events_of(run, "slice_captured")) > 1
    assert lines_of(run) == lines_of(disk)
    assert_proved_without_shards(run)
