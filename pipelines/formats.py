"""Rows of any file, foreign or growing: JSONL, JSON, Parquet, Arrow IPC. Reads, changes nothing.

A `Reading` says how many rows there are and how that is known; its rows come lazily, either all of
them or a sample of head, tail and random places. What cannot be read is said in words, not raised.
"""

import gzip
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

Format = Literal["JSONL", "JSON", "Parquet", "Arrow", "safetensors", "unknown"]
Row = Mapping[str, Any]

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".ipc", ".feather", ".safetensors")

SAMPLE_BYTES = 16 << 20  # a file up to this size is read whole; of a larger one, this much
_PLACES = 24  # random places of a large file, between its head and its tail
_MAX_JSON_BYTES = 256 << 20  # one JSON value is parsed in memory
_MAX_LINE_BYTES = 64 << 20


@dataclass
class Reading:
    """What one file holds. `rows_exact` and the faults are final once `rows` is exhausted."""

    path: Path
    format: Format
    rows: Iterator[Row]
    row_count: int | None = None  # known, or estimated, before or after the rows were read
    rows_exact: bool = False
    ends_in_half_line: bool = False
    malformed: list[tuple[str, str]] = field(default_factory=list)  # (place, what was wrong)
    malformed_count: int = 0
    fault: str | None = None  # why the file, or the rest of it, cannot be read

    def note_malformed(self, place: str, reason: str) -> None:
        """Count a broken line; the first few are kept by place."""
        self.malformed_count += 1
        if len(self.malformed) < 10:
            self.malformed.append((place, reason))


