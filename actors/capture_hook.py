"""Loaded inside a stock SGLang server by `--forward-hooks`: hands over each prompt's hidden states.

The hook sits on the module that makes logits, which is given everything: ids, last states, and the
aux states of the batch. It picks the rows of this run's requests out of every prefill and copies
them to the host on a stream of its own; a thread writes them, so the scheduler waits for neither.

A prompt may come in parts, over several batches and beside others. How many rows it has rides in
its rid, since nothing else in the server says so: the file gets its room with the first part and
its name with the last row, and a request that was cut off never has a file.

Verified against sglang 0.5.23. Standard library, torch and `capture_file` only.
"""

import errno
import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.capture_file import (
    ROOM_SECONDS,
    CaptureFault,
    StatesFile,
    empty_states,
    publish_fault,
    sweep_dead,
    tokens_of,
)

logger = logging.getLogger(__name__)

# Prompts in parts at one time. SGLang has one or two; more were cut off, the oldest first.
_UNFINISHED = 256


@dataclass(frozen=True)
class Settings:
    """What the hook is told on the server's command line."""

    folder: str
    nonce: str  # this run's requests begin with it; all others are left alone
    aux_layer_ids: Sequence[int]  # "output of layer j"
    max_bytes_in_flight: int  # in host memory, between the device and the file
    room_seconds: float = ROOM_SECONDS


@dataclass(frozen=True, eq=False)
class Part:
    """Some rows of one prompt, as one batch holds them."""

    rid: str
    tokens: int  # T, of the whole prompt
    first: int  # the place of the first of these n rows in the prompt
    input_ids: torch.Tensor  # [n]
    aux: torch.Tensor | Sequence[torch.Tensor]  # [n, A*H], or A x [n, H]
    last: torch.Tensor  # [n, H]

    @property
    def aux_blocks(self) -> list[torch.Tensor]:
        """The aux states side by side, as they came."""
        return [self.aux] if isinstance(self.aux, torch.Tensor) else [*self.aux]

    @property
    def host_bytes(self) -> int:
        """What these rows take in the host's memory as int32 and bf16."""
        states = sum(one.numel() for one in (*self.aux_blocks, self.last))
        return 4 * len(self.input_ids) + 2 * states


