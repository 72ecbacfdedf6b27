"""Checkpoints: weights, optimiser state, averaged weights, and the place in the data, as one.

A checkpoint is a folder that appears by one rename, so it is there whole or not at all. Tensors are
full fp32 and named as in the model: they fit any number of workers and any ZeRO stage. Training
draws no random number after its initial weights, so there is no generator state to keep.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

_PARTS = ("weights", "exp_avg", "exp_avg_sq", "ema")


class CheckpointFault(ValueError):
    """A checkpoint that cannot be used. Training stops: it never starts afresh in silence."""


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Everything that `step` optimiser steps left behind."""

    step: int  # the place in the data: every epoch's order is a pure function of seed and epoch
    fingerprint: str  # of what the run trains, and on what
    seconds: float  # spent training so far
    weights: Mapping[str, torch.Tensor]  # fp32 masters, without the frozen embedding
    exp_avg: Mapping[str, torch.Tensor]
    exp_avg_sq: Mapping[str, torch.Tensor]
    ema: Mapping[str, torch.Tensor] = field(default_factory=dict)  # empty: not averaged


def save(folder: Path, snapshot: Snapshot, *, kept: int) -> Path:
    """Write one checkpoint, then delete all but the newest `kept`. One writer at a time."""
    final = folder / _name(snapshot.step)
    temporary = folder / f".{final.name}.tmp"
    for leftover in folder.glob(".step-*.tmp"):  # of a writer that was killed
        shutil.rmtree(leftover)
    temporary.mkdir(parents=True)
    for part in _PARTS:
        save_file(dict(getattr(snapshot, part)), temporary / f"{part}.safetensors")
    state = {
        "step": snapshot.step,
        "fingerprint": snapshot.fingerprint,
        "seconds": snapshot.seconds,
    }
    (temporary / "state.json").write_text(json.dumps(state, allow_nan=False))
    for path in temporary.iterdir():
        _sync(path)
    if final.exists():  # the same step again, after a restart: the same bytes
        shutil.rmtree(final)
    temporary.rename(final)
    _sync(folder)
    for old in complete(folder)[:-kept]:
        shutil.rmtree(old)
    return final


def complete(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first. A half-written one has another name."""
    return sorted(folder.glob("step-*")) if folder.exists() else []


def newest_step(folder: Path) -> int:
    """How many steps the newest checkpoint holds; 0 where there is none."""
    found = complete(folder)
    return int(found[-1].name.removeprefix("step-")) if found else 0


def load_newest(folder: Path, *, fingerprint: str) -> Snapshot | None:
    """The newest checkpoint, or None where there is none yet.

    Raises `CheckpointFault` if it cannot be read or belongs to other data or another recipe.
    """
    found = complete(folder)
    if not found:
        return None
    path = found[-1]
    try:
        state: dict[str, Any] = json.loads((path / "state.json").read_text())
        parts = {part: load_file(path / f"{part}.safetensors") for part in _PARTS}
        snapshot = Snapshot(
            step=state["step"],
            fingerprint=state["fingerprint"],
            seconds=state["seconds"],
            **parts,
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise CheckpointFault(
            f"checkpoint {path} cannot be read ({error!r}); delete that folder to go on from the "
            f"one before it, or delete {folder} to train from the start"
        ) from error
    if path.name != _name(snapshot.step):
        raise CheckpointFault(f"checkpoint {path} says it is step {snapshot.step}: it was renamed")
    if snapshot.fingerprint != fingerprint:
        raise CheckpointFault(
            f"checkpoint {path} belongs to other data or another recipe (fingerprint "
            f"{snapshot.fingerprint}, this run has {fingerprint}); use another run folder, or "
            f"delete {folder} to train from the start"
        )
    return snapshot


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
