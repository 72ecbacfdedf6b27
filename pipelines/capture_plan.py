"""What capture has to make: which rows go into which shard, how big it gets, what is there already.

A shard's part of the index lies beside it in a hidden file until all are merged. The part names the
rows it was made from and the shard's checksum, so a later call knows what it need not make again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.errors import PreflightFailed
from pipelines.storage import listed, readable
from pipelines.store import RunFolder, sha256_of, write_parquet
from training.config import DraftConfig, Storage
from training.features import FEATURES_VERSION, INDEX_SCHEMA

Dtype = Literal["float32", "bfloat16"]

_COLUMNS = ["sample_id", "dataset", "domain", "status", "prompt_ids", "output_ids"]
_INDEX_BYTES_PER_ROW = 200
_HEADER_BYTES_PER_SHARD = 1_000
_SPARE_DISK_BYTES = 100_000_000


@dataclass(frozen=True, eq=False)
class Shard:
    """Some rows of the plan, in order, and where their hidden states go."""

    name: str
    rows: pa.Table  # columns of a response row
    mark: str  # a hash of everything that the shard's content depends on
    tokens: int
    answer_tokens: int  # of them: only these have a last state that teaches

    @property
    def part(self) -> str:
        """The hidden file with this shard's part of the index."""
        return f".{Path(self.name).stem}.parquet"


@dataclass(frozen=True, eq=False)
class Part:
    """A finished shard: its part of the index, and the rows whose states could not be had."""

    index: pa.Table
    failed: tuple[Mapping[str, str], ...]  # sample_id, fault, detail


@dataclass(frozen=True, eq=False)
class Plan:
    """What is to be made, how, and what of it is not there yet."""

    config: DraftConfig
    dtype: Dtype  # in which the servers compute
    shards: Sequence[Shard]
    done: Mapping[str, Part]  # by the shard's name, proved whole

    @property
    def missing(self) -> list[Shard]:
        """The shards to make."""
        return [shard for shard in self.shards if shard.name not in self.done]


def read_responses(run: RunFolder, sets: Sequence[str]) -> pa.Table:
    """The ok rows of the named sets by (set, sample id): the order of everything that follows."""
    files = [file for name in sets for file in listed(run.responses / name, "*.parquet")]
    tables = [pq.read_table(readable(file), columns=_COLUMNS, partitioning=None) for file in files]
    rows = pa.concat_tables(tables) if tables else None
    rows = rows.filter(pc.equal(rows["status"], "ok")) if rows is not None else None
    if rows is None or rows.num_rows == 0:
        raise PreflightFailed(
            f"{run.responses} holds no response that passed its gates",
            expected="rows with status ok in at least one training set",
            change="run the generate stage; `eyas glance` on the folder says what is in it",
        )
    ids = rows["sample_id"]
    if pc.count_distinct(ids).as_py() != rows.num_rows:
        raise PreflightFailed(
            f"{run.responses} holds {rows.num_rows} rows with "
            f"{pc.count_distinct(ids).as_py()} distinct sample ids",
            expected="every sample once",
            change="remove the Parquet file that does not belong there; `eyas verify` names it",
        )
    return rows.sort_by([("dataset", "ascending"), ("sample_id", "ascending")]).combine_chunks()


def plan_shards(
    rows: pa.Table, *, samples_per_shard: int, depends_on: Mapping[str, Any]
) -> list[Shard]:
    """Cut the ordered rows into shards. `depends_on` says what else decides the states."""
    shards = []
    for number, start in enumerate(range(0, rows.num_rows, samples_per_shard)):
        some = rows.slice(start, samples_per_shard)
        shards.append(
            Shard(
                name=f"shard-{number:05d}.safetensors",
                rows=some,
                mark=_mark(some, depends_on),
                tokens=int(lengths(some).sum()),
                answer_tokens=int(pc.list_value_length(some["output_ids"]).to_numpy().sum()),
            )
        )
    return shards


def lengths(rows: pa.Table) -> np.ndarray:
    """Tokens of each row, prompt and response."""
    both = [pc.list_value_length(rows[name]).to_numpy() for name in ("prompt_ids", "output_ids")]
    total: np.ndarray = both[0].astype(np.int64) + both[1]
    return total


@dataclass(frozen=True)
class TokenBytes:
    """What one token takes on disk: its aux states, and its last state if it is of an answer."""

    aux: int  # scales included
    last: int
    ids: int = 5  # an int32 id and a byte of the mask

    @staticmethod
    def of(config: DraftConfig, storage: Storage) -> "TokenBytes":
        """Of the states that a draft of this config is trained on."""
        width, layers = config.target_hidden_size, len(config.aux_layer_ids)
        aux = 2 * width if storage == "bfloat16" else width + 4
        return TokenBytes(layers * aux, 2 * width)

    @property
    def at_most(self) -> int:
        """Of a token of an answer."""
        return self.aux + self.last + self.ids

    def total(self, tokens: int, answer_tokens: int) -> int:
        """Of so many tokens, and of those of answers among them."""
        return tokens * (self.aux + self.ids) + answer_tokens * self.last