def read_rows(path: Path, *, full: bool) -> Reading:
    """Open a file by its first bytes, then by its name. Raises `OSError` if it cannot be opened."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        start = handle.read(4096)
    reading = Reading(path, "unknown", iter(()))
    if size == 0:
        reading.format = _named_format(path)
        reading.row_count, reading.rows_exact = 0, True
        reading.fault = "the file is empty (0 bytes)"
        return reading
    reading.format = _format_of(path, start)
    claimed = _named_format(path)
    if claimed in ("Parquet", "Arrow", "safetensors") and reading.format != claimed:
        reading.fault = f"the name says {claimed}, the first bytes do not ({start[:8]!r})"
        return reading
    match reading.format:
        case "JSONL":
            _open_lines(reading, size, full, zipped=start[:2] == b"\x1f\x8b")
        case "JSON":
            _open_json(reading, size, zipped=start[:2] == b"\x1f\x8b")
        case "Parquet":
            _open_parquet(reading, full)
        case "Arrow":
            _open_arrow(reading, start, full)
        case "safetensors":
            reading.fault = None
        case "unknown":
            reading.fault = f"no format is known that starts with {start[:16]!r}"
    return reading


def arrow_rows(batch: pa.RecordBatch) -> Iterator[Row]:
    """Rows of a batch as mappings. Lists of integers stay NumPy arrays: no object for each id."""
    columns: list[tuple[str, Any]] = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = column.type
        if pa.types.is_list(kind) and pa.types.is_integer(kind.value_type):
            columns.append((name, _integer_lists(column)))
        else:
            columns.append((name, column.to_pylist()))
    for at in range(batch.num_rows):
        yield {name: values[at] for name, values in columns}


def _integer_lists(column: pa.ListArray) -> list[Any]:
    values = column.values
    if values.null_count:
        return column.to_pylist()
    flat = values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    absent = column.is_null().to_pylist()
    return [None if absent[i] else flat[offsets[i] : offsets[i + 1]] for i in range(len(column))]


def _format_of(path: Path, start: bytes) -> Format:
    if start[:4] == b"PAR1":
        return "Parquet"
    if start[:6] == b"ARROW1" or start[:4] == b"\xff\xff\xff\xff":
        return "Arrow"
    if start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 100 << 20:
        return "safetensors"
    named = _named_format(path)
    if start[:2] == b"\x1f\x8b":
        with suppress(OSError, EOFError), gzip.open(path) as handle:
            start = handle.read(4096)
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if named == "JSONL":
        return "JSONL"
    if text[:1] not in (b"{", b"["):
        return "JSON" if named == "JSON" else "unknown"
    first_line = text.split(b"\n", 1)[0]
    is_lines = text[:1] == b"{" and b"\n" in text and _parses(first_line)
    return "JSONL" if is_lines else "JSON"


def _named_format(path: Path) -> Format:
    name = path.name.lower().removesuffix(".gz")
    match Path(name).suffix:
        case ".jsonl" | ".ndjson":
            return "JSONL"
        case ".json":
            return "JSON"
        case ".parquet":
            return "Parquet"
        case ".arrow" | ".ipc" | ".feather":
            return "Arrow"
        case ".safetensors":
            return "safetensors"
        case _:
            return "unknown"


def _parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


# --- lines


def _open_lines(reading: Reading, size: int, full: bool, *, zipped: bool) -> None:
    if zipped:
        reading.rows = _zipped_lines(reading, size, full)
    elif full or size <= SAMPLE_BYTES:
        reading.rows = _all_lines(reading)
    else:
        reading.rows = _sampled_lines(reading, size)


def _all_lines(reading: Reading) -> Iterator[Row]:
    with reading.path.open("rb") as handle:
        yield from _parse_lines(reading, handle)
    reading.rows_exact = True


def _zipped_lines(reading: Reading, size: int, full: bool) -> Iterator[Row]:
    """gzip has no random access: a sample is the head, and the count is read off its position."""
    with reading.path.open("rb") as raw, gzip.open(raw) as handle:
        try:
            yield from _parse_lines(reading, handle, limit=None if full else SAMPLE_BYTES)
            done = full or not handle.read(1)
        except (EOFError, OSError, gzip.BadGzipFile) as error:
            reading.fault = f"the gzip stream breaks off: {error}"
            done = True
        reading.rows_exact = done
        if not done and reading.row_count:
            reading.row_count = round(reading.row_count * size / max(raw.tell(), 1))


def _parse_lines(
    reading: Reading, handle: IO[bytes] | gzip.GzipFile, limit: int | None = None
) -> Iterator[Row]:
    number, seen, reading.row_count = 0, 0, 0
    while limit is None or seen < limit:
        line = handle.readline(_MAX_LINE_BYTES)
        if not line:
            break
        number += 1
        seen += len(line)
        row = _parse_line(reading, line, f"line {number}", is_last=not line.endswith(b"\n"))
        if row is not None:
            reading.row_count += 1
            yield row


def _parse_line(reading: Reading, line: bytes, place: str, *, is_last: bool) -> Row | None:
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        if is_last:  # a writer is in the middle of it, or died there
            reading.ends_in_half_line = True
        else:
            reading.note_malformed(place, _reason(error))
        return None
    if not isinstance(row, dict):
        reading.note_malformed(place, f"{type(row).__name__}, not an object")
        return None
    return row


def _sampled_lines(reading: Reading, size: int) -> Iterator[Row]:
    """Head, random places, tail: disjoint spans, so that a row seen twice is in the file twice."""
    edge = SAMPLE_BYTES // 3
    span = SAMPLE_BYTES // 3 // _PLACES
    slots = (size - 2 * edge) // span
    chooser = random.Random(size)  # the same file is sampled at the same places
    middle = sorted(chooser.sample(range(slots), min(_PLACES, slots)))
    starts = [(0, edge), *((edge + slot * span, span) for slot in middle), (size - edge, edge)]
    rows = taken = 0
    with reading.path.open("rb") as handle:
        for start, length in starts:
            handle.seek(start)
            if start:
                handle.readline(_MAX_LINE_BYTES)  # the rest of a line that began before
            number = 0
            while (at := handle.tell()) < start + length:
                line = handle.readline(_MAX_LINE_BYTES)
                if not line:
                    break
                number += 1
                place = f"line {number}" if start == 0 else f"the line at byte {at:,}"
                row = _parse_line(reading, line, place, is_last=not line.endswith(b"\n"))
                taken += len(line)
                if row is not None:
                    rows += 1
                    yield row
    reading.row_count = round(rows * size / taken) if taken else None


def _open_json(reading: Reading, size: int, *, zipped: bool) -> None:
    if size > _MAX_JSON_BYTES:
        reading.fault = f"one JSON value of {size:,} bytes; write one object a line (JSONL) instead"
        return
    try:
        with gzip.open(reading.path) if zipped else reading.path.open("rb") as handle:
            value = json.loads(handle.read(_MAX_JSON_BYTES))
    except (ValueError, RecursionError, OSError, EOFError) as error:
        reading.fault = f"not JSON: {_reason(error)}"
        return
    values = value if isinstance(value, list) else [value]
    if isinstance(value, dict) and len(value) <= 3:  # {"data": [...]}: the rows are inside
        inner = [one for one in value.values() if isinstance(one, list) and len(one) > 1]
        if len(inner) == 1 and all(isinstance(one, dict) for one in inner[0]):
            values = inner[0]
    rows = []
    for at, one in enumerate(values, start=1):
        if isinstance(one, dict):
            rows.append(one)
        else:
            reading.note_malformed(f"item {at}", f"{type(one).__name__}, not an object")
    reading.rows = iter(rows)
    reading.row_count, reading.rows_exact = len(rows), True


def _reason(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= 90 else text[:87] + "..."


# --- tables


def _open_parquet(reading: Reading, full: bool) -> None:
    try:
        file = pq.ParquetFile(reading.path, memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        reading.fault = f"the Parquet footer cannot be read (cut short, or not finished): {error}"
        return
    reading.row_count, reading.rows_exact = file.metadata.num_rows, True
    groups = file.num_row_groups

    def batches(group: int) -> Iterator[pa.RecordBatch]:
        return file.iter_batches(batch_size=64, row_groups=[group])

    reading.rows = _table_rows(reading, groups, batches, full)


def _open_arrow(reading: Reading, start: bytes, full: bool) -> None:
    try:
        if start[:6] == b"ARROW1":
            file = pa.ipc.open_file(pa.memory_map(str(reading.path)))
        else:
            reading.rows = _stream_rows(reading)
            return
    except (pa.ArrowInvalid, OSError) as error:
        reading.fault = f"the Arrow footer cannot be read (cut short, or not finished): {error}"
        return
    count = file.num_record_batches
    try:
        reading.row_count = sum(file.get_batch(at).num_rows for at in range(count))
        reading.rows_exact = True
    except (pa.ArrowInvalid, OSError) as error:
        reading.fault = f"an Arrow batch cannot be read: {error}"
        return

    def batches(at: int) -> Iterator[pa.RecordBatch]:
        batch = file.get_batch(at)
        return (batch.slice(row, 64) for row in range(0, batch.num_rows, 64))

    reading.rows = _table_rows(reading, count, batches, full)


def _stream_rows(reading: Reading) -> Iterator[Row]:
    reading.row_count = 0
    try:
        with pa.memory_map(str(reading.path)) as source, pa.ipc.open_stream(source) as stream:
            for batch in stream:
                reading.row_count += batch.num_rows
                yield from arrow_rows(batch)
        reading.rows_exact = True
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        reading.fault = f"the Arrow stream breaks off: {error}"


def _table_rows(
    reading: Reading, groups: int, batches: Callable[[int], Iterator[pa.RecordBatch]], full: bool
) -> Iterator[Row]:
    """All rows; or, up to a budget of bytes, those of the first, of random, and the last group."""
    order = list(range(groups))
    budget = None if full else SAMPLE_BYTES // max(1, min(groups, 8))
    if not full and groups > 8:
        middle = random.Random(groups).sample(range(1, groups - 1), 6)
        order = [0, *sorted(middle), groups - 1]
    try:
        for group in order:
            spent = 0
            for batch in batches(group):
                yield from arrow_rows(batch)
                spent += batch.nbytes
                if budget is not None and spent >= budget:
                    break
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        reading.fault = f"a row group cannot be read: {error}"
