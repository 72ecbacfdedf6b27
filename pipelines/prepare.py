"""Stage prepare: source rows become prompts, checked, tokenised once, kept in a fixed order."""

import logging
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.errors import BadRecipe, PreflightFailed
from pipelines.prepare_worker import (
    PromptMaker,
    SetRules,
    Task,
    Worked,
    is_ready,
    start_worker,
    work,
)
from pipelines.profile_checks import check_profile
from pipelines.prompt_choice import Chooser, HeldOut, place_of
from pipelines.prompt_files import PromptFiles, PromptProfile
from pipelines.recipe import PromptSet, Recipe
from pipelines.selection.draw import Draw, quotas
from pipelines.selection.near_duplicates import NearDuplicates
from pipelines.sources.files import SourceFile, columns_of, find_files, read_chunks
from pipelines.sources.formats import recognise
from pipelines.sources.row import CHOICES, BadRow, FormatName
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog, Progress
from pipelines.template import (
    ChatTemplate,
    load_tokenizer,
    read_target_config,
    text_config,
)
from pipelines.turns import check_history_reasoning

logger = logging.getLogger(__name__)

_CHUNK_BYTES = 512 << 10
# A chunk is told what the draw had decided so many chunks before it: a constant, so that what is
# named `not_drawn` does not depend on how many processes there are.
_DRAW_LAG = 64
_POOL_BYTES = 16 << 20  # of sources: fewer are worked through sooner than a pool has started
_IN_FLIGHT = 4  # chunks for each process of the pool

_WorkThrough = Callable[[Iterable[Task]], Iterator[Worked]]


def prepare(recipe: Recipe, run: RunFolder, events: EventLog) -> dict[str, Any]:
    """Write `prompts/<set>/part-*.parquet`, ordered by sample id, and return the counts.

    All sets or none: they are built beside and renamed at the end. Prompts that cannot be used stop
    the run or are kept in `prompts/_rejected/<set>.parquet`, as `on_bad_prompt` says; what the
    recipe's selection leaves out is kept there in any case. An evaluation prompt that equals a
    training prompt stops the run. Raises `BadRecipe`, `PreflightFailed`.
    """
    sources = {one.name: Source.of(one) for one in _all_sets(recipe)}
    building = run.root / f".prompts.{os.getpid()}"
    _remove_leftovers(run)
    with ExitStack() as stack:
        pool = _start_pool(recipe, sources, stack)
        template = checked_template(recipe)
        stack.callback(shutil.rmtree, building, ignore_errors=True)
        building.mkdir()
        sets = _prepare_sets(recipe, template, sources, building, pool)
        _put_in_place(building, run)
    for name, counts in sets.items():
        events.append("prompts_prepared", dataset=name, **counts)
    prompts = sum(one["prompts"] for one in sets.values())
    rejected = sum(sum(one["rejected"].values()) for one in sets.values())
    held_out = sum(sets[one.name]["prompts"] for one in recipe.prompts.evaluation)
    turns = sum(one["turns"] for one in sets.values())
    of_turns = f", {turns:,} turns" if turns > prompts else ""
    return {
        "headline": f"{prompts:,} prompts ({held_out:,} held out){of_turns}, {rejected:,} rejected",
        "rows": sum(one["rows"] for one in sets.values()),
        "prompts": prompts,
        "turns": turns,
        "rejected": rejected,
        "prompt_tokens": sum(one["prompt_tokens"] for one in sets.values()),
        "sets": sets,
    }


def checked_template(recipe: Recipe) -> ChatTemplate:
    """The target's template and tokenizer, compared with its profile. Raises `PreflightFailed`."""
    config = read_target_config(Path(recipe.target.path))
    tokenizer = load_tokenizer(recipe.target)
    check_profile(tokenizer, recipe.target.profile, config)
    longest, wanted = text_config(config)["max_position_embeddings"], recipe.prompts.context_tokens
    if wanted > longest:
        raise PreflightFailed(
            f"prompts.context_tokens is {wanted}, the target reads {longest}",
            expected="no more than the target's max_position_embeddings",
            change=f"set prompts.context_tokens to {longest} or less",
        )
    template = ChatTemplate(tokenizer, recipe.target.profile)
    check_history_reasoning(template, recipe.target.profile)
    return template


@dataclass(frozen=True)
class Source:
    """A set's files, and the format of each."""

    set: PromptSet
    files: tuple[SourceFile, ...]
    formats: Mapping[str, FormatName]  # by the file's name

    @staticmethod
    def of(one: PromptSet) -> "Source":
        """Find them. A format that the recipe does not name is recognised, and named in the log."""
        files = find_files(one.path)
        if one.format is not None:
            return Source(one, files, {file.name: one.format for file in files})
        formats = {file.name: _recognised(file) for file in files}
        seen = Counter(formats.values())
        told = ", ".join(f"{count} of format {name}" for name, count in seen.items())
        logger.info("%s: %d file(s), %s", one.name, len(files), told)
        return Source(one, files, formats)