def estimate_bytes(shards: Sequence[Shard], size: TokenBytes) -> int:
    """Size of the shards: of the tokens, and small change."""
    return sum(
        stored_bytes(size, shard.rows.num_rows, shard.tokens, shard.answer_tokens)
        for shard in shards
    )


def stored_bytes(
    size: TokenBytes, samples: int, tokens: int, answer_tokens: int, *, shards: int = 1
) -> int:
    """What so many samples take, their index and the shards' headers included."""
    small_change = samples * _INDEX_BYTES_PER_ROW + shards * _HEADER_BYTES_PER_SHARD
    return size.total(tokens, answer_tokens) + small_change


def check_room(
    features: Path,
    shards: Sequence[Shard],
    missing: Sequence[Shard],
    *,
    size: TokenBytes,
    quota_bytes: int,
) -> None:
    """Compare the estimate with the quota and the free disk. Raises `PreflightFailed`."""
    whole, rest = estimate_bytes(shards, size), estimate_bytes(missing, size)
    tokens, answers = (
        sum(getattr(shard, name) for shard in shards) for name in ("tokens", "answer_tokens")
    )
    sum_of_it = (
        f"{tokens:,} tokens x {size.aux:,} bytes of aux states, {answers:,} of answers x "
        f"{size.last:,} of last ones: {whole:,} bytes with ids and index"
    )
    if whole > quota_bytes:
        raise PreflightFailed(
            f"the hidden states would take {sum_of_it}",
            expected=f"at most capture.max_bytes, {quota_bytes:,}",
            change="raise capture.max_bytes, or train on fewer prompts or shorter responses",
        )
    free = shutil.disk_usage(features.parent).free
    if rest + _SPARE_DISK_BYTES > free:
        raise PreflightFailed(
            f"{rest:,} bytes are still to be written ({sum_of_it}), the disk of {features.parent} "
            f"has {free:,} free",
            expected=f"room for them and {_SPARE_DISK_BYTES:,} bytes to spare",
            change="free space there, or set run_folder on a larger disk",
        )


def drop_foreign_files(features: Path, shards: Sequence[Shard]) -> None:
    """Remove shards, parts and leftovers of writes that no shard of this plan owns."""
    owned = {shard.name for shard in shards} | {shard.part for shard in shards}
    for pattern in ("shard-*.safetensors", ".shard-*", ".*.tmp"):
        for path in features.glob(pattern):
            if path.name not in owned:
                path.unlink()


def forget_shards(features: Path) -> None:
    """Remove every shard, and what says where it is."""
    for name in ("index.parquet", "failed.json"):
        (features / name).unlink(missing_ok=True)
    drop_foreign_files(features, ())


def finish_shard(
    features: Path, shard: Shard, index: pa.Table, failed: Sequence[Mapping[str, str]]
) -> Part:
    """Say that a shard is done: its part goes to disk after the shard itself is safely there."""
    checksum = ""
    if index.num_rows:
        with (features / shard.name).open("rb") as handle:
            os.fsync(handle.fileno())
        checksum = sha256_of(features / shard.name)
    facts = {"mark": shard.mark, "sha256": checksum, "failed": json.dumps(list(failed))}
    metadata = {**(index.schema.metadata or {}), **facts}
    write_parquet(features / shard.part, index.replace_schema_metadata(metadata))
    return Part(index, tuple(failed))


def read_part(features: Path, shard: Shard) -> Part | None:
    """The part of a shard that is whole and made from this very plan, else None."""
    path = features / shard.part
    if not path.exists():
        return None
    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid:  # made again from the responses, so nothing is lost
        return None
    facts = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    if facts["mark"] != shard.mark:
        return None
    if facts["sha256"]:
        file = features / shard.name
        if not file.exists() or sha256_of(file) != facts["sha256"]:
            return None
    return Part(table.cast(INDEX_SCHEMA), tuple(json.loads(facts["failed"])))


def merge_parts(features: Path, parts: Sequence[Part]) -> None:
    """Write `index.parquet`: every captured row in the plan's order."""
    index = pa.concat_tables([part.index for part in parts])
    write_parquet(features / "index.parquet", index.cast(INDEX_SCHEMA))


def _mark(rows: pa.Table, depends_on: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    digest.update(json.dumps([FEATURES_VERSION, depends_on], sort_keys=True).encode())
    for row in rows.select(["sample_id", "dataset", "domain"]).to_pylist():
        digest.update(json.dumps(row, sort_keys=True).encode())
    for name in ("prompt_ids", "output_ids"):
        column = rows[name].combine_chunks()
        for part in (pc.list_value_length(column), column.flatten()):
            digest.update(np.ascontiguousarray(part.to_numpy()).tobytes())
    return digest.hexdigest()
