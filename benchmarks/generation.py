"""What `eyas generate` costs beside a bare client: `python benchmarks/generation.py [--short]`.

All figures come from the real command against local fake servers (`fake_fleet.py`), with ids and
tokens as long as those of a vocabulary of 150,000.

* rows_vs_bare_loop: steady rows per second over those of `bare_loop.py`, the same number in flight,
  the runs interleaved. Steady is between the first and the last tenth of the rows.
* cpu_vs_bare_loop: CPU-seconds per row over the bare loop's. Both are slopes between two sizes, so
  that starting costs nothing; ours is the whole tree of processes, with every row validated,
  durable and committed, from when the same few rows are finished to the last process's end.
* rows_vs_ray_data_llm: steady rows per second over those of ray.data.llm's HTTP processor, both
  seen by the server. Left out where ray.data.llm cannot be imported.
* memory_growth: the most private memory (USS) of the driver, a generate worker or another worker
  with 100,000 short rows, over the same with 10,000; the worst of the three. time_growth: the
  stage's seconds likewise.
* tail_excess: seconds that the last hundredth of the rows took over the longest single answer, with
  three servers of which one is five times slower and one joins late. idle_share: of the places that
  a server may hold, the share that was empty while prompts waited; the worst server's.

`--profile` shows instead where the CPU of the worker and the driver goes (needs py-spy).
"""

import json
import logging
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script

from benchmarks import harness, peer_ray_data_llm  # noqa: E402
from benchmarks.fake_fleet import WORDS, FakeServer, ServerLog, Work, read_log, serving  # noqa: E402
from benchmarks.harness import Bar, Options, run_measured, steady_rate  # noqa: E402
from benchmarks.stage import StageRun, prompts_of, run_stage  # noqa: E402
from benchmarks.worker_profile import profiling  # noqa: E402
from tests.support.tiny_target import make_tiny_target  # noqa: E402

logger = logging.getLogger(__name__)

BARS: dict[str, Bar | None] = {
    "rows_vs_bare_loop": Bar("at least", 0.99),
    "cpu_vs_bare_loop": Bar("at most", 2.0),
    "rows_vs_ray_data_llm": Bar("at least", 1.0),
    "memory_growth": Bar("at most", 1.1),
    "time_growth": Bar("at most", 10.5),
    "tail_excess": Bar("at most", 1.1),
    "idle_share": Bar("at most", 0.05),
}
GROUPS = ("bare_loop", "ray_data_llm", "growth", "tail")
IN_FLIGHT = 256  # four servers with the default of 64 requests each
_TAIL_IN_FLIGHT = 32  # of each of three servers: enough to see, little enough for two cores
_JOINING_SECONDS = 5.0  # from a server's opening until it may be expected to be busy


@dataclass(frozen=True)
class BareRun:
    """One run of the bare loop."""

    rate: float  # steady rows per second
    cpu_seconds: float

    @staticmethod
    def mean(one: "BareRun", other: "BareRun") -> "BareRun":
        """Of two runs of the same size."""
        return BareRun((one.rate + other.rate) / 2, (one.cpu_seconds + other.cpu_seconds) / 2)


