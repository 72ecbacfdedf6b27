"""What all benchmarks share: options, bars, the one JSON object or table, and the cost of a tree.

A benchmark is a script `benchmarks/NAME.py`. It declares its figures with their bars and hands over
one function that measures; `main` here does the rest and returns the exit code.
"""

import argparse
import bisect
import importlib.metadata
import json
import logging
import math
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("eyas", "ray", "aiohttp", "pyarrow", "torch", "transformers")


@dataclass(frozen=True)
class Bar:
    """What a figure must reach. Judged in the long form only, unless it holds in any form."""

    kind: Literal["at least", "at most"]
    limit: float
    in_any_form: bool = False

    def holds(self, figure: float) -> bool:
        """Whether the figure is on the right side. NaN never is."""
        return figure >= self.limit if self.kind == "at least" else figure <= self.limit

    def __str__(self) -> str:
        return f"{self.kind} {self.limit:g}"


@dataclass(frozen=True)
class Options:
    """How a benchmark was called. `only` is empty for all groups of figures."""

    short: bool
    only: frozenset[str]

    def wants(self, group: str) -> bool:
        """Whether a group of figures is to be measured."""
        return not self.only or group in self.only


def main(
    name: str,
    bars: Mapping[str, Bar | None],
    measure: Callable[[Options], Mapping[str, float]],
    *,
    groups: Sequence[str] = (),
    arguments: Sequence[str] | None = None,
) -> int:
    """Measure and show. 1 if a bar is missed, else 0.

    `bars` names every figure that `measure` may return; a figure without a bar is context.
    A figure that could not be measured is left out, which counts as missed in the long form.
    `groups` are the values of `--only`.
    """
    parser = argparse.ArgumentParser(prog=f"benchmarks/{name}.py")
    parser.add_argument("--short", action="store_true", help="small sizes: a look, no judgement")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--only", action="append", choices=sorted(groups), default=[])
    given = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    options = Options(given.short, frozenset(given.only))
    seen_machine = machine()  # before the load is our own
    with _stdout_is_stderr():
        figures = dict(measure(options))
    unknown = figures.keys() - bars.keys()
    assert not unknown, f"figures without a declared bar: {sorted(unknown)}"
    if given.json:
        result = {
            "name": name,
            "figures": figures,
            "versions": versions(),
            "machine": seen_machine,
        }
        sys.stdout.write(json.dumps(result, allow_nan=False) + "\n")
    else:
        Console().print(_table(name, figures, bars, options))
    return 1 if missed(figures, bars, options) else 0


