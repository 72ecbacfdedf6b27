"""The train stage: what it makes, what it takes up again, and what it refuses."""

import json
import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines import train as stage
from pipelines.errors import PreflightFailed, QualityStop
from pipelines.telemetry import EventLog
from pipelines.train import train
from tests.support.tiny_run import tiny_run
from tests.support.tiny_training import random_rows, write_features
from training import draft_vocab
from training.checkpoint import complete
from training.engine import TrainingFault

SMALL = ("train.epochs=2", "train.checkpoint_every_steps=2", "train.log_every_steps=1")


def make(folder: Path, target: Path, *overrides: str, samples: int = 12):
    recipe, run = tiny_run(folder, target, *SMALL, *overrides)
    write_features(run.features, random_rows(samples))
    return recipe, run, EventLog(run)


def events(run) -> list[dict]:
    return [json.loads(line) for line in run.events.open()]


@pytest.mark.usefixtures("local_ray")
def test_features_become_weights_vocabulary_metrics_and_a_summary(
    tmp_path: Path, tiny_target: Path, caplog: pytest.LogCaptureFixture
):
    recipe, run, log = make(tmp_path, tiny_target)
    with caplog.at_level(logging.INFO):
        summary = train(recipe, run, log)
    written = json.loads((run.training / "summary.json").read_text())
    assert summary == {"headline": summary["headline"], **written}
    assert f"{written['steps']} steps" in summary["headline"]
    weights = load_file(run.training / "weights.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())
    vocab = draft_vocab.load(run.draft_vocab)
    assert len(vocab.used) == len(weights["lm_head.weight"])
    assert summary["draft_vocab_coverage"] == pytest.approx(vocab.coverage)
    named = [one["event"] for one in events(run)]
    assert (named[0], named[-1]) == ("train_started", "train_finished")
    assert named.count("heldout_measured") == 2
    assert any("AL" in record.getMessage() for record in caplog.records)
    assert len(complete(run.checkpoints)) <= recipe.train.checkpoints_kept


def launches(monkeypatch: pytest.MonkeyPatch, effect=None) -> list:
    """Replace the Ray job; return the jobs that were launched."""
    seen = []

    def launch(job, streams):
        assert streams is None, "states are on disk here"
        seen.append(job)
        summary = {
            "steps": 1,
            "seconds": 0.0,
            "rows_trained": 8,
            "heldout": {"overall": {"acceptance_length": None}},
        }
        (Path(job.output) / "summary.json").write_text(json.dumps(summary))
        if effect:
            effect(job)

    monkeypatch.setattr(stage, "launch", launch)
    return seen


def test_the_vocabulary_is_used_again_only_for_the_same_data(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
):
    jobs = launches(monkeypatch)
    recipe, run, log = make(tmp_path, tiny_target)
    train(recipe, run, log)
    written = run.draft_vocab.stat().st_mtime_ns
    train(recipe, run, log)
    assert run.draft_vocab.stat().st_mtime_ns == written
    write_features(run.features, random_rows(14))
    train(recipe, run, log)
    assert run.draft_vocab.stat().st_mtime_ns != written
    assert jobs[0].fingerprint == jobs[1].fingerprint != jobs[2].fingerprint


def test_how_the_work_is_cut_does_not_change_what_a_checkpoint_belongs_to(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
):
    jobs = launches(monkeypatch)
    for number, override in enumerate(
        ("train.workers=1", "train.workers=2", "train.zero_stage=3", "train.seed=99")
    ):
        recipe, run, log = make(tmp_path / str(number), tiny_target, override)
        train(recipe, run, log)
    prints = [job.fingerprint for job in jobs]
    assert prints[0] == prints[1] == prints[2] != prints[3]


def test_a_checkpoint_of_other_data_stops_the_stage_and_says_so(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
):
    from training.checkpoint import CheckpointFault

    def refuse(_job):
        raise CheckpointFault("belongs to other data")

    launches(monkeypatch, refuse)
    recipe, run, log = make(tmp_path, tiny_target)
    with pytest.raises(PreflightFailed, match="other data"):
        train(recipe, run, log)


def test_a_loss_that_is_no_number_is_a_quality_stop(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
):
    def explode(_job):
        raise TrainingFault("step 4: loss nan; this rank's samples: chat-1")

    launches(monkeypatch, explode)
    recipe, run, log = make(tmp_path, tiny_target)
    with pytest.raises(QualityStop, match="chat-1"):
        train(recipe, run, log)


def test_missing_features_are_a_failed_preflight(tmp_path: Path, tiny_target: Path):
    recipe, run = tiny_run(tmp_path, tiny_target)
    with pytest.raises(PreflightFailed, match="run the capture stage"):
        train(recipe, run, EventLog(run))


def test_an_interrupt_asks_the_workers_to_stop_and_waits_for_them(
    tmp_path: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch
):
    stopped = threading.Event()

    def work(job):
        stop = Path(job.output) / "stop"
        os.kill(os.getpid(), signal.SIGINT)
        waiting = threading.Event()
        while not stop.exists():
            waiting.wait(0.01)
        stopped.set()

    launches(monkeypatch, work)
    recipe, run, log = make(tmp_path, tiny_target)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, run, log)
    assert stopped.is_set()
    assert not (run.training / "stop").exists()
