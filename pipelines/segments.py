"""Rows made durable as they arrive (immutable Arrow segments), and their deterministic commit.

A segment's name holds the checksum of its content. Segments hold every row until the Parquet
files that replace them are durable, so a kill at any step leaves nothing to guess.
"""

import hashlib
import secrets
import shutil
import tempfile
import threading
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.errors import StorageFailed, VerificationFailed
from pipelines.lease import check_lease
from pipelines.row_report import REPORT_COLUMNS, RowReport, report_of
from pipelines.schema import RESPONSE_SCHEMA
from pipelines.storage import (
    Location,
    RemotePath,
    atomic_file,
    contents,
    for_each,
    listed,
    readable,
    sha256_of,
    storage_faults,
    write_atomically,
)
from pipelines.store import RunFolder

ROWS_PER_PART = 4096

_REOPENED = "reopened"  # begins the name of the segment that `reopen_failed` writes

_ROWS_PER_GROUP = 512  # of a Parquet row group: what a reader, and a commit, holds at once
_WINDOW_BYTES = 256 << 20  # of rows that a commit brings into order at a time
_STATUSES = ("ok", "rejected", "failed")  # the best first
_INDEX_COLUMNS = ("sample_id", "status", "attempt", "finished_at", "server")
# The last two only make the choice independent of the files' order.
_PREFERENCE = ("sample_id", "rank", "attempt", "finished_at", "server", "status", "file", "at")
_IDS = ("prompt_ids", "output_ids")
# A dictionary pays where values repeat; on ids and texts it is tried in vain.
_DICTIONARIES = ["dataset", "domain", "tools", "finish_reason", "finish_matched", "status"]
_DICTIONARIES += ["flags", "server", "weight_version", "tool_calls", "segments.list.element.kind"]

Hook = Callable[[str], None]


def _no_hook(step: str) -> None:
    """Called before each step of a commit; a test may end the process there."""
    del step


class SegmentWriter:
    """One worker's rows of one set. Any thread may add; rows are durable when `flush` returns."""

    def __init__(self, run: RunFolder, set_name: str, *, flush_rows: int = 64) -> None:
        self._folder = run.segments / set_name
        self._flush_rows = flush_rows
        self._name = secrets.token_hex(6)  # no two writers ever share a file
        self._written = 0
        self._rows: list[dict[str, Any]] = []
        self._adding, self._writing = threading.Lock(), threading.Lock()

    def add(self, row: Mapping[str, Any]) -> None:
        """Take one row; write a segment when enough have come together."""
        with self._adding:
            self._rows.append(dict(row))
            full = len(self._rows) >= self._flush_rows
        if full:
            self.flush()

    def flush(self) -> None:
        """Make every row that was added before this call durable.

        Raises `StorageFailed` or `OSError`; the rows stay, and the next flush tries again.
        """
        with self._writing:
            with self._adding:
                rows, self._rows = self._rows, []
            if not rows:
                return
            try:
                write_segment(self._folder, f"{self._name}-{self._written:06d}", table_of(rows))
            except BaseException:
                with self._adding:
                    self._rows = rows + self._rows
                raise
            self._written += 1


