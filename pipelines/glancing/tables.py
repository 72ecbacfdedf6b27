"""Parquet and Arrow IPC: rows of the first, of random and of the last group, or all of them."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.glancing.places import Place, opened
from pipelines.glancing.reading import At, Reading, Row, short

_GROUPS = 8  # of a table are looked at
_BATCH_ROWS = 64
_FAULTS = (pa.ArrowException, OSError, UnicodeDecodeError, ValueError)


def open_parquet(reading: Reading) -> None:
    """Give the reading its rows; a footer that cannot be read is a finding."""
    try:
        file = pq.ParquetFile(_source(reading.place), memory_map=True)
    except _FAULTS as error:
        reading.find("cut_short", f"the Parquet footer cannot be read: {short(error)}")
        return
    reading.row_count, reading.rows_exact = file.metadata.num_rows, True
    sizes = [file.metadata.row_group(at).num_rows for at in range(file.num_row_groups)]

    def batches(group: int) -> Iterator[pa.RecordBatch]:
        return file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group])

    reading.rows = _rows(reading, sizes, batches)


def open_arrow(reading: Reading, *, is_stream: bool) -> None:
    """Give the reading its rows; a footer that cannot be read is a finding."""
    if is_stream:
        reading.rows = _stream_rows(reading)
        return
    try:
        file = pa.ipc.open_file(_source(reading.place))
        sizes = [file.get_batch(at).num_rows for at in range(file.num_record_batches)]
    except _FAULTS as error:
        reading.find("cut_short", f"the Arrow footer cannot be read: {short(error)}")
        return
    reading.row_count, reading.rows_exact = sum(sizes), True

    def batches(at: int) -> Iterator[pa.RecordBatch]:
        batch = file.get_batch(at)
        return (batch.slice(row, _BATCH_ROWS) for row in range(0, batch.num_rows, _BATCH_ROWS))

    reading.rows = _rows(reading, sizes, batches)


def _source(place: Place) -> pa.NativeFile:
    return pa.memory_map(str(place)) if isinstance(place, Path) else pa.PythonFile(opened(place))


def _rows(
    reading: Reading, sizes: Sequence[int], batches: Callable[[int], Iterator[pa.RecordBatch]]
) -> Iterator[tuple[At, Row]]:
    """All rows; or, up to the budget, those of the first, of random, and of the last group."""
    groups = len(sizes)
    order = list(range(groups))
    budget = None if reading.budget is None else reading.budget // max(1, min(groups, _GROUPS))
    if budget is not None and groups > _GROUPS:
        middle = random.Random(groups).sample(range(1, groups - 1), _GROUPS - 2)
        order = [0, *sorted(middle), groups - 1]
    try:
        for group in order:
            spent, number = 0, sum(sizes[:group])
            for batch in batches(group):
                for row in batch_rows(batch):
                    number += 1
                    yield At("row", number), row
                spent += batch.nbytes
                if budget is not None and spent >= budget:
                    break
    except _FAULTS as error:
        reading.find("cut_short", f"a group of rows cannot be read: {short(error)}")


def _stream_rows(reading: Reading) -> Iterator[tuple[At, Row]]:
    """A stream has no index: its rows from the beginning, up to the budget."""
    reading.row_count = passed = 0
    try:
        with pa.ipc.open_stream(_source(reading.place)) as stream:
            for batch in stream:
                for row in batch_rows(batch):
                    reading.row_count += 1
                    yield At("row", reading.row_count), row
                passed += batch.nbytes
                if reading.budget is not None and passed >= reading.budget:
                    reading.row_count = round(reading.row_count * max(reading.size / passed, 1))
                    return
        reading.rows_exact = True
    except (*_FAULTS, EOFError) as error:
        reading.find("cut_short", f"the Arrow stream breaks off: {short(error)}")


def batch_rows(batch: pa.RecordBatch) -> Iterator[Row]:
    """Rows of a batch as mappings. Lists of integers stay NumPy arrays: no object for each id."""
    columns = [
        (name, _integer_lists(column) if _is_integer_list(column.type) else column.to_pylist())
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    ]
    for at in range(batch.num_rows):
        yield {name: values[at] for name, values in columns}


def _is_integer_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) and pa.types.is_integer(kind.value_type)


def _integer_lists(column: pa.ListArray) -> list[Any]:
    values = column.values
    if values.null_count:
        return column.to_pylist()
    flat = values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    absent = column.is_null().to_pylist()
    return [None if absent[i] else flat[offsets[i] : offsets[i + 1]] for i in range(len(column))]