def measure(options: Options) -> dict[str, float]:
    """All figures that are asked for."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="eyas-generation-") as name:
        folder = Path(name)
        target = make_tiny_target(folder / "target", context_tokens=2048, words=WORDS)
        if options.wants("bare_loop"):
            figures |= beside_the_bare_loop(folder, target, short=options.short)
        if options.wants("ray_data_llm"):
            figures |= beside_ray_data_llm(folder, target, rows=400 if options.short else 5_000)
        if options.wants("tail"):
            figures |= tail(folder, target, rows=1_500 if options.short else 5_000)
        if options.wants("growth"):
            few, many = (500, 2_000) if options.short else (10_000, 100_000)
            figures |= growth(folder, target, few=few, many=many)
    return figures


def beside_the_bare_loop(folder: Path, target: Path, *, short: bool) -> dict[str, float]:
    """Rows per second and CPU per row over the bare loop's."""
    few, many = (1_000, 4_000) if short else (2_000, 10_000)
    skipped = few // 10  # by then everything has started
    work = Work()
    ours: dict[int, StageRun] = {}
    bare: dict[int, BareRun] = {}
    with serving(work, [FakeServer()], model_path=str(target)) as urls:
        for rows in (few, many):
            before = bare_loop(urls[0], work, rows)
            run = run_stage(folder / f"ours-{rows}", target, urls, work, rows, in_flight=IN_FLIGHT)
            after = bare_loop(urls[0], work, rows)  # both sides: a machine's pace drifts
            ours[rows], bare[rows] = run, BareRun.mean(before, after)
            logger.info(
                "%d rows: %.1f rows/s, bare loop %.1f and %.1f; stage %.1f s, steady CPU %.3f s "
                "per 1,000 rows",
                rows,
                steady_rate(run.finished),
                before.rate,
                after.rate,
                run.seconds,
                1000 * run.steady_cpu_per_row,
            )
    our_cpu = (ours[many].cpu_after(skipped) - ours[few].cpu_after(skipped)) / (many - few)
    bare_cpu = (bare[many].cpu_seconds - bare[few].cpu_seconds) / (many - few)
    logger.info("CPU per 1,000 rows: %.3f s, bare loop %.3f", 1000 * our_cpu, 1000 * bare_cpu)
    return {
        "rows_vs_bare_loop": steady_rate(ours[many].finished) / bare[many].rate,
        "cpu_vs_bare_loop": our_cpu / bare_cpu,
    }


def beside_ray_data_llm(folder: Path, target: Path, *, rows: int) -> dict[str, float]:
    """Rows per second over those of ray.data.llm, as the server saw them."""
    work, ours, theirs = Work(), folder / "beside", folder / "theirs"
    with serving(work, [FakeServer()], model_path=str(target)) as urls:
        run_stage(ours, target, urls, work, rows, in_flight=IN_FLIGHT)
        our_rate = steady_rate([done for _, done in read_log(urls[0]).answers])
    with serving(work, [FakeServer()], model_path=str(target)) as urls:
        command = [sys.executable, "-m", "benchmarks.peer_ray_data_llm", urls[0]]
        command += [str(prompts_of(ours)), str(theirs), str(IN_FLIGHT)]
        cost = run_measured(command, log=folder / "peer.log", environment={"PYTHONPATH": str(ROOT)})
        if cost.code == peer_ray_data_llm.NOT_INSTALLED:
            logger.warning("ray.data.llm cannot be imported: no figure; see its log")
            return {}
        answers = read_log(urls[0]).answers
    if cost.code or len(answers) != rows:
        raise RuntimeError(
            f"ray.data.llm ended with {cost.code} after {len(answers)} of {rows} answers:\n"
            + (folder / "peer.log").read_text()[-3000:]
        )
    their_rate = steady_rate([done for _, done in answers])
    logger.info("%.1f rows/s, ray.data.llm %.1f", our_rate, their_rate)
    return {"rows_vs_ray_data_llm": our_rate / their_rate}


