"""How far a run is, how fast, and whether anyone is working on it. Reads a few counts, fast.

Knows no Ray and no torch: it works beside a running driver, after its death, and on a copy.
"""

import fcntl
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.errors import BadRecipe
from pipelines.recipe import Recipe, load_recipe
from pipelines.storage import Location, contents, for_each, listed, newest, readable
from pipelines.store import STAGES, RunFolder, read_manifest
from pipelines.telemetry import duration

_TAIL_BYTES = 1 << 18
_STALE_SECONDS = 600.0  # a driver that lives and writes nothing for so long may hang


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


@dataclass(frozen=True)
class TrainingStatus:
    """The last line of metrics."""

    step: int
    total_steps: int
    loss: float
    acceptance_length: float | None  # simulated, on training rows
    tokens_per_second: float
    eta_seconds: float | None


@dataclass(frozen=True)
class StageStatus:
    """One stage. `done` and `total` are null where the stage has nothing to count yet."""

    stage: str
    state: Literal["done", "running", "stopped", "waiting"]
    unit: str
    done: int | None
    total: int | None
    rows_per_second: float | None
    tokens_per_second: float | None
    seconds: float | None
    headline: str


@dataclass(frozen=True)
class StatusReport:
    """A run at one moment."""

    run_folder: str
    name: str
    state: Literal["finished", "running", "dead", "stopped", "not started"]
    driver_pid: int | None  # of the living driver
    last_event: str | None
    last_event_age_seconds: float | None
    last_error: str | None
    stages: tuple[StageStatus, ...]
    sets: tuple[SetStatus, ...]
    training: TrainingStatus | None
    next_command: str
    alarms: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The same, as data."""
        return asdict(self)


def status(run: RunFolder, *, now: float | None = None) -> StatusReport:
    """Look at a run folder. Raises `BadRecipe` where its manifest or recipe is no such thing."""
    at = time.time() if now is None else now
    recipe = load_recipe(run.recipe) if run.recipe.exists() else None
    stages = read_manifest(run)["stages"]
    events = _events(run)
    pid = living_driver(run)
    sets = _sets(run, recipe)
    training = _training(run)
    state = _state(stages, events, pid)
    last = events[-1] if events else None
    rows = tuple(
        _stage(run, stage, stages, events, sets, training, pid is not None, at) for stage in STAGES
    )
    return StatusReport(
        run_folder=str(run.root),
        name=recipe.name if recipe else run.root.name,
        state=state,
        driver_pid=pid,
        last_event=last["event"] if last else None,
        last_event_age_seconds=round(max(0.0, at - last["at"]), 1) if last else None,
        last_error=_last_error(events, state),
        stages=rows,
        sets=sets,
        training=training,
        next_command=_next(run, state),
        alarms=tuple(_alarms(run, state, at, events)),
    )


def living_driver(run: RunFolder) -> int | None:
    """The pid of the process that holds the run's lock, or None. Never waits, never disturbs it.

    The probe takes a shared lock for a moment: two probes do not see each other, and a driver that
    starts in that very moment is told that the folder is held. So it is released at once.
    """
    path = run.root / ".lock"
    try:
        with path.open("r") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                word = handle.read().removeprefix("pid ").strip()
                return int(word) if word.isdigit() else -1
            fcntl.flock(handle, fcntl.LOCK_UN)
    except FileNotFoundError:
        return None
    return None


def render(report: StatusReport, console: Console) -> None:
    """Print the report. Reads without colour, in 80 columns."""
    console.print(f"[bold]{escape(report.name)}[/]  {_say_state(report)}", highlight=False)
    if report.last_error:
        console.print(f"it ended with {report.last_error}", highlight=False, markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("progress", justify="right", no_wrap=True)
    table.add_column("speed", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for one in report.stages:
        table.add_row(
            one.stage,
            one.state,
            _progress(one),
            _speed(one),
            "" if one.seconds is None else duration(one.seconds),
            escape(one.headline),
        )
    console.print(table)
    if report.training and report.training.step < report.training.total_steps:
        console.print(_say_training(report.training), highlight=False)
    if report.sets:
        console.print(_set_table(report))
    for alarm in report.alarms:
        console.print(f"[bold yellow]ALARM[/] {escape(alarm)}", highlight=False)
    console.print(f"next  {report.next_command}", highlight=False, markup=False, soft_wrap=True)


# --- state


def _state(
    stages: Mapping[str, Any], events: list[dict[str, Any]], pid: int | None
) -> Literal["finished", "running", "dead", "stopped", "not started"]:
    if pid is not None:
        return "running"
    if all(stage in stages for stage in STAGES):
        return "finished"
    if not events:
        return "not started"
    # A stage that began and never said how it ended: its driver was killed.
    open_stage = None
    for event in events:
        match event["event"]:
            case "stage_started":
                open_stage = event["stage"]
            case "stage_finished" | "stage_stopped":
                open_stage = None
    return "stopped" if open_stage is None else "dead"


def _last_error(events: list[dict[str, Any]], state: str) -> str | None:
    if state != "stopped" or events[-1]["event"] != "stage_stopped":
        return None
    return f"{events[-1]['error']} in {events[-1]['stage']}"


def _next(run: RunFolder, state: str) -> str:
    match state:
        case "finished":
            return f"eyas verify {run.root}"
        case "running":
            return f"eyas status {run.root} --watch"
        case "not started":
            return "eyas run RECIPE"
        case _:
            return f"eyas run {run.recipe}  (goes on where it was)"


def _alarms(run: RunFolder, state: str, now: float, events: list[dict[str, Any]]) -> list[str]:
    alarms = []
    if state == "running":
        freshest = _freshest(run, events)
        if freshest is not None and now - freshest > _STALE_SECONDS:
            alarms.append(
                f"the driver lives, and nothing was written for {duration(now - freshest)}: look "
                f"at {run.logs}, then at the servers"
            )
    for event in events:
        if event["event"] == "quality_stop":
            alarms.append(f"quality stop, {event['scope']}: {event['reason']}")
    return alarms[-5:]


def _freshest(run: RunFolder, events: list[dict[str, Any]]) -> float | None:
    """When anything of the run was last written: an event, a segment, a shard, a metric."""
    folders = [run.training, run.features, run.checkpoints]
    times = [folder.stat().st_mtime for folder in folders if folder.exists()]
    metrics = run.training / "metrics.jsonl"
    rows = newest(run.segments)
    times += [] if rows is None else [rows]
    times += [metrics.stat().st_mtime] if metrics.exists() else ()
    times += [events[-1]["at"]] if events else ()
    return max(times, default=None)


# --- events


def _events(run: RunFolder) -> list[dict[str, Any]]:
    """Every whole line; a half one at the end is a writer's that was killed."""
    if not run.events.exists():
        return []
    events = []
    for number, line in enumerate(run.events.read_bytes().split(b"\n"), start=1):
        if not line:
            continue
        try:
            event = json.loads(line)
            events.append({"event": event["event"], "at": event["at"], **event})
        except (ValueError, KeyError, TypeError) as error:
            if not run.events.read_bytes().endswith(b"\n"):
                break
            raise BadRecipe(
                f"{run.events}:{number} is not an event: {error!r}",
                expected="one JSON object a line, with at and event",
                change="take that line out",
            ) from error
    return events


