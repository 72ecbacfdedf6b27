"""Which rows count, the order of rows, and how they are dealt out."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_training import random_rows
from training.packing import (
    counted_rows,
    deal,
    is_heldout,
    pack,
    plan_epoch,
    split_rows,
    steps_per_epoch,
)

IDS = [f"chat-{number:012x}" for number in range(300)]


def test_rows_count_from_the_last_prompt_token_to_the_last_but_one_label():
    """Prompt 0..2, answer 3..6 (6 is its end token), the next prompt 7..8."""
    mask = torch.tensor([False] * 3 + [True] * 4 + [False] * 2)
    counted = counted_rows(mask, 3)
    assert counted[:, 0].nonzero().flatten().tolist() == [2, 3, 4]  # labels 4, 5, 6
    assert counted[:, 1].nonzero().flatten().tolist() == [2, 3]
    assert counted[:, 2].nonzero().flatten().tolist() == [2]


@given(mask=st.lists(st.booleans(), max_size=20), steps=st.integers(1, 8))
def test_a_row_counts_if_its_first_token_and_its_label_may_teach(mask: list[bool], steps: int):
    counted = counted_rows(torch.tensor(mask, dtype=torch.bool), steps)
    for p in range(len(mask)):
        for k in range(steps):
            label = p + 2 + k
            assert bool(counted[p, k]) == (label < len(mask) and mask[p + 1] and mask[label])


def plan(**changes):
    settings_ = {
        "seed": 1,
        "epoch": 0,
        "batch_samples": 8,
        "micro_batch_tokens": 100,
        "workers": 1,
    }
    lengths = [1 + number * 37 % 90 for number in range(len(IDS))]
    return plan_epoch(IDS, lengths, lengths, **(settings_ | changes))


def rows_of(step) -> set[int]:
    return {row for rank in step for batch in rank for row in batch}


@settings(max_examples=25, deadline=None)
@given(workers=st.integers(1, 5), epoch=st.integers(0, 3), tokens=st.sampled_from([90, 100, 700]))
def test_every_step_holds_the_same_rows_for_any_number_of_workers(
    workers: int, epoch: int, tokens: int
):
    alone = plan(epoch=epoch)
    shared = plan(epoch=epoch, workers=workers, micro_batch_tokens=tokens)
    assert [rows_of(step) for step in alone] == [rows_of(step) for step in shared]
    seen = Counter(row for step in shared for rank in step for batch in rank for row in batch)
    assert seen == Counter(range(len(IDS)))
    assert len(shared) == steps_per_epoch(len(IDS), 8)
    lengths = [1 + number * 37 % 90 for number in range(len(IDS))]
    for step in shared:
        assert len({len(rank) for rank in step}) == 1  # or the others wait in a collective
        assert all(sum(lengths[row] for row in batch) <= tokens for rank in step for batch in rank)


def test_the_order_changes_with_epoch_and_seed_and_with_nothing_else():
    order = [rows_of(step) for step in plan()]
    assert order == [rows_of(step) for step in plan()]
    assert order != [rows_of(step) for step in plan(epoch=1)]
    assert order != [rows_of(step) for step in plan(seed=2)]


def test_rows_are_dealt_out_by_cost():
    (first,), (second,) = deal([0, 1, 2, 3], [20, 30, 30, 30], [90, 30, 30, 30], 100, 2)
    assert {first, second} == {(0,), (1, 2, 3)}


def test_the_heldout_share_is_kept_and_a_sample_stays_on_its_side():
    held = {name for name in IDS if is_heldout(name, 0.2)}
    assert 0.1 < len(held) / len(IDS) < 0.3
    assert held < {name for name in IDS if is_heldout(name, 0.5)}
    assert not any(is_heldout(name, 0.0) for name in IDS)
    split = split_rows(IDS, 0.2)
    assert {IDS[row] for row in split.heldout} == held
    assert sorted((*split.train, *split.heldout)) == list(range(len(IDS)))


def test_a_packed_batch_points_at_the_right_rows_and_teachers():
    rows = random_rows(3)
    batch = pack(rows, steps=3, aux_size=192, last_size=64)
    starts = [0, len(rows[0].input_ids), len(rows[0].input_ids) + len(rows[1].input_ids)]
    for r, (row, document) in enumerate(zip(batch.rows, batch.documents, strict=True)):
        own = rows[int(document)]
        p = int(row) - starts[int(document)]
        assert torch.equal(batch.aux[row], own.aux[p])
        assert int(batch.positions[row]) == p
        span = batch.spans[int(document)]
        assert span.first_row <= r < span.end_row
        assert span.first_token == starts[int(document)]
        for k in range(3):
            if batch.counted[r, k]:
                teacher = batch.last[batch.labels[batch.label_of[r, k]]]
                assert torch.equal(teacher, own.last[p + 1 + k])
