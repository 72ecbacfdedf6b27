"""`eyas prepare --plan`: what a recipe's prompts will be, and cost, before any work is done.

Small sets are looked at whole; of large ones the heads of some of their files, and figures from a
part are marked. Copies in the parts that nobody looked at are not foreseen. Nothing is written.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from pipelines.errors import BadRecipe
from pipelines.prepare import Source, checked_template, limits_of, near_duplicates, rules_of
from pipelines.prepare_worker import PromptMaker, Task, Worked, passages_of
from pipelines.prompt_choice import Chooser, HeldOut
from pipelines.recipe import PromptSet, Recipe
from pipelines.selection.lengths import LengthProfile
from pipelines.sources.files import Chunk, SourceFile, read_chunks
from pipelines.sources.row import BadRow
from pipelines.template import read_target_config, text_config

_CHUNK_BYTES = 256 << 10
_WHOLE_BYTES = 8 << 20  # a set up to this size is looked at whole, of another so much
_FILES_LOOKED_AT = 8
_ID_BYTES = 4
_MASK_BYTES = 1
_STATE_BYTES = 2  # an element of a hidden state, bfloat16


@dataclass(frozen=True)
class SetPlan:
    """What one set will give. Counts are estimates unless `is_exact`."""

    name: str
    formats: tuple[str, ...]
    files: int
    bytes: int
    is_held_out: bool
    is_exact: bool  # every row was looked at
    rows_looked_at: int
    rows: int
    prompts: int
    turns: int  # answers that they want
    rejected: dict[str, int]
    prompt_tokens: int
    tokens_p50: int
    tokens_p90: int
    tokens_max: int
    characters_per_token: float
    answer_tokens: int | None  # of one answer, if it is as long as the set's own; None without any


@dataclass(frozen=True)
class Plan:
    """What a recipe's training prompts will cost."""

    sets: tuple[SetPlan, ...]
    responses: int
    output_tokens: int
    output_tokens_at_most: int  # if every answer is cut at max_new_tokens
    tokens_per_second: float
    hours: float
    hours_at_most: float
    response_bytes: int  # before compression
    hidden_state_bytes: int
    evaluation_prompts_too_short: int  # to look for their words in training prompts

    def to_json(self) -> dict[str, Any]:
        """The same, as data."""
        return asdict(self)


def plan(recipe: Recipe, *, tokens_per_second: float, answer_tokens: int | None) -> Plan:
    """Look at the sources of a recipe. `answer_tokens` stands for the sets' own answers.

    Raises what `prepare` raises, but for single rows: those are counted.
    """
    template = checked_template(recipe)
    selection, held_out = recipe.prompts.selection, HeldOut()
    with ExitStack() as stack:
        spill = Path(stack.enter_context(TemporaryDirectory(prefix="eyas-plan-")))
        maker = PromptMaker(recipe, template)
        evaluation = [
            _look_at(recipe, one, maker, Chooser({}, None), held_out)
            for one in recipe.prompts.evaluation
        ]
        texts, words = held_out.write(spill), selection.shared_words
        chooser = Chooser({}, near_duplicates(recipe, spill, stack))
        limits = limits_of(recipe)
        training = [
            _drawn(_look_at(recipe, one, maker, chooser, None, texts), limits[one.name])
            for one in recipe.prompts.train
        ]
        too_short = 0 if words is None else passages_of(texts, words).too_short
    return _add_up(
        recipe, training, evaluation, tokens_per_second, answer_tokens, too_short=too_short
    )


# Looking


