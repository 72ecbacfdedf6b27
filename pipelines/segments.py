"""Rows made durable as they arrive (immutable Arrow segments), and their deterministic commit.

A segment's name holds the checksum of its content. Segments hold every row until the Parquet
files that replace them are durable, so a kill at any step leaves nothing to guess.
"""

import hashlib
import io
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import VerificationFailed
from pipelines.row_report import REPORT_COLUMNS, RowReport, report_of
from pipelines.schema import RESPONSE_SCHEMA
from pipelines.store import RunFolder, write_atomically, write_parquet

ROWS_PER_PART = 4096

_RANKS = {"ok": 0, "rejected": 1, "failed": 2}
_INDEX_COLUMNS = ("sample_id", "status", "attempt", "finished_at", "server")

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
        """Make every row that was added before this call durable."""
        with self._writing:
            with self._adding:
                rows, self._rows = self._rows, []
            if not rows:
                return
            try:
                write_segment(self._folder, f"{self._name}-{self._written:06d}", _table_of(rows))
            except BaseException:
                with self._adding:  # not durable: the next flush tries again
                    self._rows = rows + self._rows
                raise
            self._written += 1


def write_segment(folder: Path, name: str, table: pa.Table) -> Path:
    """Write one immutable segment whole or not at all; return its path."""
    buffer = io.BytesIO()
    with pa.ipc.new_file(buffer, table.schema) as writer:
        writer.write_table(table)
    content = buffer.getvalue()
    path = folder / f"{name}-{_checksum(content)}.arrow"
    write_atomically(path, content)
    return path


def durable_ids(run: RunFolder, set_name: str) -> set[str]:
    """The sample ids of every row that is in a segment or committed."""
    return {report.sample_id for report in durable_reports(run, set_name)}


def durable_reports(run: RunFolder, set_name: str) -> list[RowReport]:
    """One report for each durable row: the version that a commit would choose."""
    best: dict[str, tuple[tuple[Any, ...], RowReport]] = {}
    columns = list(dict.fromkeys((*_INDEX_COLUMNS, *REPORT_COLUMNS)))
    for path in (*_segment_files(run, set_name), *committed_files(run, set_name)):
        for row in _read(path).select(columns).to_pylist():
            key = _preference(row)
            if row["sample_id"] not in best or key < best[row["sample_id"]][0]:
                best[row["sample_id"]] = (key, report_of(row))
    return [best[sample_id][1] for sample_id in sorted(best)]


def committed_ids(run: RunFolder, set_name: str) -> set[str]:
    """The sample ids of a finished commit; none while segments are left to commit."""
    if _segment_files(run, set_name):
        return set()
    return {
        sample_id
        for path in committed_files(run, set_name)
        for sample_id in _read(path)["sample_id"].to_pylist()
    }


def commit(
    run: RunFolder,
    set_name: str,
    expected_prompts: Collection[str],
    *,
    rows_per_part: int = ROWS_PER_PART,
    hook: Hook = _no_hook,
) -> None:
    """Compact the segments of a set into Parquet: each prompt once, ordered by sample id.

    The same rows give the same bytes, in whatever order and files they arrived. Where a row came
    twice, ok is preferred to rejected and rejected to failed, then the lower attempt, then the
    earlier time. Raises `VerificationFailed` unless the rows are exactly those of
    `expected_prompts`. May be killed at any moment and called again.
    """
    _remove_torn(run, set_name)
    segments = _segment_files(run, set_name)
    if segments:
        hook("carry")
        segments += _carry_committed(run, set_name, segments)
    chosen = _choose(segments or committed_files(run, set_name))
    _check_conservation(set_name, {one.sample_id for one in chosen}, expected_prompts)
    if not segments and committed_files(run, set_name):
        return
    ok = [one for one in chosen if one.preference[0] == _RANKS["ok"]]
    others = [one for one in chosen if one.preference[0] != _RANKS["ok"]]
    hook("ok")
    _write_parts(run.responses / set_name, ok, rows_per_part, hook)
    hook("rejected")
    _write_parts(run.rejected_responses / set_name, others, rows_per_part, hook)
    for path in segments:
        hook("remove")
        path.unlink()
    for folder in (run.segments / set_name, run.segments):
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()


def committed_files(run: RunFolder, set_name: str) -> list[Path]:
    """The Parquet files of a set: ok rows, then rejected and failed ones."""
    folders = (run.responses / set_name, run.rejected_responses / set_name)
    return [path for folder in folders for path in sorted(folder.glob("part-*.parquet"))]


@dataclass(frozen=True)
class _Place:
    """Where the chosen version of a row lies."""

    sample_id: str
    preference: tuple[Any, ...]
    path: Path
    index: int


