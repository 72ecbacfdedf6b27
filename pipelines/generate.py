"""Have the target answer the training prompts: prompt rows in, committed response rows out.

A canary of every set is judged before the tap opens, windows of the same size while it runs.
Rows flow from worker to server to disk; the driver sees ids, statuses and counts only.
"""

import collections
import functools
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.config import EmbeddedServers
from actors.errors import ServerFailed, ServerUnfit
from actors.fit import Expectation
from actors.fleet import running_servers
from actors.launch import EngineOptions
from actors.preflight import Admission, model_context_tokens
from pipelines.errors import PreflightFailed, QualityStop, VerificationFailed
from pipelines.generate_worker import GenerateWorker, WorkerPlan
from pipelines.quality import Stop, Window, judge_window
from pipelines.recipe import Recipe
from pipelines.row_report import RowReport
from pipelines.segments import commit, committed_files, committed_ids, durable_reports
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog, Progress

logger = logging.getLogger(__name__)

# Measured: a worker keeps its permits busy when it has admitted about six times as many rows.
# One call takes half the permits.
_CALLS_PER_WORKER = 12
_WORKER_CPUS = 0.1  # it waits for servers; on a machine with two cores Ray Data needs its own


def generate(recipe: Recipe, run: RunFolder, events: EventLog) -> dict[str, Any]:
    """Answer every prompt that has no durable response yet, then commit. Ray must be initialised.

    Returns counts. Raises `QualityStop`, `PreflightFailed` (servers), or `VerificationFailed`
    (rows that do not add up); what was durable stays so, and the next call goes on from there.
    """
    started = time.monotonic()
    prompts = {one.name: _prompt_ids(run, one.name) for one in recipe.prompts.train}
    held = {name: _held_reports(run, name) for name in prompts}
    open_sets = {name: ids for name, ids in prompts.items() if _is_open(run, name, ids)}
    asking = _Asking(recipe, run, events, open_sets, held)
    asking.run_to_the_end()
    for name, ids in prompts.items():
        commit(run, name, ids)
    seconds = time.monotonic() - started
    new_tokens = sum(report.output_tokens for report in asking.asked)
    sets = {name: _counts(run, name, len(ids)) for name, ids in prompts.items()}
    return {
        "headline": _headline(sets.values()),
        "sets": sets,
        "asked": len(asking.asked),
        "seconds": round(seconds, 1),
        "output_tokens_per_second": round(new_tokens / seconds, 1),
    }


def _prompt_files(run: RunFolder, set_name: str) -> list[Path]:
    return sorted((run.prompts / set_name).glob("*.parquet"))


def _prompt_ids(run: RunFolder, set_name: str) -> list[str]:
    """The sample ids of a set, in file order. Each may come once, and belongs to this set."""
    files = _prompt_files(run, set_name)
    if not files:
        raise PreflightFailed(
            f"there are no prompts in {run.prompts / set_name}",
            expected="the prompt files that prepare makes",
            change="run `eyas prepare` with this recipe first",
        )
    tables = [pq.read_table(path, columns=["sample_id", "dataset"]) for path in files]
    table = pa.concat_tables(tables)
    ids: list[str] = table["sample_id"].to_pylist()
    datasets = set(table["dataset"].to_pylist())
    if len(set(ids)) != len(ids) or not datasets <= {set_name}:
        raise VerificationFailed(
            f"{run.prompts / set_name}: {len(ids) - len(set(ids))} sample ids come twice, "
            f"datasets are {sorted(datasets)}",
            expected=f"every sample id once, and only the set {set_name}",
            change="make the prompts again with `eyas prepare`",
        )
    return ids


def _held_reports(run: RunFolder, set_name: str) -> dict[str, RowReport]:
    """The rows that are not asked again: all that are committed, and every durable reply.

    A row that failed (a dead server, say) and is not committed yet gets another chance.
    """
    committed = committed_ids(run, set_name)
    return {
        report.sample_id: report
        for report in durable_reports(run, set_name)
        if report.has_reply or report.sample_id in committed
    }


def _is_open(run: RunFolder, set_name: str, ids: Sequence[str]) -> bool:
    """Whether a set is still to be committed, or has prompts beyond its commit."""
    return not set(ids) <= committed_ids(run, set_name)