def factory(config: Mapping[str, Any]) -> "CaptureHook | None":
    """What SGLang calls in every process that runs a part of the model; rank 0 has all rows."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return None
    return CaptureHook(Settings(**config))


class CaptureHook:
    """A forward hook, and the thread that writes. Nothing of it raises into the server."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        sweep_dead(self._folder)  # of the server that this one takes the place of
        self._room = _ByteBudget(settings.max_bytes_in_flight)
        self._stream: torch.cuda.Stream | None = None
        self._copied: queue.SimpleQueue[_Copied | None] = queue.SimpleQueue()
        # The file and the rows that it has; None once the reader was told of a fault.
        self._unfinished: OrderedDict[str, tuple[StatesFile, int] | None] = OrderedDict()
        self._thread = threading.Thread(target=self._write_all, name="capture", daemon=True)
        self._thread.start()

    def __call__(self, _module: torch.nn.Module, args: tuple[Any, ...], _output: Any) -> None:
        """Take this run's rows out of one forward of the module that makes logits."""
        try:
            for part in parts_of(args, self._settings.nonce, len(self._settings.aux_layer_ids)):
                self._take(part)
        except Exception as error:
            # The server's own work goes on.
            logger.exception("no states of a batch were captured")
            self._tell(None, error)

    def close(self) -> None:
        """Write what was taken, and end the thread."""
        self._copied.put(None)
        self._thread.join()

    def _take(self, part: Part) -> None:
        size = part.host_bytes
        self._room.take(size)  # slows the server down where files are written slower than made
        try:
            if part.last.is_cuda and self._stream is None:
                self._stream = torch.cuda.Stream(part.last.device)
            self._copied.put(_to_host(part, size, self._stream))
        except Exception as error:
            logger.exception("rows of %s did not reach the host", part.rid)
            self._room.give_back(size)
            self._tell(part.rid, error)

    def _write_all(self) -> None:
        while self._write_next():
            continue

    def _write_next(self) -> bool:
        """Write one part, and let go of its memory by returning; False at the end."""
        copied = self._copied.get()
        if copied is None:
            return False
        try:
            copied.wait()
            self._write(copied)
        except Exception as error:
            # The thread's edge: told to the reader, who asks again.
            logger.exception("rows of %s were not written", copied.part.rid)
            self._tell(copied.part.rid, error)
            self._keep(copied.part.rid, None)
        finally:
            self._room.give_back(copied.size)
        return True

    def _write(self, copied: "_Copied") -> None:
        part = copied.part
        unfinished = self._unfinished.pop(part.rid, (None, 0))
        if part.first != 0 and unfinished is None:
            self._keep(part.rid, None)  # the first fault is the one that says why
            return
        file, there = self._file_of(copied, unfinished or (None, 0))
        try:
            file.write(part.first, copied.input_ids, copied.aux, copied.last)
            there += len(copied.input_ids)
            if there == part.tokens:
                file.finish()
                return
        except BaseException:
            file.discard()
            raise
        self._keep(part.rid, (file, there))

    def _keep(self, rid: str, unfinished: tuple[StatesFile, int] | None) -> None:
        self._unfinished[rid] = unfinished
        if len(self._unfinished) > _UNFINISHED:
            _, oldest = self._unfinished.popitem(last=False)
            if oldest is not None:
                oldest[0].discard()

    def _file_of(
        self, copied: "_Copied", unfinished: tuple[StatesFile | None, int]
    ) -> tuple[StatesFile, int]:
        """The file that a part goes on with, and the rows that it has."""
        part, (file, there) = copied.part, unfinished
        if file is not None and part.first == there:
            return file, there
        if file is not None:  # from its first row on, the server reads a prompt anew
            file.discard()
        if part.first != 0:
            raise CaptureFault("part", f"rows from {part.first} on came after {there} rows")
        settings = self._settings
        return (
            StatesFile(
                self._folder,
                part.rid,
                tokens=part.tokens,
                aux_width=copied.aux.shape[1],
                width=copied.last.shape[1],
                aux_layer_ids=settings.aux_layer_ids,
                room_seconds=settings.room_seconds,
            ),
            0,
        )

    def _tell(self, rid: str | None, error: Exception) -> None:
        """Leave a fault file; where even that fails, the reader finds nothing, which is a fault."""
        try:
            publish_fault(self._folder, rid, _fault_of(error))
        except OSError:
            logger.exception("no fault file either")


def parts_of(args: Sequence[Any], nonce: str, layers: int) -> list[Part]:
    """The rows of this run's prompts in one batch: none of a decoding batch, of a warm-up, or of
    anybody else's requests.

    Raises `CaptureFault` where the server does not pass what sglang 0.5.23 does.
    """
    try:
        input_ids, last, _, batch, aux = args[:5]
        is_prefill = batch.forward_mode.is_extend()
        rids, lengths, firsts = batch.rids, batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu
    except (AttributeError, TypeError, ValueError) as error:
        raise CaptureFault(
            "unknown_server", f"it does not pass what sglang 0.5.23 does: {error!r}"
        ) from error
    if not is_prefill or rids is None:  # a batch of the server's own has no rids
        return []
    _check_batch(input_ids, last, aux, rids, lengths, firsts, layers)
    parts, end = [], 0
    for rid, length, first in zip(rids, lengths, firsts, strict=False):
        start, end = end, end + length
        tokens = tokens_of(rid, nonce)
        if tokens is None or length == 0:
            continue
        if first + length > tokens:
            raise CaptureFault("rows", f"{rid} has rows up to {first + length}")
        rows = slice(start, end)
        some = aux[rows] if isinstance(aux, torch.Tensor) else [one[rows] for one in aux]
        parts.append(Part(rid, tokens, first, input_ids[rows], some, last[rows]))
    return parts


