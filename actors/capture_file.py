"""One captured request as one file: who writes it, what is in it, how it is proved and removed.

Loaded inside a server's process too, so: standard library, numpy, torch and safetensors only.
The file is named after the request and appears by rename: what is there is whole. A server that
meets a fault leaves a fault file of the same name instead, and the reader raises what it says.
"""

import errno
import json
import math
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

# How long a writer waits for room in a full folder; a reader waits longer, so as to hear of it.
ROOM_SECONDS = 30.0
LATE_SECONDS = 45.0

_SUFFIX = ".safetensors"
_FAULT_SUFFIX = ".fault"
_TEMPORARY = ".part-"  # a rid cannot begin with a dot
_HOOK_FAULT = ".hook.fault"  # of a server that could not tell whose rows it held
_RID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@=+,-]{0,199}")
_LAYER_IDS = "aux_layer_ids"
_TENSORS = {"input_ids": torch.int32, "aux": torch.bfloat16, "last": torch.bfloat16}
_DTYPE_NAMES = {torch.int32: "I32", torch.bfloat16: "BF16"}  # as safetensors writes them
_LOOK_SECONDS = (0.002, 0.05)  # between two looks: at least, and at most
_LOOK_SHARE = 0.1  # of the time that was waited: what a late look adds to it

# bf16 as int16 and as uint16: from these on, and to the end, there are infinities and NaN only.
_INFINITY, _MINUS_INFINITY = 0x7F80, 0xFF80
_CHECKED_AT_ONCE = 1 << 17  # values, which a core's cache holds: they are looked at twice


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

    def copied(self) -> "CapturedStates":
        """The same in memory of its own, for one who keeps it.

        All of it: any view of the file keeps all of the file's room.
        """
        aux, last = (empty_states(*one.shape).copy_(one) for one in (self.aux, self.last))
        return replace(self, input_ids=self.input_ids.clone(), aux=aux, last=last)


def empty_states(rows: int, width: int) -> torch.Tensor:
    """[rows, width] bf16 in new memory.

    numpy asks the system for large pages and torch does not: the faults of small ones can take
    longer than what is copied there.
    """
    return torch.from_numpy(np.empty((rows, width), np.int16)).view(torch.bfloat16)


class StatesFile:
    """One request's states while they are written, part by part; invisible until `finish`.

    The whole file's room is taken at the beginning, so that a full folder is met there.
    """

    def __init__(
        self,
        folder: Path,
        rid: str,
        *,
        tokens: int,  # T
        aux_width: int,  # A*H
        width: int,  # H
        aux_layer_ids: Sequence[int],
        room_seconds: float = 0.0,
    ) -> None:
        """Raises `CaptureFault` on a rid that cannot name a file, and `OSError` where there is no
        room after `room_seconds`."""
        self._final = _path_of(folder, rid)
        self._path = folder / f"{_TEMPORARY}{os.getpid()}-{self._final.name}"
        metadata = {"rid": rid, _LAYER_IDS: json.dumps(list(aux_layer_ids))}
        shapes = {"input_ids": (tokens,), "aux": (tokens, aux_width), "last": (tokens, width)}
        header, self._starts, size = _layout(metadata, shapes)
        self._row_bytes = {"input_ids": 4, "aux": 2 * aux_width, "last": 2 * width}
        try:
            _reserve(self._path, size, room_seconds)
            self._put(0, header)
        except OSError:
            self.discard()
            raise

    def write(
        self,
        first: int,
        input_ids: torch.Tensor,  # [n] int32
        aux: torch.Tensor,  # [n, A*H] bf16
        last: torch.Tensor,  # [n, H] bf16
    ) -> None:
        """Write rows `first` to `first + n`, all tensors in the host's memory."""
        for name, rows in (("input_ids", input_ids), ("aux", aux), ("last", last)):
            assert rows.dtype == _TENSORS[name]
            content = rows.contiguous().view(torch.uint8).numpy().data.cast("B")
            assert len(content) == len(rows) * self._row_bytes[name]
            self._put(self._starts[name] + first * self._row_bytes[name], content)

    def finish(self) -> Path:
        """Give the file its name; every row has been written."""
        return self._path.rename(self._final)

    def discard(self) -> None:
        """Remove what there is."""
        self._path.unlink(missing_ok=True)

    def _put(self, place: int, rest: bytes | memoryview) -> None:
        with self._path.open("r+b", buffering=0) as file:
            file.seek(place)
            while rest:  # one call writes 2 GiB at most
                rest = rest[file.write(rest) :]


