"""SIGKILL at any stage: the same command goes on, and the rows are those of an undisturbed run."""

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.road import TRAIN_PROMPTS, eyas, start_eyas, write_recipe

# What may differ between two runs of one recipe: where and when, never what.
CIRCUMSTANCE = ["server", "attempt", "queued_ms", "latency_ms", "finished_at"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_target) -> Path:
    recipe = write_recipe(tmp_path_factory.mktemp("calm"), tiny_target)
    outcome = eyas("run", recipe, "--until", "train")
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return recipe.parent / "run"


def test_a_run_killed_in_every_stage_ends_like_one_that_was_not(tmp_path, tiny_target, undisturbed):
    recipe = write_recipe(tmp_path, tiny_target)
    run = recipe.parent / "run"

    _kill_when(recipe, lambda: any(run.glob("responses/_segments/chat/*.arrow")))
    early = _durable_rows(run)
    assert early
    _kill_when(recipe, lambda: any(run.glob("features/shard-*.safetensors")))
    _kill_when(recipe, lambda: any(run.glob("checkpoints/*")))
    outcome = eyas("run", recipe, "--until", "train")
    assert outcome.returncode == 0, outcome.stderr[-4000:]

    rows = _rows(run)
    assert rows.num_rows == TRAIN_PROMPTS
    assert rows.drop_columns(CIRCUMSTANCE).equals(_rows(undisturbed).drop_columns(CIRCUMSTANCE))
    finished = dict(
        zip(rows["sample_id"].to_pylist(), rows["finished_at"].to_pylist(), strict=True)
    )
    assert early.items() <= finished.items(), "a durable row was generated again"
    for made in ("features/index.parquet", "training/weights.safetensors"):
        assert (run / made).read_bytes() == (undisturbed / made).read_bytes(), made
    assert eyas("verify", run).returncode == 0


def _kill_when(recipe: Path, is_time: Callable[[], bool]) -> None:
    """Start the run and SIGKILL its driver as soon as `is_time` holds."""
    process = start_eyas("run", recipe, "--until", "train")
    deadline = time.monotonic() + 120
    while not is_time():
        assert process.poll() is None, "the run ended before its moment came"
        assert time.monotonic() < deadline, "the moment did not come"
        time.sleep(0.01)
    process.kill()
    process.wait()


def _durable_rows(run: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in run.glob("responses/_segments/chat/*.arrow"):
        table = pa.ipc.open_file(path).read_all()
        found |= zip(table["sample_id"].to_pylist(), table["finished_at"].to_pylist(), strict=True)
    return found


def _rows(run: Path) -> pa.Table:
    return pq.read_table(run / "responses" / "chat", partitioning=None)