def _started(events: list[dict[str, Any]], stage: str) -> float | None:
    for event in reversed(events):
        if event["event"] == "stage_started" and event["stage"] == stage:
            return float(event["at"])
    return None


# --- stages


def _stage(
    run: RunFolder,
    stage: str,
    stages: Mapping[str, Any],
    events: list[dict[str, Any]],
    sets: tuple[SetStatus, ...],
    training: TrainingStatus | None,
    is_alive: bool,
    now: float,
) -> StageStatus:
    unit, done, total = _counts(run, stage, sets, training, stages)
    entry = stages.get(stage)
    if entry is not None:
        seconds = float(entry["seconds"])
        counts = entry["counts"]
        headline = str(counts["headline"]) if "headline" in counts else ""
        rows, tokens = _rates(stage, counts, done, seconds)
        return StageStatus(stage, "done", unit, done, total, rows, tokens, seconds, headline)
    started = _started(events, stage)
    if started is None:
        return StageStatus(stage, "waiting", unit, done, total, None, None, None, "")
    is_open = is_alive and _is_open(events, stage)
    last = now if is_open else max(events[-1]["at"], started)
    seconds = max(last - started, 0.0)
    rate = _live_rate(run, stage, events, started, now) if is_open else None
    tokens_rate = training.tokens_per_second if stage == "train" and training else None
    state: Literal["running", "stopped"] = "running" if is_open else "stopped"
    return StageStatus(stage, state, unit, done, total, rate, tokens_rate, round(seconds, 1), "")


