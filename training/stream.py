"""Rows whose states are on no disk: their tokens lie in a file, their states come by in a stream.

The stream has one row for each row that the plan asks for, in the plan's order. What it says is
compared with the file: a stream that starts at another step than training is noticed at once.
"""

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from training.features import FeatureFault, FeatureRow, FeatureStore

TOKENS_FILE = "tokens.arrow"  # in the features folder

TOKENS_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("input_ids", pa.list_(pa.int32()), nullable=False),  # prompt and response
        pa.field("loss_mask", pa.list_(pa.bool_()), nullable=False),  # tokens that may teach
    ],
    metadata={"eyas.schema": "tokens", "eyas.schema_version": "1"},
)

STREAM_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("fault", pa.string(), nullable=False),  # "": none; otherwise there are no states
        pa.field("aux", pa.large_binary(), nullable=False),  # [T, A*H] bf16
        pa.field("last", pa.large_binary(), nullable=False),  # [T, H] bf16
    ]
)


class StreamFault(RuntimeError):
    """A stream that cannot go on: states were asked for in vain, as often as the pool allows."""


# States are read where Ray keeps them, which nobody may write to; packing copies them.
warnings.filterwarnings("ignore", message="The given buffer is not writable")


def write_tokens(path: Path, tables: Iterable[pa.Table]) -> None:
    """Write rows of `TOKENS_SCHEMA`, whole or not at all; one table is held at a time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, TOKENS_SCHEMA) as to:
            for table in tables:
                to.write_table(table.cast(TOKENS_SCHEMA).combine_chunks())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class TokenStore:
    """Random access to the tokens of all rows, through a memory map. Read-only."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FeatureFault(f"{path} is missing: run the capture stage")
        with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
            if not reader.schema.equals(TOKENS_SCHEMA, check_metadata=True):
                raise FeatureFault(f"{path} has another schema than this version writes")
            self._batches = [reader.get_batch(at) for at in range(reader.num_record_batches)]
        self._firsts = np.cumsum([0, *(batch.num_rows for batch in self._batches)])
        self.sample_ids: list[str] = self._all("sample_id")
        self.datasets: list[str] = self._all("dataset")
        self.domains: list[str] = self._all("domain")
        self.lengths: list[int] = []
        self.loss_tokens: list[int] = []
        for batch in self._batches:
            starts = batch["loss_mask"].offsets.to_numpy()
            flags = batch["loss_mask"].values.to_numpy(zero_copy_only=False)
            before = np.concatenate([[0], np.cumsum(flags)])
            self.lengths += np.diff(starts).tolist()
            self.loss_tokens += np.diff(before[starts]).tolist()

    def tokens(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`input_ids` [T] int64 and `loss_mask` [T] bool of one row."""
        number = int(np.searchsorted(self._firsts, row, side="right")) - 1
        batch, at = self._batches[number], row - int(self._firsts[number])
        ids = batch["input_ids"][at].values.to_numpy().astype(np.int64)
        mask = batch["loss_mask"][at].values.to_numpy(zero_copy_only=False)
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def _all(self, name: str) -> list[str]:
        return [one for batch in self._batches for one in batch[name].to_pylist()]


@dataclass(frozen=True, eq=False)
class StreamedStates:
    """The states of one sample as they travel, or why there are none."""

    sample_id: str
    aux: torch.Tensor  # [T, A*H] bf16
    last: torch.Tensor  # [T, H] bf16
    fault: str = ""

    @staticmethod
    def none(sample_id: str, fault: str) -> "StreamedStates":
        """A sample whose states cannot be had."""
        assert fault
        nothing = torch.zeros(0, 0, dtype=torch.bfloat16)
        return StreamedStates(sample_id, nothing, nothing, fault)

    def table(self) -> pa.Table:
        """One row of `STREAM_SCHEMA`, which shares the states' memory."""
        states = [_binary(self.aux), _binary(self.last)]
        names = [pa.array([one], pa.string()) for one in (self.sample_id, self.fault)]
        return pa.table([*names, *states], schema=STREAM_SCHEMA)


class StreamedRows:
    """The rows of a plan, taken from a stream in the order in which they are asked for.

    A sample without states becomes a row without tokens, which teaches nothing, and is named in
    `set_aside`.
    """

    def __init__(
        self,
        tokens: TokenStore,
        tables: Iterable[pa.Table],
        *,
        aux_size: int,
        last_size: int,
        max_tokens: int,  # of a sample: what lies beyond is not asked for
    ) -> None:
        self._tokens, self._max_tokens = tokens, max_tokens
        self._aux_size, self._last_size = aux_size, last_size
        self._coming = _rows_of(tables)
        self.set_aside: dict[str, str] = {}

    def row(self, row: int) -> FeatureRow:
        """The next row of the stream, which must be the one of this number."""
        name = self._tokens.sample_ids[row]
        coming = next(self._coming, None)
        seen = "the end" if coming is None else coming["sample_id"].as_py()
        if coming is None or seen != name:
            raise FeatureFault(f"the stream of states brought {seen} where {name} is next")
        end = self._max_tokens
        if coming["fault"].as_py():
            self.set_aside[name] = coming["fault"].as_py()
            end = 0
        aux = _states(coming["aux"].as_buffer(), self._aux_size, name)
        last = _states(coming["last"].as_buffer(), self._last_size, name)
        return _row(self._tokens, row, end, aux, last)


class SlicedRows:
    """The rows of a plan of which only a slice is on disk: those that these steps ask for.

    A sample that could not be captured becomes a row without tokens, as in a stream.
    """

    def __init__(
        self,
        tokens: TokenStore,
        store: FeatureStore,
        failed: Mapping[str, str],  # samples that could not be captured, and why
        *,
        aux_size: int,
        last_size: int,
    ) -> None:
        self._tokens, self._store, self._failed = tokens, store, failed
        self._places = {name: place for place, name in enumerate(store.sample_ids)}
        self._none = [torch.zeros(0, size, dtype=torch.bfloat16) for size in (aux_size, last_size)]
        self.set_aside: dict[str, str] = {}

    def row(self, row: int) -> FeatureRow:
        """The row of this number."""
        name = self._tokens.sample_ids[row]
        if name in self._places:
            return self._store.row(self._places[name])
        if name not in self._failed:
            raise FeatureFault(f"{name} is not in the slice that was captured for these steps")
        self.set_aside[name] = self._failed[name]
        return _row(self._tokens, row, 0, *self._none)


def _row(
    tokens: TokenStore, row: int, end: int, aux: torch.Tensor, last: torch.Tensor
) -> FeatureRow:
    ids, mask = tokens.tokens(row)
    return FeatureRow(
        sample_id=tokens.sample_ids[row],
        dataset=tokens.datasets[row],
        domain=tokens.domains[row],
        input_ids=ids[:end],
        loss_mask=mask[:end],
        aux=aux,
        last=last,
    )


def _rows_of(tables: Iterable[pa.Table]) -> Iterator[dict[str, pa.Scalar]]:
    for table in tables:
        for at in range(table.num_rows):
            yield {name: table[name][at] for name in STREAM_SCHEMA.names}


def _states(buffer: pa.Buffer, size: int, sample_id: str) -> torch.Tensor:
    """[T, size] bf16, without a copy."""
    tokens, rest = divmod(buffer.size, 2 * size)
    if rest:
        raise FeatureFault(f"{sample_id}: {buffer.size} bytes of states, no multiple of {2 * size}")
    if not tokens:
        return torch.zeros(0, size, dtype=torch.bfloat16)
    return torch.frombuffer(buffer, dtype=torch.bfloat16).view(tokens, size)


def _binary(states: torch.Tensor) -> pa.LargeBinaryArray:
    """One value that shares the tensor's memory."""
    assert states.dtype == torch.bfloat16
    flat = states.detach().contiguous().view(torch.int16).numpy()
    ends = pa.py_buffer(np.array([0, flat.nbytes], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, pa.py_buffer(flat)])
