"""Run every response once more through the target and keep its hidden states: `features/`.

The client runs in this process, because the states come through node-local memory: the servers are
started on this machine and put one file for each request into a folder that this process made.
Rows flow server -> memory -> shard; nothing of them passes through Ray or JSON.

An embedded engine reads one sequence at a time: padding and neighbours change the last bits of a
state, and a capture that was cut short must end with the bytes of one that was not. A stock SGLang
server batches as it likes, so its states are the same within the tolerance of `capture_probe`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from actors.config import EmbeddedServers, LaunchedServers
from actors.dispatch import ServerReport
from pipelines.capture_plan import (
    Part,
    Plan,
    TokenBytes,
    check_room,
    drop_foreign_files,
    forget_shards,
    lengths,
    merge_parts,
    plan_shards,
    read_part,
    read_responses,
)
from pipelines.capture_servers import capture_servers, dtype_of, own_servers
from pipelines.capture_session import CaptureSession
from pipelines.errors import PreflightFailed
from pipelines.recipe import Recipe
from pipelines.schema import response_loss_mask
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog
from training.config import DraftConfig
from training.features import write_failed
from training.model import TargetFault, draft_config
from training.stream import TOKENS_FILE, TOKENS_SCHEMA, write_tokens

logger = logging.getLogger(__name__)

_ROWS_PER_BATCH = 4096

# Of SGLang's options, those that decide about the states.
_STATES = ("dtype", "quantization", "kv-cache-dtype", "json-model-override-args", "load-format")


def capture(recipe: Recipe, run: RunFolder, events: EventLog) -> dict[str, Any]:
    """Write `features/`; shards that an earlier call finished are kept. Ray is running.

    Raises `PreflightFailed` before the first byte where quota or disk are too small, or where the
    server's states are not those of the layers asked for; `QualityStop` where too many samples
    cannot be captured.
    """
    if recipe.capture.mode != "offline":
        return note_tokens(recipe, run)
    return capture_rows(recipe, run, events)


def capture_rows(
    recipe: Recipe, run: RunFolder, events: EventLog, only: Collection[str] | None = None
) -> dict[str, Any]:
    """Shards and index of all rows, or of the samples that are named."""
    plan = plan_capture(recipe, run, only)
    run.features.mkdir(parents=True, exist_ok=True)
    drop_foreign_files(run.features, plan.shards)
    made: Mapping[str, Part] = {}
    attempts: Mapping[str, Any] = {"asked_again": 0, "faults": {}}
    if plan.missing:
        (run.features / "index.parquet").unlink(missing_ok=True)
        made, attempts = _capture_missing(recipe, run, events, plan)
    counts = commit(run, [{**plan.done, **made}[shard.name] for shard in plan.shards])
    return {**counts, **attempts}


def note_tokens(recipe: Recipe, run: RunFolder) -> dict[str, Any]:
    """Write the tokens of all rows, for training that has their states made as it needs them."""
    own_servers(recipe)
    config, rows = draft_of(recipe), read_responses(run, _sets(recipe))
    run.features.mkdir(parents=True, exist_ok=True)
    forget_shards(run.features)
    batches = range(0, rows.num_rows, _ROWS_PER_BATCH)
    write_tokens(
        run.features / TOKENS_FILE, (_tokens(rows.slice(at, _ROWS_PER_BATCH)) for at in batches)
    )
    tokens = int(lengths(rows).sum())
    size = tokens * TokenBytes.of(config, recipe.capture.storage).at_most
    return {
        "headline": f"{rows.num_rows:,} samples, {tokens:,} tokens; their states "
        f"({size / 1e9:,.1f} GB) are made while training",
        "samples": rows.num_rows,
        "tokens": tokens,
        "state_bytes": size,
    }


def _tokens(rows: pa.Table) -> pa.Table:
    prompts, outputs = rows["prompt_ids"].to_pylist(), rows["output_ids"].to_pylist()
    masks = [
        response_loss_mask(len(prompt), len(output))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]
    ids = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    names = [rows[name] for name in ("sample_id", "dataset", "domain")]
    return pa.table([*names, ids, masks], schema=TOKENS_SCHEMA)


def _sets(recipe: Recipe) -> list[str]:
    return [one.name for one in recipe.prompts.train]


def plan_capture(recipe: Recipe, run: RunFolder, only: Collection[str] | None = None) -> Plan:
    """Decide which shards to make, and write nothing. Raises `PreflightFailed`."""
    servers, layer_ids = own_servers(recipe), recipe.target.profile.aux_layer_ids
    config = draft_of(recipe)
    rows = read_responses(run, _sets(recipe))
    if only is not None:
        rows = rows.filter(pc.is_in(rows["sample_id"], pa.array(sorted(only), pa.string())))
    shards = plan_shards(
        rows,
        samples_per_shard=recipe.capture.samples_per_shard,
        depends_on={
            "target": recipe.target.path,
            "layers": layer_ids,
            "storage": recipe.capture.storage,
            "servers": _what_decides(servers),
        },
    )
    parts = {shard.name: read_part(run.features, shard) for shard in shards}
    plan = Plan(
        config=config,
        dtype=dtype_of(servers),
        shards=shards,
        done={name: part for name, part in parts.items() if part is not None},
    )
    check_room(
        run.features,
        shards,
        plan.missing,
        size=TokenBytes.of(config, recipe.capture.storage),
        quota_bytes=recipe.capture.max_bytes,
    )
    return plan


def commit(run: RunFolder, parts: Sequence[Part]) -> dict[str, Any]:
    """Merge the finished shards' parts into the index; return the counts."""
    failed = [one for part in parts for one in part.failed]
    write_failed(run.features, failed)
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
    longest = max(int(lengths(shard.rows).max()) for shard in plan.missing)
    with capture_servers(recipe, run, events, plan.config, longest=longest) as (fleet, handover):

        def reports() -> Sequence[ServerReport]:
            fleet.check()
            return fleet.subscription()

        session = CaptureSession(recipe, run, events, plan, handover)
        made = asyncio.run(session.run(fleet.urls, reports))
        return made, {
            "asked_again": session.asked_again,
            "faults": dict(sorted(session.faults.items())),
        }


def _what_decides(servers: EmbeddedServers | LaunchedServers) -> list[Any]:
    """What of the servers decides about the states, as far as they are meant to be other ones."""
    if isinstance(servers, EmbeddedServers):
        return [servers.dtype, servers.device]
    given = {name: servers.arguments[name] for name in _STATES if name in servers.arguments}
    return [servers.kind, servers.device, given]


def draft_of(recipe: Recipe) -> DraftConfig:
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