def _is_open(events: list[dict[str, Any]], stage: str) -> bool:
    for event in reversed(events):
        if event["event"] in ("stage_started", "stage_finished", "stage_stopped"):
            return bool(event["event"] == "stage_started" and event["stage"] == stage)
    return False


def _counts(
    run: RunFolder,
    stage: str,
    sets: tuple[SetStatus, ...],
    training: TrainingStatus | None,
    stages: Mapping[str, Any],
) -> tuple[str, int | None, int | None]:
    match stage:
        case "prepare":
            prompts = sum(_rows(path) for path in run.prompts.glob("[!_.]*/*.parquet"))
            return "prompts", prompts or None, prompts or None
        case "generate":
            total = sum(one.total for one in sets)
            return "rows", sum(one.done for one in sets) if total else None, total or None
        case "capture":
            # Hidden parts of the index say what each finished shard holds.
            done = sum(_rows(path) for path in run.features.glob(".shard-*.parquet"))
            index = run.features / "index.parquet"
            done = _rows(index) if index.exists() else done
            wanted = sum(one.ok for one in sets) if "generate" in stages else None
            return "samples", done if wanted else None, wanted
        case "train":
            if training is None:
                return "steps", None, None
            return "steps", training.step, training.total_steps
        case "export":
            done = int("export" in stages)
            return "draft", done or None, 1 if done else None
        case _:
            phases = len(list(run.evaluation_phases.glob("[!.]*.json")))
            return "phases", 3 if "evaluate" in stages else phases or None, 3


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


def _live_rate(
    run: RunFolder, stage: str, events: list[dict[str, Any]], started: float, now: float
) -> float | None:
    """Rows of this session a second: only what was written since its stage began."""
    elapsed = now - started
    if elapsed < 1:
        return None
    match stage:
        case "generate":
            fresh = [
                path
                for path in listed(run.segments, "*/*.arrow")
                if path.stat().st_mtime >= started
            ]
            return sum(for_each(_arrow_rows, fresh)) / elapsed
        case "capture":
            shards = (
                event["samples"]
                for event in events
                if event["event"] == "shard_captured" and event["at"] >= started
            )
            return float(sum(shards)) / elapsed
        case _:
            return None


# --- sets


def _sets(run: RunFolder, recipe: Recipe | None) -> tuple[SetStatus, ...]:
    if recipe is None:
        return ()
    samples = recipe.generate.samples_per_prompt
    return tuple(_set(run, one.name, samples) for one in recipe.prompts.train)


def _set(run: RunFolder, name: str, samples: int) -> SetStatus:
    total = samples * sum(_turns(path) for path in (run.prompts / name).glob("*.parquet"))
    statuses: Counter[str] = Counter()
    segments = listed(run.segments / name, "*.arrow")
    committed = listed(run.responses / name, "part-*.parquet")
    committed += listed(run.rejected_responses / name, "part-*.parquet")
    if segments:
        # While segments are there a row may lie in several files; the best version counts.
        best: dict[str, str] = {}
        for found in for_each(_ids_and_statuses, [*segments, *committed]):
            for sample_id, state in found:
                if sample_id not in best or _rank(state) < _rank(best[sample_id]):
                    best[sample_id] = state
        statuses.update(best.values())
    else:
        for path in committed:
            table = pq.read_table(readable(path), columns=["status"], partitioning=None)
            counted = pc.value_counts(table["status"])
            statuses.update({one["values"]: one["counts"] for one in counted.to_pylist()})
    bad = Counter({state: count for state, count in statuses.items() if state != "ok"})
    return SetStatus(
        name=name,
        total=total,
        done=sum(statuses.values()),
        ok=statuses["ok"],
        rejected=sum(n for state, n in bad.items() if state.startswith("rejected:")),
        failed=sum(n for state, n in bad.items() if state.startswith("failed:")),
        reasons=dict(bad.most_common(3)),
    )


def _rank(state: str) -> int:
    return {"ok": 0, "rejected": 1}.get(state.partition(":")[0], 2)