def _recognised(file: SourceFile) -> FormatName:
    head = columns_of(file)
    # Where no row can be decoded, each is rejected for that, whatever the format.
    return recognise(head, file=file.name).name if head else "messages"


def _all_sets(recipe: Recipe) -> tuple[PromptSet, ...]:
    return (*recipe.prompts.train, *recipe.prompts.evaluation)


def _prepare_sets(
    recipe: Recipe,
    template: ChatTemplate,
    sources: Mapping[str, Source],
    building: Path,
    pool: ProcessPoolExecutor | None,
) -> dict[str, dict[str, Any]]:
    """The held-out sets first: training prompts are compared with them."""
    prompts, selection = recipe.prompts, recipe.prompts.selection
    counts: dict[str, dict[str, Any]] = {}
    held_out = HeldOut()
    maker = PromptMaker(recipe, template)
    work_through = partial(map, maker.make) if pool is None else partial(_through, pool)
    for one in prompts.evaluation:
        stage = _SetWork(recipe, sources[one.name], building, Chooser({}, None), held_out=held_out)
        stage.work(work_through)
        counts[one.name] = stage.finish()
    texts = held_out.write(building)
    limits = limits_of(recipe)
    with ExitStack() as stack:
        writer = stack.enter_context(ThreadPoolExecutor(1))  # of a set, while the next is read
        chooser = Chooser(held_out.said, near_duplicates(recipe, building, stack))
        written: dict[str, Future[dict[str, Any]]] = {}
        for one in prompts.train:
            stage = _SetWork(
                recipe,
                sources[one.name],
                building,
                chooser,
                limit=limits[one.name],
                texts=None if selection.shared_words is None else texts,
            )
            stage.work(work_through)
            written[one.name] = writer.submit(stage.finish)
        counts |= {name: one.result() for name, one in written.items()}
    texts.unlink()
    return {one.name: counts[one.name] for one in _all_sets(recipe)}


def near_duplicates(recipe: Recipe, spill: Path, stack: ExitStack) -> NearDuplicates | None:
    """What finds near duplicates, as long as the stack is open; None where nobody looks."""
    threshold = recipe.prompts.selection.near_duplicates
    return None if threshold is None else stack.enter_context(NearDuplicates(threshold, spill))


def limits_of(recipe: Recipe) -> dict[str, int | None]:
    """How many prompts each training set may have, by its cap and its share of the mix."""
    caps = {one.name: one.cap for one in recipe.prompts.train}
    mix = recipe.prompts.selection.mix
    return caps if mix is None else quotas(mix.rows, mix.weights, caps)


def rules_of(
    recipe: Recipe, one: PromptSet, format_name: FormatName, texts: Path | None = None
) -> SetRules:
    """How a set's rows are read and judged; a held-out set is asked whole, its last turn."""
    trains = one in recipe.prompts.train
    return SetRules(
        name=one.name,
        domain=one.domain,
        format=format_name,
        turns=recipe.prompts.turns if trains else "last",
        selection=recipe.prompts.selection if trains else None,
        held_out=texts if trains else None,
    )


# Processes


def _start_pool(
    recipe: Recipe, sources: Mapping[str, Source], stack: ExitStack
) -> ProcessPoolExecutor | None:
    """A process for each CPU, which gets ready meanwhile; None where this one is enough."""
    cpus = len(os.sched_getaffinity(0))
    size = sum(file.size for one in recipe.prompts.train for file in sources[one.name].files)
    if cpus == 1 or size < _POOL_BYTES:
        return None
    logger.info("preparing with %d processes", cpus)
    pool = ProcessPoolExecutor(
        cpus, mp_context=get_context("spawn"), initializer=start_worker, initargs=(recipe,)
    )
    stack.callback(pool.shutdown, wait=True, cancel_futures=True)
    for _ in range(cpus):
        pool.submit(is_ready)
    return pool


def _through(pool: ProcessPoolExecutor, tasks: Iterable[Task]) -> Iterator[Worked]:
    """Results in the order of the tasks, of which a few for each process are held at a time."""
    in_flight = _IN_FLIGHT * len(os.sched_getaffinity(0))
    waiting: deque[Future[Worked]] = deque()
    try:
        for task in tasks:
            waiting.append(pool.submit(work, task))
            if len(waiting) >= in_flight:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise PreflightFailed(
            "a process that prepares prompts died",
            expected="processes that live to the end; the system may have run out of memory",
            change="look into the system's log, free memory, and start again",
        ) from error


# One set