def growth(folder: Path, target: Path, *, few: int, many: int) -> dict[str, float]:
    """Memory and time of many short rows over those of few."""
    work = Work(prompt_tokens=50, answer_tokens=50, latency_seconds=0.005)
    runs: dict[int, StageRun] = {}
    with serving(work, [FakeServer()], model_path=str(target)) as urls:
        for rows in (few, many):
            runs[rows] = run_stage(
                folder / f"growth-{rows}", target, urls, work, rows, in_flight=IN_FLIGHT
            )
            mib = {role: size // 2**20 for role, size in runs[rows].cost.peak_bytes.items()}
            logger.info("%d rows: stage %.1f s, MiB %s", rows, runs[rows].seconds, mib)
    small, large = runs[few].cost.peak_bytes, runs[many].cost.peak_bytes
    assert {"driver", "generate_worker"} <= small.keys() & large.keys(), (small, large)
    return {
        "memory_growth": max(large[role] / small[role] for role in small.keys() & large.keys()),
        "time_growth": runs[many].seconds / runs[few].seconds,
    }


def tail(folder: Path, target: Path, *, rows: int) -> dict[str, float]:
    """How a run ends, and how busy its servers are, with a slow one and one that joins late."""
    work = Work()
    fleet = [FakeServer(), FakeServer(slowness=5.0), FakeServer(opens_after_requests=rows // 10)]
    with serving(work, fleet, model_path=str(target)) as urls:
        run = run_stage(folder / "tail", target, urls, work, rows, in_flight=_TAIL_IN_FLIGHT)
        logs = [read_log(url) for url in urls]
    excess = tail_excess(run.finished, logs)
    idle = idle_shares(logs, _TAIL_IN_FLIGHT, joining_seconds=_JOINING_SECONDS)
    logger.info(
        "answers %s, idle shares %s, tail excess %.2f",
        [len(log.answers) for log in logs],
        [round(one, 3) for one in idle],
        excess,
    )
    return {"tail_excess": excess, "idle_share": max(idle)}


def tail_excess(finished: Sequence[float], logs: Sequence[ServerLog]) -> float:
    """Seconds that the last hundredth of the rows took over the longest single answer."""
    times = sorted(finished)
    longest = max(done - arrived for log in logs for arrived, done in log.answers)
    return (times[-1] - times[math.ceil(len(times) * 0.99) - 1]) / longest


def idle_shares(
    logs: Sequence[ServerLog], places: int, *, joining_seconds: float
) -> tuple[float, ...]:
    """Of each server's `places`, the share that was empty while prompts waited.

    Looked at from a tenth of all answers, when the canary is over and everything has started, to
    the last arrival anywhere. A server that opened later has `joining_seconds` to be found; one
    that was never asked is wholly idle.
    """
    answered = sorted(done for log in logs for _, done in log.answers)
    steady_since = answered[len(answered) // 10]
    until = max(arrived for log in logs for arrived, _ in log.answers)
    shares = []
    for log in logs:
        since = max(steady_since, log.opened + joining_seconds)
        assert since < until, "the prompts were gone before a server could be judged"
        busy = sum(
            max(0.0, min(done, until) - max(arrived, since)) for arrived, done in log.answers
        )
        shares.append(1 - busy / (places * (until - since)))
    return tuple(shares)


def profile(rows: int) -> str:
    """Where the CPU of worker and driver goes while rows flow, as text."""
    work = Work()
    with tempfile.TemporaryDirectory(prefix="eyas-generation-") as name:
        folder = Path(name)
        target = make_tiny_target(folder / "target", context_tokens=2048, words=WORDS)
        output = folder / "profile.txt"
        with (
            serving(work, [FakeServer()], model_path=str(target)) as urls,
            profiling(output, 8, urls[0], IN_FLIGHT),
        ):
            run = run_stage(folder / "run", target, urls, work, rows, in_flight=IN_FLIGHT)
        cost = f"whole tree: {1000 * run.steady_cpu_per_row:.3f} CPU-seconds per 1,000 rows\n\n"
        return cost + output.read_text()


def bare_loop(url: str, work: Work, rows: int) -> BareRun:
    """Run the bare loop in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bare_loop", url, str(rows), str(IN_FLIGHT)]
    done = subprocess.run(
        [*command, json.dumps(asdict(work))], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return BareRun(**json.loads(done.stdout))


if __name__ == "__main__":
    if "--profile" in sys.argv:
        sys.stdout.write(profile(rows=4_000))
        raise SystemExit(0)
    raise SystemExit(harness.main("generation", BARS, measure, groups=GROUPS))
