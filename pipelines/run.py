"""A run: which stages are done, which are next, and the one table at the end."""

import errno
import importlib
import json
import logging
import shutil
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.errors import BadRecipe, PreflightFailed
from pipelines.quality_stop import holds_suspects_only, set_aside_suspects
from pipelines.recipe import Recipe, dump_recipe, fingerprint
from pipelines.segments import reopen_failed
from pipelines.stages import STAGES
from pipelines.storage import RemotePath, storage_failed
from pipelines.store import (
    RunFolder,
    forget_stages,
    read_manifest,
    record_stage,
    stage_files,
    write_atomically,
    write_json,
)
from pipelines.telemetry import EventLog, duration

logger = logging.getLogger(__name__)

_NEEDS_RAY = frozenset({"generate", "capture", "train", "evaluate"})


@dataclass(frozen=True)
class StageResult:
    """What one stage did, now or in an earlier session."""

    stage: str
    counts: Mapping[str, Any]
    seconds: float
    was_done: bool


def run_stages(
    recipe: Recipe,
    *,
    stages: Sequence[str] = STAGES,
    again: Sequence[str] = (),
    retry_failed: bool = False,
) -> list[StageResult]:
    """Run the stages in order, skipping those that are done; those in `again` are made once more.

    With `retry_failed`, rows that no server answered are asked again, and what came after them is
    made again where there are any.

    Raises `BadRecipe` when the folder holds the work of another recipe, and whatever a stage
    raises; what was durable by then stays, and the next call goes on from there.
    """
    run = run_of(recipe)
    run.create()
    with _storage_stops(run), run.lock():
        if again:
            _forget(recipe, run, again)
        _refuse_another_recipe(recipe, run)
        _refuse_foreign_store(recipe, run)
        write_atomically(run.recipe, dump_recipe(recipe).encode())
        events = EventLog(run)
        if retry_failed:
            _reopen(recipe, run, events)
        with _ray_when_needed(recipe) as start_ray:
            return [_run_stage(recipe, run, stage, events, start_ray) for stage in stages]


def run_of(recipe: Recipe) -> RunFolder:
    """The run that a recipe makes, with its store."""
    return RunFolder(Path(recipe.run_folder), recipe.generate.store)


def done_stages(recipe: Recipe) -> list[StageResult]:
    """The stages that are done, in order, up to the first that is not."""
    run = run_of(recipe)
    results: list[StageResult] = []
    for stage in STAGES:
        entry = _done(recipe, run, stage)
        if entry is None:
            break
        results.append(StageResult(stage, entry["counts"], entry["seconds"], was_done=True))
    return results


def _run_stage(
    recipe: Recipe, run: RunFolder, stage: str, events: EventLog, start_ray: "_RayStarter"
) -> StageResult:
    entry = _done(recipe, run, stage)
    if entry is not None:
        logger.info("%s: done before (%s)", stage, duration(entry["seconds"]))
        return StageResult(stage, entry["counts"], entry["seconds"], was_done=True)
    for earlier in STAGES[: STAGES.index(stage)]:
        if _done(recipe, run, earlier) is None:
            raise PreflightFailed(
                f"{stage} cannot start: {earlier} is not done in {run.root}",
                expected="every earlier stage done",
                change=f"run `eyas {earlier} RECIPE`, or `eyas run RECIPE` for all of them",
            )
    if stage in _NEEDS_RAY:
        start_ray()
    logger.info("%s: started", stage)
    events.append("stage_started", stage=stage)
    started = time.monotonic()
    try:
        verb = getattr(importlib.import_module(f"pipelines.{stage}"), stage)
        with _storage_stops(run), _publishing(run, events, stage):
            counts = verb(recipe, run, events)
    except BaseException as error:
        events.append("stage_stopped", stage=stage, error=type(error).__name__)
        raise
    seconds = time.monotonic() - started
    mark = fingerprint(recipe, stage)
    record_stage(run, stage, fingerprint=mark, counts=counts, seconds=seconds)
    events.append("stage_finished", stage=stage, seconds=round(seconds, 1))
    logger.info("%s: done in %s", stage, duration(seconds))
    return StageResult(stage, counts, seconds, was_done=False)


def _publishing(run: RunFolder, events: EventLog, stage: str) -> AbstractContextManager[None]:
    if stage not in _NEEDS_RAY:
        return nullcontext()
    from pipelines.publish import publishing  # here: a run that is done needs no server's client

    return publishing(run, events, stage)


@contextmanager
def _storage_stops(run: RunFolder) -> Iterator[None]:
    """A full disk, or a store out of reach, whoever met it: no bug, and no reason to go on."""
    try:
        yield
    except OSError as error:
        where = run.responses
        stop = None
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            stop = storage_failed(error, run.root)
        elif error.errno is None and isinstance(where, RemotePath):
            stop = storage_failed(error, where, patient=False)
        if stop is None:
            raise
        raise stop from error


