"""What a proof is made of: the evidence of one run folder, and how a check ends."""

import json
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import BadRecipe, PreflightFailed
from pipelines.recipe import Recipe, load_recipe
from pipelines.storage import Location, readable
from pipelines.store import RunFolder, read_manifest


class Broken(Exception):
    """A promise that does not hold. The message names the first place where, and what to do."""


class NotThere(Exception):
    """The artefact does not exist yet, or what it must be compared with cannot be reached."""


@dataclass(frozen=True)
class Check:
    """One promise, and whether it holds."""

    name: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str
    seconds: float


@dataclass
class Breaks:
    """Rows that break one promise: how many, and the first by name."""

    count: int = 0
    first: str = ""

    def add(self, where: str, what: str) -> None:
        """Count one more."""
        self.first = self.first or f"{where}: {what}"
        self.count += 1

    def raise_if_any(self) -> None:
        """Raise `Broken` with the first and the number of the others."""
        if self.count:
            more = f" (and {self.count - 1:,} more)" if self.count > 1 else ""
            raise Broken(self.first + more)


@dataclass(frozen=True)
class SampleMark:
    """What is remembered of a response, so that later artefacts can be compared with it."""

    digest: bytes  # of prompt + output ids
    prompt_tokens: int
    output_tokens: int


@dataclass
class Evidence:
    """The run folder, what it says about itself, and what earlier checks remembered.

    Ids and 16-byte digests are kept for all rows; bodies are read batch by batch.
    """

    run: RunFolder
    responses: dict[str, SampleMark] = field(default_factory=dict)  # ok rows of training sets
    rows_walked: int = 0  # responses, those kept aside included

    @cached_property
    def stages(self) -> dict[str, Any]:
        """The manifest's stages; none where it cannot be read, which a check of its own says."""
        try:
            return read_stages(self.run)
        except Broken:
            return {}

    def is_done(self, stage: str) -> bool:
        """Whether the manifest says that a stage is done."""
        return stage in self.stages

    def need(self, stage: str) -> None:
        """Raise `NotThere` unless the stage is recorded as done."""
        if not self.is_done(stage):
            raise NotThere(f"not there yet: {stage} is not recorded as done")

    def refuse_nothing(self, stage: str, what: str) -> NoReturn:
        """What a stage makes is not there: normal before it is done, a break after."""
        self.need(stage)
        raise Broken(f"{stage} is recorded as done, and there are no {what}")

    @cached_property
    def recipe(self) -> Recipe:
        """The run's own recipe. Raises `NotThere` without one; a check of its own says why."""
        try:
            return load_recipe(self.run.recipe)
        except BadRecipe as error:
            raise NotThere("recipe.yaml cannot be read") from error

    @property
    def train_sets(self) -> list[str]:
        """Names of the sets that responses are made for."""
        return [one.name for one in self.recipe.prompts.train]

    @property
    def evaluation_sets(self) -> list[str]:
        """Names of the held-out sets."""
        return [one.name for one in self.recipe.prompts.evaluation]

    @cached_property
    def target_config(self) -> dict[str, Any]:
        """The target's `config.json`, the text part of a composite one."""
        path = Path(self.recipe.target.path) / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_bytes())
        except OSError as error:
            raise NotThere(f"the target is out of reach: {path}") from error
        except ValueError as error:
            raise Broken(f"{path} is not JSON") from error
        inner = config.get("text_config")
        return inner if isinstance(inner, dict) else config

    def target_number(self, key: str) -> int | None:
        """A number of the target's config; None where the target is out of reach."""
        try:
            return int(self.target_config[key])
        except NotThere:
            return None

    @cached_property
    def tokenizer(self) -> Any:
        """The target's tokenizer. Raises `NotThere` where its folder is out of reach."""
        from pipelines.template import load_tokenizer

        try:
            return load_tokenizer(self.recipe.target)
        except PreflightFailed as error:
            raise NotThere(f"the target is out of reach: {error.seen}") from error


def read_stages(run: RunFolder) -> dict[str, Any]:
    """What the manifest says of each finished stage. Raises `Broken` where it is no manifest."""
    try:
        manifest = read_manifest(run)
    except BadRecipe as error:
        raise Broken(error.seen) from error
    match manifest:
        case {"stages": dict(stages)} if all(isinstance(one, dict) for one in stages.values()):
            return stages
        case _:
            raise Broken(f"{run.manifest.name} has no mapping of stages")


def parquet_rows(
    files: Sequence[Location], columns: Sequence[str] | None = None
) -> Iterator[tuple[Location, dict[str, Any]]]:
    """Rows of Parquet files, batch by batch. Raises `Broken` on a file that cannot be read."""
    for path in files:
        try:
            file = pq.ParquetFile(readable(path))
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for row in batch.to_pylist():
                    yield path, row
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError, KeyError) as error:
            raise Broken(f"{path.name} cannot be read: {error}") from error


def load_tensors(path: Path, names: Set[str] = frozenset()) -> dict[str, Any]:
    """All tensors of a file. Raises `Broken` if it cannot be read or a name is not in it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Any] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Broken(f"{path.name} cannot be read: {error}") from error
    if missing := names - tensors.keys():
        raise Broken(f"{path.name} has no {min(missing)}")
    return tensors


def load_json(path: Path) -> dict[str, Any]:
    """The object that a file holds. Raises `Broken` where it holds none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Broken(f"{path.name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise Broken(f"{path.name} is no mapping")
    return value


def digest_of(*id_lists: Sequence[int] | np.ndarray) -> bytes:
    """A 16-byte digest of token ids one after the other."""
    digest = blake2b(digest_size=16)
    for ids in id_lists:
        digest.update(np.asarray(ids, dtype="<i4").tobytes())
    return digest.digest()