@contextmanager
def _stdout_is_stderr() -> Iterator[None]:
    """Libraries and child processes that print do so to stderr: stdout is the result's alone."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def missed(
    figures: Mapping[str, float], bars: Mapping[str, Bar | None], options: Options
) -> list[str]:
    """The figures whose bar is missed, or that a whole long form should have and has not."""
    names = []
    for name, bar in bars.items():
        if bar is None or (options.short and not bar.in_any_form):
            continue
        if name in figures:
            if not bar.holds(figures[name]):
                names.append(name)
        elif not options.only and not options.short:
            names.append(name)
    return names


def _table(
    name: str, figures: Mapping[str, float], bars: Mapping[str, Bar | None], options: Options
) -> Table:
    form = "short form: bars are not judged" if options.short else "long form"
    table = Table("figure", "value", "bar", "holds", title=f"{name} ({form})")
    for one, bar in bars.items():
        if one in figures:
            holds = "" if bar is None else "yes" if bar.holds(figures[one]) else "NO"
            table.add_row(one, f"{figures[one]:.4g}", "" if bar is None else str(bar), holds)
        elif not options.only:
            table.add_row(one, "not measured", "" if bar is None else str(bar), "")
    return table


def versions() -> dict[str, str]:
    """Of Python and of the packages that the figures depend on; only what is installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def machine() -> dict[str, str | int | float]:
    """What the figures were measured on, and how busy it was (load average of a minute)."""
    return {
        "system": platform.system(),
        "processor": _processor(),
        "cpus": os.cpu_count() or 0,
        "memory_bytes": psutil.virtual_memory().total,
        "load": round(os.getloadavg()[0], 2),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def steady_rate(finished: Iterable[float], *, cut: float = 0.1) -> float:
    """Events per second between the first and the last `cut` of them; times in seconds."""
    times = sorted(finished)
    first, last = math.floor(len(times) * cut), math.ceil(len(times) * (1 - cut)) - 1
    assert last > first, f"{len(times)} events have no middle"
    assert times[last] > times[first], "all events came at once"
    return (last - first) / (times[last] - times[first])


@dataclass(frozen=True)
class TreeCost:
    """What a command and all its descendants used. CPU is user + system, in seconds."""

    code: int
    seconds: float
    samples: tuple[tuple[float, float], ...]  # (time.time(), CPU-seconds so far), ascending
    peak_bytes: Mapping[str, int]  # role -> most private memory (USS) that one of its processes had

    def cpu_since(self, moment: float) -> float:
        """CPU-seconds from a moment (`time.time()`) to the end."""
        return self.samples[-1][1] - self.cpu_at(moment)

    def cpu_at(self, moment: float) -> float:
        """CPU-seconds used up to a moment, between two samples in proportion."""
        times = [at for at, _ in self.samples]
        place = bisect.bisect_left(times, moment)
        if place == 0:
            return self.samples[0][1]
        if place == len(times):
            return self.samples[-1][1]
        (before, low), (after, high) = self.samples[place - 1 : place + 1]
        return low + (high - low) * (moment - before) / (after - before)


def run_measured(
    command: Sequence[str],
    *,
    log: Path,
    every_seconds: float = 0.25,
    role_of: Callable[[Sequence[str]], str | None] | None = None,
    memory_every_seconds: float = 1.0,
    environment: Mapping[str, str] | None = None,
) -> TreeCost:
    """Run a command to its end, its output in `log`, and measure its whole process tree.

    A process counts up to its last sight, so what it does in its last `every_seconds` is missed;
    differences between two sizes of the same work are free of that. `role_of` names, by command
    line, the processes whose memory is measured.
    """
    with log.open("ab") as output:
        started = time.time()
        process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        sampler = _Sampler(process.pid, every_seconds, role_of, memory_every_seconds)
        with ThreadPoolExecutor(1) as threads:
            sampling = threads.submit(sampler.run)
            try:
                code = process.wait()
            except BaseException:
                process.terminate()
                process.wait()
                raise
            finally:
                sampler.ended.set()
            sampling.result()
    return TreeCost(code, time.time() - started, tuple(sampler.samples), dict(sampler.peak_bytes))


@dataclass
class _Sampler:
    """Adds up CPU times of a process tree, those of ended processes included, in a thread."""

    root: int
    every_seconds: float
    role_of: Callable[[Sequence[str]], str | None] | None
    memory_every_seconds: float
    samples: list[tuple[float, float]] = field(default_factory=list)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._known: dict[int, psutil.Process] = {self.root: psutil.Process(self.root)}
        self._cpu: dict[tuple[int, float], float] = {}
        self._roles: dict[tuple[int, float], str | None] = {}
        self._memory_at = 0.0
        self.ended = threading.Event()

    def run(self) -> None:
        """Look again and again until `ended` is set, and once more."""
        while not self.ended.wait(self.every_seconds):
            self._look()
        self._look()

    def _look(self) -> None:
        self._find()
        for pid, one in list(self._known.items()):
            try:
                times = one.cpu_times()
            except psutil.Error:
                del self._known[pid]  # it ended; what it had used stays counted
                continue
            self._cpu[(pid, one.create_time())] = times.user + times.system
        self.samples.append((time.time(), sum(self._cpu.values())))
        if self.role_of is not None and time.time() - self._memory_at >= self.memory_every_seconds:
            self._memory_at = time.time()
            self._weigh(self.role_of)

    def _find(self) -> None:
        """New descendants. A known one stays known when its parent dies before it."""
        parents: dict[int, list[int]] = {}
        for one in psutil.process_iter(["ppid"]):
            parents.setdefault(one.info["ppid"], []).append(one.pid)
        waiting = list(self._known)
        while waiting:
            for pid in parents.get(waiting.pop(), ()):
                if pid not in self._known:
                    try:
                        self._known[pid] = psutil.Process(pid)
                    except psutil.NoSuchProcess:
                        continue
                    waiting.append(pid)

    def _weigh(self, role_of: Callable[[Sequence[str]], str | None]) -> None:
        for one in self._known.values():
            try:
                line = one.cmdline()  # empty once it has ended and waits to be reaped
                role = role_of(line) if line else None
                size = one.memory_full_info().uss if role is not None else 0
            except psutil.Error:
                continue  # it ended in this moment
            if role is not None:
                self.peak_bytes[role] = max(size, self.peak_bytes.get(role, 0))
