"""Run every response once more through the target and keep its hidden states: `features/`.

The client runs in this process, because the states come through node-local memory: the servers are
started on this machine and put one file for each request into a folder that this process made.
Rows flow server -> memory -> shard; nothing of them passes through Ray or JSON.

A server reads one sequence at a time: padding and neighbours change the last bits of a state, and a
capture that was cut short must end with the bytes of one that was not.
"""

import asyncio
import hashlib
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from actors import capture_file
from actors.capture_file import CapturedStates, CaptureFault
from actors.config import EmbeddedServers
from actors.errors import BadReply, ServerFailed
from actors.fleet import running_servers
from actors.launch import EngineOptions
from actors.pool import Completed, Failed, Pool
from actors.protocol import Completion, GenerateRequest
from pipelines.capture_plan import (
    Part,
    Shard,
    check_room,
    drop_foreign_files,
    finish_shard,
    lengths,
    merge_parts,
    plan_shards,
    read_part,
    read_responses,
)
from pipelines.capture_probe import TOLERANCE, check_batch, check_layers
from pipelines.errors import PreflightFailed, QualityStop, RunError
from pipelines.readings import shard_readings
from pipelines.recipe import Recipe
from pipelines.schema import response_loss_mask
from pipelines.store import RunFolder, write_json
from pipelines.telemetry import EventLog, Progress
from pipelines.witness import Witness, can_witness
from training.config import DraftConfig
from training.features import INDEX_SCHEMA, FeatureRow, write_shard
from training.model import TargetFault, draft_config

logger = logging.getLogger(__name__)

# Faults of a sample rather than of a server: after all attempts it is set aside, and counted.
SAMPLE_FAULTS = frozenset({"nan", "capture_not_finite"})
MAX_FAILED_SHARE = 0.01
_PROBE_ROWS = 4
_PROBE_TOKENS = 512  # states depend on earlier tokens only, so the start of a sequence is enough
_SHARDS_IN_FLIGHT = 2  # the next one's requests wait while the last rows of this one are made


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be made, and what of it is not there yet."""

    config: DraftConfig
    shards: Sequence[Shard]
    done: Mapping[str, Part]  # by the shard's name, proved whole

    @property
    def missing(self) -> list[Shard]:
        """The shards to make."""
        return [shard for shard in self.shards if shard.name not in self.done]


@dataclass(frozen=True)
class _Sample:
    """One row of the plan, ready to be sent."""

    sample_id: str
    dataset: str
    domain: str
    input_ids: tuple[int, ...]
    prompt_tokens: int


def capture(recipe: Recipe, run: RunFolder, events: EventLog) -> dict[str, Any]:
    """Write `features/`; shards that an earlier call finished are kept. Ray is running.

    Raises `PreflightFailed` before the first byte where quota or disk are too small, or where the
    server's states are not those of the layers asked for; `QualityStop` where too many samples
    cannot be captured.
    """
    plan = plan_capture(recipe, run)
    run.features.mkdir(parents=True, exist_ok=True)
    drop_foreign_files(run.features, plan.shards)
    made: Mapping[str, Part] = {}
    if plan.missing:
        (run.features / "index.parquet").unlink(missing_ok=True)
        made = _capture_missing(recipe, run, events, plan)
    return commit(run, [{**plan.done, **made}[shard.name] for shard in plan.shards])


def plan_capture(recipe: Recipe, run: RunFolder) -> Plan:
    """Decide which shards to make, and write nothing. Raises `PreflightFailed`."""
    servers, layer_ids = recipe.capture.servers, recipe.target.profile.aux_layer_ids
    if not isinstance(servers, EmbeddedServers):
        raise PreflightFailed(
            f"capture.servers.kind is {servers.kind}",
            expected="embedded: hidden states are handed over in this machine's memory",
            change="set capture.servers.kind to embedded",
        )
    config = _draft_config(recipe)
    shards = plan_shards(
        read_responses(run, [one.name for one in recipe.prompts.train]),
        samples_per_shard=recipe.capture.samples_per_shard,
        depends_on={
            "target": recipe.target.path,
            "layers": layer_ids,
            "servers": [servers.dtype, servers.device],
        },
    )
    parts = {shard.name: read_part(run.features, shard) for shard in shards}
    plan = Plan(config, shards, {name: part for name, part in parts.items() if part is not None})
    check_room(
        run.features,
        shards,
        plan.missing,
        hidden_size=config.target_hidden_size,
        aux_layers=len(layer_ids),
        quota_bytes=recipe.capture.max_bytes,
    )
    return plan


def commit(run: RunFolder, parts: Sequence[Part]) -> dict[str, Any]:
    """Merge the finished shards' parts into the index; return the counts."""
    failed = [one for part in parts for one in part.failed]
    (run.features / "failed.json").unlink(missing_ok=True)
    if failed:
        write_json(run.features / "failed.json", failed)
    merge_parts(run.features, parts)
    samples = sum(part.index.num_rows for part in parts)
    tokens = sum(sum(part.index["length"].to_pylist()) for part in parts)
    stored = sum(path.stat().st_size for path in run.features.glob("shard-*.safetensors"))
    return {
        "headline": f"{samples:,} samples, {tokens:,} tokens, {stored / 1e6:,.0f} MB"
        + (f", {len(failed)} set aside" if failed else ""),
        "responses": samples + len(failed),
        "samples": samples,
        "failed": dict(sorted(Counter(one["fault"] for one in failed).items())),
        "tokens": tokens,
        "loss_tokens": sum(sum(part.index["loss_tokens"].to_pylist()) for part in parts),
        "shards": len(parts),
        "bytes": stored,
    }


