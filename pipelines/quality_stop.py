"""What a quality gate stopped on is remembered, and set aside when the run goes on after the cure.

The rows that made the gate fire are suspect, whatever their own status: they are asked again. They
stay readable in `<run>/suspect/`.
"""

import json
import logging
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.segments import write_segment
from pipelines.storage import Location, contents, listed
from pipelines.store import RunFolder, write_json, write_parquet

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QualityMark:
    """What stopped a run."""

    reason: str
    phase: str  # canary | window
    suspects: Mapping[str, tuple[str, ...]]  # sample ids by set


def remember_stop(run: RunFolder, mark: QualityMark) -> None:
    """Write down what stopped the run, where its rows are."""
    value = {"reason": mark.reason, "phase": mark.phase, "suspects": dict(mark.suspects)}
    write_json(_place(run), value)


def remembered_stop(run: RunFolder) -> QualityMark | None:
    """What stopped the run the last time, if its suspect rows have not been set aside yet."""
    try:
        value = json.loads(_place(run).read_bytes())
    except FileNotFoundError:
        return None
    suspects = {name: tuple(ids) for name, ids in value["suspects"].items()}
    return QualityMark(value["reason"], value["phase"], suspects)


def set_aside_suspects(run: RunFolder) -> int:
    """Move the suspect rows of the last stop out of the segments; return how many they were.

    May be killed at any moment and called again: a row is first written to `<run>/suspect/`.
    """
    mark = remembered_stop(run)
    if mark is None:
        return 0
    moved = 0
    for name, ids in mark.suspects.items():
        moved += _set_aside(run, name, ids)
    _place(run).unlink()
    logger.info(
        "%d rows that stopped the run (%s) are set aside in %s and asked again",
        moved,
        mark.reason,
        _suspect(run),
    )
    return moved


def holds_suspects_only(run: RunFolder) -> bool:
    """Whether every durable row, if any, is one that stopped the run: then another way of asking
    mixes with nothing."""
    mark = remembered_stop(run)
    if any(run.responses.rglob("part-*.parquet")):
        return False
    suspects = {one for ids in mark.suspects.values() for one in ids} if mark else set()
    return all(
        suspects.issuperset(_read(path)["sample_id"].to_pylist())
        for path in run.segments.rglob("*.arrow")
    )


def _set_aside(run: RunFolder, set_name: str, ids: Collection[str]) -> int:
    wanted = pa.array(sorted(ids), pa.string())
    suspect: list[pa.Table] = []
    rests: list[tuple[Location, pa.Table]] = []
    for path in listed(run.segments / set_name, "*.arrow"):
        table = _read(path)
        chosen = pc.is_in(table["sample_id"], value_set=wanted)
        if pc.any(chosen).as_py():
            suspect.append(table.filter(chosen))
            rests.append((path, table.filter(pc.invert(chosen))))
    if not suspect:
        return 0
    token = secrets.token_hex(6)
    rows = pa.concat_tables(suspect)
    write_parquet(_suspect(run) / f"{set_name}-{token}.parquet", rows)
    for number, (path, rest) in enumerate(rests):
        if rest.num_rows:
            write_segment(run.segments / set_name, f"kept-{token}-{number:06d}", rest)
        path.unlink()
    return rows.num_rows


def _place(run: RunFolder) -> Location:
    return run.responses / "_quality_stop.json"


def _suspect(run: RunFolder) -> Path:
    return run.root / "suspect"


def _read(path: Location) -> pa.Table:
    return pa.ipc.open_file(contents(path)).read_all()
