"""One pass over the shards that are missing: asked, proved, written. Knows no Ray.

Every state comes with the answer to one request, whose rid says whose it is and how many rows it
must have. A request that failed is asked again under another rid, and what the first one may still
bring is removed: it is nobody's.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from actors import capture_file
from actors.capture_file import CapturedStates, CaptureFault
from actors.dispatch import ServerReport
from actors.errors import BadReply
from actors.pool import Failed, Pool
from actors.protocol import Completion, GenerateRequest
from pipelines.capture_plan import Part, Plan, Shard, finish_shard
from pipelines.capture_probe import TOLERANCE, check_batch, check_layers, check_start
from pipelines.errors import PreflightFailed, QualityStop, RunError
from pipelines.readings import shard_readings
from pipelines.recipe import Recipe
from pipelines.schema import response_loss_mask
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog, Progress
from pipelines.witness import Witness, can_witness
from training.features import INDEX_SCHEMA, FeatureRow, write_shard

logger = logging.getLogger(__name__)

# Faults of a sample rather than of a server: after all attempts it is set aside, and counted.
SAMPLE_FAULTS = frozenset({"nan", "capture_not_finite"})
MAX_FAILED_SHARE = 0.01
_PROBE_ROWS = 4
_PROBE_TOKENS = 512  # states depend on earlier tokens only, so the start of a sequence is enough
_SHARDS_IN_FLIGHT = 2  # the next one's requests wait while the last rows of this one are made
_LOOK_SECONDS = 1.0

T = TypeVar("T")
Reports = Callable[[], Sequence[ServerReport]]


@dataclass(frozen=True)
class _Sample:
    """One row of the plan, ready to be sent."""

    sample_id: str
    dataset: str
    domain: str
    input_ids: tuple[int, ...]
    prompt_tokens: int

    def start(self, tokens: int) -> "_Sample":
        """The same, cut to its first tokens."""
        return replace(
            self,
            input_ids=self.input_ids[:tokens],
            prompt_tokens=min(self.prompt_tokens, tokens),
        )


class CaptureSession:
    """One pass with the servers that are up now, which put their files into `folder`.

    `nonce` begins the rid of every request; a file may come `late_seconds` after the answer that it
    belongs to. `asked_again` counts the rows that took more than one
    attempt, `faults` the attempts that were in vain, by name.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        events: EventLog,
        plan: Plan,
        folder: Path,
        *,
        nonce: str,
        late_seconds: float = 0.0,
    ) -> None:
        self._recipe, self._run, self._events = recipe, run, events
        self._config, self._folder, self._missing = plan.config, folder, plan.missing
        self._layer_ids, self._dtype = plan.config.aux_layer_ids, plan.dtype
        self._nonce, self._late_seconds = nonce, late_seconds
        total, rest = (sum(one.tokens for one in some) for some in (plan.shards, plan.missing))
        self._progress = Progress(
            "capture", total=total, done=total - rest, unit="tokens", figures=events.figures
        )
        self._may_fail = int(MAX_FAILED_SHARE * sum(one.rows.num_rows for one in plan.shards))
        self._failures = sum(len(part.failed) for part in plan.done.values())
        self._asked: dict[str, str] = {}  # sample id to the rid of its last attempt
        self._given_up: set[str] = set()  # rids whose files nobody will read
        self.asked_again = 0
        self.faults: Counter[str] = Counter()

    async def run(self, urls: Sequence[str], reports: Reports | None = None) -> Mapping[str, Part]:
        """Probe, then capture shard after shard with the next one's requests already waiting.

        `reports` says what is known of the servers now; what it raises ends the pass.
        """
        made: dict[str, Part] = {}
        async with Pool(
            urls,
            self._recipe.capture.pool,
            vocab_size=self._config.vocab_size,
            naming=self._rid,
        ) as pool:

            async def one(shard: Shard, permits: asyncio.Semaphore) -> None:
                async with permits:
                    made[shard.name] = await self._shard(pool, shard)

            async def all_of_them() -> None:
                await self._probe(pool)
                permits = asyncio.Semaphore(_SHARDS_IN_FLIGHT)
                await _gather([one(shard, permits) for shard in self._missing])

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
        samples = _samples(shard)
        made = await _gather([self._row(pool, sample) for sample in samples])
        rows = [row for row in made if isinstance(row, FeatureRow)]
        failed = [
            {"sample_id": sample.sample_id, "fault": one.fault, "detail": one.detail}
            for sample, one in zip(samples, made, strict=True)
            if isinstance(one, Failed)
        ]
        self._discard_late_files()
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
            index = write_shard(features, shard.name, rows, aux_layer_ids=self._layer_ids)
        else:
            (features / shard.name).unlink(missing_ok=True)
        return finish_shard(features, shard, index, failed)

    async def _row(self, pool: Pool, sample: _Sample) -> FeatureRow | Failed:
        outcome = await self._states(pool, sample)
        self._progress.advance(len(sample.input_ids))
        if isinstance(outcome, CapturedStates):
            mask = response_loss_mask(
                sample.prompt_tokens, len(sample.input_ids) - sample.prompt_tokens
            )
            return FeatureRow(
                sample_id=sample.sample_id,
                dataset=sample.dataset,
                domain=sample.domain,
                input_ids=outcome.input_ids.to(torch.int64),
                loss_mask=torch.tensor(mask),
                aux=outcome.aux,
                last=outcome.last,
            )
        if outcome.fault not in SAMPLE_FAULTS:
            raise self._gave_up(sample, outcome)
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

    async def _states(self, pool: Pool, sample: _Sample) -> CapturedStates | Failed:
        request = GenerateRequest(
            rid=sample.sample_id, input_ids=sample.input_ids, sampling_params=_CAPTURE_ONLY
        )
        outcome = await pool.generate(request, self._take)
        last = self._asked.pop(sample.sample_id, None)  # None: there was no server to ask
        if isinstance(outcome, Failed):
            if last is not None:
                self._given_up.add(last)
            return outcome
        self.asked_again += outcome.attempt > 1
        assert outcome.value is not None, "_take returns states or raises"
        return outcome.value

    def _rid(self, digest: str, request: GenerateRequest) -> str:
        rid = capture_file.rid_of(self._nonce, digest, len(request.input_ids))
        if request.rid in self._asked:
            self._given_up.add(self._asked[request.rid])
        self._asked[request.rid] = rid
        return rid

    def _discard_late_files(self) -> None:
        """Remove what requests that were given up have brought by now; look again next time."""
        for rid in self._given_up:
            capture_file.discard(self._folder, rid)

    def _take(self, _: Completion, request: GenerateRequest) -> CapturedStates:
        """The states of a request that was answered. What is wrong with them is asked again."""
        width = self._config.target_hidden_size
        try:
            return capture_file.take(
                self._folder,
                request.rid,
                expected_ids=request.input_ids,
                aux_width=len(self._layer_ids) * width,
                width=width,
                aux_layer_ids=self._layer_ids,
                late_seconds=self._late_seconds,
            )
        except CaptureFault as fault:
            raise BadReply(f"capture_{fault.name}", fault.detail) from fault

    def _gave_up(self, sample: _Sample, outcome: Failed) -> RunError:
        return PreflightFailed(
            f"{sample.sample_id} was not captured after {outcome.attempt} attempts: "
            f"{outcome.fault}: {outcome.detail}",
            expected="a server that answers, and hands over the states of what it was sent",
            change=f"see its log in {self._run.logs}; the same command goes on from here",
        )

    # Before the first shard

    async def _probe(self, pool: Pool) -> None:
        """Capture a sequence alone, beside others and cut, and ask transformers about it.

        The longest sequence is cut in the middle: where its prefill comes in several parts, the cut
        one's comes in fewer, and the rows of both must be the same.
        """
        samples = _samples(self._missing[0])
        starts = [one.start(_PROBE_TOKENS) for one in samples[:_PROBE_ROWS]]
        alone = await self._proved(pool, starts[0], "alone")
        among, *_ = await _gather([self._proved(pool, one, "beside others") for one in starts])
        longest = max(samples, key=lambda one: len(one.input_ids))
        whole = await self._proved(pool, longest, "whole")
        start = longest.start(max(1, len(longest.input_ids) // 2))
        half = await self._proved(pool, start, "cut")
        tolerance = TOLERANCE[self._dtype]
        facts: dict[str, Any] = {
            "tolerance": tolerance,
            "batch_error": check_batch(
                [alone.aux, alone.last], [among.aux, among.last], tolerance=tolerance
            ),
            "start_error": check_start(
                [half.aux, half.last], [whole.aux, whole.last], tolerance=tolerance
            ),
        }
        facts |= await asyncio.to_thread(self._ask_transformers, starts[0], alone, tolerance)
        self._events.append("capture_probe", **facts)

    async def _proved(self, pool: Pool, sample: _Sample, how: str) -> CapturedStates:
        """The states of a probe, which needs a name of its own: some ask the same sequence."""
        sample = replace(sample, sample_id=f"{sample.sample_id}, probed {how},")
        outcome = await self._states(pool, sample)
        if isinstance(outcome, Failed):
            raise self._gave_up(sample, outcome)
        return outcome

    def _ask_transformers(
        self, sample: _Sample, seen: CapturedStates, tolerance: float
    ) -> dict[str, Any]:
        if not can_witness(self._recipe.target):
            logger.warning("capture: the target is too large to load here; layers are not proved")
            return {"layers_proved": False}
        witness = Witness(self._recipe.target, getattr(torch, self._dtype))
        error = check_layers(
            seen.aux,
            seen.last,
            states=witness.states(sample.input_ids),
            aux_layer_ids=self._layer_ids,
            tolerance=tolerance,
        )
        shown = f"{error:.2%}"
        logger.info("capture: layers proved, states differ by %s from transformers'", shown)
        return {"layers_proved": True, "layer_error": error}


# The prefill is all that is wanted. Greedy, so that no seed has to be said.
_CAPTURE_ONLY: Mapping[str, Any] = {"max_new_tokens": 0, "temperature": 0.0}


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
        await _end(tasks)


async def _gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """`asyncio.gather` that leaves none behind: the first exception cancels and awaits the rest."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def _end(tasks: "Sequence[asyncio.Future[Any]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _samples(shard: Shard) -> list[_Sample]:
    return [
        _Sample(
            sample_id=row["sample_id"],
            dataset=row["dataset"],
            domain=row["domain"],
            input_ids=(*row["prompt_ids"], *row["output_ids"]),
            prompt_tokens=len(row["prompt_ids"]),
        )
        for row in shard.rows.to_pylist()
    ]
