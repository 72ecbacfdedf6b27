"""What `eyas generate` costs beside a bare client: `python benchmarks/generation.py [--short]`.

All figures come from the real command against local fake servers (`fake_fleet.py`).

* rows_vs_bare_loop: steady rows per second over those of `bare_loop.py`, the same number in flight,
  the runs interleaved. Steady is between the first and the last tenth of the rows.
* cpu_vs_bare_loop: CPU-seconds per row over the bare loop's. Both are slopes between two sizes, so
  that starting costs nothing; ours is the whole tree of processes from the first finished row to
  the last process's end, with every row validated, durable and committed.

`--profile` shows instead where the CPU of the worker and the driver goes (needs py-spy).
"""

import json
import logging
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script

from benchmarks import harness  # noqa: E402
from benchmarks.fake_fleet import FakeServer, Work, serving  # noqa: E402
from benchmarks.harness import Bar, Options, steady_rate  # noqa: E402
from benchmarks.stage import StageRun, run_stage  # noqa: E402
from benchmarks.worker_profile import profiling  # noqa: E402
from tests.support.tiny_target import make_tiny_target  # noqa: E402

logger = logging.getLogger(__name__)

BARS: dict[str, Bar | None] = {
    "rows_vs_bare_loop": Bar("at least", 0.99),
    "cpu_vs_bare_loop": Bar("at most", 2.0),
}
GROUPS = ("bare_loop",)
IN_FLIGHT = 128


@dataclass(frozen=True)
class BareRun:
    """One run of the bare loop."""

    rate: float  # steady rows per second
    cpu_seconds: float


def measure(options: Options) -> dict[str, float]:
    """All figures that are asked for."""
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="eyas-generation-") as name:
        folder = Path(name)
        target = make_tiny_target(folder / "target", context_tokens=2048)
        if options.wants("bare_loop"):
            figures |= beside_the_bare_loop(folder, target, short=options.short)
    return figures


def beside_the_bare_loop(folder: Path, target: Path, *, short: bool) -> dict[str, float]:
    """Rows per second and CPU per row over the bare loop's."""
    few, many = (1_000, 4_000) if short else (2_000, 10_000)
    work = Work()
    ours: dict[int, StageRun] = {}
    bare: dict[int, BareRun] = {}
    with serving(work, [FakeServer()], model_path=str(target)) as urls:
        for rows in (few, many):
            bare[rows] = bare_loop(urls[0], work, rows)
            ours[rows] = run_stage(
                folder / f"ours-{rows}", target, urls, work, rows, in_flight=IN_FLIGHT
            )
            rate = steady_rate(ours[rows].finished)
            logger.info(
                "%d rows: %.1f rows/s (bare %.1f), stage %.1f s, CPU from the first row on %.1f s, "
                "steady %.3f s per 1,000 rows (bare loop in all %.1f s)",
                rows,
                rate,
                bare[rows].rate,
                ours[rows].seconds,
                ours[rows].cpu_seconds,
                1000 * ours[rows].steady_cpu_per_row,
                bare[rows].cpu_seconds,
            )
    our_cpu = (ours[many].cpu_seconds - ours[few].cpu_seconds) / (many - few)
    bare_cpu = (bare[many].cpu_seconds - bare[few].cpu_seconds) / (many - few)
    logger.info("CPU per 1,000 rows: %.3f s (bare %.3f)", 1000 * our_cpu, 1000 * bare_cpu)
    return {
        "rows_vs_bare_loop": steady_rate(ours[many].finished) / bare[many].rate,
        "cpu_vs_bare_loop": our_cpu / bare_cpu,
    }


def profile(rows: int) -> str:
    """Where the CPU of worker and driver goes while rows flow, as text."""
    work = Work()
    with tempfile.TemporaryDirectory(prefix="eyas-generation-") as name:
        folder = Path(name)
        target = make_tiny_target(folder / "target", context_tokens=2048)
        output = folder / "profile.txt"
        with serving(work, [FakeServer()], model_path=str(target)) as urls:
            with profiling(output, 8, urls[0], IN_FLIGHT):
                run = run_stage(folder / "run", target, urls, work, rows, in_flight=IN_FLIGHT)
            logger.info("%.3f CPU-seconds per 1,000 rows", 1000 * run.steady_cpu_per_row)
        return output.read_text()


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
