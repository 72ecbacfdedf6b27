"""Have the target answer the training prompts: prompt rows in, committed response rows out.

A canary is judged before the tap opens, sliding windows of sets and servers while it runs.
Rows flow from worker to server to disk; the driver sees ids, statuses and counts only.
"""

import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from actors.config import AttachedServers, LaunchedServers
from actors.errors import ServerFailed, ServerUnfit
from actors.fleet import Fleet, running_servers
from actors.launch import EngineOptions
from actors.mailbox import Mailbox
from pipelines.calls import Places, call_shape
from pipelines.collector import rare_collections
from pipelines.errors import PreflightFailed, QualityStop, RunError
from pipelines.generate_preflight import admission_of
from pipelines.generate_watch import Watch
from pipelines.generate_worker import GenerateWorker, WorkerPlan, permits_per_server
from pipelines.metrics import Reading
from pipelines.monitor import Monitor, Stop
from pipelines.quality_stop import QualityMark, remember_stop, set_aside_suspects
from pipelines.readings import row_readings
from pipelines.recipe import Recipe
from pipelines.row_report import RowReport, reports_in
from pipelines.segments import commit
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog, Progress
from pipelines.wanted import Wanted, counts_of

logger = logging.getLogger(__name__)

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
        commit(run, one.name, one.responses())
    seconds = time.monotonic() - started
    counts = {name: counts_of(run, one) for name, one in sets.items()}
    return {
        "headline": _headline(counts.values()),
        "sets": counts,
        "asked": asking.asked,
        "seconds": round(seconds, 1),
        "output_tokens_per_second": round(asking.tokens / seconds, 1),
    }


def _dataset(recipe: Recipe, plan: WorkerPlan, calls: Sequence[pa.Table], at_once: int) -> Any:
    """Calls through the workers: a Ray `Dataset` of how many rows became durable."""
    import ray
    from ray.data import ActorPoolStrategy, DataContext

    _quiet_console()
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_no_progress_timeout_s = -1  # a block may take as long as a deadline
    context.memory_usage_poll_interval_s = None  # it costs more than a worker's own bookkeeping
    return ray.data.from_arrow(list(calls)).map_batches(
        GenerateWorker,
        fn_constructor_args=(plan,),
        batch_format="pyarrow",
        batch_size=None,
        num_cpus=_WORKER_CPUS,
        compute=ActorPoolStrategy(
            size=recipe.generate.workers,
            max_concurrent_calls_per_actor=at_once,
            max_tasks_in_flight_per_actor=at_once + 4,
            enable_true_multi_threading=True,
        ),
        label_selector=_place(recipe),
    )


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
            events.figures.servers = fleet.states
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
        self._held_before = any(len(wanted.held) for wanted in sets.values())
        self._seen = frozenset(one for wanted in sets.values() for one in wanted.segment_names)

    def run_to_the_end(self) -> None:
        """Ask for all that is missing. Raises `QualityStop`."""
        if not any(len(wanted.missing()) for wanted in self._sets.values()):
            return
        total = sum(wanted.total for wanted in self._sets.values())
        held = sum(len(wanted.held) for wanted in self._sets.values())
        figures = self._events.figures
        figures.take([Reading("eyas_canary_passed", 0)])
        progress = Progress("generate", total=total, done=held, unit="rows", figures=figures)
        with _servers(self._recipe, self._run, self._events) as fleet, _mailbox() as mailbox:
            monitor = self._monitor(len(fleet.states()))
            rows = self._recipe.generate.gates.canary_rows
            watch = Watch(
                mailbox, monitor, progress, fleet.check, self._count, stride=max(1, rows // 2)
            )
            with watch, rare_collections():
                self._ask(self._canary(len(fleet.states())), fleet, mailbox, watch)
                self._ask_the_rest(fleet, mailbox, watch)
            if watch.stop is not None:
                self._stop(watch.stop, watch.suspects)

    def _ask_the_rest(self, fleet: Fleet, mailbox: Mailbox, watch: Watch) -> None:
        if not watch.look():
            return
        self._is_open = True
        self._events.append("canary_passed")
        self._events.figures.take([Reading("eyas_canary_passed", 1)])
        rest = {name: wanted.missing() for name, wanted in self._sets.items()}
        self._ask(rest, fleet, mailbox, watch)

    def _canary(self, servers: int) -> dict[str, Places]:
        """What is missing of each set's first prompts: enough rows for every set and server."""
        rows = self._recipe.generate.gates.canary_rows
        each = max(rows, -(-rows * servers // len(self._sets)))
        return {name: wanted.missing(each) for name, wanted in self._sets.items()}

    def _monitor(self, servers: int) -> Monitor:
        """A monitor that knows the rows which are held."""
        sizes = {name: wanted.total for name, wanted in self._sets.items()}
        permits = permits_per_server(self._recipe)
        in_flight = {"set": permits * servers, "server": permits}
        monitor = Monitor(self._recipe.generate.gates, sizes, in_flight)
        held = pa.concat_tables([wanted.reports for wanted in self._sets.values()])
        order = pc.sort_indices(held, [("finished_us", "ascending"), ("sample_id", "ascending")])
        for report in reports_in(held.take(order)):
            monitor.add(report, None)
        for wanted in self._sets.values():
            del wanted.reports
        return monitor

    def _count(self, reports: Sequence[RowReport]) -> None:
        if not self._is_open:  # of the canary alone is asked what came
            for name, wanted in self._sets.items():
                wanted.hold([one.sample_id for one in reports if one.dataset == name])
        self.tokens += sum(one.output_tokens for one in reports)
        self.asked += len(reports)
        self._events.figures.take(row_readings(reports))

    def _ask(
        self,
        wanted: Mapping[str, Places],
        fleet: Fleet,
        mailbox: Mailbox,
        watch: Watch,
    ) -> None:
        """Have workers answer the wanted prompts, until all are or the watch ends it."""
        prompts = sum(map(len, wanted.values()))
        if not prompts:
            return
        import ray

        plan = WorkerPlan.of(
            self._recipe,
            self._run,
            servers=fleet.subscription,
            report=mailbox.outbox,
            seen_segments=self._seen,
            earlier_turns=frozenset(
                one for name, some in wanted.items() for one in self._sets[name].earlier_turns(some)
            ),
        )
        permits = plan.pool.max_in_flight_per_server * len(fleet.states())
        shape = call_shape(prompts, self._recipe.generate.workers, permits)
        calls = [
            call
            for name, some in wanted.items()
            for call in self._sets[name].calls(some, shape.rows)
        ]
        dataset = _dataset(self._recipe, plan, calls, shape.calls)
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
            seen = {name: sorted(one.held.to_pylist()) for name, one in self._sets.items()}
        suspects = {name: tuple(ids) for name, ids in seen.items() if ids}
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
