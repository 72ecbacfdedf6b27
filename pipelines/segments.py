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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.errors import StorageFailed, VerificationFailed
from pipelines.lease import check_lease
from pipelines.row_index import STATUSES, RowIndex, checksum, read_index, read_reports
from pipelines.row_report import RowReport, reports_in
from pipelines.schema import RESPONSE_SCHEMA
from pipelines.storage import (
    Location,
    RemotePath,
    atomic_file,
    for_each,
    listed,
    sha256_of,
    storage_faults,
    write_atomically,
)
from pipelines.store import RunFolder

ROWS_PER_PART = 4096

_REOPENED = "reopened"  # begins the name of the segment that `reopen_failed` writes

_ROWS_PER_GROUP = 512  # of a Parquet row group: what a reader holds at once
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
    location = folder / f"{name}-{checksum(content)}.arrow"
    write_atomically(location, content)
    return location


def durable_ids(run: RunFolder, set_name: str) -> set[str]:
    """The sample ids of every row that is in a segment or committed."""
    return set(read_index(_all_files(run, set_name), check=False).ids.to_pylist())


def report_table(run: RunFolder, set_name: str, *, check: bool = True) -> pa.Table:
    """One report, of `REPORT_SCHEMA`, for each durable row: the version that a commit would choose.

    With `check`, every segment is compared with its checksum, which reads all of it; without, only
    the columns of a report are read. A commit checks in any case.
    """
    return read_reports(_all_files(run, set_name), check=check)


def durable_reports(run: RunFolder, set_name: str, *, check: bool = True) -> list[RowReport]:
    """The rows of `report_table`."""
    return list(reports_in(report_table(run, set_name, check=check)))


def committed_ids(run: RunFolder, set_name: str) -> set[str]:
    """The sample ids of a finished commit; none while segments are left to commit."""
    return set() if is_open(run, set_name) else durable_ids(run, set_name)


def is_open(run: RunFolder, set_name: str) -> bool:
    """Whether segments are left to commit."""
    return bool(_segment_files(run, set_name))


def reopen_failed(run: RunFolder, set_name: str, *, hook: Hook = _no_hook) -> int:
    """Have the failed rows of a set asked again; return how many they are. Loses no row.

    Where a set is committed, one segment with some of its failed rows is written: a set with
    segments is one that is still to be answered, and of such a set failed rows are asked again.
    The committed files stay as they are until the next commit, which prefers an answer to a failure
    and takes over every other row. One atomic write: before it, nothing has changed.
    """
    segments = _segment_files(run, set_name)
    index = read_index([*segments, *committed_files(run, set_name)], check=False)
    failed = index.where(index.rank == STATUSES.index("failed"))
    if len(failed.ids) and not segments:
        hook("reopen")
        (table,) = failed.bodies([(0, min(_ROWS_PER_GROUP, len(failed.ids)))])
        write_segment(run.segments / set_name, f"{_REOPENED}-000000", table)
    return len(failed.ids)


def is_reopened(run: RunFolder, set_name: str) -> bool:
    """Whether failed rows of a set are to be asked again, refusals too, until the next commit."""
    return any(one.name.startswith(_REOPENED) for one in _segment_files(run, set_name))


def commit(
    run: RunFolder,
    set_name: str,
    expected_ids: pa.StringArray | Sequence[str],
    *,
    rows_per_part: int = ROWS_PER_PART,
    hook: Hook = _no_hook,
) -> None:
    """Compact the segments of a set into Parquet: each response once, ordered by sample id.

    The same rows give the same bytes, in whatever order and files they arrived. Where a row came
    twice, ok is preferred to rejected and rejected to failed, then the lower attempt, then the
    earlier time. Raises `VerificationFailed` unless the rows are exactly those of `expected_ids`,
    `StorageFailed` where they cannot be written. May be killed at any moment and called again.
    Memory: an index of all rows, bodies by the window. Room on this machine's disk: all rows again.
    """
    _remove_torn(run, set_name)
    segments, committed = _segment_files(run, set_name), committed_files(run, set_name)
    with _scratch(run) as scratch:
        index = read_index([*segments, *committed], check=True, scratch=scratch)
        _check_conservation(set_name, index.ids, pa.array(expected_ids, pa.string()))
        if committed and not segments:
            return
        hook("carry")
        carried = _carry(run, set_name, index.where(index.file >= len(segments)))
        if carried:
            segments += carried
            index = read_index(segments, check=True, scratch=scratch)
        _check_hold(run)
        index = index.in_runs(scratch)
        is_ok = index.rank == STATUSES.index("ok")
        for step, folder, rows, at_least in (
            # At least one part, so that a set of which nothing was ok can be read.
            ("ok", run.responses / set_name, index.where(is_ok), 1),
            ("rejected", run.rejected_responses / set_name, index.where(~is_ok), 0),
        ):
            hook(step)
            _write_parts(folder, rows, rows_per_part, hook, at_least=at_least)
        _check_hold(run)
    _remove_segments(run, set_name, segments, hook)


