"""What a run's files say of its rows, read with pyarrow only; and what two runs' rows differ in."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tests.support.scripted_answers import ScriptedTarget

logger = logging.getLogger(__name__)

SET_NAME = "chat"
# Where and when, never what: two runs of one recipe may differ in these.
CIRCUMSTANCE = ("server", "attempt", "queued_ms", "latency_ms", "finished_at")


@dataclass(frozen=True)
class Findings:
    """How far the rows of a run are from those of a calm one. All but the last are to be zero."""

    lost: int  # no row, or failed where the calm run's row did not
    doubled: int
    malformed: int
    different: int  # rows that are not the calm run's
    rows: int

    def __add__(self, other: "Findings") -> "Findings":
        return Findings(
            self.lost + other.lost,
            self.doubled + other.doubled,
            self.malformed + other.malformed,
            self.different + other.different,
            self.rows + other.rows,
        )


def committed_rows(run: Path) -> pa.Table:
    """Every committed row of a run: ok, rejected and failed, ordered by sample id."""
    files = sorted((run / "responses" / SET_NAME).glob("*.parquet"))
    files += sorted((run / "responses" / "_rejected" / SET_NAME).glob("*.parquet"))
    assert files, f"nothing is committed in {run}"
    table = pa.concat_tables([pq.read_table(path, partitioning=None) for path in files])
    return table.sort_by("sample_id")


def prompt_ids_of(run: Path) -> list[str]:
    """The sample ids of all prompts."""
    files = sorted((run / "prompts" / SET_NAME).glob("*.parquet"))
    tables = [pq.read_table(path, columns=["sample_id"], partitioning=None) for path in files]
    ids: list[str] = pa.concat_tables(tables)["sample_id"].to_pylist()
    return ids


def durable_replies(run: Path) -> dict[str, Any]:
    """When each row that is durable and has a reply was finished: sample id to time."""
    found: dict[str, Any] = {}
    segments = (run / "responses" / "_segments").rglob("*.arrow")
    tables = [
        pa.ipc.open_file(path).read_all() for path in segments if not path.name.startswith(".")
    ]
    for folder in (run / "responses" / SET_NAME, run / "responses" / "_rejected" / SET_NAME):
        tables += [pq.read_table(path, partitioning=None) for path in folder.glob("*.parquet")]
    for table in tables:
        has_reply = table.filter(pc.invert(pc.starts_with(table["status"], "failed")))
        columns = (has_reply["sample_id"].to_pylist(), has_reply["finished_at"].to_pylist())
        found |= zip(*columns, strict=True)
    return found


def compare(
    rows: pa.Table, calm: pa.Table, prompts: Iterable[str], target: ScriptedTarget
) -> Findings:
    """Judge the rows of a run beside those that an undisturbed run had for the same prompts."""
    calm = calm.filter(pc.is_in(calm["prompt_id"], value_set=pa.array(list(prompts))))
    found, expected = _by_id(rows), _by_id(calm)
    times = Counter(rows["sample_id"].to_pylist())
    lost = len(expected.keys() - found.keys())
    different = malformed = 0
    for sample_id, row in found.items():
        if sample_id not in expected:
            malformed += 1
            continue
        if _failed(row) and not _failed(expected[sample_id]):
            lost += 1
        malformed += not is_well_formed(row, target)
        if row != expected[sample_id]:
            different += 1
            changed = [name for name in row if row[name] != expected[sample_id][name]]
            logger.warning("%s differs from the calm run's row in %s", sample_id, changed)
    if rows.schema != calm.schema:
        malformed += rows.num_rows
    return Findings(lost, rows.num_rows - len(times), malformed, different + lost, rows.num_rows)


def is_well_formed(row: Mapping[str, Any], target: ScriptedTarget) -> bool:
    """Whether a row says of its own prompt what the scripted target says of it, and adds up."""
    if _failed(row):
        return row["output_ids"] == [] and target.refuses(row["prompt_ids"])
    params, usage = json.loads(row["params"]), row["usage"]
    ids = target.answer(row["prompt_ids"], params["max_new_tokens"], params["sampling_seed"])
    return (
        row["output_ids"] == ids
        and row["text"] == target.decode(ids)
        and usage["completion_tokens"] == len(ids)
        and usage["prompt_tokens"] == len(row["prompt_ids"])
        and usage["total_tokens"] == len(ids) + len(row["prompt_ids"])
        and row["weight_version"] == "default"
    )


def _by_id(table: pa.Table) -> dict[str, dict[str, Any]]:
    rows = table.drop_columns(list(CIRCUMSTANCE)).to_pylist()
    return {row["sample_id"]: row for row in rows}


def _failed(row: Mapping[str, Any]) -> bool:
    return str(row["status"]).startswith("failed")
