"""What a training step costs beside its peers: `python benchmarks/train.py [--short]`.

A step is forward, backward, clipping and AdamW of a draft with hidden size 576, FFN 1,536, a target
vocabulary of 49,152, a draft vocabulary of 4,096 and 7 TTT steps, on one thread. Ours is the
engine's. Each implementation has a process; they take steps by turns, and the median of its
CPU-seconds counts. Loss and gradient norm of the first steps must be the peer's, or the run fails.

* tokens_vs_specforge: tokens per CPU-second over SpecForge's, 1,024 tokens in fp32, the last half
  of which is in the loss. memory_vs_specforge: resident memory that the step takes at its peak,
  over SpecForge's. tokens_vs_specforge_bf16: with weights and states in bf16.
* all_tokens_vs_specforge: every token in the loss.
* tokens_vs_speculators: as tokens_vs_specforge, with all labels in the draft vocabulary.
* packed_vs_padded: documents of mixed length (lognormal, sigma 0.7), packed, over SpecForge's batch
  of the same, which is padded to the longest.
* growth: CPU-seconds per token of 8 packed documents of 1,024 tokens over those of one document.

Peers (SpecForge 0.2.0, speculators 0.9.0) are installed without their dependencies in the cache
folder, once. What of them asks for `torch.compile` runs as plain torch, as does all of ours.
"""

import dataclasses
import json
import logging
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script

from benchmarks import harness  # noqa: E402
from benchmarks.harness import Bar, Options  # noqa: E402
from benchmarks.train_case import Case, StepCost  # noqa: E402
from pipelines.recipe import cache_folder  # noqa: E402

logger = logging.getLogger(__name__)

BARS: dict[str, Bar | None] = {
    "tokens_vs_specforge": Bar("at least", 2.4),
    "memory_vs_specforge": Bar("at most", 0.4),
    "tokens_vs_specforge_bf16": Bar("at least", 2.5),
    "all_tokens_vs_specforge": Bar("at least", 1.6),
    "tokens_vs_speculators": Bar("at least", 2.4),
    "packed_vs_padded": Bar("at least", 3.0),
    "growth": Bar("at most", 1.3),
}
GROUPS = ("specforge", "bf16", "all_tokens", "speculators", "packed", "growth")


@dataclasses.dataclass(frozen=True)
class Side:
    """An implementation: the module that takes its steps, and the package that it needs."""

    module: str
    requirement: str | None
    # By dtype, of loss and gradient norm in the first step, relative to ours.
    tolerance: Mapping[str, float]


OURS = Side("benchmarks.train_case", None, {})
# bf16 rounds every product once.
SPECFORGE = Side(
    "benchmarks.peer_specforge", "specforge==0.2.0", {"float32": 1e-4, "bfloat16": 5e-3}
)
# It weighs steps by their own counts of rows, and some of its rows start from a prompt's token.
SPECULATORS = Side("benchmarks.peer_speculators", "speculators==0.9.0", {"float32": 1.5e-2})