def _missing(
    prompts: Mapping[str, Sequence[str]], held: Mapping[str, Mapping[str, RowReport]]
) -> dict[str, list[str]]:
    return {name: [one for one in ids if one not in held[name]] for name, ids in prompts.items()}


def _counts(run: RunFolder, set_name: str, prompts: int) -> dict[str, Any]:
    """What was committed for a set, read from the committed files."""
    rejected: collections.Counter[str] = collections.Counter()
    failed: collections.Counter[str] = collections.Counter()
    ok = prompt_tokens = output_tokens = 0
    for path in committed_files(run, set_name):
        table = pq.read_table(path, columns=["status", "usage"], partitioning=None)
        for row in table.to_pylist():
            kind, _, reason = row["status"].partition(":")
            match kind:
                case "ok":
                    ok += 1
                    prompt_tokens += row["usage"]["prompt_tokens"]
                    output_tokens += row["usage"]["completion_tokens"]
                case "rejected":
                    rejected[reason] += 1
                case _:
                    failed[reason] += 1
    assert prompts == ok + rejected.total() + failed.total()
    return {
        "prompts": prompts,
        "ok": ok,
        "rejected": dict(sorted(rejected.items())),
        "failed": dict(sorted(failed.items())),
        "prompt_tokens": prompt_tokens,  # of the ok rows, as is the next
        "output_tokens": output_tokens,
    }


def _headline(sets: Collection[Mapping[str, Any]]) -> str:
    ok, tokens = (sum(one[key] for one in sets) for key in ("ok", "output_tokens"))
    rejected, failed = (
        sum(sum(one[key].values()) for one in sets) for key in ("rejected", "failed")
    )
    return f"{ok:,} ok, {rejected:,} rejected, {failed:,} failed; {tokens:,} tokens"