@dataclass(frozen=True)
class _Sample:
    """The part of a set that is looked at: all of it, or the heads of some of its files."""

    files: tuple[SourceFile, ...]
    bytes_each: int | None  # decoded; None: the whole file

    @staticmethod
    def of(files: tuple[SourceFile, ...]) -> "_Sample":
        if sum(file.size for file in files) <= _WHOLE_BYTES:
            return _Sample(files, None)
        some = files[:: max(1, len(files) // _FILES_LOOKED_AT)][:_FILES_LOOKED_AT]
        return _Sample(some, _WHOLE_BYTES // len(some))

    def chunks(self) -> Iterator[Chunk]:
        for file in self.files:
            read = 0
            with closing(read_chunks([file], chunk_bytes=_CHUNK_BYTES)) as chunks:
                for chunk in chunks:
                    yield chunk
                    read += len(chunk.payload)
                    if self.bytes_each is not None and read >= self.bytes_each:
                        break


@dataclass
class _Tally:
    """Of the part of a set that was looked at."""

    lengths: LengthProfile
    rows: int = 0
    turns: int = 0
    made: int = 0  # prompts, copies included
    stored_bytes: int = 0
    prompt_characters: int = 0
    answer_characters: int = 0  # of the set's answers to `made`
    reasons: Counter[str] = field(default_factory=Counter)

    def add(self, chunk: Chunk, worked: Worked, kept: list[int], copies: list[BadRow]) -> None:
        prompts = worked.prompts
        self.rows += worked.rows
        self.made += prompts.num_rows
        self.stored_bytes += chunk.read_bytes
        self.answer_characters += worked.answer_characters
        self.reasons.update(bad.reason for bad in (*worked.rejected, *copies))
        if kept:
            self.lengths.add(pc.list_value_length(prompts["prompt_ids"]).to_numpy()[kept])
            later = pc.list_value_length(prompts["continuations"]).to_numpy()[kept]
            self.turns += len(kept) + int(later.sum())
            characters = pc.utf8_length(prompts["messages"]).to_numpy()[kept]
            self.prompt_characters += int(characters.sum())


def _look_at(
    recipe: Recipe,
    one: PromptSet,
    maker: PromptMaker,
    chooser: Chooser,
    held_out: HeldOut | None,
    texts: Path | None = None,
) -> SetPlan:
    source = Source.of(one)
    sample = _Sample.of(source.files)
    tally = _Tally(LengthProfile(recipe.prompts.context_tokens))
    for chunk in sample.chunks():
        rules = rules_of(recipe, one, source.formats[chunk.file], texts)
        worked = maker.make(Task(chunk, rules, None))
        kept, copies = chooser.choose(worked, one)
        if held_out is not None:
            held_out.add(worked, kept, one)
        tally.add(chunk, worked, kept, copies)
    if not tally.lengths.count:
        raise BadRecipe(
            f"the prompt set {one.name} ({one.path}) has no usable prompt in the {tally.rows} rows "
            f"looked at: {dict(tally.reasons.most_common(3))}",
            expected="usable prompts in every set",
            change="correct the file, its path, or its format in the recipe",
        )
    return _set_plan(source, sample, tally, is_held_out=held_out is not None)


def _set_plan(source: Source, sample: _Sample, tally: _Tally, *, is_held_out: bool) -> SetPlan:
    size = sum(file.size for file in source.files)
    scale = 1.0 if sample.bytes_each is None else size / tally.stored_bytes
    lengths = tally.lengths
    per_token = tally.prompt_characters / max(1, lengths.total)
    answer = tally.answer_characters / max(1, tally.made) / per_token
    return SetPlan(
        name=source.set.name,
        formats=tuple(sorted(set(source.formats.values()))),
        files=len(source.files),
        bytes=size,
        is_held_out=is_held_out,
        is_exact=sample.bytes_each is None,
        rows_looked_at=tally.rows,
        rows=round(tally.rows * scale),
        prompts=round(lengths.count * scale),
        turns=round(tally.turns * scale),
        rejected={name: round(count * scale) for name, count in sorted(tally.reasons.items())},
        prompt_tokens=round(lengths.total * scale),
        tokens_p50=lengths.quantile(0.5),
        tokens_p90=lengths.quantile(0.9),
        tokens_max=lengths.max,
        characters_per_token=per_token,
        answer_tokens=round(answer) if tally.answer_characters else None,
    )


def _drawn(whole: SetPlan, limit: int | None) -> SetPlan:
    """What the draw leaves of a set."""
    if limit is None or whole.prompts <= limit:
        return whole
    share = limit / whole.prompts
    return replace(
        whole,
        prompts=limit,
        turns=round(whole.turns * share),
        prompt_tokens=round(whole.prompt_tokens * share),
        rejected={**whole.rejected, "not_drawn": whole.prompts - limit},
    )


# Adding up


def _add_up(
    recipe: Recipe,
    training: Sequence[SetPlan],
    evaluation: Sequence[SetPlan],
    tokens_per_second: float,
    answer_tokens: int | None,
    *,
    too_short: int,
) -> Plan:
    generate = recipe.generate
    cap, samples = generate.sampling.max_new_tokens, generate.samples_per_prompt
    config = text_config(read_target_config(Path(recipe.target.path)))
    states = len(recipe.target.profile.aux_layer_ids) + 1
    per_token = states * config["hidden_size"] * _STATE_BYTES + _ID_BYTES + _MASK_BYTES
    responses = output = most = response_bytes = state_bytes = 0
    for one in training:
        answers = one.turns * samples
        # Without an answer to go by, the longest that there can be.
        expected = answer_tokens if answer_tokens is not None else one.answer_tokens
        each = cap if expected is None else min(expected, cap)
        responses += answers
        output += answers * each
        most += answers * cap
        tokens = one.prompt_tokens * samples + answers * each
        # The answer's text is kept twice: as the server gave it, and split.
        text = one.characters_per_token * (one.prompt_tokens * samples + 2 * answers * each)
        response_bytes += round(_ID_BYTES * tokens + text)
        state_bytes += tokens * per_token
    return Plan(
        sets=(*training, *evaluation),
        responses=responses,
        output_tokens=output,
        output_tokens_at_most=most,
        tokens_per_second=tokens_per_second,
        hours=output / tokens_per_second / 3600,
        hours_at_most=most / tokens_per_second / 3600,
        response_bytes=response_bytes,
        hidden_state_bytes=state_bytes,
        evaluation_prompts_too_short=too_short,
    )


# Showing


def render(found: Plan, console: Console) -> None:
    """Print the plan, 80 columns wide."""
    console.print(_set_table(found))
    for one in found.sets:
        if one.rejected:
            reasons = ", ".join(f"{name} {count:,}" for name, count in _ranked(one.rejected))
            console.print(f"{one.name}: {reasons}", highlight=False, soft_wrap=True)
    facts = {
        "answers": f"{found.responses:,}",
        "tokens to generate": f"about {found.output_tokens:,}, at most "
        f"{found.output_tokens_at_most:,}",
        f"hours at {found.tokens_per_second:,.0f} tokens/s": f"about {found.hours:,.1f}, at most "
        f"{found.hours_at_most:,.1f}",
        "responses": f"about {_size(found.response_bytes)} before compression",
        "hidden states": f"about {_size(found.hidden_state_bytes)}",
    }
    table = Table(title="What they cost", title_justify="left", show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)
    if any(not one.is_exact for one in found.sets):
        console.print("~ estimated from a part of the set; copies elsewhere are not foreseen")
    if any(one.answer_tokens is None for one in found.sets if not one.is_held_out):
        console.print(
            "? no answers in the set to go by: max_new_tokens is taken; --answer-tokens says better"
        )
    if found.evaluation_prompts_too_short:
        console.print(
            f"{found.evaluation_prompts_too_short} evaluation prompts are shorter than "
            "selection.shared_words: their words are not looked for in training prompts"
        )


def _set_table(found: Plan) -> Table:
    table = Table(title="What the prompts will be", title_justify="left")
    table.add_column("set")
    table.add_column("format")
    for name in ("rows", "prompts", "rejected", "tokens p50", "p90", "answer"):
        table.add_column(name, justify="right")
    for place, one in enumerate(found.sets):
        about = "" if one.is_exact else "~"
        answer = "" if one.is_held_out else "?"
        last_of_training = place + 1 < len(found.sets) and found.sets[place + 1].is_held_out
        table.add_row(
            one.name,
            ", ".join(one.formats),
            f"{about}{one.rows:,}",
            f"{about}{one.prompts:,}",
            f"{about}{sum(one.rejected.values()):,}",
            f"{one.tokens_p50:,}",
            f"{one.tokens_p90:,}",
            answer if one.answer_tokens is None else f"{one.answer_tokens:,}",
            end_section=last_of_training and not one.is_held_out,
        )
    return table


def _ranked(rejected: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(rejected.items(), key=lambda one: (-one[1], one[0]))


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:,.3g} PB"