def measure(options: Options) -> dict[str, float]:
    """All figures that are asked for."""
    turns, tokens = (1, 512) if options.short else (5, 1024)
    half = Case((tokens,), 0.5, "float32", 1)
    figures: dict[str, float] = {}

    def against(case: Case, turns: int = turns, peer: Side = SPECFORGE) -> tuple[float, float]:
        ours, theirs = take_turns([(OURS, case), (peer, case)], turns)
        must_agree(ours[0], theirs[0], peer.tolerance[case.dtype])
        return seconds_of(theirs) / seconds_of(ours), peak_of(ours) / peak_of(theirs)

    if options.wants("specforge"):
        figures["tokens_vs_specforge"], figures["memory_vs_specforge"] = against(half)
    if options.wants("bf16") and not options.short:
        # Where the CPU has no bf16 arithmetic, the peer's step takes more than a minute.
        narrow = dataclasses.replace(half, dtype="bfloat16")
        figures["tokens_vs_specforge_bf16"], _ = against(narrow, 1)
    if options.wants("all_tokens"):
        figures["all_tokens_vs_specforge"], _ = against(dataclasses.replace(half, trainable=1.0))
    if options.wants("speculators"):
        inside = dataclasses.replace(half, speakable=1.0)
        figures["tokens_vs_speculators"], _ = against(inside, turns, SPECULATORS)
    if options.wants("packed"):
        mixed = dataclasses.replace(half, lengths=mixed_lengths(2 * tokens))
        figures["packed_vs_padded"], _ = against(mixed, max(1, turns // 2))
    if options.wants("growth"):
        documents = 2 if options.short else 8
        many = dataclasses.replace(half, lengths=(tokens,) * documents)
        large, small = take_turns([(OURS, many), (OURS, half)], max(1, turns // 2))
        figures["growth"] = seconds_of(large) / documents / seconds_of(small)
    return figures


def mixed_lengths(tokens: int) -> tuple[int, ...]:
    """Lengths of a lognormal distribution (median 200, sigma 0.7) at even quantiles, in sum about
    `tokens`, longest first."""
    count = max(1, round(tokens / (200 * math.exp(0.7**2 / 2))))
    normal = statistics.NormalDist()
    quantiles = ((place + 0.5) / count for place in range(count))
    lengths = (round(200 * math.exp(0.7 * normal.inv_cdf(one))) for one in quantiles)
    return tuple(sorted(lengths, reverse=True))


def take_turns(sides: Sequence[tuple[Side, Case]], turns: int) -> list[list[StepCost]]:
    """Costs of each side's steps, taken by turns after one step each that warms up.

    The first cost of a side is of its first step, from the weights that all sides start from.
    """
    costs: list[list[StepCost]] = [[] for _ in sides]
    with ExitStack() as stack:
        processes = [stack.enter_context(stepping(*side)) for side in sides]
        for _ in range(1 + turns):
            for process, seen in zip(processes, costs, strict=True):
                seen.append(ask(process))
                logger.info("%s: %s", process.args[2], seen[-1])  # type: ignore[index]
    return costs


@contextmanager
def stepping(side: Side, case: Case) -> Iterator["subprocess.Popen[str]"]:
    """A process that takes a step when asked. Ends with its context."""
    packages = [str(install(side.requirement))] if side.requirement else []
    environment = {
        "OMP_NUM_THREADS": str(case.threads),
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), *packages, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        ),
        "TORCHDYNAMO_DISABLE": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", side.module, case.json()],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ask(process: "subprocess.Popen[str]") -> StepCost:
    """One step. Raises `RuntimeError` if the process has ended instead."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended with code {process.wait()}")
    return StepCost(**json.loads(line))


def must_agree(ours: StepCost, theirs: StepCost, tolerance: float) -> None:
    """Raises `RuntimeError` unless both did the same work: speed of other numbers means nothing."""
    for name in ("loss", "grad_norm"):
        a, b = getattr(ours, name), getattr(theirs, name)
        if not math.isclose(a, b, rel_tol=tolerance):
            raise RuntimeError(f"{name}: ours is {a}, the peer's {b}; expected within {tolerance}")


def seconds_of(costs: Sequence[StepCost]) -> float:
    """CPU-seconds of a step, without the first, which warms up."""
    return statistics.median(cost.cpu_seconds for cost in costs[1:])


def peak_of(costs: Sequence[StepCost]) -> float:
    """Bytes that a step takes at its peak, without the first, which makes the optimiser's state."""
    return statistics.median(cost.peak_bytes for cost in costs[1:])


def install(requirement: str) -> Path:
    """A folder of its own with one package and none of its dependencies; installed once."""
    folder = cache_folder() / "benchmarks" / requirement.replace("==", "-")
    if not folder.exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        part = folder.with_name(f"{folder.name}.part")
        subprocess.run([*pip, "--upgrade", "--target", str(part), requirement], check=True)
        part.rename(folder)
    return folder


if __name__ == "__main__":
    raise SystemExit(harness.main("train", BARS, measure, groups=GROUPS))
