"""One pass over the shards that are missing: asked, proved, written. Knows no Ray."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.capture_file import CapturedStates
from actors.dispatch import ServerReport
from actors.pool import Failed, Pool
from pipelines.capture_plan import Part, Plan, Shard, finish_shard
from pipelines.capture_trial import end_all, gather_all, gave_up, try_capture
from pipelines.errors import QualityStop
from pipelines.readings import shard_readings
from pipelines.recipe import Recipe
from pipelines.schema import response_loss_mask
from pipelines.state_reader import SAMPLE_FAULTS, Handover, Sample, StateReader
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog, Progress
from training.features import INDEX_SCHEMA, FeatureRow, write_shard

logger = logging.getLogger(__name__)

MAX_FAILED_SHARE = 0.01
_SHARDS_IN_FLIGHT = 2  # the next one's requests wait while the last rows of this one are made
_LOOK_SECONDS = 1.0

Reports = Callable[[], Sequence[ServerReport]]


@dataclass(frozen=True)
class _Row:
    """One row of the plan."""

    sample: Sample
    dataset: str
    domain: str
    prompt_tokens: int


class CaptureSession:
    """One pass with the servers that are up now.

    `asked_again` counts the rows that took more than one attempt, `faults` the attempts that were
    in vain, by name.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        events: EventLog,
        plan: Plan,
        handover: Handover,
    ) -> None:
        self._recipe, self._run, self._events = recipe, run, events
        self._config, self._dtype, self._missing = plan.config, plan.dtype, plan.missing
        self._reader = StateReader(handover)
        total, rest = (sum(one.tokens for one in some) for some in (plan.shards, plan.missing))
        self._progress = Progress(
            "capture", total=total, done=total - rest, unit="tokens", figures=events.figures
        )
        self._may_fail = int(MAX_FAILED_SHARE * sum(one.rows.num_rows for one in plan.shards))
        self._failures = sum(len(part.failed) for part in plan.done.values())
        self.faults: Counter[str] = Counter()

    @property
    def asked_again(self) -> int:
        """Samples that took more than one attempt."""
        return self._reader.asked_again

    async def run(self, urls: Sequence[str], reports: Reports | None = None) -> Mapping[str, Part]:
        """Probe, then capture shard after shard with the next one's requests already waiting.

        `reports` says what is known of the servers now; what it raises ends the pass.
        """
        made: dict[str, Part] = {}
        async with Pool(
            urls,
            self._recipe.capture.pool,
            vocab_size=self._config.vocab_size,
            naming=self._reader.rid,
        ) as pool:

            async def one(shard: Shard, permits: asyncio.Semaphore) -> None:
                async with permits:
                    made[shard.name] = await self._shard(pool, shard)

            async def all_of_them() -> None:
                facts = await try_capture(
                    lambda sample: self._reader.read(pool, sample),
                    [row.sample for row in _rows(self._missing[0])],
                    self._recipe,
                    dtype=self._dtype,
                    logs=self._run.logs,
                )
                self._events.append("capture_probe", **facts)
                permits = asyncio.Semaphore(_SHARDS_IN_FLIGHT)
                await gather_all([one(shard, permits) for shard in self._missing])

            try:
                await _first([all_of_them(), _follow(pool, reports)])
            finally:
                for server in pool.snapshot():
                    self.faults.update(server.faults)
                if self.faults:
                    self._events.append(
                        "captured_again", samples=self.asked_again, faults=dict(self.faults)
                    )
        return made

    async def _shard(self, pool: Pool, shard: Shard) -> Part:
        wanted = _rows(shard)
        made = await gather_all([self._row(pool, row) for row in wanted])
        rows = [row for row in made if isinstance(row, FeatureRow)]
        failed = [
            {"sample_id": row.sample.sample_id, "fault": one.fault, "detail": one.detail}
            for row, one in zip(wanted, made, strict=True)
            if isinstance(one, Failed)
        ]
        self._reader.discard_late_files()
        # In a thread, so that replies are taken while the disk is busy.
        part = await asyncio.to_thread(self._write, shard, rows, failed)
        self._events.append(
            "shard_captured", shard=shard.name, samples=len(rows), tokens=shard.tokens
        )
        self._events.figures.take(shard_readings(len(rows), len(failed), shard.tokens))
        return part

    def _write(
        self, shard: Shard, rows: Sequence[FeatureRow], failed: Sequence[Mapping[str, str]]
    ) -> Part:
        assert len(rows) + len(failed) == shard.rows.num_rows, "a response was lost"
        features = self._run.features
        index = INDEX_SCHEMA.empty_table()
        if rows:
            index = write_shard(
                features,
                shard.name,
                rows,
                aux_layer_ids=self._config.aux_layer_ids,
                storage=self._recipe.capture.storage,
            )
        else:
            (features / shard.name).unlink(missing_ok=True)
        return finish_shard(features, shard, index, failed)

    async def _row(self, pool: Pool, row: _Row) -> FeatureRow | Failed:
        sample = row.sample
        outcome = await self._reader.read(pool, sample)
        self._progress.advance(len(sample.input_ids))
        if isinstance(outcome, CapturedStates):
            mask = response_loss_mask(row.prompt_tokens, len(sample.input_ids) - row.prompt_tokens)
            return FeatureRow(
                sample_id=sample.sample_id,
                dataset=row.dataset,
                domain=row.domain,
                input_ids=outcome.input_ids.to(torch.int64),
                loss_mask=torch.tensor(mask),
                aux=outcome.aux,
                last=outcome.last,
            )
        if outcome.fault not in SAMPLE_FAULTS:
            raise gave_up(sample, outcome, self._run.logs)
        self._failures += 1
        logger.warning("%s is set aside: %s: %s", sample.sample_id, outcome.fault, outcome.detail)
        if self._failures > self._may_fail:
            raise QualityStop(
                f"{self._failures} samples could not be captured; the last, {sample.sample_id}, "
                f"by {outcome.fault}: {outcome.detail}",
                expected=f"at most {self._may_fail} ({MAX_FAILED_SHARE:.0%} of the responses)",
                change="a target that computes NaN in this dtype needs another dtype: see "
                "capture.servers.dtype",
            )
        return outcome


async def _follow(pool: Pool, reports: Reports | None) -> None:
    """Tell the pool what is known of its servers, until something is wrong."""
    while reports is not None:
        pool.apply(await asyncio.to_thread(reports))
        await asyncio.sleep(_LOOK_SECONDS)
    await asyncio.Event().wait()


async def _first(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for the first to end, or raise what it raises; the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        await end_all(tasks)


def _rows(shard: Shard) -> list[_Row]:
    return [
        _Row(
            Sample(row["sample_id"], (*row["prompt_ids"], *row["output_ids"])),
            row["dataset"],
            row["domain"],
            len(row["prompt_ids"]),
        )
        for row in shard.rows.to_pylist()
    ]
