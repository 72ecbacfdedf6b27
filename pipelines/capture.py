"""Run every response once more through the target and keep its hidden states: `features/`.

The client runs in this process, because the states come through node-local memory: the servers are
started on this machine and put one file for each request into a folder that this process made.
Rows flow server -> memory -> shard; nothing of them passes through Ray or JSON.

An embedded engine reads one sequence at a time: padding and neighbours change the last bits of a
state, and a capture that was cut short must end with the bytes of one that was not. A stock SGLang
server batches as it likes, so its states are the same within the tolerance of `capture_probe`.
"""

import asyncio
import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast, get_args

from pydantic import ValidationError

from actors.capture_file import LATE_SECONDS
from actors.config import AttachedServers, EmbeddedServers, LaunchedServers
from actors.dispatch import ServerReport
from actors.errors import ServerFailed, ServerUnfit
from actors.fit import Expectation
from actors.fleet import running_servers
from actors.launch import EngineOptions
from actors.launch_capture import CaptureOptions, architecture_of, place_hook, served_layer_ids
from actors.preflight import Admission
from pipelines.capture_plan import (
    Dtype,
    Part,
    Plan,
    check_room,
    drop_foreign_files,
    lengths,
    merge_parts,
    plan_shards,
    read_part,
    read_responses,
)
from pipelines.capture_session import CaptureSession
from pipelines.errors import PreflightFailed
from pipelines.recipe import Recipe
from pipelines.store import RunFolder, write_json
from pipelines.telemetry import EventLog
from training.config import DraftConfig
from training.model import TargetFault, draft_config

logger = logging.getLogger(__name__)

# Of SGLang's options, those that decide about the states.
_STATES = ("dtype", "quantization", "kv-cache-dtype", "json-model-override-args", "load-format")
# SGLang keeps some tokens of its context to itself: six of the input's, and `check_fit` counts four
# of them as room for a response (managers/scheduler.py, max_req_input_len).
_BEYOND_INPUT, _SPARE_CONTEXT = 4, 16


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
    attempts: Mapping[str, Any] = {"asked_again": 0, "faults": {}}
    if plan.missing:
        (run.features / "index.parquet").unlink(missing_ok=True)
        made, attempts = _capture_missing(recipe, run, events, plan)
    counts = commit(run, [{**plan.done, **made}[shard.name] for shard in plan.shards])
    return {**counts, **attempts}


def plan_capture(recipe: Recipe, run: RunFolder) -> Plan:
    """Decide which shards to make, and write nothing. Raises `PreflightFailed`."""
    servers, layer_ids = recipe.capture.servers, recipe.target.profile.aux_layer_ids
    if isinstance(servers, AttachedServers):
        raise PreflightFailed(
            f"capture.servers.kind is {servers.kind}",
            expected="embedded or launch: hidden states are handed over in this machine's memory",
            change="set capture.servers.kind to launch",
        )
    config = _draft_config(recipe)
    shards = plan_shards(
        read_responses(run, [one.name for one in recipe.prompts.train]),
        samples_per_shard=recipe.capture.samples_per_shard,
        depends_on={
            "target": recipe.target.path,
            "layers": layer_ids,
            "servers": _what_decides(servers),
        },
    )
    parts = {shard.name: read_part(run.features, shard) for shard in shards}
    plan = Plan(
        config=config,
        dtype=_dtype(servers),
        served_ids=_served_ids(recipe) if isinstance(servers, LaunchedServers) else (),
        shards=shards,
        done={name: part for name, part in parts.items() if part is not None},
    )
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
) -> tuple[Mapping[str, Part], Mapping[str, Any]]:
    """Make the missing shards; return their parts, and how often rows were asked again."""
    servers = recipe.capture.servers
    assert not isinstance(servers, AttachedServers), "plan_capture refuses them"
    longest = max(int(lengths(shard.rows).max()) for shard in plan.missing)
    in_flight = recipe.capture.pool.max_in_flight_per_server * servers.count
    row_bytes = 2 * (len(plan.config.aux_layer_ids) + 1) * plan.config.target_hidden_size
    nonce = secrets.token_hex(8)
    with handover_folder(run, need_bytes=2 * in_flight * longest * row_bytes) as folder:
        admission: Admission | None = None
        context: int | None = None
        late_seconds = 0.0  # the embedded engine writes a file before it answers
        if isinstance(servers, LaunchedServers):
            place_hook(folder)
            late_seconds = LATE_SECONDS
            admission, context = _demands(recipe, plan.config, longest)
        else:
            # A prefill of some hundred tokens fills the cores: batches win little here.
            servers = servers.model_copy(update={"max_running_requests": 1})
        layer_ids = plan.config.aux_layer_ids
        try:
            with running_servers(
                servers,
                target=Path(recipe.target.path),
                options=EngineOptions(
                    capture=CaptureOptions(folder, layer_ids, plan.served_ids, nonce),
                    context_length=context,
                ),
                logs=run.logs,
                label="capture",
                admission=admission,
                on_event=lambda name, fields: events.append(name, **fields),
            ) as fleet:
                events.figures.servers = fleet.states

                def reports() -> Sequence[ServerReport]:
                    fleet.check()
                    return fleet.subscription()

                session = CaptureSession(
                    recipe, run, events, plan, folder, nonce=nonce, late_seconds=late_seconds
                )
                made = asyncio.run(session.run(fleet.urls, reports))
                return made, {
                    "asked_again": session.asked_again,
                    "faults": dict(sorted(session.faults.items())),
                }
        except ServerUnfit as error:
            raise PreflightFailed(
                error.seen, expected=error.expected, change=error.change
            ) from error
        except ServerFailed as error:
            raise PreflightFailed(
                f"the capture server failed: {error}",
                expected="a server that loads the target and stays up",
                change="the log above says why; the same command goes on from here",
            ) from error


def _demands(recipe: Recipe, config: DraftConfig, longest: int) -> tuple[Admission, int | None]:
    """What a stock server must be and have room for, and the context that it is given if the
    target's own is too short for what a server keeps to itself of it."""
    own, roomy = config.max_position_embeddings, longest + _SPARE_CONTEXT
    expectation = Expectation(Path(recipe.target.path), longest + _BEYOND_INPUT, max(own, roomy))
    admission = Admission(expectation, vocab_size=config.vocab_size)
    return admission, roomy if roomy > own else None


def _served_ids(recipe: Recipe) -> tuple[int, ...]:
    path = Path(recipe.target.path) / "config.json"
    try:
        architecture, layers = architecture_of(json.loads(path.read_text()))
        return served_layer_ids(architecture, layers, recipe.target.profile.aux_layer_ids)
    except ValueError as error:
        raise PreflightFailed(
            f"{path}: {error}",
            expected="a target whose layers SGLang 0.5.23 is known to capture",
            change="set target.profile.aux_layer_ids, or capture.servers.kind to embedded",
        ) from error


def _dtype(servers: EmbeddedServers | LaunchedServers) -> Dtype:
    if isinstance(servers, EmbeddedServers):
        return servers.dtype
    dtype = servers.arguments["dtype"]
    assert dtype in get_args(Dtype), "the recipe was checked"
    return cast(Dtype, dtype)


def _what_decides(servers: EmbeddedServers | LaunchedServers) -> list[Any]:
    """What of the servers decides about the states, as far as they are meant to be other ones."""
    if isinstance(servers, EmbeddedServers):
        return [servers.dtype, servers.device]
    given = {name: servers.arguments[name] for name in _STATES if name in servers.arguments}
    return [servers.kind, servers.device, given]


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