def _done(recipe: Recipe, run: RunFolder, stage: str) -> dict[str, Any] | None:
    """The manifest's entry of a stage that is done and whose files are there, else None."""
    entry: dict[str, Any] | None = read_manifest(run)["stages"].get(stage)
    if entry is None or entry["fingerprint"] != fingerprint(recipe, stage):
        return None
    sizes = {run.name_of(path): path.stat().st_size for path in stage_files(run, stage)}
    for name, file in entry["files"].items():
        if name not in sizes or sizes[name] != file["bytes"]:
            raise PreflightFailed(
                f"{run.locate(name)} is missing or has another size than when {stage} made it",
                expected=f"{file['bytes']} bytes",
                change=f"restore it, or make it again with `eyas run RECIPE --from {stage}`",
            )
    return entry


def _refuse_another_recipe(recipe: Recipe, run: RunFolder) -> None:
    """A done stage with another fingerprint means that the recipe changed under the folder."""
    for stage, entry in read_manifest(run)["stages"].items():
        if entry["fingerprint"] != fingerprint(recipe, stage):
            raise BadRecipe(
                f"{run.root} holds the {stage} stage of another recipe (its own is {run.recipe})",
                expected="the recipe that the run folder was started with",
                change=f"set another run_folder, or do it again with --from {stage}",
            )
    if run.recipe.exists() and not read_manifest(run)["stages"].get("generate"):
        _refuse_mixed_responses(recipe, run)


def _refuse_mixed_responses(recipe: Recipe, run: RunFolder) -> None:
    """Rows of an unfinished generate must all come from one way of asking."""
    from pipelines.recipe import load_recipe  # here: a stored recipe is read in this case only

    if not run.segments.exists() or not any(run.segments.rglob("*.arrow")):
        return
    stored = load_recipe(run.recipe)
    if fingerprint(stored, "generate") != fingerprint(recipe, "generate"):
        if holds_suspects_only(run):  # a canary that failed: the cure may be in the recipe
            set_aside_suspects(run)
            return
        raise BadRecipe(
            f"{run.root} holds responses made with other prompts, sampling or gates",
            expected=f"the prompts, sampling and gates of {run.recipe}",
            change="set another run_folder",
        )


def _refuse_foreign_store(recipe: Recipe, run: RunFolder) -> None:
    """A store belongs to one way of asking, whichever folder a run looks at it from."""
    if run.store is None:
        return
    mark = fingerprint(recipe, "generate")
    try:
        origin = json.loads(run.origin.read_bytes())
    except FileNotFoundError:
        write_json(run.origin, {"recipe": recipe.name, "fingerprint": mark})
        return
    if origin["fingerprint"] != mark and holds_suspects_only(run):
        set_aside_suspects(run)
        write_json(run.origin, {"recipe": recipe.name, "fingerprint": mark})
    elif origin["fingerprint"] != mark:
        raise BadRecipe(
            f"{run.responses} holds responses of another recipe ({origin['recipe']}), or made "
            "with other prompts, sampling or gates",
            expected="one store for one recipe",
            change="set another generate.store",
        )


def _reopen(recipe: Recipe, run: RunFolder, events: EventLog) -> None:
    """Have failed rows asked again, and everything made again that came after them."""
    counts = {one.name: reopen_failed(run, one.name) for one in recipe.prompts.train}
    total = sum(counts.values())
    logger.info("%s failed rows are asked again", f"{total:,}")
    if total:
        events.append("failed_reopened", sets=counts)
        _forget(recipe, run, STAGES[STAGES.index("generate") :])


def _forget(recipe: Recipe, run: RunFolder, stages: Sequence[str]) -> None:
    """Take the given stages' done marks, and what they made that is not a row of a response."""
    made = read_manifest(run)["stages"].get("generate")
    rows_differ = made is not None and made["fingerprint"] != fingerprint(recipe, "generate")
    if rows_differ and {"prepare", "generate"} & set(stages):
        raise BadRecipe(
            f"{run.root} holds responses made with other prompts, sampling or gates",
            expected="committed responses are never thrown away",
            change="set another run_folder",
        )
    forget_stages(run, stages)
    made_by = {
        "train": (run.checkpoints, run.training, run.draft_vocab),
        "export": (run.draft,),
        "evaluate": (run.evaluation, run.evaluation_samples, run.evaluation_phases),
    }
    for stage, paths in made_by.items():
        for path in paths if stage in stages else ():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


class _RayStarter:
    """Starts or joins Ray on the first call; knows whether it has to end it."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.is_started = False

    def __call__(self) -> None:
        """Have Ray ready. Does nothing when it is, here or in the caller."""
        import ray

        if ray.is_initialized():
            return
        config = self._recipe.ray
        logger.info("starting Ray" if config.address is None else "joining Ray")
        local = config.address is None
        on_sigterm = signal.getsignal(signal.SIGTERM)
        ray.init(
            address="local" if local else config.address,
            num_cpus=config.num_cpus if local else None,
            include_dashboard=config.dashboard if local else None,
            object_store_memory=config.object_store_bytes if local else None,
            logging_level=logging.ERROR,
            # Workers' lines reach people through the run's logs and events, not through stdout.
            log_to_driver=False,
        )
        # Ray puts a handler of its own there, which ends the process without any clean-up.
        signal.signal(signal.SIGTERM, on_sigterm)
        self.is_started = True


@contextmanager
def _ray_when_needed(recipe: Recipe) -> Iterator[_RayStarter]:
    starter = _RayStarter(recipe)
    try:
        yield starter
    finally:
        if starter.is_started:
            import ray

            ray.shutdown()
