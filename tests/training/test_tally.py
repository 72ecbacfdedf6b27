"""Counts by hand, and their sums."""

import pytest
import torch

from training.tally import Tally


def flags(*rows: str) -> torch.Tensor:
    return torch.tensor([[mark == "1" for mark in row] for row in rows])


def test_the_counts_of_four_rows_are_what_a_hand_counts():
    counted = flags("111", "110", "111", "011")
    speakable = flags("111", "110", "101", "011")
    correct = flags("110", "010", "101", "011")
    tally = Tally.of(counted, speakable, correct)
    assert tally.rows == (3, 4, 3)
    assert tally.speakable == (3, 3, 3)
    assert tally.correct == (2, 3, 2)
    assert tally.chain_rows == (3, 3, 2)  # the last row has no step 0
    assert tally.chain_reached == (3, 2, 1)
    assert tally.chain_correct == (2, 1, 0)
    assert tally.accuracy == pytest.approx([2 / 3, 3 / 4, 2 / 3])
    assert tally.acceptance_rate == pytest.approx([2 / 3, 1 / 2, 0.0])
    assert tally.acceptance_length == pytest.approx(1 + 2 / 3 + 1 / 3 + 0)


def test_counts_of_parts_add_up_to_the_counts_of_the_whole():
    dice = torch.Generator().manual_seed(0)
    counted, speakable, correct = (torch.rand(50, 4, generator=dice) < 0.7 for _ in range(3))
    speakable &= counted
    correct &= speakable
    whole = Tally.of(counted, speakable, correct)
    halves = [
        Tally.of(counted[at], speakable[at], correct[at]) for at in (slice(20), slice(20, 50))
    ]
    assert halves[0] + halves[1] == whole
    assert Tally.from_vector(whole.vector()) == whole


def test_a_rate_of_nothing_is_absent_and_not_zero():
    summary = Tally.empty(2).summary()
    assert summary["acceptance_length"] is None
    assert summary["accuracy"] == [None, None]
