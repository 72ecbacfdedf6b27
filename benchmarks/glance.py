"""What `eyas glance` costs on a large file: `python benchmarks/glance.py [--short]`.

A JSONL file of responses with long answers is made and removed: 4 GB, in the short form 400 MB.
All times are of whole commands, with the start of their interpreter; of several runs the best one
counts, since only other work on the machine makes one slower.

* full_read_over_glance: seconds in which DuckDB reads the file (`read_json_auto`, and the questions
  that a glance answers) over those of the glance.
* growth: seconds of the glance over those on a file of a tenth.
* full_vs_duckdb: DuckDB's seconds over those of `--full`, which reads every row, too.
* peak_mib: most private memory (USS) of the process tree of both commands.
"""

import logging
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script

from benchmarks import harness  # noqa: E402
from benchmarks.harness import Bar, Options  # noqa: E402

logger = logging.getLogger(__name__)

BARS: dict[str, Bar | None] = {
    "full_read_over_glance": Bar("at least", 20.0),
    "growth": Bar("at most", 1.5),
    "full_vs_duckdb": Bar("at least", 0.5),
    "peak_mib": Bar("at most", 300.0),
}
GROUPS = ("sample", "full")
_LOOK_EVERY_SECONDS = 0.05
_GLANCES = 3  # of a turn
_TURNS = 3
_TEXTS = 500
_WORDS = 700  # of a text; a row has three

# What a glance says of the answers, asked of DuckDB, which uses all CPUs by default.
QUESTIONS = """
    select count(*), count(distinct sample_id), count(distinct hash(reasoning, content)),
        count(*) filter (length(reasoning) > 0), avg(length(reasoning)), avg(length(content)),
        count(*) filter (contains(content, '<think>') or contains(content, '</think>')),
        count(usage.completion_tokens),
        quantile_disc(usage.completion_tokens, [0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
        histogram(finish_reason)
    from read_json_auto('{path}')
"""
_ASK = "import sys, duckdb; duckdb.sql(sys.argv[1]).fetchall()"


def measure(options: Options) -> dict[str, float]:
    """All figures that are asked for."""
    size = (400 if options.short else 4_000) * 10**6
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="eyas-glance-") as name:
        large, small = Path(name, "large.jsonl"), Path(name, "small.jsonl")
        write_responses(large, size)
        write_responses(small, size // 10)
        turns = [measure_once(large, small, options) for _ in range(_TURNS)]
        best = {name: min(turn[name] for turn in turns) for name in turns[0]}
        logger.info("%.1f MB, seconds: %s", large.stat().st_size / 1e6, best)
        if options.wants("sample"):
            figures["full_read_over_glance"] = best["read"] / best["glance"]
            figures["growth"] = best["glance"] / best["glance of a tenth"]
        if options.wants("full"):
            figures["full_vs_duckdb"] = best["read"] / best["full"]
        figures["peak_mib"] = max(
            peak_bytes(command_of(large, *more)) / 2**20
            for group, more in (("sample", ()), ("full", ("--full",)))
            if options.wants(group)
        )
    return figures


def measure_once(large: Path, small: Path, options: Options) -> dict[str, float]:
    """Seconds of every command, one after the other: a machine's pace drifts."""
    question = [sys.executable, "-c", _ASK, QUESTIONS.format(path=large)]
    seconds = {"read": seconds_of(question)}
    if options.wants("full"):
        seconds["full"] = glance(large, "--full")
    if options.wants("sample"):
        for name, path in (("glance", large), ("glance of a tenth", small)):
            seconds[name] = min(glance(path) for _ in range(_GLANCES))
    return seconds


def glance(path: Path, *more: str) -> float:
    """Seconds of one command."""
    return seconds_of(command_of(path, *more))


def command_of(path: Path, *more: str) -> list[str]:
    """The command as a person starts it, but for its output."""
    return [sys.executable, "-m", "pipelines.cli", "glance", str(path), "--json", *more]


def seconds_of(command: Sequence[str]) -> float:
    """Seconds of a command that has to succeed."""
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def peak_bytes(command: Sequence[str]) -> int:
    """The most private memory (USS) that a command and its descendants had together."""
    ended = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        watching = threads.submit(_watch, psutil.Process(process.pid), ended)
        code = process.wait()
        ended.set()
        if code:
            raise subprocess.CalledProcessError(code, list(command))
        return watching.result()


def _watch(root: psutil.Process, ended: threading.Event) -> int:
    most = 0
    while not ended.wait(_LOOK_EVERY_SECONDS):
        total = 0
        try:
            for one in (root, *root.children(recursive=True)):
                total += one.memory_full_info().uss
        except psutil.Error:  # one ended in this moment
            continue
        most = max(most, total)
    return most


def write_responses(path: Path, size: int) -> int:
    """Write healthy rows of the six fields until the file has `size` bytes; how many rows."""
    chooser = random.Random(0)
    words = ["".join(chooser.choices("etaoinshrdlucm", k=length % 9 + 2)) for length in range(3000)]
    texts = [" ".join(chooser.choices(words, k=_WORDS)).encode() for _ in range(_TEXTS)]
    rows = 0
    with path.open("wb") as handle:
        while handle.tell() < size:
            first, second, third = chooser.choices(texts, k=3)
            handle.write(
                b'{"sample_id": "b1-%012x", "messages": [{"role": "user", "content": "%b"}], '
                b'"reasoning": "First %d. %b %b", "content": "So %d. %b", "finish_reason": "stop", '
                b'"usage": {"prompt_tokens": 80, "completion_tokens": %d}}\n'
                % (
                    rows,
                    third[:300],
                    rows,
                    first,
                    second,
                    rows,
                    third[: chooser.randrange(200, 3000)],
                    chooser.randrange(1200, 3000),
                )
            )
            rows += 1
    return rows


if __name__ == "__main__":
    raise SystemExit(harness.main("glance", BARS, measure, groups=GROUPS))
