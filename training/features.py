"""The training row and its shards: what capture hands to training. The consumer owns the contract.

Shape legend, for every file of this package:
`B` packed rows, `T` tokens in a row, `N` tokens in a shard, `A` aux layers, `H` target hidden size,
`D` draft hidden size, `V` target vocabulary, `U` draft vocabulary, `K` TTT steps.

On disk: `shard-NNNNN.safetensors`, each with `input_ids` [N] int32, `loss_mask` [N] bool,
`aux` [N, A*H] bf16 and `last` [L, H] bf16, rows one after the other; and `index.parquet`, which
says where each sample lies. Shards are memory-mapped, and addressed by (shard, start, length).

A row that counts is taught by the last states of tokens from the first that may teach on, and by no
earlier one: `last` holds those alone. The aux states of the others are attention's keys.

Where storage has 8 bits, `aux` is float8_e4m3 or int8, and `aux_scale` [N, A] fp32 says what to
multiply each layer's state by. `last` is bf16 always: it is the label.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from training.config import Storage

FEATURES_VERSION = "2"
_FAILED = "failed.json"
# The type of `aux`, and the largest value that it is given.
STORED: Mapping[Storage, tuple[torch.dtype, float]] = {
    "bfloat16": (torch.bfloat16, float("inf")),
    "float8_e4m3": (torch.float8_e4m3fn, 448.0),
    "int8": (torch.int8, 127.0),
}

INDEX_SCHEMA = pa.schema(
    [
        pa.field("sample_id", pa.string(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("domain", pa.string(), nullable=False),
        pa.field("shard", pa.string(), nullable=False),
        pa.field("start", pa.int64(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),  # tokens, prompt and response
        pa.field("loss_tokens", pa.int32(), nullable=False),  # tokens that may teach
        # The first token that may teach, or the length; its last state is the shard's [last_start].
        pa.field("teaches_from", pa.int32(), nullable=False),
        pa.field("last_start", pa.int64(), nullable=False),
    ],
    metadata={"eyas.schema": "features", "eyas.schema_version": FEATURES_VERSION},
)


class FeatureFault(ValueError):
    """A row or shard that breaks its contract. The message names the sample and the fault."""


@dataclass(frozen=True, eq=False)
class FeatureRow:
    """One sample with the target's hidden states at each of its tokens."""

    sample_id: str
    dataset: str
    domain: str
    input_ids: torch.Tensor  # [T] int64, prompt + response
    loss_mask: torch.Tensor  # [T] bool, tokens the target itself produced
    aux: torch.Tensor  # [T, A*H] bf16, residual stream after layers aux_layer_ids, ascending
    # [T, H] bf16, after the target's final norm. Before the first token that may teach, nobody
    # reads it: a row from disk holds NaN there, and whoever does read it is noticed.
    last: torch.Tensor

    def __post_init__(self) -> None:
        tokens = self.input_ids.shape[0]
        for name in ("loss_mask", "aux", "last"):
            if getattr(self, name).shape[0] != tokens:
                raise FeatureFault(
                    f"{self.sample_id}: {name} has {getattr(self, name).shape[0]} rows for "
                    f"{tokens} tokens"
                )


def teaches_from(loss_mask: torch.Tensor) -> int:
    """The first of [T] tokens that may teach; T where none may."""
    return int(loss_mask.int().argmax()) if bool(loss_mask.any()) else len(loss_mask)