class _Asking:
    """One session of asking: what is held is judged, then the canary, then the rest under watch."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        events: EventLog,
        prompts: Mapping[str, Sequence[str]],
        held: dict[str, dict[str, RowReport]],
    ) -> None:
        self.asked: list[RowReport] = []
        self._recipe, self._run, self._events = recipe, run, events
        self._prompts, self._held = prompts, held
        total = sum(len(ids) for ids in prompts.values())
        left = sum(len(ids) for ids in _missing(prompts, held).values())
        self._progress = Progress("generate", total=total, done=total - left, unit="rows")
        self._started, self._tokens = time.monotonic(), 0

    def run_to_the_end(self) -> None:
        """Ask for all that is missing. Raises `QualityStop`.

        A stop of an earlier session is repeated from the rows that are held, without a server.
        """
        canary = self._missing_of_canary()
        if not any(canary.values()):
            self._judge_canaries()
            for name in self._prompts:
                self._judge_if_full(name, self._last_window(name))
        if not any(_missing(self._prompts, self._held).values()):
            return
        with _servers(self._recipe, self._run, self._events) as urls:
            if any(canary.values()):
                for reports in self._ask(canary, urls):
                    self._count(reports)
                self._judge_canaries()
            self._ask_the_rest(urls)

    def _ask_the_rest(self, urls: Sequence[str]) -> None:
        rest = _missing(self._prompts, self._held)
        if not any(rest.values()):
            return
        windows = {name: self._last_window(name) for name in self._prompts}
        for reports in self._ask(rest, urls):
            self._count(reports)
            for report in reports:
                windows[report.dataset] = windows[report.dataset].after(report)
                self._judge_if_full(report.dataset, windows[report.dataset])

    def _last_window(self, name: str) -> Window:
        size = self._recipe.generate.gates.canary_rows
        held = sorted(self._held[name].values(), key=lambda one: (one.finished_us, one.sample_id))
        return Window(size, tuple(held[-size:]))

    def _judge_if_full(self, name: str, window: Window) -> None:
        if window.is_full:
            self._judge(name, window.reports, "window")

    def _count(self, reports: Sequence[RowReport]) -> None:
        for report in reports:
            self._held[report.dataset][report.sample_id] = report
            self._tokens += report.output_tokens
        self.asked += reports
        elapsed = max(time.monotonic() - self._started, 1e-9)
        self._progress.advance(len(reports), {"tokens/s": f"{self._tokens / elapsed:,.0f}"})

    def _canary(self, name: str) -> Sequence[str]:
        return self._prompts[name][: self._recipe.generate.gates.canary_rows]

    def _missing_of_canary(self) -> dict[str, list[str]]:
        return _missing({name: self._canary(name) for name in self._prompts}, self._held)

    def _judge_canaries(self) -> None:
        for name in self._prompts:
            reports = [self._held[name][one] for one in self._canary(name)]
            self._judge(name, reports, "canary")

    def _judge(self, name: str, reports: Sequence[RowReport], phase: str) -> None:
        gates = self._recipe.generate.gates
        verdict = judge_window(reports, gates)
        figures = asdict(verdict.figures)
        match verdict:
            case Stop(reason=reason, cause=cause, cure=cure):
                self._events.append("quality_stop", set=name, phase=phase, reason=reason, **figures)
                raise QualityStop(
                    f"set {name}, {phase}: {reason}; most likely {cause}",
                    expected=f"at most {gates.max_rejected_share:.0%} rejected and at least "
                    f"{gates.min_reasoning_share:.0%} with reasoning in {len(reports)} rows",
                    change=f"{cure}. The rows are kept in {self._run.segments / name}; remove that "
                    "folder to ask them again",
                )
            case _ if phase == "canary":
                self._events.append("canary_passed", set=name, **figures)

    def _ask(
        self, wanted: Mapping[str, Sequence[str]], urls: Sequence[str]
    ) -> Iterator[list[RowReport]]:
        """Have workers answer the wanted rows; yield them as they become durable, in any order."""
        import ray
        from ray.data import ActorPoolStrategy, DataContext

        plan = WorkerPlan.of(self._recipe, self._run, tuple(urls))
        files = [
            str(path)
            for name, ids in wanted.items()
            if ids
            for path in _prompt_files(self._run, name)
        ]
        ids = ray.put(pa.array([one for ids in wanted.values() for one in ids], pa.string()))
        rows = plan.rows_per_call
        _quiet_console()
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_no_progress_timeout_s = -1  # a block may take as long as a deadline
        dataset = (
            ray.data.read_parquet(files, partitioning=None)
            .map_batches(
                # In a list, so that Ray hands over the reference and not each time the ids.
                functools.partial(_keep, wanted=[ids]),
                batch_format="pyarrow",
                batch_size=None,
            )
            .repartition(target_num_rows_per_block=rows)
            .map_batches(
                GenerateWorker,
                fn_constructor_args=(plan,),
                batch_format="pyarrow",
                batch_size=None,
                num_cpus=_WORKER_CPUS,
                compute=ActorPoolStrategy(
                    size=self._recipe.generate.workers,
                    max_concurrent_calls_per_actor=_CALLS_PER_WORKER,
                    max_tasks_in_flight_per_actor=_CALLS_PER_WORKER + 4,
                    enable_true_multi_threading=True,
                ),
                label_selector=_place(self._recipe),
            )
        )
        for batch in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            table: pa.Table = batch
            yield [RowReport(**row) for row in table.to_pylist()]


def _place(recipe: Recipe) -> dict[str, str] | None:
    """Embedded servers listen on this node's loopback, so their workers live here too."""
    if not isinstance(recipe.generate.servers, EmbeddedServers):
        return None
    import ray

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
def _servers(recipe: Recipe, run: RunFolder, events: EventLog) -> Iterator[tuple[str, ...]]:
    """Servers that run and fit the recipe."""
    target, need = Path(recipe.target.path), recipe.prompts.context_tokens
    try:
        with running_servers(
            recipe.generate.servers,
            target=target,
            options=EngineOptions(),
            logs=run.logs,
            label="generate",
            admission=Admission(
                Expectation(target, need, model_context_tokens(target)), vocab_size=0
            ),
            on_event=lambda name, fields: events.append(name, **fields),
        ) as fleet:
            yield fleet.urls
    except ServerUnfit as error:
        raise PreflightFailed(error.seen, expected=error.expected, change=error.change) from error
    except ServerFailed as error:
        raise PreflightFailed(
            str(error),
            expected="a server that becomes ready",
            change="read the log above; generate.servers.ready_seconds is how long it may take",
        ) from error
