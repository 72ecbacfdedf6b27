"""Rows of Parquet and Arrow files as values that JSON could have given.

A null in a column or a struct stands for an absent key; in a list or a map it stays. Times and
decimals are strings, in Arrow's words (2024-05-01 12:00:00Z). Bytes that are UTF-8 are text; other
bytes stay bytes, and a float that is not a number stays one: whoever keeps such a cell refuses it.
"""

from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.sources.row import Json, Refused
from pipelines.sources.row_ends import BrokenFile

FEATHER_V1 = b"FEA1"
_PARQUET, _ARROW_FILE, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_END_OF_STREAM = _ARROW_STREAM + bytes(4)
_BATCH_ROWS = 1024  # at most: a dictionary's cells are larger in memory than in the file
_READ_BYTES = 1 << 20  # of a column at a time, rather than all that a row group has of it
_Batches = Iterator[tuple[pa.RecordBatch, float]]


def is_arrow(head: bytes) -> bool:
    """Whether a file that starts like this holds Parquet or Arrow."""
    return head.startswith((_PARQUET, _ARROW_FILE, _ARROW_STREAM))


def read_batches(
    handle: pa.NativeFile, head: bytes, *, columns: Collection[str] | None, limit: int
) -> _Batches:
    """Batches of at most `limit` bytes or one row, each with the part of the file that is read.

    Of Parquet, a few pages are held; of Arrow, one record batch of the file. Raises `BrokenFile`,
    `pa.ArrowException`.
    """
    if head.startswith(_PARQUET):
        found = _parquet(handle, columns, limit)
    else:
        found = _file(handle) if head.startswith(_ARROW_FILE) else _stream(handle)
    for batch, done in found:
        names = _chosen(batch.schema, columns)
        for piece in _pieces(_plain(batch.select(names)), limit):
            yield piece, done


def pack(batch: pa.RecordBatch) -> bytes:
    """A batch with its schema, for another process."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    packed: bytes = sink.getvalue().to_pybytes()
    return packed


def unpack(packed: bytes) -> Iterator[Json | Refused]:
    """The rows of a packed batch, in order; a row that cannot be decoded as what is wrong."""
    with pa.ipc.open_stream(packed) as reader:
        yield from _decoded(reader.read_next_batch())


# Files


def _parquet(handle: pa.NativeFile, columns: Collection[str] | None, limit: int) -> _Batches:
    with pq.ParquetFile(handle, buffer_size=_READ_BYTES, pre_buffer=False) as parquet:
        names, meta, seen = _chosen(parquet.schema_arrow, columns), parquet.metadata, 0
        for index in range(meta.num_row_groups):
            group = meta.row_group(index)
            cells = (group.column(one) for one in range(group.num_columns))
            size = sum(
                one.total_uncompressed_size
                for one in cells
                if one.path_in_schema.startswith(tuple(names))
            )
            rows = max(1, min(_BATCH_ROWS, limit * group.num_rows // max(1, size)))
            batches = parquet.iter_batches(
                rows, row_groups=[index], columns=names, use_threads=False
            )
            for batch in batches:
                seen += batch.num_rows
                yield batch, seen / meta.num_rows
        if seen != meta.num_rows:
            raise BrokenFile(f"{seen} of {meta.num_rows} rows are there")


def _file(handle: pa.NativeFile) -> _Batches:
    with pa.ipc.open_file(handle) as reader:
        count = reader.num_record_batches
        for index in range(count):
            yield reader.get_batch(index), (index + 1) / count


def _stream(handle: pa.NativeFile) -> _Batches:
    size = handle.size()
    with pa.ipc.open_stream(handle) as reader:
        for batch in reader:
            yield batch, handle.tell() / size
    # A reader takes the end of a file for the end of a stream, and stops at the first of two.
    handle.seek(handle.tell() - len(_END_OF_STREAM))
    if handle.read() != _END_OF_STREAM:
        raise BrokenFile("its stream does not end where the file does")


def _chosen(schema: pa.Schema, columns: Collection[str] | None) -> list[str]:
    for name in schema.names:
        if schema.names.count(name) > 1:
            raise BrokenFile(f"two columns are named {name!r}")
    return [name for name in schema.names if columns is None or name in columns]


def _pieces(batch: pa.RecordBatch, limit: int) -> Iterator[pa.RecordBatch]:
    if batch.num_rows > 1 and batch.nbytes > limit:
        half = batch.num_rows // 2
        yield from _pieces(batch.slice(0, half), limit)
        yield from _pieces(batch.slice(half), limit)
    elif batch.num_rows:
        yield batch


# Types


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The same cells with few types, no dictionary shared by slices, and no metadata."""
    fields = [one.with_type(_plain_type(one.type, one.name)) for one in batch.schema]
    bare, schema = batch.replace_schema_metadata(None), pa.schema(fields).remove_metadata()
    # Casting a batch without columns would lose its rows.
    return bare if bare.schema == schema else bare.cast(schema)


