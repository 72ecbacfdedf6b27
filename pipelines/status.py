"""How far a run is, how fast, and whether anyone is working on it. Reads a few counts, fast.

Knows no Ray and no torch: it works beside a running driver, after its death, and on a copy.
"""

import shutil
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from pipelines.last_seen import LastSeen, read_last_seen
from pipelines.recipe import Recipe, load_recipe
from pipelines.stages import STAGES
from pipelines.status_driver import SILENT_SECONDS, find_driver, freshest, last_pid
from pipelines.status_events import (
    Events,
    last_error,
    open_stage,
    quality_stops,
    read_events,
    started_at,
)
from pipelines.status_rows import NOW_SECONDS, SetRows, Speed, added, prompts_wanted, read_set
from pipelines.status_training import TrainingStatus, read_training
from pipelines.storage import RemotePath, storage_failed
from pipelines.store import RunFolder, read_manifest
from pipelines.telemetry import duration

_STALE_SECONDS = 600.0  # a driver that lives and writes nothing for so long may hang
_LEAST_FREE_BYTES = 1 << 30
_REASONS = 3

State = Literal["finished", "running", "dead", "stopped", "not started"]


@dataclass(frozen=True)
class SetStatus:
    """One prompt set. `done` rows are durable: in segments, or committed."""

    name: str
    total: int
    done: int
    ok: int
    rejected: int
    failed: int
    reasons: dict[str, int]  # the most frequent statuses that are not ok
    rows_per_second: float | None  # now; null unless rows are being asked for
    eta_seconds: float | None


@dataclass(frozen=True)
class StageStatus:
    """One stage. `done` and `total` are null where the stage has nothing to count yet.

    Rates are over the whole stage, or of this session while it runs; `..._now` over a minute.
    """

    stage: str
    state: Literal["done", "running", "stopped", "waiting"]
    unit: str
    done: int | None
    total: int | None
    rows_per_second: float | None = None
    tokens_per_second: float | None = None
    rows_per_second_now: float | None = None
    tokens_per_second_now: float | None = None
    eta_seconds: float | None = None
    seconds: float | None = None
    headline: str = ""


@dataclass(frozen=True)
class StatusReport:
    """A run at one moment."""

    run_folder: str
    name: str
    state: State
    driver_pid: int | None  # of the living driver
    driver_host: str | None
    dead_pid: int | None  # of the driver that was killed
    last_event: str | None
    last_event_age_seconds: float | None
    last_error: str | None
    stages: tuple[StageStatus, ...]
    sets: tuple[SetStatus, ...]
    last_row_age_seconds: float | None  # since the newest response became durable
    training: TrainingStatus | None
    seen: LastSeen | None  # what the driver saw of servers, GPUs and Ray
    seen_age_seconds: float | None
    next_command: str
    alarms: tuple[str, ...]
    history: tuple[str, ...]  # past stops that were mended

    def to_json(self) -> dict[str, Any]:
        """The same, as data."""
        return asdict(self)


def status(run: RunFolder, *, now: float | None = None) -> StatusReport:
    """Look at a run folder and its store.

    Raises `BadRecipe` where its manifest, recipe, events or `servers.json` are no such thing, and
    `StorageFailed` where the store does not answer.
    """
    at = time.time() if now is None else now
    try:
        return _Look(run, at).report()
    except OSError as error:
        where = run.responses
        if error.errno is not None or not isinstance(where, RemotePath):
            raise
        failed = storage_failed(error, where, patient=False)
        assert failed is not None, "whoever is not patient is always told"
        raise failed from error


