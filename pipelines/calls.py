"""How prompts get to the workers: by their places in the prompt files, which a worker reads."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

Places = npt.NDArray[np.int64]

# A worker keeps its permits busy when it has admitted several times as many rows as it has permits.
_ADMITTED_PER_PERMIT = 8
_ROWS_PER_CALL = (8, 512)
_CALLS_AT_ONCE = (4, 16)
_CALLS_PER_WORKER = 16  # at least, so that none is left with a big last call while others idle

_CALL_SCHEMA = pa.schema(
    [
        pa.field("file", pa.string(), nullable=False),
        pa.field("group", pa.int32(), nullable=False),
        pa.field("rows", pa.list_(pa.int64()), nullable=False),  # places in the group
    ]
)


@dataclass(frozen=True)
class RowGroup:
    """What is read of a prompt file at once. `first` is the place of its first row in the set."""

    file: Path
    number: int
    first: int
    rows: int


def row_groups(files: Sequence[Path]) -> list[RowGroup]:
    """The row groups of a set's prompt files, in order."""
    found, first = [], 0
    for path in files:
        metadata = pq.read_metadata(path)
        for number in range(metadata.num_row_groups):
            found.append(RowGroup(path, number, first, metadata.row_group(number).num_rows))
            first += found[-1].rows
    return found


@dataclass(frozen=True)
class CallShape:
    """How Ray Data calls a worker: rows in a call, calls at once."""

    rows: int
    calls: int


def call_shape(prompts: int, workers: int, permits: int) -> CallShape:
    """Calls big enough to cost little, small enough that every worker gets many; and so many at
    once that a worker has admitted several times the rows it has permits for. `permits` are one
    worker's, over all servers."""
    least, most = _ROWS_PER_CALL
    rows = min(most, max(least, prompts // (workers * _CALLS_PER_WORKER)))
    fewest, many = _CALLS_AT_ONCE
    return CallShape(rows, min(many, max(fewest, -(-_ADMITTED_PER_PERMIT * permits // rows))))


def calls_for(groups: Sequence[RowGroup], places: Places, rows: int) -> Iterator[pa.Table]:
    """Calls for the prompts at `places` of a set, ascending: each of at most so many rows, all of
    one group."""
    for group in groups:
        start, stop = np.searchsorted(places, (group.first, group.first + group.rows))
        wanted = places[start:stop] - group.first
        for some in np.array_split(wanted, -(-len(wanted) // rows)) if len(wanted) else ():
            columns = [[str(group.file)], [group.number], [some]]
            yield pa.table(columns, schema=_CALL_SCHEMA)


class PromptReader:
    """Reads the prompts of calls, from any thread. Holds the group that was read last: the next
    calls are mostly for rows of the same."""

    def __init__(self) -> None:
        self._reading = threading.Lock()
        self._group: tuple[str, int] | None = None
        self._table = pa.table({})

    def prompts(self, calls: pa.Table) -> pa.Table:
        """The prompt rows of some calls."""
        return pa.concat_tables(
            [
                self._read(one["file"], one["group"]).take(pa.array(one["rows"], pa.int64()))
                for one in calls.to_pylist()
            ]
        )

    def _read(self, file: str, group: int) -> pa.Table:
        with self._reading:
            if self._group != (file, group):
                with pq.ParquetFile(file) as parquet:
                    self._table = parquet.read_row_group(group, use_threads=False)
                self._group = file, group
            return self._table
