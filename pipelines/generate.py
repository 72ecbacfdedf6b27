"""Have the target answer the training prompts: prompt rows in, committed response rows out.

A canary is judged before the tap opens, sliding windows of sets and servers while it runs.
Rows flow from worker to server to disk; the driver sees ids, statuses and counts only.
"""

import functools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from actors.config import AttachedServers, LaunchedServers
from actors.errors import ServerFailed, ServerUnfit
from actors.fleet import Fleet, running_servers
from actors.launch import EngineOptions
from actors.mailbox import Mailbox
from pipelines.errors import PreflightFailed, QualityStop, RunError
from pipelines.generate_preflight import admission_of
from pipelines.generate_watch import Watch
from pipelines.generate_worker import GenerateWorker, WorkerPlan, permits_per_server
from pipelines.monitor import Monitor, Stop
from pipelines.quality_stop import QualityMark, remember_stop, set_aside_suspects
from pipelines.recipe import Recipe
from pipelines.row_report import RowReport
from pipelines.segments import commit
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog, Progress
from pipelines.wanted import Wanted, counts_of

logger = logging.getLogger(__name__)

# A worker keeps its permits busy when it has admitted several times as many rows as it has permits.
_ADMITTED_PER_PERMIT = 8
_ROWS_PER_CALL = (8, 512)
_CALLS_AT_ONCE = (4, 16)
_CALLS_PER_WORKER = 16  # at least, so that none is left with a big last block while others idle
_PROBES = 2  # prompts that every server answers before rows are sent to it
_WORKER_CPUS = 0.1  # it waits for servers; on a machine with two cores Ray Data needs its own


def generate(recipe: Recipe, run: RunFolder, events: EventLog) -> dict[str, Any]:
    """Answer every prompt that has no durable response yet, then commit. Ray must be initialised.

    Returns counts. Raises `QualityStop`, `PreflightFailed` (servers), `StorageFailed`, or
    `VerificationFailed` (rows that do not add up); what was durable stays so, and the next call
    goes on from there.
    """
    started = time.monotonic()
    suspects = set_aside_suspects(run)
    if suspects:
        events.append("suspects_set_aside", rows=suspects)
    samples = recipe.generate.samples_per_prompt
    sets = {one.name: Wanted(run, one.name, samples) for one in recipe.prompts.train}
    asking = _Asking(recipe, run, events, sets)
    asking.run_to_the_end()
    for one in sets.values():
        commit(run, one.name, list(one.responses()))
    seconds = time.monotonic() - started
    counts = {name: counts_of(run, one) for name, one in sets.items()}
    return {
        "headline": _headline(counts.values()),
        "sets": counts,
        "asked": asking.asked,
        "seconds": round(seconds, 1),
        "output_tokens_per_second": round(asking.tokens / seconds, 1),
    }