def _plain_type(kind: pa.DataType, where: str) -> pa.DataType:
    """Raises `BrokenFile` for a type without a certain reading."""
    of = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _plain_type(kind.storage_type, where)
    if of.is_dictionary(kind):
        return _plain_type(kind.value_type, where)
    if of.is_struct(kind):
        return _plain_struct(kind, where)
    if of.is_map(kind):
        cells = (_plain_type(one, where) for one in (kind.key_type, kind.item_type))
        return pa.map_(*cells)
    if of.is_large_list(kind):
        return pa.large_list(_plain_type(kind.value_type, where))
    if of.is_list(kind) or of.is_fixed_size_list(kind):
        return pa.list_(_plain_type(kind.value_type, where))
    if of.is_interval(kind) or not (of.is_primitive(kind) or _is_flat(kind)):
        # Among them list views, which pyarrow casts to lists without their elements.
        raise BrokenFile(f"its column {where} is of the type {kind}, which is not read")
    if of.is_temporal(kind) or of.is_decimal(kind):
        return pa.string()
    return {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(
        kind, kind
    )


def _plain_struct(kind: pa.StructType, where: str) -> pa.StructType:
    names = [one.name for one in kind]
    if len({*names}) < len(names):
        raise BrokenFile(f"its column {where} has two fields of the same name")
    return pa.struct([(one.name, _plain_type(one.type, where)) for one in kind])


def _is_flat(kind: pa.DataType) -> bool:
    return kind in (pa.string_view(), pa.binary_view()) or any(
        test(kind)
        for test in (
            pa.types.is_null,
            pa.types.is_decimal,
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_fixed_size_binary,
        )
    )


# Values


def _decoded(batch: pa.RecordBatch) -> Iterator[Json | Refused]:
    """All at once; where that fails, halves, down to the row that cannot be decoded."""
    try:
        values = _values(batch.to_struct_array())
    except ValueError as error:
        if batch.num_rows == 1:
            is_text = isinstance(error, UnicodeDecodeError)
            yield Refused("invalid_utf8" if is_text else "malformed_json", str(error))
            return
        half = batch.num_rows // 2
        yield from _decoded(batch.slice(0, half))
        yield from _decoded(batch.slice(half))
    else:
        yield from values


def _values(array: pa.Array) -> list[Any]:
    """The cells of an array of a plain type. Raises `ValueError`, `UnicodeDecodeError`."""
    kind, of = array.type, pa.types
    if of.is_struct(kind):
        return _objects(array)
    if of.is_map(kind):
        entry = pa.struct([("key", kind.key_type), ("value", kind.item_type)])
        lists = array.cast(pa.list_(entry))
        keys, values = (_values(one) for one in lists.flatten().flatten())
        pairs = _grouped(lists, zip(keys, values, strict=True))
        return [None if one is None else _from_pairs(one) for one in pairs]
    if of.is_list(kind) or of.is_large_list(kind):
        return _grouped(array, iter(_values(array.flatten())))
    if of.is_binary(kind) or of.is_large_binary(kind) or of.is_fixed_size_binary(kind):
        return [None if one is None else _text(one) for one in array.to_pylist()]
    cells: list[Any] = array.to_pylist()
    return cells


def _objects(array: pa.StructArray) -> list[Any]:
    names = [one.name for one in array.type]
    if not names:
        return [{} for _ in range(len(array))]
    cells = zip(*(_values(one) for one in array.flatten()), strict=True)
    found = [
        {name: cell for name, cell in zip(names, row, strict=True) if cell is not None}
        for row in cells
    ]
    if not array.null_count:
        return found
    valid = array.is_valid().to_pylist()
    return [row if there else None for row, there in zip(found, valid, strict=True)]


def _grouped(lists: pa.Array, cells: Iterator[Any]) -> list[Any]:
    lengths = pc.list_value_length(lists).to_pylist()
    return [None if length is None else list(islice(cells, length)) for length in lengths]


def _from_pairs(pairs: list[tuple[Any, Any]]) -> Json:
    found = {str(key): value for key, value in pairs}
    if len(found) < len(pairs):
        raise ValueError("a map has the same key twice")
    return found


def _text(content: bytes) -> str | bytes:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content
