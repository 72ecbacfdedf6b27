"""The training benchmark's parts: its batches, its check of the peer, its process that steps."""

import dataclasses
import statistics
from pathlib import Path

import pytest
import torch

from benchmarks.train import Side, ask, mixed_lengths, must_agree, peak_of, seconds_of, stepping
from benchmarks.train_case import Case, StepCost, make_rows, target_head

CASE = Case((40, 24), 0.5, "float32", 1)
COST = StepCost(1.0, 100, 3.0, 2.0)


def test_a_case_survives_a_command_line():
    assert Case.parse(CASE.json()) == CASE


def test_the_target_chooses_the_tokens_itself_and_most_are_in_the_draft_vocabulary():
    case = dataclasses.replace(CASE, lengths=(300,))
    (row,) = make_rows(case)
    head, used = target_head()
    assert int(row.loss_mask.sum()) == 150
    assert not row.loss_mask[:150].any()
    chosen = (row.last[:-1].float() @ head.T).argmax(-1)
    assert (chosen == row.input_ids[1:]).float().mean() > 0.95
    assert 0.9 < torch.isin(row.input_ids, used).float().mean() < 1


def test_mixed_lengths_are_lognormal():
    lengths = mixed_lengths(100_000)
    assert sum(lengths) == pytest.approx(100_000, rel=0.02)
    assert statistics.median(lengths) == pytest.approx(200, abs=2)
    assert lengths[0] > 4 * 200


def test_other_numbers_than_the_peers_end_the_run():
    must_agree(COST, dataclasses.replace(COST, loss=3.0001), 1e-4)
    with pytest.raises(RuntimeError, match="loss"):
        must_agree(COST, dataclasses.replace(COST, loss=3.001), 1e-4)
    with pytest.raises(RuntimeError, match="grad_norm"):
        must_agree(COST, dataclasses.replace(COST, grad_norm=float("nan")), 1e-4)


def test_the_first_step_is_not_judged():
    costs = [dataclasses.replace(COST, cpu_seconds=99.0, peak_bytes=10**9), COST, COST]
    assert (seconds_of(costs), peak_of(costs)) == (1.0, 100)


def test_a_process_answers_each_line_with_a_cost_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "stepper.py").write_text(
        "from benchmarks import train_case\n"
        "losses = iter([1.0, 2.0])\n"
        "def step():\n"
        "    bytearray(b'x' * (50 << 20))\n"
        "    return next(losses), 0.5\n"
        "def prepare(case):\n"
        "    print(case)\n"
        "    return step\n"
        "train_case.answer(prepare)\n"
    )
    with stepping(Side("stepper", None, {}), CASE) as process:
        first, second = ask(process), ask(process)
        assert (first.loss, second.loss, first.grad_norm) == (1.0, 2.0, 0.5)
        assert first.peak_bytes > 50 << 20
        assert first.cpu_seconds > 0
        with pytest.raises(RuntimeError, match="ended with code 1"):
            ask(process)
