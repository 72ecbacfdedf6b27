"""One captured request as one file: who writes it, what is in it, how it is proved and removed.

Loaded inside a server's process too, so: standard library, numpy, torch and safetensors only.
The file is named after the request and appears by rename: what is there is whole.
"""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

_SUFFIX = ".safetensors"
_TEMPORARY = ".part-"  # a rid cannot begin with a dot
_RID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@=+,-]{0,199}")
_LAYER_IDS = "aux_layer_ids"
_TENSORS = {"input_ids": torch.int32, "aux": torch.bfloat16, "last": torch.bfloat16}


class CaptureFault(Exception):
    """A captured file that is absent or breaks its contract. `name` is the fault's short name."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail

    def __reduce__(self) -> tuple:
        return (type(self), (self.name, self.detail))


@dataclass(frozen=True, eq=False)
class CapturedStates:
    """The target's states at every token of one request: T tokens, A layers, width H."""

    rid: str
    input_ids: torch.Tensor  # [T] int32
    aux: torch.Tensor  # [T, A*H] bf16, residual stream after the layers, ascending
    last: torch.Tensor  # [T, H] bf16, after the final norm
    aux_layer_ids: tuple[int, ...]  # "output of layer j"


def publish(
    folder: Path,
    rid: str,
    input_ids: Sequence[int],
    aux: torch.Tensor,  # [T, A*H]
    last: torch.Tensor,  # [T, H]
    aux_layer_ids: Sequence[int],
) -> Path:
    """Write one request's states as bf16, whole or not at all, and return the file's path.

    Raises `CaptureFault` on a rid that cannot name a file, and `OSError` on a full disk.
    """
    path = _path_of(folder, rid)
    temporary = folder / f"{_TEMPORARY}{os.getpid()}-{path.name}"
    tensors = {
        "input_ids": torch.tensor(input_ids, dtype=torch.int32),
        "aux": aux.detach().to("cpu", torch.bfloat16).contiguous(),
        "last": last.detach().to("cpu", torch.bfloat16).contiguous(),
    }
    try:
        save_file(
            tensors, temporary, metadata={"rid": rid, _LAYER_IDS: json.dumps(list(aux_layer_ids))}
        )
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def take(
    folder: Path,
    rid: str,
    *,
    expected_ids: Sequence[int],
    aux_width: int,
    width: int,
    aux_layer_ids: Sequence[int] | None = None,
) -> CapturedStates:
    """Read one request's states, prove them, and remove the file whether they hold or not.

    Raises `CaptureFault` with one of the names `bad_rid`, `missing`, `unreadable`, `tensors`,
    `dtype`, `rows`, `width`, `layer_ids`, `foreign_rid`, `foreign_ids`, `not_finite`.
    """
    path = _path_of(folder, rid)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise CaptureFault("missing", f"no {path.name} in {folder}") from error
    path.unlink()
    states = _parse(path.name, content)
    if states.rid != rid:
        raise CaptureFault("foreign_rid", f"{path.name} holds the states of {states.rid!r}")
    _check_rows(states, len(expected_ids), aux_width, width)
    if aux_layer_ids is not None and states.aux_layer_ids != tuple(aux_layer_ids):
        raise CaptureFault(
            "layer_ids", f"captured {list(states.aux_layer_ids)}, wanted {list(aux_layer_ids)}"
        )
    if states.input_ids.tolist() != list(expected_ids):
        raise CaptureFault("foreign_ids", f"{path.name} holds other ids than those that were sent")
    for name in ("aux", "last"):
        if not bool(torch.isfinite(getattr(states, name)).all()):
            raise CaptureFault("not_finite", f"{name} of {path.name} holds a NaN or an infinity")
    return states


def sweep(folder: Path) -> int:
    """Remove every captured and half-written file in `folder`; return how many there were."""
    leftovers = [
        path
        for path in folder.iterdir()
        if path.name.startswith(_TEMPORARY) or path.name.endswith(_SUFFIX)
    ]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


def can_name_a_file(rid: str) -> bool:
    """Whether a file of this rid stays inside its folder and survives a sweep's rules."""
    return _RID.fullmatch(rid) is not None


def _path_of(folder: Path, rid: str) -> Path:
    if not can_name_a_file(rid):
        raise CaptureFault(
            "bad_rid", f"{rid[:80]!r} cannot name a file; it must match {_RID.pattern}"
        )
    return folder / f"{rid}{_SUFFIX}"


def _parse(name: str, content: bytes) -> CapturedStates:
    try:
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        metadata = header["__metadata__"]
        rid, layer_ids = metadata["rid"], tuple(json.loads(metadata[_LAYER_IDS]))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CaptureFault("unreadable", f"{name}: {error!r}") from error
    if tensors.keys() != _TENSORS.keys():
        raise CaptureFault("tensors", f"{name} holds {sorted(tensors)}, not {sorted(_TENSORS)}")
    for key, dtype in _TENSORS.items():
        if tensors[key].dtype != dtype:
            raise CaptureFault("dtype", f"{key} of {name} is {tensors[key].dtype}, not {dtype}")
    return CapturedStates(rid, tensors["input_ids"], tensors["aux"], tensors["last"], layer_ids)


def _check_rows(states: CapturedStates, rows: int, aux_width: int, width: int) -> None:
    expected = {"input_ids": (rows,), "aux": (rows, aux_width), "last": (rows, width)}
    for name, shape in expected.items():
        seen = tuple(getattr(states, name).shape)
        if seen[:1] != shape[:1] or len(seen) != len(shape):
            raise CaptureFault("rows", f"{name} is {seen}, expected {shape}")
        if seen != shape:
            raise CaptureFault("width", f"{name} is {seen}, expected {shape}")