class _Look:
    """What is read once for one report."""

    def __init__(self, run: RunFolder, now: float) -> None:
        self.run, self.now = run, now
        self.recipe: Recipe | None = load_recipe(run.recipe) if run.recipe.exists() else None
        self.stages: Mapping[str, Any] = read_manifest(run)["stages"]
        self.events: Events = read_events(run)
        self.seen = read_last_seen(run)
        self.driver = find_driver(run, self.seen, now)
        self.open = open_stage(self.events) if self.driver else None
        train = self.recipe.prompts.train if self.recipe else ()
        self.rows = {one.name: read_set(run, one.name) for one in train}
        self.sets = tuple(self._set(name, rows) for name, rows in self.rows.items())
        self.training = read_training(run)

    def report(self) -> StatusReport:
        """All of it."""
        last = self.events[-1] if self.events else None
        state = self._state()
        past, current = quality_stops(self.events)
        newest_row = max((one.newest for one in self.rows.values() if one.newest), default=None)
        seen = None if state == "finished" else self.seen
        return StatusReport(
            run_folder=str(self.run.root),
            name=self.recipe.name if self.recipe else self.run.root.name,
            state=state,
            driver_pid=self.driver.pid if self.driver else None,
            driver_host=self.driver.host if self.driver else None,
            dead_pid=last_pid(self.run) if state == "dead" else None,
            last_event=last["event"] if last else None,
            last_event_age_seconds=self._age(last["at"] if last else None),
            last_error=last_error(self.events) if state == "stopped" else None,
            stages=tuple(self._stage(stage) for stage in STAGES),
            sets=self.sets,
            last_row_age_seconds=self._age(newest_row),
            training=self.training,
            seen=seen,
            seen_age_seconds=self._age(seen.at if seen else None),
            next_command=_next(self.run, state),
            alarms=(*current, *self._alarms(state)),
            history=tuple(past),
        )

    def _age(self, at: float | None) -> float | None:
        return None if at is None else round(max(0.0, self.now - at), 1)

    def _state(self) -> State:
        if self.driver:
            return "running"
        if all(stage in self.stages for stage in STAGES):
            return "finished"
        if not self.events:
            return "not started"
        # A stage that began and never said how it ended: its driver was killed.
        return "dead" if open_stage(self.events) else "stopped"

    # What is wrong now

    def _alarms(self, state: State) -> list[str]:
        alarms = [f"{name} cannot be read: eyas verify says why" for name in self._damaged()]
        if state == "dead":
            alarms.append(
                f"the driver is dead (pid {last_pid(self.run)}, in {open_stage(self.events)}): "
                "nobody works on this run"
            )
        if state == "running":
            alarms += self._silence() + self._servers()
        if self.run.root.exists() and state != "finished":
            free = shutil.disk_usage(self.run.root).free
            if free < _LEAST_FREE_BYTES:
                alarms.append(f"{free / 2**20:,.0f} MiB are free on the disk of {self.run.root}")
        return alarms

    def _damaged(self) -> list[str]:
        return [name for rows in self.rows.values() for name in rows.damaged]

    def _silence(self) -> list[str]:
        written = freshest(self.run, self.events)
        if written is None or self.now - written <= _STALE_SECONDS:
            return []
        return [
            f"the driver lives, and nothing was written for {duration(self.now - written)}: look "
            f"at {self.run.logs}, then at the servers"
        ]

    def _servers(self) -> list[str]:
        seen = self.seen
        if seen is None or seen.stage != self.open:
            return []
        if self.now - seen.at > SILENT_SECONDS:
            age = duration(self.now - seen.at)
            return [f"the driver lives, and has not looked at its servers for {age}"]
        alarms = [
            f"server {one.name} is {one.state}: {_first_line(one.error)}"
            for one in seen.servers
            if one.state in ("unfit", "failed")
        ]
        if seen.servers and not any(one.state == "ready" for one in seen.servers):
            states = Counter(one.state for one in seen.servers)
            alarms.append("no server is ready: " + _listed(states))
        if seen.ray.dead_nodes:
            alarms.append(f"{seen.ray.dead_nodes} of Ray's nodes are dead")
        return alarms

    # Sets and stages

    def _set(self, name: str, rows: SetRows) -> SetStatus:
        assert self.recipe is not None, "sets are the recipe's"
        prompts = (self.run.prompts / name).glob("*.parquet")
        samples = self.recipe.generate.samples_per_prompt
        total = samples * sum(prompts_wanted(path) for path in prompts)
        counts = rows.statuses
        bad = Counter({status: count for status, count in counts.items() if status != "ok"})
        done = counts.total()
        speed = self._speed(rows)
        return SetStatus(
            name=name,
            total=total,
            done=done,
            ok=counts["ok"],
            rejected=sum(n for status, n in bad.items() if status.startswith("rejected:")),
            failed=sum(n for status, n in bad.items() if status.startswith("failed:")),
            reasons=dict(bad.most_common(_REASONS)),
            rows_per_second=speed.rows_per_second if speed else None,
            eta_seconds=_eta(total - done, speed.rows_per_second if speed else None),
        )

    def _speed(self, rows: SetRows, *, overall: bool = False) -> Speed | None:
        """Of this session, or of its last minute; None unless rows are being asked for."""
        began = started_at(self.events, "generate")
        if self.open != "generate" or began is None:
            return None
        return rows.speed(began if overall else max(began, self.now - NOW_SECONDS), self.now)

    def _stage(self, stage: str) -> StageStatus:
        unit, done, total = self._counts(stage)
        entry = self.stages.get(stage)
        if entry is not None:
            seconds, counts = float(entry["seconds"]), entry["counts"]
            rows, tokens = _rates(stage, counts, done, seconds)
            headline = str(counts["headline"]) if "headline" in counts else ""
            return StageStatus(
                stage, "done", unit, done, total, rows, tokens, seconds=seconds, headline=headline
            )
        began = started_at(self.events, stage)
        if began is None:
            return StageStatus(stage, "waiting", unit, done, total)
        if self.open == stage:
            return self._running(stage, unit, done, total, began)
        seconds = round(max(self.events[-1]["at"] - began, 0.0), 1)
        return StageStatus(stage, "stopped", unit, done, total, seconds=seconds)

    def _running(
        self, stage: str, unit: str, done: int | None, total: int | None, began: float
    ) -> StageStatus:
        seconds = round(max(self.now - began, 0.0), 1)
        here = StageStatus(stage, "running", unit, done, total, seconds=seconds)
        left = None if done is None or total is None else total - done
        match stage:
            case "generate":
                now, session = (
                    added([self._speed(one, overall=overall) for one in self.rows.values()])
                    for overall in (False, True)
                )
                rate = now.rows_per_second if now else None
                return _with(
                    here,
                    rows_per_second=session.rows_per_second if session else None,
                    tokens_per_second=session.tokens_per_second if session else None,
                    rows_per_second_now=rate,
                    tokens_per_second_now=now.tokens_per_second if now else None,
                    eta_seconds=_eta(left, rate),
                )
            case "capture" if seconds >= 1:
                shards = [
                    event
                    for event in self.events
                    if event["event"] == "shard_captured" and event["at"] >= began
                ]
                rate = sum(event["samples"] for event in shards) / seconds
                tokens = sum(event["tokens"] for event in shards) / seconds
                return _with(
                    here,
                    rows_per_second=rate,
                    tokens_per_second=tokens,
                    eta_seconds=_eta(left, rate),
                )
            case "train" if self.training:
                return _with(
                    here,
                    tokens_per_second_now=self.training.tokens_per_second,
                    eta_seconds=self.training.eta_seconds,
                )
            case _:
                return here

    def _counts(self, stage: str) -> tuple[str, int | None, int | None]:
        """Unit, done and total."""
        run = self.run
        match stage:
            case "prepare":
                prompts = sum(_rows(path) for path in run.prompts.glob("[!_.]*/*.parquet"))
                return "prompts", prompts or None, prompts or None
            case "generate":
                total = sum(one.total for one in self.sets)
                return "rows", sum(one.done for one in self.sets) if total else None, total or None
            case "capture":
                # Hidden parts of the index say what each finished shard holds.
                done = sum(_rows(path) for path in run.features.glob(".shard-*.parquet"))
                index = run.features / "index.parquet"
                done = _rows(index) if index.exists() else done
                wanted = sum(one.ok for one in self.sets) if "generate" in self.stages else None
                return "samples", done if wanted else None, wanted
            case "train":
                if self.training is None:
                    return "steps", None, None
                return "steps", self.training.step, self.training.total_steps
            case "export":
                done = int("export" in self.stages)
                return "draft", done or None, 1 if done else None
            case _:
                phases = len(list(run.evaluation_phases.glob("[!.]*.json")))
                return "phases", 3 if "evaluate" in self.stages else phases or None, 3