def table_of(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Response rows as a table of `RESPONSE_SCHEMA`. A null is refused, in the usage also."""
    columns = []
    for field in RESPONSE_SCHEMA:
        values = [row[field.name] for row in rows]
        made = _id_lists(values, field.type) if field.name in _IDS else pa.array(values, field.type)
        assert made.null_count == 0, f"{field.name} may not be null"
        if pa.types.is_struct(field.type):
            assert not any(one.null_count for one in made.flatten()), f"{field.name} has a hole"
        columns.append(made)
    return pa.table(columns, schema=RESPONSE_SCHEMA)


def write_segment(folder: Location, name: str, table: pa.Table) -> Location:
    """Write one immutable segment whole or not at all; return where it is."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    location = folder / f"{name}-{_checksum(content)}.arrow"
    write_atomically(location, content)
    return location


def durable_ids(run: RunFolder, set_name: str) -> set[str]:
    """The sample ids of every row that is in a segment or committed."""
    return set(_index(_all_files(run, set_name), check=False).table["sample_id"].to_pylist())


def durable_reports(run: RunFolder, set_name: str, *, check: bool = True) -> list[RowReport]:
    """One report for each durable row: the version that a commit would choose.

    With `check`, every segment is compared with its checksum, which reads all of it; without, only
    the columns of a report are read. A commit checks in any case.
    """
    files = _all_files(run, set_name)
    index = _index(files, check=check, reports=True)
    chosen = _best(index.table)["row"].to_pylist()
    return [index.reports[at] for at in chosen]


def committed_ids(run: RunFolder, set_name: str) -> set[str]:
    """The sample ids of a finished commit; none while segments are left to commit."""
    if _segment_files(run, set_name):
        return set()
    return set(_index(committed_files(run, set_name), check=False).table["sample_id"].to_pylist())


def reopen_failed(run: RunFolder, set_name: str, *, hook: Hook = _no_hook) -> int:
    """Have the failed rows of a set asked again; return how many they are. Loses no row.

    Where a set is committed, one segment with some of its failed rows is written: a set with
    segments is one that is still to be answered, and of such a set failed rows are asked again.
    The committed files stay as they are until the next commit, which prefers an answer to a failure
    and takes over every other row. One atomic write: before it, nothing has changed.
    """
    segments = _segment_files(run, set_name)
    files = [*segments, *committed_files(run, set_name)]
    best = _best(_index(files, check=False).table)
    failed = best.filter(pc.equal(best["rank"], _STATUSES.index("failed")))
    if failed.num_rows and not segments:
        hook("reopen")
        some = failed.slice(0, _ROWS_PER_GROUP)
        (table,) = _gather(files, some, [(0, some.num_rows)])
        write_segment(run.segments / set_name, f"{_REOPENED}-000000", table)
    return int(failed.num_rows)


def is_reopened(run: RunFolder, set_name: str) -> bool:
    """Whether failed rows of a set are to be asked again, refusals too, until the next commit."""
    return any(one.name.startswith(_REOPENED) for one in _segment_files(run, set_name))


def commit(
    run: RunFolder,
    set_name: str,
    expected_ids: Collection[str],
    *,
    rows_per_part: int = ROWS_PER_PART,
    hook: Hook = _no_hook,
) -> None:
    """Compact the segments of a set into Parquet: each response once, ordered by sample id.

    The same rows give the same bytes, in whatever order and files they arrived. Where a row came
    twice, ok is preferred to rejected and rejected to failed, then the lower attempt, then the
    earlier time. Raises `VerificationFailed` unless the rows are exactly those of `expected_ids`,
    `StorageFailed` where they cannot be written. May be killed at any moment and called again.
    Memory: an index of all rows, bodies by the window.
    """
    _remove_torn(run, set_name)
    segments, committed = _segment_files(run, set_name), committed_files(run, set_name)
    with _scratch(run) as scratch:
        index = _index([*segments, *committed], check=True, scratch=scratch)
        best = _best(index.table)
        _check_conservation(set_name, set(best["sample_id"].to_pylist()), expected_ids)
        if committed and not segments:
            return
        hook("carry")
        carried = _carry(run, set_name, index, best, len(segments))
        if carried:
            segments += carried
            index = _index(segments, check=True, scratch=scratch)
            best = _best(index.table)
        _check_hold(run)
        is_ok = pc.equal(best["rank"], _STATUSES.index("ok"))
        for step, folder, chosen, at_least in (
            # At least one part, so that a set of which nothing was ok can be read.
            ("ok", run.responses / set_name, best.filter(is_ok), 1),
            ("rejected", run.rejected_responses / set_name, best.filter(pc.invert(is_ok)), 0),
        ):
            hook(step)
            _write_parts(folder, chosen, index.files, rows_per_part, hook, at_least=at_least)
        _check_hold(run)
    _remove_segments(run, set_name, segments, hook)


def committed_files(run: RunFolder, set_name: str) -> list[Location]:
    """The Parquet files of a set: ok rows, then rejected and failed ones."""
    folders = (run.responses / set_name, run.rejected_responses / set_name)
    return [path for folder in folders for path in listed(folder, "part-*.parquet")]


@dataclass(frozen=True)
class _Index:
    """What is known of every row of some files without its body."""

    table: pa.Table  # _INDEX_COLUMNS, rank, file, at (its place in there), row (in all), bytes
    files: list[Location]  # where bodies are read: a store's segments lie in the scratch folder
    reports: list[RowReport]  # by row, where they were asked for


def _index(
    files: Sequence[Location], *, check: bool, reports: bool = False, scratch: Path | None = None
) -> _Index:
    """Read the index of files; with `scratch`, keep copies of a store's segments there."""
    columns = list(dict.fromkeys((*_INDEX_COLUMNS, *(REPORT_COLUMNS if reports else ()))))

    def read(location: Location) -> tuple[pa.Table, float, list[RowReport]]:
        table, size = _read(location, columns, check=check, scratch=scratch)
        made = _reports(table) if reports else []
        return table.select(_INDEX_COLUMNS), size, made

    found = for_each(read, files)
    tables = [one for one, _, _ in found]
    table = pa.concat_tables(tables) if tables else RESPONSE_SCHEMA.empty_table()
    rows = [one.num_rows for one in tables]
    kind = pc.list_element(pc.split_pattern(table["status"], ":", max_splits=1), 0)
    added = {
        "rank": pc.index_in(kind, value_set=pa.array(_STATUSES)),
        "file": np.repeat(np.arange(len(files), dtype=np.int32), rows),
        "at": np.concatenate([np.arange(0, dtype=np.int32), *map(np.arange, rows)]),
        "row": np.arange(table.num_rows),
        "bytes": np.repeat([size for _, size, _ in found], rows).astype(np.float64),
    }
    if added["rank"].null_count:
        odd = files[int(added["file"][pc.is_null(added["rank"]).index(True).as_py()])]
        raise _damaged(odd, f"a status is none of {', '.join(_STATUSES)}")
    table = table.select(_INDEX_COLUMNS)
    for name, column in added.items():
        table = table.append_column(name, column if name == "rank" else pa.array(column))
    bodies: list[Location] = [
        scratch / one.name if scratch and _is_remote_segment(one) else one for one in files
    ]
    return _Index(table, bodies, list(chain.from_iterable(made for _, _, made in found)))


def _best(table: pa.Table) -> pa.Table:
    """One row of an index for each sample id, in the order of the ids."""
    if not table.num_rows:
        return table
    ordered = table.sort_by([(name, "ascending") for name in _PREFERENCE])
    ids = ordered["sample_id"].combine_chunks()
    first = np.ones(len(ids), bool)
    first[1:] = pc.not_equal(ids[1:], ids[:-1]).to_numpy(zero_copy_only=False)
    return ordered.filter(pa.array(first))


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
    if check and _checksum(content) != location.stem.rpartition("-")[2]:
        raise _damaged(location, "its content does not have the checksum in its name")
    if scratch and _is_remote_segment(location):
        (scratch / location.name).write_bytes(content)
    with pa.ipc.open_file(content) as file:
        _check_schema(location, file.schema)
        table = file.read_all().select(columns)
    return table.take(np.arange(table.num_rows)), content.size  # a copy: the rest can go


def _reports(table: pa.Table) -> list[RowReport]:
    ids = table["output_ids"].combine_chunks()
    ends, values = ids.offsets.to_numpy(), ids.values.to_numpy()
    return [
        report_of({**row, "output_ids": array("i", values[start:end].tobytes())})
        for row, start, end in zip(
            table.drop_columns(["output_ids"]).to_pylist(), ends[:-1], ends[1:], strict=True
        )
    ]


def _carry(
    run: RunFolder, set_name: str, index: _Index, best: pa.Table, segments: int
) -> list[Location]:
    """Put back into segments what only the committed files hold, before those are rewritten.

    So it is after an earlier commit, when more prompts came, and after a commit that was killed
    while it removed segments. A row that lies in both places equally is taken from the segment.
    """
    carried = best.filter(pc.greater_equal(best["file"], segments))
    cuts = _cuts(0, carried.num_rows)
    return [
        write_segment(run.segments / set_name, f"carried-{number:06d}", table)
        for number, table in enumerate(_gather(index.files, carried, cuts))
    ]


def _cuts(start: int, stop: int) -> list[tuple[int, int]]:
    return [(at, min(at + _ROWS_PER_GROUP, stop)) for at in range(start, stop, _ROWS_PER_GROUP)]


def _gather(
    files: Sequence[Location], chosen: pa.Table, cuts: Sequence[tuple[int, int]]
) -> Iterator[pa.Table]:
    """The whole rows of an index, in its order: one table for each of the cuts, which are in order.

    Bodies are read a window at a time, file after file, one open at once.
    """
    sizes = np.concatenate([[0.0], np.cumsum(chosen["bytes"].to_numpy())])
    while cuts:
        first = cuts[0][0]
        count = sum(bool(sizes[stop] - sizes[first] <= _WINDOW_BYTES) for _, stop in cuts)
        window, cuts = cuts[: max(1, count)], cuts[max(1, count) :]
        rows = chosen.slice(first, window[-1][1] - first)
        file, at = rows["file"].to_numpy(), rows["at"].to_numpy()
        order = np.lexsort((at, file))
        borders = np.flatnonzero(np.diff(file[order])) + 1
        pieces = [_whole(files[file[here[0]]]).take(at[here]) for here in np.split(order, borders)]
        table = pa.concat_tables(pieces).combine_chunks()
        del pieces  # the window would be held twice
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        for start, stop in window:
            yield table.take(back[start - first : stop - first])


def _whole(location: Location) -> pa.Table:
    """All of a file that the index has read, and checked, a moment ago."""
    if location.suffix == ".parquet":
        return pq.read_table(readable(location), partitioning=None, use_threads=False)
    return pa.ipc.open_file(contents(location)).read_all()


def _write_parts(
    folder: Location,
    chosen: pa.Table,
    files: Sequence[Location],
    rows_per_part: int,
    hook: Hook,
    *,
    at_least: int,
) -> None:
    """Write `part-00000.parquet`...; then remove parts beyond the last one."""
    total = chosen.num_rows
    starts = list(range(0, total, rows_per_part))
    cuts = [_cuts(start, min(start + rows_per_part, total)) for start in starts]
    cuts += [[]] * (at_least - len(cuts))
    tables = _gather(files, chosen, list(chain.from_iterable(cuts)))
    written = set()
    for number, groups in enumerate(cuts):
        hook("part")
        part = folder / f"part-{number:05d}.parquet"
        _write_part(part, [next(tables) for _ in groups])
        written.add(part)
    for path in listed(folder, "part-*.parquet"):
        if path not in written:
            path.unlink()


def _write_part(location: Location, tables: Sequence[pa.Table]) -> None:
    digest = None
    with atomic_file(location) as handle:
        with pq.ParquetWriter(
            handle,
            RESPONSE_SCHEMA,
            compression="zstd",
            use_dictionary=_DICTIONARIES,
            write_statistics=["sample_id", "status"],
        ) as writer:
            for table in tables:
                writer.write_table(table)
        if isinstance(location, RemotePath):
            handle.seek(0)
            digest = hashlib.sha256(handle.read()).hexdigest()
    # On a disk the file was synced. A store said that it has the part: the segments go only if so.
    if digest is not None and sha256_of(location) != digest:
        raise StorageFailed(
            f"{location} came back from the store with other bytes than were put there",
            expected="a store that keeps what it is given",
            change="look at the store; the segments are kept, and the same command goes on",
        )


def _check_hold(run: RunFolder) -> None:
    """A commit replaces files, so nobody else may write to the store."""
    if run.store is not None:
        check_lease(run.lease, run.lease_mark)


def _segment_files(run: RunFolder, set_name: str) -> list[Location]:
    return listed(run.segments / set_name, "*.arrow")


def _all_files(run: RunFolder, set_name: str) -> list[Location]:
    # Segments first: a commit writes parts before it removes segments, so what leaves the first
    # listing is in the second.
    return [*_segment_files(run, set_name), *committed_files(run, set_name)]


def _is_remote_segment(location: Location) -> bool:
    return isinstance(location, RemotePath) and location.suffix == ".arrow"


def _remove_torn(run: RunFolder, set_name: str) -> None:
    """Temp files of writers and commits that were killed. Only while nobody writes."""
    for folder in (
        run.segments / set_name,
        run.responses / set_name,
        run.rejected_responses / set_name,
    ):
        for path in folder.glob(".*.tmp"):
            path.unlink()
    for left in run.root.glob(".commit-*"):
        shutil.rmtree(left)


@contextmanager
def _scratch(run: RunFolder) -> Iterator[Path | None]:
    """A folder for a store's segments while they are brought into order; none for a disk's."""
    if not isinstance(run.segments, RemotePath):
        yield None
        return
    with storage_faults(run.root):
        folder = Path(tempfile.mkdtemp(prefix=".commit-", dir=run.root))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def _remove_segments(
    run: RunFolder, set_name: str, segments: Sequence[Location], hook: Hook
) -> None:
    def remove(location: Location) -> None:
        hook("remove")
        location.unlink(missing_ok=True)

    for_each(remove, segments)
    for folder in (run.segments / set_name, run.segments):
        if isinstance(folder, Path) and folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


def _check_conservation(set_name: str, seen: set[str], expected: Collection[str]) -> None:
    """Prompts in = ok + rejected + failed, id by id."""
    missing = sorted(set(expected) - seen)
    foreign = sorted(seen - set(expected))
    if missing or foreign:
        raise VerificationFailed(
            f"set {set_name}: {len(missing)} prompts have no response {missing[:3]}, "
            f"{len(foreign)} responses have no prompt {foreign[:3]}",
            expected="exactly one response row for each prompt",
            change="run generate again for missing rows; where prompts changed, use another "
            "run_folder",
        )


def _check_schema(location: Location, seen: pa.Schema) -> None:
    if not seen.equals(RESPONSE_SCHEMA, check_metadata=True):
        raise _damaged(location, "its schema is another one")


def _damaged(location: Location, why: str) -> VerificationFailed:
    return VerificationFailed(
        f"{location} is damaged: {why}",
        expected="the file as it was written; segments and parts never change",
        change="restore it from a copy, or remove it: its rows are generated again",
    )


def _id_lists(lists: Sequence[Sequence[int]], kind: pa.DataType) -> pa.Array:
    """Lists of ids as an Arrow array, without an Arrow value for each id."""
    values = array("i")  # raises OverflowError beyond int32
    for ids in lists:
        values += array("i", ids)
    ends = pa.array(accumulate(map(len, lists), initial=0), pa.int32())
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    return pa.ListArray.from_arrays(ends, flat, type=kind)


def _checksum(content: bytes | pa.Buffer) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
