"""States on disk, in a stream and slice by slice: the same rows in the same order, to the bit."""

import json
import shutil
from pathlib import Path

from tests.support.road import ask_eyas, eyas

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


def test_a_stream_teaches_the_same(finished, tmp_path):
    recipe, _ = finished
    run = shutil.copytree(recipe.parent / "run", tmp_path / "run")
    run_on(recipe, run, "capture", "capture.mode=streaming")
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