def _ids_and_statuses(path: Location) -> list[tuple[str, str]]:
    columns = ["sample_id", "status"]
    if path.suffix == ".parquet":
        table = pq.read_table(readable(path), columns=columns, partitioning=None)
    else:
        try:
            table = pa.ipc.open_file(contents(path)).read_all().select(columns)
        except FileNotFoundError:  # a commit replaced it a moment ago
            return []
    return list(zip(*(table[name].to_pylist() for name in columns), strict=True))


def _turns(path: Path) -> int:
    """How many answers the prompts of a file want, one sample each."""
    later = pq.read_table(path, columns=["continuations"], partitioning=None)["continuations"]
    return later.length() + int(pc.sum(pc.list_value_length(later)).as_py() or 0)


def _rows(path: Path) -> int:
    count: int = pq.read_metadata(path).num_rows
    return count


def _arrow_rows(path: Location) -> int:
    try:
        file = pa.ipc.open_file(contents(path))
        return sum(file.get_batch(at).num_rows for at in range(file.num_record_batches))
    except FileNotFoundError:  # a commit replaced it a moment ago
        return 0


# --- training


def _training(run: RunFolder) -> TrainingStatus | None:
    path = run.training / "metrics.jsonl"
    if not path.exists():
        return None
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        lines = handle.read().split(b"\n")[:-1]  # what follows the last newline is half a line
    for line in reversed(lines):
        try:
            figures = json.loads(line)
        except ValueError:
            continue  # the first line of the tail may be cut
        if figures["kind"] == "train":
            left = figures["total_steps"] - figures["step"]
            rate = figures["tokens_per_second"]
            per_step = _seconds_per_step(lines)
            return TrainingStatus(
                step=figures["step"],
                total_steps=figures["total_steps"],
                loss=figures["loss"],
                acceptance_length=figures["acceptance_length"],
                tokens_per_second=rate,
                eta_seconds=None if per_step is None else round(left * per_step, 1),
            )
    return None


def _seconds_per_step(lines: list[bytes]) -> float | None:
    """Over the last lines of metrics: each tells the seconds since the one before."""
    steps, seconds = [], []
    for line in lines[-50:]:
        try:
            figures = json.loads(line)
        except ValueError:
            continue
        if figures["kind"] == "train":
            steps.append(figures["step"])
            seconds.append(figures["seconds"])
    if len(steps) < 2 or steps[-1] == steps[0]:
        return None
    per_step: float = sum(seconds[1:]) / (steps[-1] - steps[0])
    return per_step


# --- printing


def _say_state(report: StatusReport) -> str:
    age = report.last_event_age_seconds
    ago = "" if age is None else f", last event {duration(age)} ago ({report.last_event})"
    match report.state:
        case "finished":
            return f"[green]finished[/]{ago}"
        case "running":
            return f"[green]running[/], driver pid {report.driver_pid}{ago}"
        case "dead":
            return f"[bold red]dead[/]: its driver was killed; what was durable is kept{ago}"
        case "stopped":
            return f"[yellow]stopped[/]: nobody is working on it{ago}"
        case "not started":
            return "not started"


def _progress(one: StageStatus) -> str:
    if one.done is None and one.total is None:
        return "-"
    if one.total is None:
        return f"{one.done:,} {one.unit}"
    done = "?" if one.done is None else f"{one.done:,}"  # not known is not none
    return f"{done}/{one.total:,} {one.unit}"


def _speed(one: StageStatus) -> str:
    if one.tokens_per_second is not None:
        return f"{one.tokens_per_second:,.0f} tok/s"
    return "" if one.rows_per_second is None else f"{one.rows_per_second:.3g}/s"


def _say_training(one: TrainingStatus) -> str:
    left = "" if one.eta_seconds is None else f", ETA {duration(one.eta_seconds)}"
    length = "" if one.acceptance_length is None else f", simulated AL {one.acceptance_length:.2f}"
    return f"training  step {one.step:,}/{one.total_steps:,}, loss {one.loss:.3f}{length}{left}"


def _set_table(report: StatusReport) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("set", overflow="fold")
    for title in ("done", "ok", "rejected", "failed"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("most frequent reasons", overflow="fold")
    for one in report.sets:
        reasons = ", ".join(f"{name} {count:,}" for name, count in one.reasons.items())
        table.add_row(
            escape(one.name),
            f"{one.done:,}/{one.total:,}",
            f"{one.ok:,}",
            f"{one.rejected:,}",
            f"{one.failed:,}",
            escape(reasons) or "-",
        )
    return table