class TokenRows(Protocol):
    """Rows whose tokens are known, wherever their states are."""

    sample_ids: list[str]
    domains: list[str]
    lengths: list[int]  # tokens, prompt and response
    loss_tokens: list[int]  # tokens that may teach

    def tokens(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`input_ids` [T] int64 and `loss_mask` [T] bool of one row."""
        ...


class FeatureRows(Protocol):
    """Where the states of those rows come from."""

    set_aside: dict[str, str]  # samples whose states could not be had, and why

    def row(self, row: int) -> FeatureRow:
        """The row of this number. Raises `FeatureFault` where it cannot be had."""
        ...


def write_shard(
    folder: Path,
    name: str,
    rows: Sequence[FeatureRow],
    *,
    aux_layer_ids: Sequence[int],
    storage: Storage = "bfloat16",
) -> pa.Table:
    """Write one shard, whole or not at all, and return its part of the index.

    Raises `FeatureFault` on a non-finite state: a NaN that enters here poisons every step.
    """
    assert rows
    firsts = [teaches_from(row.loss_mask) for row in rows]
    last = [row.last[first:] for row, first in zip(rows, firsts, strict=True)]
    for row, taught in zip(rows, last, strict=True):
        if not (bool(torch.isfinite(row.aux).all()) and bool(torch.isfinite(taught).all())):
            raise FeatureFault(f"{row.sample_id}: a hidden state is not finite")
    tensors = {
        "input_ids": torch.cat([row.input_ids for row in rows]).to(torch.int32),
        "loss_mask": torch.cat([row.loss_mask for row in rows]).to(torch.bool),
        "last": torch.cat(last).to(torch.bfloat16),
    }
    if storage == "bfloat16":
        tensors["aux"] = torch.cat([row.aux for row in rows]).to(torch.bfloat16)
    else:
        made = [to_eight_bits(row.aux, len(aux_layer_ids), storage) for row in rows]
        tensors["aux"], tensors["aux_scale"] = (torch.cat(some) for some in zip(*made, strict=True))
    # One key only: safetensors writes several in random order, and the same rows must give the
    # same bytes. The version is the index's.
    metadata = {"aux_layer_ids": json.dumps(list(aux_layer_ids))}
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        save_file(tensors, temporary, metadata=metadata)
        temporary.replace(folder / name)
    finally:
        temporary.unlink(missing_ok=True)
    lengths = [len(row.input_ids) for row in rows]
    return pa.table(
        {
            "sample_id": [row.sample_id for row in rows],
            "dataset": [row.dataset for row in rows],
            "domain": [row.domain for row in rows],
            "shard": [name] * len(rows),
            "start": _starts(lengths),
            "length": lengths,
            "loss_tokens": [int(row.loss_mask.sum()) for row in rows],
            "teaches_from": firsts,
            "last_start": _starts([len(one) for one in last]),
        },
        schema=INDEX_SCHEMA,
    )


def to_eight_bits(
    aux: torch.Tensor,  # [T, A*H], finite
    layers: int,
    storage: Storage,
) -> tuple[torch.Tensor, torch.Tensor]:  # [T, A*H], [T, A] fp32
    """States in 8 bits, and their scales: the largest value of each becomes the type's largest."""
    dtype, largest = STORED[storage]
    states = aux.float().unflatten(1, (layers, -1))  # [T, A, H]
    scale = states.abs().amax(-1).div(largest).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = states / scale[..., None]
    values = scaled.round() if dtype == torch.int8 else scaled
    return values.clamp(-largest, largest).flatten(1).to(dtype), scale


def from_eight_bits(
    values: torch.Tensor,  # [T, A*H] in 8 bits
    scale: torch.Tensor,  # [T, A] fp32
) -> torch.Tensor:  # [T, A*H] bf16
    """The states again, as near as 8 bits are."""
    states = values.float().unflatten(1, (scale.shape[1], -1))
    return (states * scale[..., None]).flatten(1).to(torch.bfloat16)


def read_aux(shard: safe_open, place: slice) -> torch.Tensor:
    """`aux` [T, A*H] bf16 of some tokens of a shard, however it is stored."""
    values = shard.get_slice("aux")[place]
    if values.dtype == torch.bfloat16:
        return values
    scale = shard.get_slice("aux_scale")[place]
    if len(scale) != len(values):  # one alone would be taken for all
        raise FeatureFault(f"aux has {len(values)} tokens at {place}, aux_scale {len(scale)}")
    return from_eight_bits(values, scale)


def _starts(counts: Sequence[int]) -> list[int]:
    return [0, *accumulate(counts[:-1])]


def write_failed(folder: Path, failed: Sequence[Mapping[str, str]]) -> None:
    """Name the samples without states: `sample_id`, `fault` and `detail` of each."""
    path = folder / _FAILED
    path.unlink(missing_ok=True)
    if failed:
        temporary = folder / f".{_FAILED}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(list(failed), indent=2) + "\n")
        temporary.replace(path)


def failed_samples(folder: Path) -> dict[str, str]:
    """The samples that capture could not get states of, and why."""
    path = folder / _FAILED
    failed = json.loads(path.read_bytes()) if path.exists() else []
    return {one["sample_id"]: f"{one['fault']}: {one['detail']}" for one in failed}


def refuse_another_version(schema: pa.Schema, name: str) -> None:
    """Raise `FeatureFault` unless an index is one that this version reads."""
    if schema.equals(INDEX_SCHEMA, check_metadata=True):
        return
    version = (schema.metadata or {}).get(b"eyas.schema_version", b"unknown").decode()
    what = "another schema" if version == FEATURES_VERSION else f"version {version}"
    raise FeatureFault(
        f"{name} is of {what}, expected version {FEATURES_VERSION} of training/features.py: have "
        "the states made again with --from capture"
    )


class FeatureStore:
    """Random access to the rows of a features folder, through memory maps. Read-only."""

    def __init__(self, folder: Path, *, aux_layer_ids: Sequence[int]) -> None:
        self._folder = folder
        self._aux_layer_ids = list(aux_layer_ids)
        index = folder / "index.parquet"
        if not index.exists():
            raise FeatureFault(f"{index} is missing: run the capture stage to its end")
        refuse_another_version(pq.read_schema(index), str(index))
        self.index = pq.read_table(index, schema=INDEX_SCHEMA)
        self.sample_ids: list[str] = self.index["sample_id"].to_pylist()
        self.datasets: list[str] = self.index["dataset"].to_pylist()
        self.domains: list[str] = self.index["domain"].to_pylist()
        self.lengths: list[int] = self.index["length"].to_pylist()
        self.loss_tokens: list[int] = self.index["loss_tokens"].to_pylist()
        self._shard: list[str] = self.index["shard"].to_pylist()
        self._start: list[int] = self.index["start"].to_pylist()
        self._teaches_from: list[int] = self.index["teaches_from"].to_pylist()
        self._last_start: list[int] = self.index["last_start"].to_pylist()
        self._open: dict[str, safe_open] = {}
        self.set_aside: dict[str, str] = {}  # capture has left them out

    def __len__(self) -> int:
        return len(self.sample_ids)

    def tokens(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`input_ids` [T] int64 and `loss_mask` [T] bool of one row, without its states."""
        shard, start, end = self._place(row)
        return (
            shard.get_slice("input_ids")[start:end].to(torch.int64),
            shard.get_slice("loss_mask")[start:end],
        )

    def row(self, row: int) -> FeatureRow:
        """Read one row. The tensors are copies that the caller owns."""
        shard, start, end = self._place(row)
        input_ids, loss_mask = self.tokens(row)
        first, at = self._teaches_from[row], self._last_start[row]
        if first != teaches_from(loss_mask):  # or NaN would teach
            raise FeatureFault(
                f"{self.sample_ids[row]}: the index has it teach from token {first} on, its mask "
                f"from {teaches_from(loss_mask)}"
            )
        taught = shard.get_slice("last")[at : at + self.lengths[row] - first]
        return FeatureRow(
            sample_id=self.sample_ids[row],
            dataset=self.datasets[row],
            domain=self.domains[row],
            input_ids=input_ids,
            loss_mask=loss_mask,
            aux=read_aux(shard, slice(start, end)),
            last=torch.cat([taught.new_full((first, taught.shape[1]), torch.nan), taught]),
        )

    def _place(self, row: int) -> tuple[safe_open, int, int]:
        name = self._shard[row]
        if name not in self._open:
            path = self._folder / name
            try:
                shard = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise FeatureFault(f"{path} cannot be read: {error}") from error
            written = json.loads(shard.metadata()["aux_layer_ids"])
            if written != self._aux_layer_ids:
                raise FeatureFault(
                    f"{path} holds layers {written}, training asks for {self._aux_layer_ids}"
                )
            self._open[name] = shard
        return self._open[name], self._start[row], self._start[row] + self.lengths[row]
