"""DeepSpeed's steps against plain PyTorch's, for every ZeRO stage."""

import copy
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from tests.support.one_rank import one_rank
from tests.support.tiny_training import DRAFT, random_rows, train_config
from training.config import TrainConfig
from training.engine import Engine, ema_decay, learning_rate
from training.features import FeatureRow
from training.model import DraftModel, initial_weights
from training.packing import PackedBatch, pack
from training.ttt import TTTLoss

CPU = torch.device("cpu")
RATES = [0.01, 0.02, 0.005]


def make_loss() -> tuple[TTTLoss, dict[str, torch.Tensor]]:
    dice = torch.Generator().manual_seed(5)
    table = torch.randn(DRAFT.vocab_size, DRAFT.hidden_size, generator=dice)
    used = torch.arange(0, 2 * DRAFT.draft_vocab_size, 2)
    draft = DraftModel(DRAFT)
    draft.load_state_dict({"embed_tokens.weight": table}, strict=False)
    weights = initial_weights(DRAFT, table, used, seed=2)
    return TTTLoss(draft, table, used, steps=3, step_decay=0.8), weights


def make_engine(config: TrainConfig, **more) -> Engine:
    loss, weights = make_loss()
    return Engine(loss, config, more.pop("weights", weights), device=CPU, **more)


def packed(rows: Sequence[FeatureRow]) -> PackedBatch:
    size = DRAFT.target_hidden_size
    return pack(rows, steps=3, aux_size=3 * size, last_size=size)


def micro_batches(step: int, cuts: Sequence[int]) -> tuple[list[PackedBatch], int]:
    rows = random_rows(4, seed=step)
    edges = [0, *cuts, len(rows)]
    batches = [packed(rows[a:b]) for a, b in pairwise(edges)]
    return batches, sum(len(batch.rows) for batch in batches)


def run(engine: Engine, cuts: Sequence[int] = (), steps: Sequence[int] = (0, 1, 2)) -> None:
    for step in steps:
        engine.step(*micro_batches(step, cuts), RATES[step])


def plain_weights(config: TrainConfig) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same three steps without DeepSpeed."""
    loss, weights = make_loss()
    loss.draft.load_state_dict(weights, strict=False)
    named = {name: p for name, p in loss.draft.named_parameters() if p.requires_grad}
    adam = torch.optim.AdamW(
        named.values(), betas=config.adam_betas, weight_decay=config.weight_decay
    )
    norms = []
    for step, rate in enumerate(RATES):
        (batch,), denominator = micro_batches(step, ())
        adam.param_groups[0]["lr"] = rate
        adam.zero_grad()
        (loss(batch)[0] / denominator).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), config.gradient_clip)))
        adam.step()
    return {name: p.detach() for name, p in named.items()}, norms


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_zero_stage_makes_the_steps_that_plain_adamw_makes(stage: int):
    config = train_config(zero_stage=stage)
    expected, norms = plain_weights(config)
    with one_rank():
        engine = make_engine(config)
        for step in range(3):
            result = engine.step(*micro_batches(step, ()), RATES[step])
            assert result.grad_norm == pytest.approx(norms[step], rel=1e-3)
        for name, tensor in engine.weights().items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cutting_a_batch_into_micro_batches_changes_nothing(stage: int):
    config = train_config(zero_stage=stage)
    with one_rank():
        whole, cut = make_engine(config), make_engine(config)
        run(whole)
        run(cut, cuts=(1, 1, 3))  # the second one is empty
        other = cut.weights()
        for name, tensor in whole.weights().items():
            torch.testing.assert_close(other[name], tensor, atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_goes_on_bit_for_bit_from_what_another_gave_out(stage: int, dtype: str):
    config = train_config(zero_stage=stage, dtype=dtype)
    with one_rank():
        first = make_engine(config)
        run(first, steps=(0, 1))
        state = copy.deepcopy((first.weights(), first.moments(), first.averaged_weights()))
        weights, moments, averaged = state
        second = make_engine(config, weights=weights, moments=moments, ema=averaged, step=2)
        for got, given in (
            (second.weights(), weights),
            (second.averaged_weights(), averaged),
            (second.moments()["exp_avg"], moments["exp_avg"]),
            (second.moments()["exp_avg_sq"], moments["exp_avg_sq"]),
        ):
            assert all(torch.equal(got[name], given[name]) for name in given)
        run(first, steps=(2,))
        run(second, steps=(2,))
        for one, other in (
            (first.weights(), second.weights()),
            (first.averaged_weights(), second.averaged_weights()),
        ):
            assert all(torch.equal(one[name], other[name]) for name in one)
        assert any(not torch.equal(one[name], weights[name]) for name in one)


def test_masters_keep_what_bfloat16_would_round_away():
    with one_rank():
        engine = make_engine(train_config(dtype="bfloat16"))
        _, given = make_loss()
        given["fc.weight"] += 1e-4
        precise = make_engine(train_config(dtype="bfloat16"), weights=given).weights()
        assert all(torch.equal(precise[name], given[name]) for name in given)
        run(engine, steps=(0,))
        moved = engine.weights()["norm.weight"]
        assert not torch.equal(moved, moved.bfloat16().float())


def test_the_average_follows_the_masters_by_its_rule():
    with one_rank():
        engine = make_engine(train_config(ema_decay=0.9))
        average = engine.weights()
        for step in range(3):
            run(engine, steps=(step,))
            decay, now = ema_decay(step + 1, 0.9), engine.weights()
            average = {name: average[name].lerp(now[name], 1 - decay) for name in now}
        for name, tensor in engine.averaged_weights().items():
            torch.testing.assert_close(tensor, average[name], msg=name)
        after = engine.weights()
        assert all(torch.equal(now[name], after[name]) for name in now)  # lent, and given back


def test_a_step_draws_no_random_number():
    with one_rank():
        engine = make_engine(train_config())
        before = torch.get_rng_state()
        run(engine)
        assert torch.equal(before, torch.get_rng_state())


def test_the_rate_warms_up_and_ends_at_its_final_share():
    config = train_config(warmup_share=0.1, final_learning_rate_share=0.2, learning_rate=1.0)
    rates = [learning_rate(step, 100, config) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert max(rates) == rates[10] == 1.0
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[55] == pytest.approx(0.6)
    assert rates[99] == pytest.approx(0.2, abs=1e-3)
