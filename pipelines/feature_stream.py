"""Rows with their states as Ray datasets, one for each training worker, in its plan's order.

Nothing is on disk: a worker of a dataset asks the capture servers, takes the states out of the
memory of their node and hands them over through Ray's object store. Training that reads slowly
slows the asking down: a worker holds the rows of a few blocks and no more.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from actors.capture_file import CapturedStates
from actors.config import PoolConfig
from actors.dispatch import ServerReport
from actors.pool import Pool
from pipelines.capture_servers import capture_servers, dtype_of, own_servers
from pipelines.capture_trial import try_capture
from pipelines.loop_thread import LoopThread
from pipelines.recipe import Recipe
from pipelines.state_reader import SAMPLE_FAULTS, Handover, Sample, StateReader
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog
from training.config import DraftConfig
from training.loop import Streams
from training.reader import RowPlan
from training.stream import TOKENS_FILE, StreamedStates, StreamFault, TokenStore

_BLOCK_ROWS = 8
_BLOCKS_AT_ONCE = 2  # the next one's requests wait while the last rows of this one are made
_WORKER_CPUS = 0.1  # it waits for servers
_LOOK_SECONDS = 1.0
_TRIAL_ROWS = 4


@dataclass(frozen=True)
class StreamPlan:
    """All that a worker of a stream needs to know, and nothing that changes."""

    tokens: Path
    max_tokens: int  # of a sample; what lies beyond is not read by the target either
    vocab_size: int
    handover: Handover
    pool: PoolConfig  # this worker's share of it
    share: float  # of each server, in (0, 1]
    servers: Callable[[], tuple[ServerReport, ...]]


class StreamWorker:
    """Answers blocks of row numbers with the rows' states. One event loop in its own thread."""

    def __init__(self, plan: StreamPlan) -> None:
        self._plan, self._tokens = plan, TokenStore(plan.tokens)
        self._reader = StateReader(plan.handover, keeps=False)
        self._loop = LoopThread()
        self._loop.run(self._enter())

    def __call__(self, block: pa.Table) -> Iterator[pa.Table]:
        """One table of `STREAM_SCHEMA` for each row, in the block's order."""
        asking = [self._loop.submit(self._states(row)) for row in block["row"].to_pylist()]
        try:
            for one in asking:
                yield one.result().table()
        finally:
            for one in asking:
                one.cancel()

    def close(self) -> None:
        """End the loop and what lives in it. Ray ends the process instead."""
        self._loop.run(self._leave())
        self._loop.stop()

    async def _enter(self) -> None:
        plan = self._plan
        self._stack = AsyncExitStack()
        pool = Pool(
            (), plan.pool, vocab_size=plan.vocab_size, share=plan.share, naming=self._reader.rid
        )
        self._pool = await self._stack.enter_async_context(pool)
        self._pool.apply(await asyncio.to_thread(plan.servers))
        self._following = asyncio.create_task(self._follow())

    async def _leave(self) -> None:
        self._following.cancel()
        await self._stack.aclose()

    async def _follow(self) -> None:
        """Follow the servers as they come and go; the driver ends the run if none is left."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self._pool.apply(await asyncio.to_thread(self._plan.servers))
            await asyncio.to_thread(self._reader.discard_late_files)

    async def _states(self, row: int) -> StreamedStates:
        ids, _ = self._tokens.tokens(row)
        sample = Sample(self._tokens.sample_ids[row], tuple(ids[: self._plan.max_tokens].tolist()))
        outcome = await self._reader.read(self._pool, sample)
        if isinstance(outcome, CapturedStates):
            return StreamedStates(sample.sample_id, outcome.aux, outcome.last)
        what = f"{outcome.fault}: {outcome.detail}"
        if outcome.fault in SAMPLE_FAULTS:
            return StreamedStates.none(sample.sample_id, what)
        raise StreamFault(f"{sample.sample_id} after {outcome.attempt} attempts: {what}")


def rows_between(plan: RowPlan, step: int, until: int) -> npt.NDArray[np.int64]:
    """The rows that one rank reads from so many finished steps to so many, in order."""
    numbers = (
        row
        for turn in plan.turns(step, until)
        for batch in plan.micro_batches(turn)
        for row in batch
    )
    return np.fromiter(numbers, np.int64)


@contextmanager
def streaming(
    recipe: Recipe, run: RunFolder, events: EventLog, config: DraftConfig
) -> Iterator[Streams]:
    """Servers that hand over the right states, and what makes streams of them from any step on.

    A stream is one Ray `Dataset` of `STREAM_SCHEMA` for each training worker. Raises
    `PreflightFailed` where the servers do not start or their states are not those asked for.
    """
    import ray

    tokens, train = TokenStore(run.features / TOKENS_FILE), recipe.train
    longest = min(max(tokens.lengths), train.max_tokens_per_sample)
    with capture_servers(recipe, run, events, config, longest=longest) as (fleet, handover):
        first = [
            Sample(tokens.sample_ids[row], tuple(tokens.tokens(row)[0][:longest].tolist()))
            for row in range(min(_TRIAL_ROWS, len(tokens.sample_ids)))
        ]
        facts = asyncio.run(_try(recipe, run, config, handover, fleet.urls, first))
        events.append("capture_probe", **facts)
        pool = recipe.capture.pool
        permits = max(1, pool.max_in_flight_per_server // train.workers)
        worker = StreamPlan(
            tokens=run.features.resolve() / TOKENS_FILE,
            max_tokens=train.max_tokens_per_sample,
            vocab_size=config.vocab_size,
            handover=handover,
            pool=pool.model_copy(update={"max_in_flight_per_server": permits}),
            share=1 / train.workers,
            servers=fleet.subscription,
        )
        # The workers of a stream share the memory of the servers' node, which is this one.
        node_id = ray.get_runtime_context().get_node_id()

        def from_step(step: int) -> list[Any]:
            world = train.workers
            plans = (RowPlan(tokens, train, rank=rank, world=world) for rank in range(world))
            return [
                _dataset(rows_between(plan, step, plan.total_steps), worker, node_id)
                for plan in plans
            ]

        yield from_step


async def _try(
    recipe: Recipe,
    run: RunFolder,
    config: DraftConfig,
    handover: Handover,
    urls: Sequence[str],
    samples: Sequence[Sample],
) -> dict[str, Any]:
    reader, pool = StateReader(handover), recipe.capture.pool
    async with Pool(urls, pool, vocab_size=config.vocab_size, naming=reader.rid) as servers:
        dtype = dtype_of(own_servers(recipe))
        return await try_capture(
            lambda sample: reader.read(servers, sample), samples, recipe, dtype=dtype, logs=run.logs
        )


def _dataset(rows: npt.NDArray[np.int64], worker: StreamPlan, node_id: str) -> Any:
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = -1  # training may take its time
    return ray.data.from_arrow(list(_blocks(rows))).map_batches(
        StreamWorker,
        fn_constructor_args=(worker,),
        batch_format="pyarrow",
        batch_size=None,
        num_cpus=_WORKER_CPUS,
        compute=ActorPoolStrategy(
            size=1,
            max_concurrent_calls_per_actor=_BLOCKS_AT_ONCE,
            max_tasks_in_flight_per_actor=_BLOCKS_AT_ONCE + 1,
            enable_true_multi_threading=True,
        ),
        label_selector={"ray.io/node-id": node_id},
    )


def _blocks(rows: Sequence[int] | npt.NDArray[np.int64]) -> Iterator[pa.Table]:
    for at in range(0, max(1, len(rows)), _BLOCK_ROWS):
        yield pa.table({"row": pa.array(rows[at : at + _BLOCK_ROWS], pa.int64())})