def _segment_files(run: RunFolder, set_name: str) -> list[Path]:
    return sorted((run.segments / set_name).glob("*.arrow"))


def _remove_torn(run: RunFolder, set_name: str) -> None:
    """Temp files of writers that were killed. Only while nobody writes."""
    for folder in (
        run.segments / set_name,
        run.responses / set_name,
        run.rejected_responses / set_name,
    ):
        for path in folder.glob(".*.tmp"):
            path.unlink()


def _carry_committed(run: RunFolder, set_name: str, segments: list[Path]) -> list[Path]:
    """Put back into a segment what only the committed files hold, before those are rewritten.

    So it is after an earlier commit, when more prompts came, and after a commit that was killed
    while it removed segments.
    """
    committed = committed_files(run, set_name)
    # Segments come first, so that a row that lies in both places equally is not carried.
    carried = [one for one in _choose([*segments, *committed]) if one.path in committed]
    return [
        write_segment(run.segments / set_name, f"carried-{number:06d}", table)
        for number, table in enumerate(_gather(carried, ROWS_PER_PART))
    ]


def _choose(paths: Iterable[Path]) -> list[_Place]:
    """One place for each sample id, in the order of the ids."""
    best: dict[str, _Place] = {}
    for path in paths:
        for index, row in enumerate(_read(path).select(_INDEX_COLUMNS).to_pylist()):
            place = _Place(row["sample_id"], _preference(row), path, index)
            held = best.get(place.sample_id)
            if held is None or place.preference < held.preference:
                best[place.sample_id] = place
    return [best[sample_id] for sample_id in sorted(best)]


def _preference(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Lower is better. The last three only make the choice independent of the files' order."""
    rank = _RANKS[row["status"].partition(":")[0]]
    return rank, row["attempt"], row["finished_at"], row["server"], row["status"]


def _gather(places: list[_Place], rows: int) -> Iterator[pa.Table]:
    """Tables of at most `rows` of the places, in their order; one file is open at a time."""
    for first in range(0, len(places), rows):
        part = places[first : first + rows]
        by_path: dict[Path, list[int]] = {}
        for position, place in enumerate(part):
            by_path.setdefault(place.path, []).append(position)
        pieces, positions = [], []
        for path, here in by_path.items():
            # Mapped, and not summed again: choosing has just read all of it.
            table = (
                pq.read_table(path, partitioning=None)
                if path.suffix == ".parquet"
                else (pa.ipc.open_file(pa.memory_map(str(path))).read_all())
            )
            pieces.append(table.take([part[position].index for position in here]))
            positions += here
        back = sorted(range(len(positions)), key=positions.__getitem__)
        yield pa.concat_tables(pieces).combine_chunks().take(back).combine_chunks()


def _write_parts(folder: Path, places: list[_Place], rows_per_part: int, hook: Hook) -> None:
    """Write `part-00000.parquet`...; then remove parts beyond the last one.

    The ok folder always has its first part, so that a set of which nothing was ok can be read.
    """
    parts = set()
    for number, table in enumerate(_gather(places, rows_per_part)):
        hook("part")
        parts.add(folder / f"part-{number:05d}.parquet")
        write_parquet(folder / f"part-{number:05d}.parquet", table)
    if not places and folder.parent.name != "_rejected":
        parts.add(folder / "part-00000.parquet")
        write_parquet(folder / "part-00000.parquet", RESPONSE_SCHEMA.empty_table())
    for path in set(folder.glob("part-*.parquet")) - parts:
        path.unlink()


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


def _read(path: Path) -> pa.Table:
    """A segment or a committed part. A damaged file is an error, never skipped."""
    try:
        if path.suffix == ".parquet":
            table = pq.read_table(path, partitioning=None)
        else:
            content = path.read_bytes()
            if _checksum(content) != path.stem.rpartition("-")[2]:
                raise _damaged(path, "its content does not have the checksum in its name")
            table = pa.ipc.open_file(content).read_all()
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, str(error)) from error
    if not table.schema.equals(RESPONSE_SCHEMA, check_metadata=True):
        raise _damaged(path, "its schema is another one")
    return table


def _damaged(path: Path, why: str) -> VerificationFailed:
    return VerificationFailed(
        f"{path} is damaged: {why}",
        expected="the file as it was written; segments and parts never change",
        change="restore it from a copy, or remove it: its rows are generated again",
    )


def _table_of(rows: list[dict[str, Any]]) -> pa.Table:
    table = pa.Table.from_pylist(rows, schema=RESPONSE_SCHEMA)
    for name in table.column_names:
        assert table[name].null_count == 0, f"{name} may not be null"
    return table


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
