"""What is captured before anything else: are these the states that were asked for?"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from actors.capture_file import CapturedStates
from actors.pool import Failed
from pipelines.capture_plan import Dtype
from pipelines.capture_probe import TOLERANCE, check_batch, check_layers, check_start
from pipelines.errors import PreflightFailed
from pipelines.recipe import Recipe
from pipelines.state_reader import Sample
from pipelines.witness import Witness, can_witness

logger = logging.getLogger(__name__)

_ROWS = 4
_TOKENS = 512  # states depend on earlier tokens only, so the start of a sequence is enough

T = TypeVar("T")
Read = Callable[[Sample], Awaitable[CapturedStates | Failed]]


async def try_capture(
    read: Read, samples: Sequence[Sample], recipe: Recipe, *, dtype: Dtype, logs: Path
) -> dict[str, Any]:
    """Capture a sequence alone, beside others and cut, and ask transformers about it.

    The longest sequence is cut in the middle: where its prefill comes in several parts, the cut
    one's comes in fewer, and the rows of both must be the same. Returns what was seen. Raises
    `PreflightFailed`.
    """

    async def proved(sample: Sample, how: str) -> CapturedStates:
        # A name of its own: some ask the same sequence.
        sample = replace(sample, sample_id=f"{sample.sample_id}, probed {how},")
        outcome = await read(sample)
        if isinstance(outcome, Failed):
            raise gave_up(sample, outcome, logs)
        return outcome

    starts = [one.start(_TOKENS) for one in samples[:_ROWS]]
    alone = await proved(starts[0], "alone")
    among, *_ = await gather_all([proved(one, "beside others") for one in starts])
    longest = max(samples, key=lambda one: len(one.input_ids))
    whole = await proved(longest, "whole")
    half = await proved(longest.start(max(1, len(longest.input_ids) // 2)), "cut")
    tolerance = TOLERANCE[dtype]
    facts: dict[str, Any] = {
        "tolerance": tolerance,
        "batch_error": check_batch(
            [alone.aux, alone.last], [among.aux, among.last], tolerance=tolerance
        ),
        "start_error": check_start(
            [half.aux, half.last], [whole.aux, whole.last], tolerance=tolerance
        ),
    }
    return facts | await asyncio.to_thread(
        _ask_transformers, recipe, starts[0], alone, getattr(torch, dtype), tolerance
    )


def gave_up(sample: Sample, outcome: Failed, logs: Path) -> PreflightFailed:
    """What to say where a server's states could not be had."""
    return PreflightFailed(
        f"{sample.sample_id} was not captured after {outcome.attempt} attempts: "
        f"{outcome.fault}: {outcome.detail}",
        expected="a server that answers, and hands over the states of what it was sent",
        change=f"see its log in {logs}; the same command goes on from here",
    )


def _ask_transformers(
    recipe: Recipe, sample: Sample, seen: CapturedStates, dtype: torch.dtype, tolerance: float
) -> dict[str, Any]:
    if not can_witness(recipe.target):
        logger.warning("capture: the target is too large to load here; layers are not proved")
        return {"layers_proved": False}
    error = check_layers(
        seen.aux,
        seen.last,
        states=Witness(recipe.target, dtype).states(sample.input_ids),
        aux_layer_ids=recipe.target.profile.aux_layer_ids,
        tolerance=tolerance,
    )
    logger.info("capture: layers proved, states differ by %s from transformers'", f"{error:.2%}")
    return {"layers_proved": True, "layer_error": error}


async def gather_all(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """`asyncio.gather` that leaves none behind: the first exception cancels and awaits the rest."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await end_all(tasks)


async def end_all(tasks: "Sequence[asyncio.Future[Any]]") -> None:
    """Cancel what still runs, and wait until it has ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
