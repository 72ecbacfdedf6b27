"""What a worker may find done already: rows of its own session, and earlier turns. Read only."""

from collections.abc import Collection, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.row_report import is_settled
from pipelines.segments import committed_files
from pipelines.storage import Location, contents, listed, readable
from pipelines.store import RunFolder


class DurableRows:
    """Where the bodies of some durable rows lie, by sample id.

    Rows of segments that are not in `skip` are all known: they became durable after the driver
    looked. Of everything older, only the rows named in `also` are. A row that failed other than by
    a refusal is not known: it may be asked again.
    """

    def __init__(
        self,
        run: RunFolder,
        sets: Sequence[str],
        *,
        skip: Collection[str] = (),
        also: Collection[str] = (),
    ) -> None:
        self._places: dict[str, tuple[Location, int]] = {}
        for name in sets:
            for path in listed(run.segments / name, "*.arrow"):
                if path.name not in skip:
                    self._take(path, None)
                elif also:
                    self._take(path, also)
            for path in committed_files(run, name) if also else ():
                self._take(path, also)

    def __contains__(self, sample_id: str) -> bool:
        return sample_id in self._places

    def row(self, sample_id: str) -> dict[str, Any]:
        """The whole row, read from its file. Raises `KeyError`."""
        path, at = self._places[sample_id]
        row: dict[str, Any] = _read(path).slice(at, 1).to_pylist()[0]
        return row

    def _take(self, path: Location, wanted: Collection[str] | None) -> None:
        columns = _read(path, ["sample_id", "status"])
        for at, row in enumerate(columns.to_pylist()):
            if not is_settled(row["status"]):
                continue
            if wanted is None or row["sample_id"] in wanted:
                self._places[row["sample_id"]] = (path, at)


def _read(path: Location, columns: Sequence[str] | None = None) -> pa.Table:
    if path.suffix == ".parquet":
        names = None if columns is None else list(columns)
        return pq.read_table(readable(path), columns=names, partitioning=None)
    table = pa.ipc.open_file(contents(path)).read_all()
    return table if columns is None else table.select(list(columns))
