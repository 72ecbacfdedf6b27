"""Draws follow the filtered distribution, and belong to their row alone."""

import pytest
import torch

from actors.protocol_server import ServedSampling
from actors.reference_sampling import Sampler, greedy, next_tokens

V = 3000


def plan(**changes):
    neutral = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seed": 0,
    }
    return ServedSampling(**{**neutral, **changes})


def scores(seed=0, spread=3.0):
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * spread


def draws(settings, row, count=4000):
    return torch.bincount(
        torch.tensor([Sampler(plan(**settings, seed=n)).choose(row) for n in range(count)]),
        minlength=V,
    ).float()


def allowed_by_hand(row, temperature=1.0, top_k=None, top_p=1.0, min_p=0.0):
    """The filters, written token by token."""
    probabilities = (row / temperature).softmax(-1).tolist()
    kept, mass = {}, 0.0
    for rank, token in enumerate(sorted(range(V), key=lambda one: -probabilities[one])):
        share = probabilities[token]
        if (
            (top_k is None or rank < top_k)
            and mass <= top_p
            and share >= min_p * max(probabilities)
        ):
            kept[token] = share
        mass += share
    total = sum(kept.values())
    return {token: share / total for token, share in kept.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.5, "top_k": 50, "top_p": 0.8, "min_p": 0.01},
    ],
)
def test_draws_follow_the_distribution_that_the_filters_leave(settings):
    row = scores()
    expected = allowed_by_hand(row, **settings)
    counts = draws(settings, row)
    assert set(counts.nonzero().flatten().tolist()) <= set(expected)
    for token, share in sorted(expected.items(), key=lambda pair: -pair[1])[:5]:
        # Five standard deviations of a share over 4,000 draws.
        assert abs(counts[token] / 4000 - share) < 5 * (share * (1 - share) / 4000) ** 0.5 + 1e-9


def test_a_flat_distribution_needs_more_than_the_first_candidates():
    row = scores(spread=0.01)  # top_p 0.9 holds about 2,700 tokens
    expected = allowed_by_hand(row, top_p=0.9)
    seen = {Sampler(plan(top_p=0.9, seed=n)).choose(row) for n in range(3000)}
    assert len(expected) > 2500
    assert len(seen) > 1200
    assert seen <= set(expected)


def test_the_same_seed_draws_the_same_tokens_and_no_seed_draws_others():
    rows = [scores(seed) for seed in range(20)]

    def run(seed):
        sampler = Sampler(plan(seed=seed))
        return [sampler.choose(row) for row in rows]

    assert run(5) == run(5) != run(6)
    assert run(-3) == run(-3)
    assert run(None) != run(None)


def test_penalties_by_hand():
    row = torch.tensor([2.0, 1.9, -1.0, -1.05])
    sampler = Sampler(plan(temperature=None, frequency_penalty=0.5))
    # 2.0, 1.9 | 1.5, 1.9 | 1.5, 1.4 | 1.0, 1.4
    assert [sampler.choose(row) for _ in range(4)] == [0, 1, 0, 1]
    sampler = Sampler(plan(temperature=None, presence_penalty=0.05))
    assert [sampler.choose(row) for _ in range(3)] == [0, 0, 0]  # paid once: 1.95
    sampler = Sampler(plan(temperature=None, repetition_penalty=2.0))
    # A positive score is divided, a negative one multiplied.
    assert [sampler.choose(row) for _ in range(3)] == [0, 1, 0]
    sampler = Sampler(plan(temperature=None, repetition_penalty=2.0))
    assert [sampler.choose(row[2:]) for _ in range(2)] == [0, 1]


def test_greedy_takes_the_lowest_of_equals_and_sees_a_nan():
    logits = torch.tensor([[1.0, 3.0, 3.0], [float("nan"), 0.0, 1.0], [-1.0, -2.0, -0.5]])
    ids, broken = greedy(logits)
    assert ids[0] == 1
    assert ids[2] == 2
    assert broken.tolist() == [False, True, False]


def test_a_nan_in_one_row_leaves_the_others_alone():
    logits = torch.stack([scores(0), torch.full((V,), float("nan")), scores(1)])
    rows = [Sampler(plan(temperature=None)), Sampler(plan()), Sampler(plan(seed=9))]
    tokens = next_tokens(logits, rows)
    assert tokens[0] == int(scores(0).argmax())
    assert tokens[1] is None
    assert tokens[2] == Sampler(plan(seed=9)).choose(scores(1))
