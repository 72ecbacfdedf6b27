"""How many rows of a set are durable, what came of them, and how fast they come: from the files.

Bodies are not read. A segment never changes, so that a second look reads only what is new.
"""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.row_index import STATUSES
from pipelines.schema import RESPONSE_SCHEMA
from pipelines.storage import Location, contents, for_each, listed, readable
from pipelines.store import RunFolder

NOW_SECONDS = 60.0  # what "now" means in a rate

_COLUMNS = ("sample_id", "status", "usage")
_FILES_KEPT = 65_536  # of a watch that goes on: some 60 bytes for each of their rows
_MOVED = ("carried-", "reopened-")  # rows that a commit put there: nobody answered them just now


@dataclass(frozen=True)
class Speed:
    """Rows and output tokens that became durable within some seconds."""

    rows: int
    tokens: int
    seconds: float

    @property
    def rows_per_second(self) -> float:
        """Zero where none came."""
        return self.rows / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """Of their outputs, also of rejected rows."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class SetRows:
    """The durable rows of one set: each response once, in its best version."""

    statuses: Counter[str]
    arrivals: tuple["_Arrival", ...]  # by segment; none once a set is committed
    newest: float | None  # when the last row became durable, seconds since the epoch
    damaged: tuple[str, ...]  # files that cannot be read

    def speed(self, since: float, until: float) -> Speed | None:
        """What came between two moments; None where they are no second apart."""
        if until - since < 1:
            return None
        fresh = [one for one in self.arrivals if since <= one.at <= until]
        rows, tokens = sum(one.rows for one in fresh), sum(one.tokens for one in fresh)
        return Speed(rows, tokens, until - since)


def added(speeds: Sequence[Speed | None]) -> Speed | None:
    """The speed of several sets in the same seconds together."""
    known = [one for one in speeds if one is not None]
    if not known:
        return None
    rows, tokens = sum(one.rows for one in known), sum(one.tokens for one in known)
    return Speed(rows, tokens, known[0].seconds)


def read_set(run: RunFolder, name: str) -> SetRows:
    """Look at the files of a set as they are now."""
    segments = listed(run.segments / name, "*.arrow")
    parts = listed(run.responses / name, "part-*.parquet")
    parts += listed(run.rejected_responses / name, "part-*.parquet")
    found = for_each(_segment, segments)
    # While segments are there a row may lie in several files, and ids are needed to tell.
    found += for_each(functools.partial(_part, with_ids=bool(segments)), parts)
    whole = [one for one in found if isinstance(one, _File)]
    arrivals = [one.arrival for one in whole if one.arrival is not None]
    times = [one.at for one in arrivals] or [one.newest for one in whole if one.newest is not None]
    return SetRows(
        statuses=_best(whole) if segments else _all(whole),
        arrivals=tuple(arrivals),
        newest=max(times, default=None),
        damaged=tuple(one for one in found if isinstance(one, str)),
    )


def prompts_wanted(path: Path) -> int:
    """How many answers the prompts of a file want, one sample each."""
    later = pq.read_table(path, columns=["continuations"], partitioning=None)["continuations"]
    return later.length() + int(pc.sum(pc.list_value_length(later)).as_py() or 0)


@dataclass(frozen=True)
class _Arrival:
    at: float
    rows: int
    tokens: int


@dataclass(frozen=True, eq=False)
class _File:
    ids: pa.ChunkedArray | None
    statuses: pa.ChunkedArray  # dictionary-encoded
    arrival: _Arrival | None
    newest: float | None  # by the clock of the worker that made the rows


def _best(files: Sequence[_File]) -> Counter[str]:
    """The statuses of the best version of each row: ok before rejected before failed."""
    ids = pa.chunked_array([chunk for one in files for chunk in _ids(one).chunks], pa.string())
    statuses = _together(files)
    codes = ids.combine_chunks().dictionary_encode().indices.to_numpy()
    names = statuses.dictionary.to_pylist()
    ranks = np.array([_rank(one) for one in names], np.int8)[statuses.indices.to_numpy()]
    order = np.lexsort((ranks, codes))
    is_first = np.ones(len(order), bool)
    is_first[1:] = codes[order][1:] != codes[order][:-1]
    return _counted(statuses.take(order[is_first]))


def _ids(file: _File) -> pa.ChunkedArray:
    assert file.ids is not None, "ids are read wherever segments are"
    return file.ids


def _all(files: Sequence[_File]) -> Counter[str]:
    return _counted(_together(files)) if files else Counter()


def _together(files: Sequence[_File]) -> pa.DictionaryArray:
    chunks = [chunk for one in files for chunk in one.statuses.chunks]
    kind = pa.dictionary(pa.int32(), pa.string())
    return pa.chunked_array(chunks, kind).unify_dictionaries().combine_chunks()


def _counted(statuses: pa.DictionaryArray) -> Counter[str]:
    names = statuses.dictionary.to_pylist()
    counts = np.bincount(statuses.indices.to_numpy(), minlength=len(names)).tolist()
    return Counter({name: count for name, count in zip(names, counts, strict=True) if count})


def _rank(status: str) -> int:
    kind = status.partition(":")[0]
    return STATUSES.index(kind) if kind in STATUSES else len(STATUSES)


def _segment(location: Location) -> _File | str | None:
    """None where a commit replaced it a moment ago; its name where it cannot be read."""
    try:
        return _read_segment(location)
    except FileNotFoundError:
        return None
    except pa.ArrowInvalid:
        return str(location)


@functools.lru_cache(maxsize=_FILES_KEPT)
def _read_segment(location: Location) -> _File:
    at = location.stat().st_mtime
    # From a store only these columns are fetched, from a disk only their pages.
    fields = [RESPONSE_SCHEMA.get_field_index(name) for name in _COLUMNS]
    options = pa.ipc.IpcReadOptions(included_fields=fields)
    source = contents(location) if isinstance(location, Path) else location.open()
    with pa.ipc.open_file(source, options=options) as file:
        table = file.read_all()
    table = table.take(np.arange(table.num_rows))  # a copy: the file can go
    tokens = pc.sum(pc.struct_field(table["usage"], "completion_tokens")).as_py() or 0
    arrival = None if location.name.startswith(_MOVED) else _Arrival(at, table.num_rows, tokens)
    return _File(table["sample_id"], table["status"].dictionary_encode(), arrival, None)


def _part(location: Location, *, with_ids: bool) -> _File | str | None:
    """The same of a committed file, which another commit may replace by one of the same name."""
    try:
        stat = location.stat()
        return _read_part(location, stat.st_size, stat.st_mtime, with_ids)
    except FileNotFoundError:
        return None
    except pa.ArrowInvalid:
        return str(location)


@functools.lru_cache(maxsize=_FILES_KEPT)
def _read_part(location: Location, _size: int, _mtime: float, with_ids: bool) -> _File:
    columns = ["status", "finished_at", *(["sample_id"] if with_ids else [])]
    table = pq.read_table(readable(location), columns=columns, partitioning=None)
    newest = pc.max(table["finished_at"]).as_py()
    return _File(
        table["sample_id"] if with_ids else None,
        table["status"].dictionary_encode(),
        None,
        None if newest is None else newest.timestamp(),
    )