def publish(
    folder: Path,
    rid: str,
    input_ids: Sequence[int],
    aux: torch.Tensor,  # [T, A*H]
    last: torch.Tensor,  # [T, H]
    aux_layer_ids: Sequence[int],
    *,
    room_seconds: float = ROOM_SECONDS,
) -> Path:
    """Write one request's states as bf16, whole or not at all, and return the file's path.

    Raises `CaptureFault` on a rid that cannot name a file, and `OSError` on a disk that is still
    full after `room_seconds`.
    """
    file = StatesFile(
        folder,
        rid,
        tokens=len(input_ids),
        aux_width=aux.shape[-1],
        width=last.shape[-1],
        aux_layer_ids=aux_layer_ids,
        room_seconds=room_seconds,
    )
    try:
        file.write(
            0,
            torch.tensor(input_ids, dtype=torch.int32),
            aux.detach().to("cpu", torch.bfloat16),
            last.detach().to("cpu", torch.bfloat16),
        )
        return file.finish()
    finally:
        file.discard()


def publish_fault(folder: Path, rid: str | None, fault: CaptureFault) -> None:
    """Tell the reader of a request why its states will not come; None is "of whichever it asks".

    Raises `OSError`. In a full folder the fault keeps its place and loses its words.
    """
    path = folder / (_HOOK_FAULT if rid is None else f"{rid}{_FAULT_SUFFIX}")
    temporary = folder / f"{_TEMPORARY}{os.getpid()}-{path.name}"
    try:
        temporary.write_text(json.dumps([fault.name, fault.detail]))
        temporary.rename(path)
    except OSError:
        path.touch()  # takes no room
    finally:
        temporary.unlink(missing_ok=True)


def take(
    folder: Path,
    rid: str,
    *,
    expected_ids: Sequence[int],
    aux_width: int,
    width: int,
    aux_layer_ids: Sequence[int] | None = None,
    late_seconds: float = 0.0,
) -> CapturedStates:
    """Map one request's states, prove them, and remove the file whether they hold or not.

    The tensors are the file's own memory: its room in `folder` is free again once they are gone.
    Waits `late_seconds` for a file that a server writes after its answer. Raises `CaptureFault`
    with one of the names `bad_rid`, `missing`, `unreadable`, `tensors`, `dtype`, `rows`, `width`,
    `layer_ids`, `foreign_rid`, `foreign_ids`, `not_finite`, or the name in a fault file.
    """
    path = _path_of(folder, rid)
    _wait_for(path, late_seconds)
    try:
        states = _parse(path)
    finally:
        path.unlink(missing_ok=True)
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
        if not _is_finite(getattr(states, name)):
            raise CaptureFault("not_finite", f"{name} of {path.name} holds a NaN or an infinity")
    return states


def discard(folder: Path, rid: str) -> None:
    """Remove what a request that was given up has left, if anything."""
    path = _path_of(folder, rid)
    for one in (path, path.with_name(f"{rid}{_FAULT_SUFFIX}")):
        one.unlink(missing_ok=True)


def sweep(folder: Path) -> int:
    """Remove every captured, half-written and fault file in `folder`; return how many."""
    leftovers = [
        path
        for path in folder.iterdir()
        if path.name.startswith(_TEMPORARY) or path.name.endswith((_SUFFIX, _FAULT_SUFFIX))
    ]
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)


def sweep_dead(folder: Path) -> int:
    """Remove what processes of this machine that are gone left half-written; return how many."""
    dead = [path for path in folder.glob(f"{_TEMPORARY}*") if not _is_alive(path)]
    for path in dead:
        path.unlink(missing_ok=True)
    return len(dead)


