"""Capture what the next steps need, train on it, remove it, go on: for states that fit no disk.

A slice is as many optimiser steps as `capture.max_bytes` has room for; it always ends where a
checkpoint is, so whatever is killed goes on with the slice that it was at.
"""

import logging
from collections.abc import Iterator

from pipelines.capture import capture_rows
from pipelines.capture_plan import TokenBytes, forget_shards
from pipelines.errors import PreflightFailed
from pipelines.recipe import Recipe
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog
from training import checkpoint
from training.config import DraftConfig
from training.features import TokenRows
from training.reader import RowPlan

logger = logging.getLogger(__name__)


def captured_slices(
    recipe: Recipe, run: RunFolder, events: EventLog, config: DraftConfig, rows: TokenRows
) -> Iterator[int]:
    """Make slice after slice; yield the step up to which training may go on, and remove it then.

    Raises `PreflightFailed` where one step alone has no room.
    """
    # One rank reads all rows that a step needs, whatever the number of workers is.
    plan = RowPlan(rows, recipe.train, rank=0, world=1)
    size = TokenBytes.of(config, recipe.capture.storage).at_most
    while True:
        step = checkpoint.newest_step(run.checkpoints)
        until, wanted = next_slice(plan, step, room=recipe.capture.max_bytes // size)
        names = {rows.sample_ids[row] for row in wanted}
        logger.info("capture: %s samples for steps %d to %d", f"{len(names):,}", step + 1, until)
        counts = capture_rows(recipe, run, events, names)
        events.append("slice_captured", step=step, until=until, samples=counts["samples"])
        yield until
        forget_shards(run.features)
        if until == plan.total_steps:
            return


def next_slice(plan: RowPlan, step: int, *, room: int) -> tuple[int, set[int]]:
    """Up to which step the rows that are read from `step` on fit into `room` tokens, and which."""
    wanted: set[int] = set()
    tokens, until, fitting = 0, step, set[int]()
    for turn in plan.turns(step, plan.total_steps):
        more = {row for batch in plan.micro_batches(turn) for row in batch} - wanted
        tokens += sum(plan.rows.lengths[row] for row in more)
        if tokens > room:
            break
        wanted |= more
        # A step at the end of an epoch is whole when the held-out rows after it are there, too.
        made = turn.step + 1 if turn.part is None else turn.step
        at_end = made % plan.steps_per_epoch == 0
        if not at_end or turn.is_last_part:
            until, fitting = made, set(wanted)
    if until == step and step < plan.total_steps:
        raise PreflightFailed(
            f"step {step + 1} needs the states of {tokens:,} tokens at once",
            expected=f"at most {room:,}, for which capture.max_bytes has room",
            change="raise capture.max_bytes, or lower train.batch_samples or train.heldout_share",
        )
    return until, fitting
