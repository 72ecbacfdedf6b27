"""Which rows some files hold, without the bodies; and the bodies in order, by the window.

Memory: some 60 bytes for each row, and two windows.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.errors import VerificationFailed
from pipelines.row_report import REPORT_COLUMNS, REPORT_SCHEMA, report_of
from pipelines.schema import RESPONSE_SCHEMA
from pipelines.storage import Location, RemotePath, contents, for_each, readable

STATUSES = ("ok", "rejected", "failed")  # the best first

_WINDOW_BYTES = 8 << 20  # of rows that are brought into order at a time
_ROWS_PER_BATCH = 512  # of a run
_ROWS_PER_OPEN = 10  # so many are copied for what it costs to open a file
_COLUMNS = ("sample_id", "status", "attempt", "finished_at", "server")
# The last four only make the choice independent of the files' order.
_PREFERENCE = ("sample_id", "rank", "attempt", "finished_at", "server", "status", "file", "at")

Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class RowIndex:
    """The best version of each row, in the order of sample ids: where its body lies."""

    files: Sequence[Location]
    row_bytes: npt.NDArray[np.float64]  # of each file: the mean size of a row in memory
    ids: pa.StringArray
    rank: Ints  # place of the status in STATUSES
    file: Ints
    at: Ints  # place in the file

    def where(self, mask: npt.NDArray[np.bool_]) -> "RowIndex":
        """The rows for which the mask holds."""
        rank, file, at = self.rank[mask], self.file[mask], self.at[mask]
        return replace(self, ids=self.ids.filter(pa.array(mask)), rank=rank, file=file, at=at)

    def bodies(self, groups: Sequence[tuple[int, int]]) -> Iterator[pa.Table]:
        """The whole rows of each `[start, stop)`; the groups are in order."""
        ends = np.cumsum(self.row_bytes[self.file])
        while groups:
            first = groups[0][0]
            room = ends[first] + _WINDOW_BYTES
            count = max(1, sum(bool(ends[stop - 1] <= room) for _, stop in groups))
            window, groups = groups[:count], groups[count:]
            table, places = self._rows(np.arange(first, window[-1][1]))
            for start, stop in window:
                yield table.take(places[start - first : stop - first])
            del table  # before the next one is read
            pa.default_memory_pool().release_unused()

    def in_runs(self, scratch: Path) -> "RowIndex":
        """The same rows, copied to a few files that are in order, if that costs less than to open
        every file once for each window."""
        order = np.lexsort((self.at, self.file))
        run = np.cumsum(self.row_bytes[self.file[order]]) // _WINDOW_BYTES
        if not len(order) or run[-1] * len(self.files) * _ROWS_PER_OPEN <= len(order):
            return self
        files: list[Location] = []
        sizes, file, at = [], np.empty_like(self.file), np.empty_like(self.at)
        for rows in np.split(order, np.flatnonzero(np.diff(run)) + 1):
            rows.sort()
            file[rows], at[rows] = len(files), np.arange(len(rows))
            sizes.append(self.row_bytes[self.file[rows]].mean())
            files.append(scratch / f"run-{len(files):06d}.arrow")
            table, places = self._rows(rows)
            with pa.ipc.new_file(str(files[-1]), RESPONSE_SCHEMA) as writer:
                for start in range(0, len(rows), _ROWS_PER_BATCH):
                    writer.write_table(table.take(places[start : start + _ROWS_PER_BATCH]))
            del table
            pa.default_memory_pool().release_unused()
        return replace(self, files=files, row_bytes=np.array(sizes), file=file, at=at)

    def _rows(self, rows: npt.NDArray[np.int64]) -> tuple[pa.Table, npt.NDArray[np.int64]]:
        """Whole rows by their places in the index, file after file, one open at once; and where
        each of them is in the table."""
        file, at = self.file[rows], self.at[rows]
        order = np.lexsort((at, file))
        parts = np.split(order, np.flatnonzero(np.diff(file[order])) + 1)
        pieces = [_whole(self.files[file[here[0]]]).take(at[here]) for here in parts]
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return pa.concat_tables(pieces).combine_chunks(), back


def read_index(files: Sequence[Location], *, check: bool, scratch: Path | None = None) -> RowIndex:
    """Index segments and committed parts, which may hold several versions of a row.

    The best is ok before rejected before failed, then of the lower attempt, then of the earlier
    time. With `check`, every segment is compared with the checksum in its name, which reads all of
    it. A store's segments are copied to `scratch`, if given, and their bodies read there.
    Raises `VerificationFailed` for a damaged file.
    """

    def read(location: Location) -> tuple[pa.Table, float]:
        table, size = _read(location, _COLUMNS, check=check, scratch=scratch)
        return _compact(table), size

    found = for_each(read, files)
    columns, best = _best(files, [table for table, _ in found])
    return RowIndex(
        [scratch / one.name if scratch and _is_remote_segment(one) else one for one in files],
        np.array([size for _, size in found], np.float64),
        columns["sample_id"].take(best),
        *(columns[name].to_numpy()[best] for name in ("rank", "file", "at")),
    )


def read_reports(files: Sequence[Location], *, check: bool) -> pa.Table:
    """One report, of `REPORT_SCHEMA`, for the best version of each row, in the order of sample ids.

    Without `check`, only the columns of a report are read.
    """
    columns = list(dict.fromkeys((*_COLUMNS, *REPORT_COLUMNS)))

    def read(location: Location) -> tuple[pa.Table, pa.Table]:
        table, _ = _read(location, columns, check=check, scratch=None)
        return _compact(table), _reports(table)

    found = for_each(read, files)
    _, best = _best(files, [table for table, _ in found])
    reports = [made for _, made in found]
    return pa.concat_tables([*reports, REPORT_SCHEMA.empty_table()]).take(best)


def _compact(table: pa.Table) -> pa.Table:
    """The columns of an index; those of few values as codes of a dictionary."""
    table = table.select(_COLUMNS)
    for name in ("status", "server"):
        at = table.schema.get_field_index(name)
        table = table.set_column(at, name, table[name].dictionary_encode())
    return table


def _best(
    files: Sequence[Location], tables: Sequence[pa.Table]
) -> tuple[dict[str, pa.Array], npt.NDArray[np.int64]]:
    """The columns of all tables together, and which of their rows are the best versions, in the
    order of sample ids."""
    counts = [one.num_rows for one in tables]
    table = pa.concat_tables([*tables, _compact(RESPONSE_SCHEMA.empty_table())])
    columns = {name: table[name].combine_chunks() for name in _COLUMNS}
    columns["file"] = pa.array(np.repeat(np.arange(len(counts), dtype=np.int32), counts))
    columns["at"] = pa.array(
        np.concatenate([np.arange(one, dtype=np.int32) for one in (*counts, 0)])
    )
    columns["rank"] = _ranks(columns["status"], columns["file"], files)
    for name in ("status", "server"):  # codes in the order of what they stand for
        places = pc.rank(columns[name].dictionary, tiebreaker="first")
        columns[name] = places.take(columns[name].indices)
    order = pc.sort_indices(
        pa.table({name: columns[name] for name in _PREFERENCE}),
        sort_keys=[(name, "ascending") for name in _PREFERENCE],
    ).to_numpy()
    ids = columns["sample_id"].take(order)
    is_first = np.ones(len(ids), bool)
    is_first[1:] = pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
    return columns, order[is_first]


def _ranks(statuses: pa.DictionaryArray, file: pa.Array, files: Sequence[Location]) -> pa.Array:
    kinds = [one.partition(":")[0] for one in statuses.dictionary.to_pylist()]
    ranks = pc.index_in(pa.array(kinds, pa.string()), value_set=pa.array(STATUSES))
    ranks = ranks.take(statuses.indices)
    if ranks.null_count:
        odd = files[file[pc.is_null(ranks).index(True).as_py()].as_py()]
        raise _damaged(odd, f"a status is none of {', '.join(STATUSES)}")
    return ranks


def _read(
    location: Location, columns: Sequence[str], *, check: bool, scratch: Path | None
) -> tuple[pa.Table, float]:
    """Columns of a segment or a committed part, and bytes of a row in memory.

    The columns hold no handle and no other part of the file. A damaged file is an error, never
    skipped.
    """
    try:
        if location.suffix == ".parquet":
            with pq.ParquetFile(readable(location)) as parquet:
                _check_schema(location, parquet.schema_arrow)
                table = parquet.read(columns=list(columns), use_threads=False)
                groups = range(parquet.num_row_groups)
                size = sum(parquet.metadata.row_group(at).total_byte_size for at in groups)
        else:
            table, size = _read_segment(location, columns, check=check, scratch=scratch)
    except FileNotFoundError:
        raise  # not damaged: somebody removed it between the listing and now
    except (pa.ArrowException, OSError) as error:
        raise _damaged(location, str(error)) from error
    return table, size / max(1, table.num_rows)


def _read_segment(
    location: Location, columns: Sequence[str], *, check: bool, scratch: Path | None
) -> tuple[pa.Table, int]:
    content = contents(location)
    if check and checksum(content) != location.stem.rpartition("-")[2]:
        raise _damaged(location, "its content does not have the checksum in its name")
    if scratch and _is_remote_segment(location):
        (scratch / location.name).write_bytes(content)
    with pa.ipc.open_file(content) as file:
        _check_schema(location, file.schema)
        table = file.read_all().select(columns)
    return table.take(np.arange(table.num_rows)), content.size  # a copy: the rest can go


def _reports(table: pa.Table) -> pa.Table:
    ids = table["output_ids"].combine_chunks()
    ends, values = ids.offsets.to_numpy(), ids.values.to_numpy()
    rows = zip(table.drop_columns(["output_ids"]).to_pylist(), ends[:-1], ends[1:], strict=True)
    made: list[dict[str, Any]] = [
        vars(report_of({**row, "output_ids": array("i", values[start:end].tobytes())}))
        for row, start, end in rows
    ]
    return pa.Table.from_pylist(made, schema=REPORT_SCHEMA)


def _whole(location: Location) -> pa.Table:
    """All of a file that the index has read, and checked, a moment ago."""
    if location.suffix == ".parquet":
        return pq.read_table(readable(location), partitioning=None, use_threads=False)
    return pa.ipc.open_file(contents(location)).read_all()


def _is_remote_segment(location: Location) -> bool:
    return isinstance(location, RemotePath) and location.suffix == ".arrow"


def _check_schema(location: Location, seen: pa.Schema) -> None:
    if not seen.equals(RESPONSE_SCHEMA, check_metadata=True):
        raise _damaged(location, "its schema is another one")


def _damaged(location: Location, why: str) -> VerificationFailed:
    return VerificationFailed(
        f"{location} is damaged: {why}",
        expected="the file as it was written; segments and parts never change",
        change="restore it from a copy, or remove it: its rows are generated again",
    )


def checksum(content: bytes | pa.Buffer) -> str:
    """What the name of a segment says of its content."""
    return sha256(content).hexdigest()[:16]