def _capture_missing(
    recipe: Recipe, run: RunFolder, events: EventLog, plan: Plan
) -> Mapping[str, Part]:
    servers, layer_ids = recipe.capture.servers, plan.config.aux_layer_ids
    assert isinstance(servers, EmbeddedServers), "plan_capture refuses others"
    longest = max(int(lengths(shard.rows).max()) for shard in plan.missing)
    in_flight = recipe.capture.pool.max_in_flight_per_server * servers.count
    row_bytes = 2 * (len(layer_ids) + 1) * plan.config.target_hidden_size
    with handover_folder(run, need_bytes=2 * in_flight * longest * row_bytes) as folder:
        try:
            with running_servers(
                # A prefill of some hundred tokens fills the cores: batches win little here.
                servers.model_copy(update={"max_running_requests": 1}),
                target=Path(recipe.target.path),
                options=EngineOptions(capture_folder=folder, capture_layer_ids=layer_ids),
                logs=run.logs,
                label="capture",
            ) as fleet:
                events.figures.servers = fleet.states
                session = CaptureSession(recipe, run, events, plan, folder)
                return asyncio.run(session.run(fleet.urls))
        except ServerFailed as error:
            raise PreflightFailed(
                f"the capture server failed: {error}",
                expected="a server that loads the target and stays up",
                change="the log above says why; the same command goes on from here",
            ) from error


