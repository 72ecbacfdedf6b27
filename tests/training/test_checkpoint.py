"""Checkpoints are whole or absent, and never used where they do not belong."""

from pathlib import Path

import pytest
import torch

from training import checkpoint
from training.checkpoint import CheckpointFault, Snapshot


def snapshot(step: int, **changes) -> Snapshot:
    tensors = {"fc.weight": torch.full((2, 3), float(step)), "norm.weight": torch.ones(3)}
    values = {
        "step": step,
        "fingerprint": "run",
        "seconds": 1.5,
        "weights": tensors,
        "exp_avg": tensors,
        "exp_avg_sq": tensors,
        "ema": {},
    }
    return Snapshot(**(values | changes))


def test_the_newest_is_loaded_and_only_so_many_are_kept(tmp_path: Path):
    assert checkpoint.load_newest(tmp_path, fingerprint="run") is None
    for step in (9, 10, 100):
        checkpoint.save(tmp_path, snapshot(step), kept=2)
    assert [path.name for path in checkpoint.complete(tmp_path)] == [
        "step-00000010",
        "step-00000100",
    ]
    loaded = checkpoint.load_newest(tmp_path, fingerprint="run")
    assert loaded is not None
    assert (loaded.step, loaded.seconds, loaded.ema) == (100, 1.5, {})
    assert torch.equal(loaded.weights["fc.weight"], torch.full((2, 3), 100.0))


def test_a_half_written_one_is_not_seen_and_is_swept_away(tmp_path: Path):
    checkpoint.save(tmp_path, snapshot(1), kept=2)
    (tmp_path / ".step-00000002.tmp").mkdir()
    loaded = checkpoint.load_newest(tmp_path, fingerprint="run")
    assert loaded is not None
    assert loaded.step == 1
    checkpoint.save(tmp_path, snapshot(3), kept=2)
    assert not (tmp_path / ".step-00000002.tmp").exists()


def test_the_same_step_may_be_saved_again(tmp_path: Path):
    checkpoint.save(tmp_path, snapshot(1), kept=1)
    checkpoint.save(tmp_path, snapshot(1, seconds=2.0), kept=1)
    loaded = checkpoint.load_newest(tmp_path, fingerprint="run")
    assert loaded is not None
    assert loaded.seconds == 2.0


@pytest.mark.parametrize("part", ["weights", "exp_avg", "exp_avg_sq", "ema", "state"])
def test_a_damaged_part_is_named_and_not_skipped(tmp_path: Path, part: str):
    checkpoint.save(tmp_path, snapshot(1), kept=2)
    path = checkpoint.save(tmp_path, snapshot(2), kept=2)
    (path / (f"{part}.json" if part == "state" else f"{part}.safetensors")).write_bytes(b"\x00" * 9)
    with pytest.raises(CheckpointFault, match="step-00000002 cannot be read"):
        checkpoint.load_newest(tmp_path, fingerprint="run")


def test_one_of_other_data_is_refused(tmp_path: Path):
    checkpoint.save(tmp_path, snapshot(1), kept=2)
    with pytest.raises(CheckpointFault, match="other data or another recipe"):
        checkpoint.load_newest(tmp_path, fingerprint="other")