def rid_of(nonce: str, digest: str, tokens: int) -> str:
    """The rid of a request for `tokens` rows: whose it is and when it is whole can be read off."""
    return f"{nonce}-{digest}-{tokens}"


def tokens_of(rid: str, nonce: str) -> int | None:
    """How many rows a rid of this run stands for; None if it is not of this run."""
    head, _, tokens = rid.rpartition("-")
    return int(tokens) if head.startswith(f"{nonce}-") and tokens.isdecimal() else None


def can_name_a_file(rid: str) -> bool:
    """Whether a file of this rid stays inside its folder and survives a sweep's rules."""
    return _RID.fullmatch(rid) is not None


def _path_of(folder: Path, rid: str) -> Path:
    if not can_name_a_file(rid):
        raise CaptureFault(
            "bad_rid", f"{rid[:80]!r} cannot name a file; it must match {_RID.pattern}"
        )
    return folder / f"{rid}{_SUFFIX}"


def _layout(
    metadata: dict[str, str], shapes: dict[str, tuple[int, ...]]
) -> tuple[bytes, dict[str, int], int]:
    """The header of a safetensors file, where each tensor's bytes begin, and the file's size."""
    entries: dict[str, object] = {"__metadata__": metadata}
    ends = [0]
    for name, shape in shapes.items():
        dtype = _TENSORS[name]
        ends.append(ends[-1] + math.prod(shape) * dtype.itemsize)
        entries[name] = {
            "dtype": _DTYPE_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": ends[-2:],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + end for name, end in zip(shapes, ends, strict=False)}
    return header, starts, len(header) + ends[-1]


def _reserve(path: Path, size: int, room_seconds: float) -> None:
    """Make a file of `size` bytes that are really there. Raises `OSError` if room never comes."""
    deadline = time.monotonic() + room_seconds
    with path.open("wb") as file:
        while True:
            try:
                return os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno != errno.ENOSPC or time.monotonic() > deadline:
                    raise
            time.sleep(_LOOK_SECONDS[1])


def _wait_for(path: Path, late_seconds: float) -> None:
    started = time.monotonic()
    while True:
        waited = time.monotonic() - started
        if path.exists():
            return
        for told in (path.with_suffix(_FAULT_SUFFIX), path.with_name(_HOOK_FAULT)):
            _raise_told(told)
        if waited >= late_seconds:
            late = f" {late_seconds:g} s after the answer" if late_seconds else ""
            raise CaptureFault("missing", f"no {path.name} in {path.parent}{late}")
        least, most = _LOOK_SECONDS
        time.sleep(min(max(least, _LOOK_SHARE * waited), most))


def _raise_told(path: Path) -> None:
    """Raise what a fault file says, and remove it."""
    try:
        text = path.read_text()
        path.unlink()
    except FileNotFoundError:  # none, or another reader has just taken it
        return
    name, detail = json.loads(text) if text else ("no_room", "the folder had no room for words")
    raise CaptureFault(name, detail)


def _is_alive(path: Path) -> bool:
    pid = path.name.removeprefix(_TEMPORARY).partition("-")[0]
    return pid.isdecimal() and Path("/proc", pid).exists()


def _parse(path: Path) -> CapturedStates:
    name = path.name
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {one: file.get_tensor(one) for one in file.keys()}  # noqa: SIM118 - no mapping
            metadata = file.metadata()
        rid, layer_ids = metadata["rid"], tuple(json.loads(metadata[_LAYER_IDS]))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
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


def _is_finite(states: torch.Tensor) -> bool:
    """Whether no bf16 value is an infinity or a NaN: one pass, and nothing of the states' size."""
    bits = states.view(torch.int16).numpy().reshape(-1)
    parts = (bits[at : at + _CHECKED_AT_ONCE] for at in range(0, len(bits), _CHECKED_AT_ONCE))
    return all(
        part.max() < _INFINITY and part.view(np.uint16).max() < _MINUS_INFINITY for part in parts
    )