class CaptureSession:
    """One pass over the missing shards, with the servers that are up now."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, events: EventLog, plan: Plan, folder: Path
    ) -> None:
        self._recipe, self._run, self._events = recipe, run, events
        self._config, self._folder, self._missing = plan.config, folder, plan.missing
        self._layer_ids = plan.config.aux_layer_ids
        total, rest = (sum(one.tokens for one in some) for some in (plan.shards, plan.missing))
        self._progress = Progress(
            "capture", total=total, done=total - rest, unit="tokens", figures=events.figures
        )
        self._may_fail = int(MAX_FAILED_SHARE * sum(one.rows.num_rows for one in plan.shards))
        self._failures = sum(len(part.failed) for part in plan.done.values())

    async def run(self, urls: Sequence[str]) -> Mapping[str, Part]:
        """Probe, then capture shard after shard with the next one's requests already waiting."""
        made: dict[str, Part] = {}
        pool_config = self._recipe.capture.pool
        async with Pool(urls, pool_config, vocab_size=self._config.vocab_size) as pool:
            await self._probe(pool)
            permits = asyncio.Semaphore(_SHARDS_IN_FLIGHT)

            async def one(shard: Shard) -> None:
                async with permits:
                    made[shard.name] = await self._shard(pool, shard)

            await _gather([one(shard) for shard in self._missing])
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
        if isinstance(outcome, Completed):
            assert outcome.value is not None, "_take returns states or raises"
            return outcome.value
        return outcome

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

    async def _probe(self, pool: Pool) -> None:
        """Capture the first sequence alone and beside others, and ask transformers about it."""
        samples = [_cut(sample) for sample in _samples(self._missing[0])[:_PROBE_ROWS]]
        alone = await self._states(pool, samples[0])
        among = (await _gather([self._states(pool, sample) for sample in samples]))[0]
        for outcome in (alone, among):
            if isinstance(outcome, Failed):
                raise self._gave_up(samples[0], outcome)
        assert isinstance(alone, CapturedStates)
        dtype = self._recipe.capture.servers.dtype  # type: ignore[union-attr]
        facts = await asyncio.to_thread(self._look, samples[0], alone, among, TOLERANCE[dtype])
        self._events.append("capture_probe", **facts)

    def _look(
        self, sample: _Sample, alone: CapturedStates, among: CapturedStates, tolerance: float
    ) -> dict[str, Any]:
        batch_error = check_batch(
            [alone.aux, alone.last], [among.aux, among.last], tolerance=tolerance
        )
        facts: dict[str, Any] = {"tolerance": tolerance, "batch_error": batch_error}
        if not can_witness(self._recipe.target):
            logger.warning("capture: the target is too large to load here; layers are not proved")
            return {**facts, "layers_proved": False}
        dtype = self._recipe.capture.servers.dtype  # type: ignore[union-attr]
        witness = Witness(self._recipe.target, getattr(torch, dtype))
        error = check_layers(
            alone.aux,
            alone.last,
            states=witness.states(sample.input_ids),
            aux_layer_ids=self._layer_ids,
            tolerance=tolerance,
        )
        shown = f"{error:.2%}"
        logger.info("capture: layers proved, states differ by %s from transformers'", shown)
        return {**facts, "layers_proved": True, "layer_error": error}


# The prefill is all that is wanted. Greedy, so that no seed has to be said.
_CAPTURE_ONLY: Mapping[str, Any] = {"max_new_tokens": 0, "temperature": 0.0}


async def _gather(coroutines: Sequence[Any]) -> list[Any]:
    """`asyncio.gather` that leaves none behind: the first exception cancels and awaits the rest."""
    tasks = [asyncio.ensure_future(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
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


def _cut(sample: _Sample) -> _Sample:
    return _Sample(
        sample.sample_id,
        sample.dataset,
        sample.domain,
        sample.input_ids[:_PROBE_TOKENS],
        min(sample.prompt_tokens, _PROBE_TOKENS),
    )


@contextmanager
def handover_folder(run: RunFolder, *, need_bytes: int) -> Iterator[Path]:
    """A folder in memory where there is room, else in the temp folder. Gone on every path.

    Its name follows from the run folder, which has one writer: what a killed call left behind is
    removed by the next.
    """
    name = f"eyas-capture-{hashlib.sha256(str(run.root.resolve()).encode()).hexdigest()[:16]}"
    memory, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    for place in (memory, disk):
        shutil.rmtree(place / name, ignore_errors=True)
    fits = (
        memory.is_dir()
        and os.access(memory, os.W_OK)
        and shutil.disk_usage(memory).free >= need_bytes
    )
    if not fits:
        logger.info("capture: /dev/shm has no %s bytes free; using %s", f"{need_bytes:,}", disk)
    folder = (memory if fits else disk) / name
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _draft_config(recipe: Recipe) -> DraftConfig:
    """What the states' shapes follow from; a target that fits no draft is refused here already."""
    target = recipe.target
    try:
        return draft_config(Path(target.path), recipe.draft, target.profile.aux_layer_ids)
    except (TargetFault, ValidationError) as error:
        raise PreflightFailed(
            f"no draft can be built for {target.path}: {error}",
            expected="a target whose config.json fits target.profile and the draft's shape",
            change="set target.path, target.profile.aux_layer_ids or draft as the message says",
        ) from error