def _check_batch(
    input_ids: Any, last: Any, aux: Any, rids: Any, lengths: Any, firsts: Any, layers: int
) -> None:
    """Padding may follow the rows of a batch; anything else that does not add up is refused."""
    blocks = [aux] if isinstance(aux, torch.Tensor) else aux
    if not blocks:
        raise CaptureFault("no_aux", "the server captures no aux states")
    width = sum(one.shape[1] for one in blocks)
    if width != layers * last.shape[1]:
        raise CaptureFault("layers", f"{width} aux columns for {layers} layers of {last.shape[1]}")
    rows = {len(one) for one in (input_ids, last, *blocks)}
    if len(rows) != 1 or len(lengths) < len(rids) or len(firsts) < len(rids):
        raise CaptureFault("batch", f"{sorted(rows)} rows, {len(lengths)} of {len(rids)} lengths")
    if sum(lengths[: len(rids)]) > min(rows):
        raise CaptureFault("batch", f"{sum(lengths)} rows were announced, {min(rows)} came")


@dataclass(frozen=True, eq=False)
class _Copied:
    """A part on its way to the host; `wait` returns when it is there."""

    part: Part  # its device memory must not be used again before the copy has ended
    size: int
    input_ids: torch.Tensor  # [n] int32
    aux: torch.Tensor  # [n, A*H] bf16
    last: torch.Tensor  # [n, H] bf16
    wait: Callable[[], object]


def _to_host(part: Part, size: int, stream: "torch.cuda.Stream | None") -> _Copied:
    if stream is None:
        # The server may use its own again.
        ids, last = part.input_ids.to(torch.int32, copy=True), empty_states(*part.last.shape)
        aux = empty_states(len(ids), sum(one.shape[1] for one in part.aux_blocks))
        torch.cat([one.to(torch.bfloat16) for one in part.aux_blocks], dim=-1, out=aux)
        return _Copied(part, size, ids, aux, last.copy_(part.last), _at_once)
    stream.wait_stream(torch.cuda.current_stream(part.last.device))
    with torch.cuda.stream(stream):
        # torch keeps pinned blocks for the next ones, so this allocates in the beginning only.
        ids, aux, last = (
            torch.empty(one.shape, dtype=one.dtype, pin_memory=True).copy_(one, non_blocking=True)
            for one in _blocks(part)
        )
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
    return _Copied(part, size, ids, aux, last, done.synchronize)


def _blocks(part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, aux and last states as they are stored, where they are."""
    aux = part.aux if isinstance(part.aux, torch.Tensor) else torch.cat(list(part.aux), dim=-1)
    return part.input_ids.to(torch.int32), aux.to(torch.bfloat16), part.last.to(torch.bfloat16)


def _at_once() -> None:
    """Nothing to wait for."""


class _ByteBudget:
    """Bytes that may be in flight. One part that is larger than all of it travels alone."""

    def __init__(self, most: int) -> None:
        self._most, self._used = most, 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        """Wait until there is room."""
        with self._changed:
            self._changed.wait_for(lambda: not self._used or self._used + size <= self._most)
            self._used += size

    def give_back(self, size: int) -> None:
        """Say that they are no longer in flight."""
        with self._changed:
            self._used -= size
            self._changed.notify_all()


def _fault_of(error: Exception) -> CaptureFault:
    match error:
        case CaptureFault():
            return error
        case OSError(errno=errno.ENOSPC):
            return CaptureFault("no_room", f"no room in the folder: {error}")
        case OSError():
            return CaptureFault("not_written", repr(error))
        case _:
            return CaptureFault("hook", repr(error))