@dataclass
class _SetWork:
    """One set on its way from its source to its parts."""

    recipe: Recipe
    source: Source
    building: Path
    chooser: Chooser
    limit: int | None = None  # prompts
    held_out: HeldOut | None = None  # takes in what this set says
    texts: Path | None = None  # what held-out prompts ask; None where nobody compares
    rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def work(self, work_through: _WorkThrough) -> None:
        """Work through the source."""
        self._draw = None if self.limit is None else Draw(self.limit)
        self._below: list[int | None] = []  # after each chunk: what the draw can still take
        self._files = PromptFiles(self.building, self.source.set.name)
        size = sum(file.size for file in self.source.files)
        progress = Progress(f"prepare {self.source.set.name}", total=size, unit="bytes")
        with ExitStack() as stack:
            stack.callback(self._files.close)
            for worked in work_through(self._tasks()):
                kept, bad = self._choose(worked)
                self._files.set_aside(sorted(bad, key=lambda row: row.line))
                self._files.add(_taken(worked.prompts, kept))
                progress.advance(worked.read_bytes, {"rows": f"{self.rows:,}"})
            if not self.rows:
                raise self._empty("no rows")
            stack.pop_all()  # `finish` goes on with the files

    def finish(self) -> dict[str, Any]:
        """Write the parts and the rejected rows; return the counts."""
        with closing(self._files) as files:
            profile = files.finish(
                drawn_below=None if self._draw is None else self._draw.below,
                context_tokens=self.recipe.prompts.context_tokens,
            )
            return self._counts(profile, files)

    def _tasks(self) -> Iterator[Task]:
        one = self.source.set
        for number, chunk in enumerate(read_chunks(self.source.files, chunk_bytes=_CHUNK_BYTES)):
            rules = rules_of(self.recipe, one, self.source.formats[chunk.file], self.texts)
            seen = number - _DRAW_LAG
            yield Task(chunk, rules, self._below[seen] if seen >= 0 else None)

    def _choose(self, worked: Worked) -> tuple[list[int], list[BadRow]]:
        kept, copies = self.chooser.choose(worked, self.source.set)
        bad = [*worked.rejected, *copies]
        self.rows += worked.rows
        self._count(bad)
        if self.held_out is not None:
            self.held_out.add(worked, kept, self.source.set)
        if self._draw is not None:
            keys = worked.prompts["draw_key"].to_pylist()
            for index in kept:
                self._draw.offer(keys[index])
        self._below.append(None if self._draw is None else self._draw.below)
        return kept, bad

    def _count(self, bad: Iterable[BadRow]) -> None:
        """Raises `BadRecipe` for a row that cannot be used, if the recipe stops at one."""
        for row in bad:
            self.reasons[row.reason] += 1
            if self.recipe.prompts.on_bad_prompt == "stop" and row.reason not in CHOICES:
                place = place_of(self.source.set, row.file, row.line)
                raise BadRecipe(
                    f"{place} is not a usable prompt: {row.reason}: {row.detail[:400]}",
                    expected="every row of a set to be usable, since on_bad_prompt is stop",
                    change="mend or remove the row, or set prompts.on_bad_prompt to reject",
                )

    def _counts(self, profile: PromptProfile, files: PromptFiles) -> dict[str, Any]:
        lengths = profile.lengths
        if not lengths.count:
            reason, count = self.reasons.most_common(1)[0]
            raise self._empty(f"no usable prompt; {count} of {self.rows} rows: {reason}")
        if files.not_drawn:
            self.reasons["not_drawn"] += files.not_drawn
        assert self.rows == lengths.count + files.rejected
        if self.limit is not None and lengths.count < self.limit:
            name, usable, wanted = self.source.set.name, lengths.count, self.limit
            logger.warning("%s has %d usable prompts, the recipe wants %d", name, usable, wanted)
        return {
            "rows": self.rows,
            "prompts": lengths.count,
            "turns": profile.turns,
            "cut_at_tool_turn": profile.cut_at_tool_turn,
            "rejected": dict(sorted(self.reasons.items())),
            "repaired": dict(sorted(profile.repaired.items())),
            "formats": sorted(set(self.source.formats.values())),
            "languages": profile.languages.shares(top=5),  # of those that were looked at
            "prompt_tokens": lengths.total,  # up to turn 1, as are the next
            "tokens_p50": lengths.quantile(0.5),
            "tokens_p90": lengths.quantile(0.9),
            "tokens_max": lengths.max,
            "lengths": lengths.sparkline(width=10),  # from the shortest to the longest
        }

    def _empty(self, seen: str) -> BadRecipe:
        return BadRecipe(
            f"the prompt set {self.source.set.name} ({self.source.set.path}) has {seen}",
            expected="at least one usable prompt in every set",
            change="correct the file or its path in the recipe",
        )


def _taken(prompts: pa.RecordBatch, kept: list[int]) -> pa.RecordBatch:
    """The kept rows, which mostly are all of them."""
    return prompts if len(kept) == len(prompts) else prompts.take(pa.array(kept, pa.int64()))


# Folders


def _remove_leftovers(run: RunFolder) -> None:
    """What a killed run left half done. The caller holds the folder's lock."""
    for left in sorted(run.root.glob(".prompts.*")):
        if left.suffix == ".old" and not run.prompts.exists():
            left.rename(run.prompts)  # killed between the two renames of `_put_in_place`
        else:
            shutil.rmtree(left)


def _put_in_place(building: Path, run: RunFolder) -> None:
    old = run.root / f".prompts.{os.getpid()}.old"
    if run.prompts.exists():
        run.prompts.rename(old)
    building.rename(run.prompts)
    shutil.rmtree(old, ignore_errors=True)
