"""How training goes: from the last lines of its metrics."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.store import RunFolder

_TAIL_BYTES = 1 << 18
_LINES = 50  # over which a step's time is measured


@dataclass(frozen=True)
class TrainingStatus:
    """The last line of metrics."""

    step: int
    total_steps: int
    loss: float
    acceptance_length: float | None  # simulated, on training rows
    tokens_per_second: float
    eta_seconds: float | None


def read_training(run: RunFolder) -> TrainingStatus | None:
    """None before the first line."""
    lines = _tail(run)
    if not lines:
        return None
    last, per_step = lines[-1], _seconds_per_step(lines)
    left = last["total_steps"] - last["step"]
    return TrainingStatus(
        step=last["step"],
        total_steps=last["total_steps"],
        loss=last["loss"],
        acceptance_length=last["acceptance_length"],
        tokens_per_second=last["tokens_per_second"],
        eta_seconds=None if per_step is None else round(left * per_step, 1),
    )


def _tail(run: RunFolder) -> list[dict[str, Any]]:
    path = run.training / "metrics.jsonl"
    if not path.exists():
        return []
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        is_cut = handle.tell() > 0
        lines = handle.read().split(b"\n")[:-1]  # what follows the last newline is half a line
    figures = [json.loads(line) for line in lines[int(is_cut) :]]
    return [one for one in figures if one["kind"] == "train"][-_LINES:]


def _seconds_per_step(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Each line tells the seconds since the one before."""
    steps = lines[-1]["step"] - lines[0]["step"]
    seconds: float = sum(one["seconds"] for one in lines[1:])
    return seconds / steps if steps else None