def committed_files(run: RunFolder, set_name: str) -> list[Location]:
    """The Parquet files of a set: ok rows, then rejected and failed ones."""
    folders = (run.responses / set_name, run.rejected_responses / set_name)
    return [path for folder in folders for path in listed(folder, "part-*.parquet")]


def _carry(run: RunFolder, set_name: str, carried: RowIndex) -> list[Location]:
    """Put back into segments what only the committed files hold, before those are rewritten.

    So it is after an earlier commit, when more prompts came, and after a commit that was killed
    while it removed segments. A row that lies in both places equally is taken from the segment.
    """
    return [
        write_segment(run.segments / set_name, f"carried-{number:06d}", table)
        for number, table in enumerate(carried.bodies(_cuts(0, len(carried.ids))))
    ]


def _cuts(start: int, stop: int) -> list[tuple[int, int]]:
    return [(at, min(at + _ROWS_PER_GROUP, stop)) for at in range(start, stop, _ROWS_PER_GROUP)]


def _write_parts(
    folder: Location,
    rows: RowIndex,
    rows_per_part: int,
    hook: Hook,
    *,
    at_least: int,
) -> None:
    """Write `part-00000.parquet`...; then remove parts beyond the last one."""
    total = len(rows.ids)
    starts = list(range(0, total, rows_per_part))
    cuts = [_cuts(start, min(start + rows_per_part, total)) for start in starts]
    cuts += [[]] * (at_least - len(cuts))
    tables = rows.bodies(list(chain.from_iterable(cuts)))
    written = set()
    for number, groups in enumerate(cuts):
        hook("part")
        part = folder / f"part-{number:05d}.parquet"
        _write_part(part, islice(tables, len(groups)))
        written.add(part)
    for path in listed(folder, "part-*.parquet"):
        if path not in written:
            path.unlink()


def _write_part(location: Location, tables: Iterable[pa.Table]) -> None:
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
def _scratch(run: RunFolder) -> Iterator[Path]:
    """A folder for rows while they are brought into order."""
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


def _check_conservation(set_name: str, seen: pa.StringArray, expected: pa.StringArray) -> None:
    """Prompts in = ok + rejected + failed, id by id."""
    missing = expected.filter(pc.invert(pc.is_in(expected, value_set=seen)))
    foreign = seen.filter(pc.invert(pc.is_in(seen, value_set=expected)))
    if len(missing) or len(foreign):
        raise VerificationFailed(
            f"set {set_name}: {len(missing)} prompts have no response "
            f"{sorted(missing.to_pylist())[:3]}, {len(foreign)} responses have no prompt "
            f"{foreign.to_pylist()[:3]}",
            expected="exactly one response row for each prompt",
            change="run generate again for missing rows; where prompts changed, use another "
            "run_folder",
        )


def _id_lists(lists: Sequence[Sequence[int]], kind: pa.DataType) -> pa.Array:
    """Lists of ids as an Arrow array, without an Arrow value for each id."""
    values = array("i")  # raises OverflowError beyond int32
    for ids in lists:
        values += array("i", ids)
    ends = pa.array(accumulate(map(len, lists), initial=0), pa.int32())
    flat = pa.Array.from_buffers(pa.int32(), len(values), [None, pa.py_buffer(values)])
    return pa.ListArray.from_arrays(ends, flat, type=kind)
