"""How much of the plan fits: whole steps, with the held-out rows that follow them."""

import pytest

from pipelines.capture_slices import next_slice
from pipelines.errors import PreflightFailed
from tests.support.tiny_training import train_config
from training.reader import RowPlan


class Tokens:
    """Twenty rows of ten tokens."""

    def __init__(self) -> None:
        self.sample_ids = [f"chat-{number:02d}" for number in range(20)]
        self.domains = ["chat"] * 20
        self.lengths = [10] * 20
        self.loss_tokens = [5] * 20

    def tokens(self, row: int):
        raise AssertionError(f"a plan needs lengths alone, not the tokens of {row}")


@pytest.fixture
def plan() -> RowPlan:
    return RowPlan(Tokens(), train_config(), rank=0, world=1)


def rows_of(plan: RowPlan, step: int, until: int) -> set[int]:
    turns = plan.turns(step, until)
    return {row for turn in turns for batch in plan.micro_batches(turn) for row in batch}


def test_a_slice_is_as_many_whole_steps_as_have_room(plan):
    until, wanted = next_slice(plan, 0, room=95)
    assert until == 2  # steps of four samples of ten tokens
    assert wanted == rows_of(plan, 0, 2)


def test_an_epochs_last_step_comes_with_the_held_out_rows_or_not_at_all(plan):
    each, held = plan.steps_per_epoch, len(plan.split.heldout)
    assert held > 0
    rows = len(plan.split.train)
    assert next_slice(plan, 0, room=10 * rows)[0] == each - 1
    assert next_slice(plan, 0, room=10 * rows + 10 * held - 1)[0] == each - 1
    until, wanted = next_slice(plan, 0, room=10 * (rows + held))
    assert until == plan.total_steps  # all rows are there: every epoch fits
    assert wanted == set(range(20))


def test_slices_reach_the_end_and_every_row_is_there_when_it_is_read(plan):
    step, slices = 0, []
    while step < plan.total_steps:
        until, wanted = next_slice(plan, step, room=130)
        assert until > step
        assert rows_of(plan, step, until) <= wanted
        assert 10 * len(wanted) <= 130
        slices.append((step, until))
        step = until
    assert len(slices) > 2


def test_after_the_last_step_only_held_out_rows_are_wanted(plan):
    until, wanted = next_slice(plan, plan.total_steps, room=130)
    assert until == plan.total_steps
    assert wanted == set(plan.split.heldout)


def test_a_step_without_room_is_refused_with_the_sum(plan):
    with pytest.raises(PreflightFailed, match="step 1 needs the states of 40 tokens at once"):
        next_slice(plan, 0, room=39)
