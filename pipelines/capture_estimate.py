"""`eyas capture --plan`: what hidden states will take, before any is made. Nothing is written.

Exact once the responses are there. Before, every answer is taken to be as long as it may be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table

from pipelines.capture import draft_of
from pipelines.capture_plan import TokenBytes, lengths, read_responses, stored_bytes
from pipelines.capture_servers import handover_bytes
from pipelines.doctor_finding import size as size_of
from pipelines.errors import PreflightFailed
from pipelines.recipe import Recipe
from pipelines.run import run_of
from pipelines.storage import listed, readable
from pipelines.store import RunFolder, read_manifest
from training.config import DraftConfig, Storage


@dataclass(frozen=True)
class StoragePlan:
    """What one storage makes of the states."""

    storage: Storage
    aux_bytes_per_token: int
    last_bytes_per_token: int  # of an answer's tokens
    bytes: int  # of all samples, with ids and index


@dataclass(frozen=True)
class ModePlan:
    """What one mode needs, in the recipe's storage."""

    mode: str
    disk_bytes: int
    memory_bytes: int  # of /dev/shm: the longest row, times the requests in flight and being read
    tokens: int  # that the target reads, over all epochs
    hours: float | None  # None: nobody said how fast


@dataclass(frozen=True)
class CapturePlan:
    """What a recipe's hidden states will take. Counts are the most there can be unless exact."""

    target: str
    hidden_size: int
    aux_layers: int
    storage: Storage
    is_exact: bool  # of the responses, which are there
    samples: int
    tokens: int
    answer_tokens: int
    longest: int  # tokens of the longest sample
    tokens_per_second: float | None
    storages: tuple[StoragePlan, ...]
    modes: tuple[ModePlan, ...]

    def to_json(self) -> dict[str, Any]:
        """The same, as data."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Volume:
    """The samples that will be captured, one entry each."""

    tokens: npt.NDArray[np.int64]  # prompt and answer
    answers: npt.NDArray[np.int64]  # tokens of the answer
    is_exact: bool


def plan(recipe: Recipe, *, tokens_per_second: float | None) -> CapturePlan:
    """Look at the responses of a run, or at its prompts. Raises `PreflightFailed` without both."""
    run = run_of(recipe)
    return estimate(recipe, draft_of(recipe), _volume(recipe, run), tokens_per_second)


def estimate(
    recipe: Recipe, config: DraftConfig, volume: Volume, tokens_per_second: float | None
) -> CapturePlan:
    """What so many samples take of this target's states."""
    capture, train = recipe.capture, recipe.train
    samples, tokens, answers = (
        len(volume.tokens),
        int(volume.tokens.sum()),
        int(volume.answers.sum()),
    )
    longest, cut = int(volume.tokens.max()), train.max_tokens_per_sample
    shards = -(-samples // capture.samples_per_shard)

    def stored(storage: Storage) -> StoragePlan:
        size = TokenBytes.of(config, storage)
        total = stored_bytes(size, samples, tokens, answers, shards=shards)
        return StoragePlan(storage, size.aux, size.last, total)

    def needs(mode: str, disk: int, longest: int, tokens: int) -> ModePlan:
        memory = handover_bytes(recipe, config, longest=longest)
        hours = None if tokens_per_second is None else tokens / tokens_per_second / 3600
        return ModePlan(mode, disk, memory, tokens, hours)

    storages = tuple(stored(one) for one in get_args(Storage))
    size = TokenBytes.of(config, capture.storage)
    whole = next(one.bytes for one in storages if one.storage == capture.storage)
    token_file = tokens * size.ids
    # Each epoch has its slices made again, unless one slice is all there is.
    slices_again = 1 if tokens * size.at_most <= capture.max_bytes else train.epochs
    return CapturePlan(
        target=Path(recipe.target.path).name,
        hidden_size=config.target_hidden_size,
        aux_layers=len(config.aux_layer_ids),
        storage=capture.storage,
        is_exact=volume.is_exact,
        samples=samples,
        tokens=tokens,
        answer_tokens=answers,
        longest=longest,
        tokens_per_second=tokens_per_second,
        storages=storages,
        modes=(
            needs("offline", whole, longest, tokens),
            needs(
                "streaming",
                token_file,
                min(longest, cut),
                int(np.minimum(volume.tokens, cut).sum()) * train.epochs,
            ),
            needs(
                "chunked",
                token_file + min(whole, capture.max_bytes),
                longest,
                tokens * slices_again,
            ),
        ),
    )


def _volume(recipe: Recipe, run: RunFolder) -> Volume:
    sets = [one.name for one in recipe.prompts.train]
    stages = read_manifest(run)["stages"]
    if "generate" in stages:
        rows = read_responses(run, sets)
        answers = pc.list_value_length(rows["output_ids"]).to_numpy().astype(np.int64)
        return Volume(lengths(rows), answers, is_exact=True)
    if "prepare" not in stages:
        raise PreflightFailed(
            f"{run.root} has neither prompts nor responses yet",
            expected="a run of which prepare is done, at least",
            change="run `eyas prepare RECIPE`; its own --plan needs nothing but the sources",
        )
    samples = [
        one
        for row in _prompts(run, sets)
        for one in answers_at_most(
            *row,
            most=recipe.generate.sampling.max_new_tokens,
            context=recipe.prompts.context_tokens,
        )
        for _ in range(recipe.generate.samples_per_prompt)
    ]
    both = np.array(samples, np.int64).reshape(-1, 2)
    return Volume(both[:, 0], both[:, 1], is_exact=False)


def _prompts(run: RunFolder, sets: Sequence[str]) -> Iterator[tuple[int, list[int]]]:
    """The tokens of each prompt, and of what each later question adds to it."""
    for file in (file for name in sets for file in listed(run.prompts / name, "*.parquet")):
        table = pq.read_table(
            readable(file), columns=["prompt_ids", "continuations"], partitioning=None
        )
        later = ([len(one) for one in some] for some in table["continuations"].to_pylist())
        yield from zip(pc.list_value_length(table["prompt_ids"]).to_pylist(), later, strict=True)


def answers_at_most(
    prompt: int, continuations: Sequence[int], *, most: int, context: int
) -> Iterator[tuple[int, int]]:
    """Tokens, and the answer's of them, that each turn of a conversation may come to.

    A short answer leaves room for later turns, so each turn is bounded by itself.
    """
    for turn, more in enumerate((0, *continuations)):
        prompt += more
        answer = min(most, context - prompt)
        if answer <= 0:
            return
        yield min(context, prompt + turn * most + answer), answer


# Showing


def render(found: CapturePlan, console: Console) -> None:
    """Print the plan, 80 columns wide."""
    about = "" if found.is_exact else "at most "
    console.print(
        f"{found.target}: {found.aux_layers} aux layers and the last, {found.hidden_size:,} wide\n"
        f"{found.samples:,} samples, {about}{found.tokens:,} tokens, {found.answer_tokens:,} of "
        f"them of answers; the longest has {found.longest:,}",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(title="On disk, by capture.storage", title_justify="left")
    table.add_column("storage")
    for name in ("aux B/token", "last B/answer token", "in all"):
        table.add_column(name, justify="right")
    for one in found.storages:
        mark = " *" if one.storage == found.storage else ""
        table.add_row(
            f"{one.storage}{mark}",
            f"{one.aux_bytes_per_token:,}",
            f"{one.last_bytes_per_token:,}",
            about + size_of(one.bytes),
        )
    console.print(table)
    table = Table(title=f"By capture.mode, in {found.storage}", title_justify="left")
    table.add_column("mode")
    for name in ("disk", "/dev/shm", "tokens read", "hours"):
        table.add_column(name, justify="right")
    for mode in found.modes:
        table.add_row(
            mode.mode,
            size_of(mode.disk_bytes),
            size_of(mode.memory_bytes),
            f"{mode.tokens:,}",
            "unknown" if mode.hours is None else f"{mode.hours:,.1f}",
        )
    console.print(table)
    if found.tokens_per_second is None:
        console.print("--tokens-per-second, of a prefill by all servers together, tells the hours")
    if not found.is_exact:
        console.print("no responses yet: every answer is taken to be as long as it may be")