def _with(one: StageStatus, **changes: float | None) -> StageStatus:
    return StageStatus(**{**vars(one), **changes})


def _eta(left: int | None, rate: float | None) -> float | None:
    """None where nothing comes now: then nobody knows."""
    return None if left is None or not rate else round(left / rate, 1)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _first_line(text: str) -> str:
    return text.splitlines()[0] if text else "no reason is known"


def _next(run: RunFolder, state: State) -> str:
    match state:
        case "finished":
            return f"eyas verify {run.root}"
        case "running":
            return f"eyas status {run.root} --watch"
        case "not started":
            return "eyas run RECIPE"
        case _:
            return f"eyas run {run.recipe}  (goes on where it was)"


def _rates(
    stage: str, counts: Mapping[str, Any], done: int | None, seconds: float
) -> tuple[float | None, float | None]:
    """Overall rates of a finished stage, from what it counted itself."""
    if seconds <= 0 or stage in ("export", "evaluate"):
        return None, None
    rows = counts["asked"] if stage == "generate" and "asked" in counts else done
    tokens = None
    if stage == "generate" and "output_tokens_per_second" in counts:
        tokens = float(counts["output_tokens_per_second"])
    elif stage == "capture" and "tokens" in counts:
        tokens = counts["tokens"] / seconds
    return (rows / seconds if rows else None), tokens


def _rows(path: Path) -> int:
    count: int = pq.read_metadata(path).num_rows
    return count
