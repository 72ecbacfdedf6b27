"""Damage to a good run: small functions that break one thing, at a place that dice choose.

Each returns the name of the place that it broke: a sample id, a file, a weight; "" where the words
of the finding say it. `corruption_table` says which promise each breaks.
"""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipelines.store import RunFolder, sha256_of, stage_files, write_json, write_parquet

Corrupt = Callable[[RunFolder, Random], str]
Row = dict[str, Any]


# --- where things lie


def committed(run: RunFolder) -> Path:
    """The ok rows of the one training set."""
    return run.root / "responses" / "chat" / "part-00000.parquet"


def aside(run: RunFolder) -> Path:
    """Its rejected and failed rows."""
    return run.root / "responses" / "_rejected" / "chat" / "part-00000.parquet"


def prompts(run: RunFolder, name: str = "chat") -> Path:
    """The prompts of a set."""
    return run.prompts / name / "part-00000.parquet"


def shard(run: RunFolder) -> Path:
    """One of the files of hidden states."""
    return run.features / "shard-00001.safetensors"


def draft(run: RunFolder) -> Path:
    """The exported weights."""
    return run.draft / "model.safetensors"


# --- how they are changed


def edit_rows(path: Path, change: Callable[[list[Row]], object]) -> None:
    """Read, change and write rows, with the schema that the file has."""
    table = pq.read_table(path, partitioning=None)
    rows = table.to_pylist()
    change(rows)
    write_parquet(path, pa.Table.from_pylist(rows, schema=table.schema))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Read, change and write tensors, with the metadata that the file has."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: one.clone() for name, one in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    """Read, change and write one JSON object."""
    value = json.loads(path.read_bytes())
    change(value)
    write_json(path, value)


def reseal(run: RunFolder) -> None:
    """List the files as they are now, as if the stages had written them so."""
    manifest = json.loads(run.manifest.read_bytes())
    for stage, entry in manifest["stages"].items():
        entry["files"] = {
            str(path.relative_to(run.root)): {
                "bytes": path.stat().st_size,
                "sha256": sha256_of(path),
            }
            for path in stage_files(run, stage)
        }
    write_json(run.manifest, manifest)


def answer(change: Callable[[Row, Random], object]) -> Corrupt:
    """Damage to one committed response that stopped by itself."""

    def corrupt(run: RunFolder, dice: Random) -> str:
        broken: list[str] = []

        def one(rows: list[Row]) -> None:
            row = dice.choice([one for one in rows if one["finish_reason"] == "stop"])
            change(row, dice)
            broken.append(row["sample_id"])

        edit_rows(committed(run), one)
        return broken[0]

    return corrupt


def prompt_of(change: Callable[[Row, Random], object], name: str = "chat") -> Corrupt:
    """Damage to one prompt."""

    def corrupt(run: RunFolder, dice: Random) -> str:
        broken: list[str] = []

        def one(rows: list[Row]) -> None:
            row = dice.choice(rows)
            broken.append(row["sample_id"])
            change(row, dice)

        edit_rows(prompts(run, name), one)
        return broken[0]

    return corrupt


def tensors_of(
    path: Callable[[RunFolder], Path], change: Callable[[dict, Random], str | None]
) -> Corrupt:
    """Damage to a file of tensors; `change` may name the place."""

    def corrupt(run: RunFolder, dice: Random) -> str:
        named: list[str | None] = []
        edit_tensors(path(run), lambda tensors: named.append(change(tensors, dice)))
        return named[0] or ""

    return corrupt


def page_of(path: Callable[[RunFolder], Path], change: Callable[[dict], object]) -> Corrupt:
    """Damage to a JSON file."""

    def corrupt(run: RunFolder, _dice: Random) -> str:
        edit_json(path(run), change)
        return ""

    return corrupt


# --- rows that are not all there, or too many


def drop_a_row(run: RunFolder, dice: Random) -> str:
    """A rejected row vanishes."""
    gone: list[str] = []
    edit_rows(
        aside(run), lambda rows: gone.append(rows.pop(dice.randrange(len(rows)))["sample_id"])
    )
    return gone[0]


def repeat_a_row(run: RunFolder, dice: Random) -> str:
    """A committed row comes twice."""
    twice: list[str] = []

    def repeat(rows: list[Row]) -> None:
        at = dice.randrange(len(rows))
        rows.insert(at, rows[at])
        twice.append(rows[at]["sample_id"])

    edit_rows(committed(run), repeat)
    return twice[0]


def keep_a_row_twice(run: RunFolder, dice: Random) -> str:
    """A committed row is kept aside as well."""
    row = dice.choice(pq.read_table(committed(run), partitioning=None).to_pylist())
    edit_rows(aside(run), lambda rows: rows.append({**row, "status": "rejected:x"}))
    return str(row["sample_id"])


def answer_no_prompt(run: RunFolder, dice: Random) -> str:
    """A row answers a prompt that nobody asked."""
    name = f"chat-{dice.randrange(10**12):012d}"
    edit_rows(aside(run), lambda rows: rows.append({**rows[0], "sample_id": name}))
    return name


def shuffle_rows(run: RunFolder, dice: Random) -> str:
    """Rows lie in another order than that of their ids."""
    later: list[str] = []

    def swap(rows: list[Row]) -> None:
        at = dice.randrange(1, len(rows))
        rows[at - 1], rows[at] = rows[at], rows[at - 1]
        later.append(rows[at]["sample_id"])

    edit_rows(committed(run), swap)
    return later[0]


def count_tokens_of_no_reply(run: RunFolder, _dice: Random) -> str:
    """A failed row counts tokens."""
    row: list[Row] = []

    def count(rows: list[Row]) -> None:
        row.append(next(one for one in rows if one["status"].startswith("failed")))
        row[0]["usage"]["total_tokens"] = 9

    edit_rows(aside(run), count)
    return str(row[0]["sample_id"])


def flag_a_row(run: RunFolder, _dice: Random) -> str:
    """A committed row has a flag that nothing in it explains."""
    row: list[Row] = []

    def flag(rows: list[Row]) -> None:
        row.append(rows[0])
        rows[0]["flags"] = '["truncated_thinking"]'

    edit_rows(committed(run), flag)
    return str(row[0]["sample_id"])


def reject_under_another_name(run: RunFolder, _dice: Random) -> str:
    """A rejected row names a gate that did not reject it."""
    row: list[Row] = []

    def rename(rows: list[Row]) -> None:
        row.append(next(one for one in rows if one["status"].startswith("rejected")))
        row[0]["status"] = "rejected:repetition"

    edit_rows(aside(run), rename)
    return str(row[0]["sample_id"])


def repeat_a_prompt(run: RunFolder, dice: Random) -> str:
    """One prompt stands in the place of another."""
    twice: list[str] = []

    def repeat(rows: list[Row]) -> None:
        one, other = dice.sample(range(len(rows)), 2)
        rows[one] = rows[other]
        twice.append(rows[other]["sample_id"])

    edit_rows(prompts(run), repeat)
    return twice[0]


def drop_a_prompt(run: RunFolder, dice: Random) -> str:
    """A held-out prompt vanishes."""
    edit_rows(prompts(run, "eval"), lambda rows: rows.pop(dice.randrange(len(rows))))
    return "eval"


def hold_out_what_is_trained(run: RunFolder, dice: Random) -> str:
    """A held-out prompt says what a training prompt says."""
    trained = dice.choice(pq.read_table(prompts(run), partitioning=None).to_pylist())
    said = {key: trained[key] for key in ("messages", "prompt_ids")}
    return prompt_of(lambda row, _: row.update(said), "eval")(run, dice)


def make_nullable(run: RunFolder, dice: Random) -> str:
    """A column may hold nulls."""
    table = pq.read_table(committed(run), partitioning=None)
    at = dice.randrange(table.num_columns)
    field = table.schema.field(at)
    schema = table.schema.set(at, field.with_nullable(True))
    write_parquet(committed(run), table.cast(schema))
    return str(field.name)


def drop_a_column(run: RunFolder, dice: Random) -> str:
    """A column is missing."""
    table = pq.read_table(committed(run), partitioning=None)
    name = dice.choice(["queued_ms", "flags", "weight_version"])
    write_parquet(committed(run), table.drop_columns([name]))
    return name


def miscount(change: Callable[[dict], object]) -> Corrupt:
    """The manifest counts what is not there."""

    def corrupt(run: RunFolder, _dice: Random) -> str:
        def edit(manifest: dict) -> None:
            change(manifest["stages"]["generate"]["counts"]["sets"]["chat"])

        edit_json(run.manifest, edit)
        return "chat"

    return corrupt


def having(**values: Any) -> Callable[[Any], object]:
    """A change of a mapping: these values."""
    return lambda mapping: mapping.update(values)


def saying(**values: Any) -> Callable[[Row, Random], object]:
    """A change of a row: these values."""
    return lambda row, _: row.update(values)


def counting(**values: int) -> Callable[[Row, Random], object]:
    """A change of a row: these counts."""
    return lambda row, _: row["usage"].update(values)


def sent(**values: Any) -> Callable[[Row, Random], object]:
    """A change of a row: these sampling parameters."""

    def change(row: Row, _dice: Random) -> None:
        row["params"] = json.dumps({**json.loads(row["params"]), **values}, sort_keys=True)

    return change


def put_id(column: str, value: int) -> Callable[[Row, Random], object]:
    """A change of a row: one of its ids, but the last."""

    def change(row: Row, dice: Random) -> None:
        row[column][dice.randrange(len(row[column]) - 1)] = value

    return change
