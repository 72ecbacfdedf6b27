"""The loop of one worker: resume, metrics, faults, and one run through Ray Train."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.one_rank import one_rank
from tests.support.tiny_training import DRAFT, random_rows, tiny_job, write_features
from training import checkpoint
from training.checkpoint import CheckpointFault
from training.engine import TrainingFault
from training.loop import STOP_FILE, TrainJob, _fault_in, launch, train_rows
from training.packing import split_rows

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


def train(job: TrainJob, **more) -> None:
    with one_rank():
        train_rows(job, rank=0, world=1, device=CPU, **more)


def metrics(job: TrainJob) -> list[dict]:
    return [json.loads(line) for line in (Path(job.output) / "metrics.jsonl").open()]


def weights(job: TrainJob) -> dict[str, torch.Tensor]:
    return load_file(Path(job.output) / "weights.safetensors")


def in_process(job: TrainJob, fatal_step: int, folder: Path) -> int:
    (folder / "job.json").write_text(job.model_dump_json())
    command = [sys.executable, "-m", "tests.support.train_process", str(folder / "job.json")]
    return subprocess.run([*command, str(fatal_step)], cwd=ROOT, check=False).returncode


def test_a_killed_run_ends_bit_for_bit_as_one_that_was_not(tmp_path: Path, tiny_target: Path):
    whole = tiny_job(tmp_path / "whole", tiny_target)
    killed = tiny_job(tmp_path / "killed", tiny_target)
    train(whole)

    assert in_process(killed, 5, tmp_path) == -9
    assert [path.name for path in checkpoint.complete(Path(killed.checkpoints))] == [
        "step-00000003"
    ]
    assert [line["step"] for line in metrics(killed) if line["kind"] == "train"] == [1, 2, 3, 4, 5]
    train(killed)

    one, other = weights(whole), weights(killed)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    steps = [line["step"] for line in metrics(killed) if line["kind"] == "train"]
    assert steps == list(range(1, steps[-1] + 1))
    timeless = [
        [{key: line.get(key) for key in ("step", "kind", "loss", "grad_norm", "counts", "overall")}]
        for job in (whole, killed)
        for line in metrics(job)
    ]
    assert timeless[: len(timeless) // 2] == timeless[len(timeless) // 2 :]


def test_the_outputs_say_what_was_trained(tmp_path: Path, tiny_target: Path):
    job = tiny_job(tmp_path, tiny_target)
    train(job)
    summary = json.loads((tmp_path / "training" / "summary.json").read_text())
    rows = random_rows(18)
    split = split_rows([row.sample_id for row in rows], job.train.heldout_share)
    assert split.heldout
    lengths = [min(40, len(rows[row].input_ids)) for row in split.train]
    assert summary["samples"] == len(split.train)
    assert summary["tokens_trained"] == 2 * sum(lengths)
    assert summary["cut_samples"] == sum(len(row.input_ids) > 40 for row in rows) > 0
    assert set(summary["heldout"]["domains"]) == {rows[row].domain for row in split.heldout}
    domains = summary["heldout"]["domains"].values()
    together = [sum(d["counts"]["rows"][k] for d in domains) for k in range(3)]
    assert together == summary["heldout"]["overall"]["counts"]["rows"]
    assert "embed_tokens.weight" not in weights(job)
    assert weights(job)["lm_head.weight"].dtype == torch.float32
    trained = [line for line in metrics(job) if line["kind"] == "train"]
    assert trained[-1]["loss"] < trained[0]["loss"]


def test_a_finished_run_is_not_trained_again(tmp_path: Path, tiny_target: Path):
    job = tiny_job(tmp_path, tiny_target)
    train(job)
    before = weights(job)
    (tmp_path / "training" / "weights.safetensors").unlink()
    seen: list[int] = []
    train(job, on_step=seen.append)
    assert seen == []
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(job).items())


def test_a_stop_writes_a_checkpoint_at_that_very_step(tmp_path: Path, tiny_target: Path):
    job = tiny_job(tmp_path, tiny_target)
    (tmp_path / "training").mkdir()

    def stop(step: int) -> None:
        if step == 1:
            (tmp_path / "training" / STOP_FILE).touch()

    train(job, on_step=stop)
    snapshot = checkpoint.load_newest(Path(job.checkpoints), fingerprint="tiny")
    assert snapshot is not None
    assert snapshot.step == 2
    assert not (tmp_path / "training" / "weights.safetensors").exists()


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_samples(
    tmp_path: Path, tiny_target: Path
):
    rows = random_rows(6)
    for row in rows:
        row.last[:] = 3e38  # finite as stored; its logits are not
    write_features(tmp_path / "features", rows)
    with pytest.raises(TrainingFault, match="chat-000"):
        train(tiny_job(tmp_path, tiny_target))
    assert checkpoint.complete(tmp_path / "checkpoints") == []


def test_an_unreadable_checkpoint_stops_the_run(tmp_path: Path, tiny_target: Path):
    job = tiny_job(tmp_path, tiny_target)
    broken = tmp_path / "checkpoints" / "step-00000004"
    broken.mkdir(parents=True)
    (broken / "state.json").write_text("{")
    with pytest.raises(CheckpointFault, match="step-00000004 cannot be read"):
        train(job)


def test_only_a_fault_that_would_repeat_is_not_tried_again():
    wrapped = RuntimeError("worker")
    wrapped.__cause__ = TrainingFault("loss nan")
    assert _fault_in([wrapped]) == "loss nan"
    assert _fault_in([RuntimeError("the worker died")]) is None


@pytest.mark.usefixtures("local_ray")
def test_ray_train_with_two_workers_agrees_with_one(tmp_path: Path, tiny_target: Path):
    one = tiny_job(tmp_path / "one", tiny_target, epochs=1)
    two = tiny_job(tmp_path / "two", tiny_target, epochs=1, workers=2, zero_stage=2)
    train(one)
    with ThreadPoolExecutor(1) as pool:  # in the main thread Ray Train would take over SIGINT
        pool.submit(launch, two).result()
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(two)[name], tensor, atol=2e-4, rtol=1e-3)
    assert [line["counts"] for line in metrics(one) if line["kind"] == "train"] == [
        line["counts"] for line in metrics(two) if line["kind"] == "train"
    ]
    assert not (tmp_path / "two" / "checkpoints" / "_ray").exists()
    assert DRAFT.draft_vocab_size == len(weights(two)["lm_head.weight"])
