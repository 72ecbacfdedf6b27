"""Ctrl-C and SIGKILL: the same command goes on, and the rows are those of an undisturbed run.

SIGKILL while responses come in is `test_chaos`.
"""

import signal
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.support.road import TRAIN_PROMPTS, ask_eyas, eyas, start_eyas, write_recipe

# What may differ between two runs of one recipe: where and when, never what.
CIRCUMSTANCE = ["server", "attempt", "queued_ms", "latency_ms", "finished_at"]


def test_a_run_interrupted_and_killed_ends_like_one_that_was_not(tmp_path, tiny_target, finished):
    recipe = write_recipe(tmp_path, tiny_target)
    run, undisturbed = recipe.parent / "run", finished[0].parent / "run"

    assert _end(recipe, signal.SIGINT, run, "responses/_segments/chat/*.arrow") == 130
    early = _durable_rows(run)
    assert early
    assert not any(run.rglob("*.tmp"))
    for made in ("features/shard-*.safetensors", "checkpoints/*"):
        assert _end(recipe, signal.SIGKILL, run, made) == -signal.SIGKILL
    outcome = eyas("run", recipe, "--until", "train")
    assert outcome.returncode == 0, outcome.stderr[-4000:]

    rows = _rows(run)
    assert rows.num_rows == TRAIN_PROMPTS
    assert rows.drop_columns(CIRCUMSTANCE).equals(_rows(undisturbed).drop_columns(CIRCUMSTANCE))
    finished_at = dict(
        zip(rows["sample_id"].to_pylist(), rows["finished_at"].to_pylist(), strict=True)
    )
    assert early.items() <= finished_at.items(), "a durable row was generated again"
    for made in ("features/index.parquet", "training/weights.safetensors"):
        assert (run / made).read_bytes() == (undisturbed / made).read_bytes(), made
    assert ask_eyas("verify", run).returncode == 0


def _end(recipe: Path, number: signal.Signals, run: Path, made: str) -> int:
    """Start the run and signal its driver as soon as a file `made` is there; its exit code."""
    process = start_eyas("run", recipe, "--until", "train")
    deadline = time.monotonic() + 120
    while not any(run.glob(made)):
        assert process.poll() is None, "the run ended before its moment came"
        assert time.monotonic() < deadline, "the moment did not come"
        time.sleep(0.01)
    process.send_signal(number)
    return process.wait(timeout=60)


def _durable_rows(run: Path) -> dict[str, object]:
    found: dict[str, object] = {}
    for path in run.glob("responses/_segments/chat/*.arrow"):
        table = pa.ipc.open_file(path).read_all()
        found |= zip(table["sample_id"].to_pylist(), table["finished_at"].to_pylist(), strict=True)
    return found


def _rows(run: Path) -> pa.Table:
    return pq.read_table(run / "responses" / "chat", partitioning=None)