def _dataset(
    recipe: Recipe, plan: WorkerPlan, files: Sequence[str], ids: pa.Array, *, servers: int
) -> Any:
    """Wanted prompts through the workers: a Ray `Dataset` of how many rows became durable."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    _quiet_console()
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = -1  # a block may take as long as a deadline
    context.memory_usage_poll_interval_s = None  # it costs more than a worker's own bookkeeping
    permits = plan.pool.max_in_flight_per_server * servers
    shape = call_shape(len(ids), recipe.generate.workers, permits)
    return (
        ray.data.read_parquet(list(files), partitioning=None)
        .map_batches(
            # In a list, so that Ray hands over the reference and not each time the ids.
            functools.partial(_keep, wanted=[ray.put(ids)]),
            batch_format="pyarrow",
            batch_size=None,
        )
        .repartition(target_num_rows_per_block=shape.rows)
        .map_batches(
            GenerateWorker,
            fn_constructor_args=(plan,),
            batch_format="pyarrow",
            batch_size=None,
            num_cpus=_WORKER_CPUS,
            compute=ActorPoolStrategy(
                size=recipe.generate.workers,
                max_concurrent_calls_per_actor=shape.calls,
                max_tasks_in_flight_per_actor=shape.calls + 4,
                enable_true_multi_threading=True,
            ),
            label_selector=_place(recipe),
        )
    )


@dataclass(frozen=True)
class CallShape:
    """How Ray Data calls a worker: rows in a call, calls at once."""

    rows: int
    calls: int


def call_shape(prompts: int, workers: int, permits: int) -> CallShape:
    """Calls big enough to cost little, small enough that every worker gets many; and so many at
    once that a worker has admitted several times the rows it has permits for. `permits` are one
    worker's, over all servers."""
    least, most = _ROWS_PER_CALL
    rows = min(most, max(least, prompts // (workers * _CALLS_PER_WORKER)))
    fewest, many = _CALLS_AT_ONCE
    return CallShape(rows, min(many, max(fewest, -(-_ADMITTED_PER_PERMIT * permits // rows))))


def _place(recipe: Recipe) -> dict[str, str] | None:
    """Servers that listen on this node's loopback have their workers here too."""
    import ray

    match recipe.generate.servers:
        case AttachedServers() | LaunchedServers(listen="network"):
            return None
        case _:
            return {"ray.io/node-id": ray.get_runtime_context().get_node_id()}


def _quiet_console() -> None:
    """Ray Data's notes on each execution go to its own log file; errors still reach the console."""
    for handler in logging.getLogger("ray.data").handlers:
        if handler.name == "console":
            handler.setLevel(logging.ERROR)


def _keep(batch: pa.Table, wanted: list[Any]) -> pa.Table:
    """The rows whose sample id is wanted. `wanted` holds one reference to the ids."""
    import ray

    return batch.filter(pc.is_in(batch["sample_id"], value_set=ray.get(wanted[0])))


@contextmanager
def _mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox()
    try:
        yield mailbox
    finally:
        mailbox.end()


@contextmanager
def _servers(recipe: Recipe, run: RunFolder, events: EventLog) -> Iterator[Fleet]:
    """Servers that run and fit the recipe; those that come later join by themselves."""
    files = [sorted((run.prompts / one.name).glob("*.parquet"))[0] for one in recipe.prompts.train]
    try:
        with running_servers(
            recipe.generate.servers,
            target=Path(recipe.target.path),
            options=EngineOptions(),
            logs=run.logs,
            label="generate",
            wait_for="first",
            admission=admission_of(recipe, files[:_PROBES]),
            on_event=lambda name, fields: events.append(name, **fields),
        ) as fleet:
            yield fleet
    except ServerUnfit as error:
        raise PreflightFailed(error.seen, expected=error.expected, change=error.change) from error
    except ServerFailed as error:
        raise PreflightFailed(
            str(error),
            expected="a server that becomes ready, and stays so",
            change="read the log above; generate.servers.ready_seconds says how long it may take",
        ) from error


def _headline(sets: Collection[Mapping[str, Any]]) -> str:
    ok, tokens = (sum(one[key] for one in sets) for key in ("ok", "output_tokens"))
    rejected, failed = (
        sum(sum(one[key].values()) for one in sets) for key in ("rejected", "failed")
    )
    return f"{ok:,} ok, {rejected:,} rejected, {failed:,} failed; {tokens:,} tokens"


class _Asking:
    """One session of asking: the canary, then the rest, both under watch."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, events: EventLog, sets: Mapping[str, Wanted]
    ) -> None:
        self.asked = self.tokens = 0  # rows and their output tokens, of this session
        self._recipe, self._run, self._events, self._sets = recipe, run, events, sets
        self._is_open = False  # the tap: the canary has passed
        self._held_before = any(wanted.held for wanted in sets.values())
        self._seen = frozenset(one for wanted in sets.values() for one in wanted.segment_names)

    def run_to_the_end(self) -> None:
        """Ask for all that is missing. Raises `QualityStop`."""
        if not any(wanted.missing() for wanted in self._sets.values()):
            return
        total = sum(wanted.total for wanted in self._sets.values())
        held = sum(len(wanted.held) for wanted in self._sets.values())
        progress = Progress("generate", total=total, done=held, unit="rows")
        with _servers(self._recipe, self._run, self._events) as fleet, _mailbox() as mailbox:
            monitor = self._monitor(len(fleet.states()))
            rows = self._recipe.generate.gates.canary_rows
            watch = Watch(
                mailbox, monitor, progress, fleet.check, self._count, stride=max(1, rows // 2)
            )
            with watch:
                self._ask(self._canary(len(fleet.states())), fleet, mailbox, watch)
                self._ask_the_rest(fleet, mailbox, watch)
            if watch.stop is not None:
                self._stop(watch.stop, watch.suspects)

    def _ask_the_rest(self, fleet: Fleet, mailbox: Mailbox, watch: Watch) -> None:
        if not watch.look():
            return
        self._is_open = True
        self._events.append("canary_passed")
        rest = {name: wanted.missing() for name, wanted in self._sets.items()}
        self._ask(rest, fleet, mailbox, watch)

    def _canary(self, servers: int) -> dict[str, list[str]]:
        """What is missing of each set's first prompts: enough rows for every set and server."""
        rows = self._recipe.generate.gates.canary_rows
        each = max(rows, -(-rows * servers // len(self._sets)))
        return {name: wanted.missing(wanted.first(each)) for name, wanted in self._sets.items()}

    def _monitor(self, servers: int) -> Monitor:
        """A monitor that knows the rows which are held."""
        sizes = {name: wanted.total for name, wanted in self._sets.items()}
        permits = permits_per_server(self._recipe)
        in_flight = {"set": permits * servers, "server": permits}
        monitor = Monitor(self._recipe.generate.gates, sizes, in_flight)
        held = [report for wanted in self._sets.values() for report in wanted.reports]
        for report in sorted(held, key=lambda one: (one.finished_us, one.sample_id)):
            monitor.add(report, None)
        for wanted in self._sets.values():
            wanted.reports.clear()
        return monitor

    def _count(self, reports: Sequence[RowReport]) -> None:
        for report in reports:
            self._sets[report.dataset].held.add(report.sample_id)
            self.tokens += report.output_tokens
        self.asked += len(reports)

    def _ask(
        self,
        wanted: Mapping[str, Sequence[str]],
        fleet: Fleet,
        mailbox: Mailbox,
        watch: Watch,
    ) -> None:
        """Have workers answer the wanted prompts, until all are or the watch ends it."""
        if not any(wanted.values()):
            return
        import ray

        plan = WorkerPlan.of(
            self._recipe,
            self._run,
            servers=fleet.subscription,
            report=mailbox.outbox,
            seen_segments=self._seen,
            earlier_turns=frozenset(
                one for name, ids in wanted.items() for one in self._sets[name].earlier_turns(ids)
            ),
        )
        asked = [name for name, ids in wanted.items() if ids]
        files = [str(path) for name in asked for path in self._sets[name].files]
        ids = pa.array([one for ids in wanted.values() for one in ids], pa.string())
        dataset = _dataset(self._recipe, plan, files, ids, servers=len(fleet.states()))
        try:
            for _ in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
                if watch.is_overdue:
                    break
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, RunError):
                raise error.cause from None
            raise
        watch.raise_error()

    def _stop(self, stop: Stop, seen: Mapping[str, Sequence[str]]) -> NoReturn:
        """Remember what the gate saw, and end the run."""
        if not self._is_open and not self._held_before:
            # The canary kept the tap closed: so few rows that the cure may also be in the recipe.
            seen = {name: sorted(one.held) for name, one in self._sets.items() if one.held}
        suspects = {name: tuple(ids) for name, ids in seen.items()}
        remember_stop(self._run, QualityMark(stop.reason, stop.phase, suspects))
        figures = {name: value for name, value in asdict(stop.figures).items() if value is not None}
        self._events.append(
            "quality_stop",
            scope=str(stop.scope),
            phase=stop.phase,
            reason=stop.reason,
            cause=stop.cause,
            **figures,
        )
        rows = sum(len(ids) for ids in suspects.values())
        raise QualityStop(
            f"{stop.scope}, {stop.phase}: {stop.reason}; most likely {stop.cause}",
            expected="rows within the limits of generate.gates",
            change=f"{stop.cure}. Then run the same command: it goes on from here, and asks the "
            f"{rows} rows of this {stop.phase} again",
        )
