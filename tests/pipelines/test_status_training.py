"""Training is told from the last whole lines of its metrics."""

import json

import pytest

from pipelines import status_training
from pipelines.status_training import read_training
from pipelines.store import RunFolder
from tests.support.good_run import STEPS, _train_figures


@pytest.fixture
def lines() -> list[str]:
    return [json.dumps(_train_figures(step, 3)) for step in range(1, 11)]


def run_with(tmp_path, text: str) -> RunFolder:
    run = RunFolder(tmp_path)
    run.training.mkdir()
    (run.training / "metrics.jsonl").write_text(text)
    return run


def test_it_tells_step_loss_and_time_left(tmp_path, lines):
    training = read_training(run_with(tmp_path, "\n".join(lines) + '\n{"kind": "tr'))
    assert training is not None
    assert (training.step, training.total_steps) == (10, STEPS)
    assert training.loss == json.loads(lines[9])["loss"]
    assert training.eta_seconds == pytest.approx((STEPS - 10) * 0.1)


def test_of_a_long_file_only_the_end_is_read(tmp_path, lines, monkeypatch):
    monkeypatch.setattr(status_training, "_TAIL_BYTES", 2 * len(lines[0]))
    training = read_training(run_with(tmp_path, "\n".join(lines) + "\n"))
    assert training is not None
    assert training.step == 10


def test_one_line_tells_no_time_left_and_none_tells_nothing(tmp_path, lines):
    run = run_with(tmp_path, lines[0] + "\n")
    training = read_training(run)
    assert training is not None
    assert training.eta_seconds is None
    (run.training / "metrics.jsonl").write_text('{"kind": "heldout", "step": 1}\n')
    assert read_training(run) is None
