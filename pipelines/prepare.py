"""Stage prepare: source rows become prompts, checked, tokenised once, kept in a fixed order."""

import hashlib
import logging
import os
import shutil
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipelines.conversation import HistoryRule
from pipelines.errors import BadRecipe, PreflightFailed
from pipelines.recipe import PromptSet, Recipe
from pipelines.schema import PROMPT_SCHEMA, REJECTED_PROMPT_SCHEMA
from pipelines.sources.files import read_prompts
from pipelines.sources.row import BadRow, SourceRow, dump_json
from pipelines.store import RunFolder, write_parquet
from pipelines.telemetry import EventLog
from pipelines.template import (
    ChatTemplate,
    NotRendered,
    Rendered,
    check_profile,
    load_tokenizer,
    read_target_config,
    text_config,
)
from pipelines.turns import Turns, asked, check_history_reasoning, history_rule, render_turns

logger = logging.getLogger(__name__)

_BATCH_ROWS = 256  # rendered and tokenised together
_ROWS_PER_PART = 8192
_ID_DIGITS = 12
_HEX = "0123456789abcdef"
_DETAIL_CHARACTERS = 400


def prepare(recipe: Recipe, run: RunFolder, events: EventLog) -> dict[str, Any]:
    """Write `prompts/<set>/part-*.parquet`, ordered by sample id, and return the counts.

    All sets or none: they are built beside and renamed at the end. Prompts that cannot be used stop
    the run or are kept in `prompts/_rejected/<set>.parquet`, as `on_bad_prompt` says. An evaluation
    prompt that equals a training prompt always stops it. Raises `BadRecipe`, `PreflightFailed`.
    """
    config = read_target_config(Path(recipe.target.path))
    tokenizer = load_tokenizer(recipe.target)
    check_profile(tokenizer, recipe.target.profile, config)
    _check_context(recipe, text_config(config)["max_position_embeddings"])

    building = run.root / f".prompts.{os.getpid()}"
    _remove_leftovers(run)
    try:
        sets = _build(recipe, ChatTemplate(tokenizer, recipe.target.profile), building)
        _put_in_place(building, run)
    finally:
        shutil.rmtree(building, ignore_errors=True)
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


@dataclass
class _Tally:
    """What happened to one set's rows: rows = prompts + rejected."""

    rows: int = 0
    turns: int = 0  # answers that the prompts want
    cut_at_tool_turn: int = 0  # prompts whose conversation ends before a tool's result
    lengths: array = field(default_factory=lambda: array("l"))
    rejected: list[dict[str, Any]] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def counts(self) -> dict[str, Any]:
        lengths = sorted(self.lengths)
        assert self.rows == len(lengths) + len(self.rejected)
        return {
            "rows": self.rows,
            "prompts": len(lengths),
            "turns": self.turns,
            "cut_at_tool_turn": self.cut_at_tool_turn,
            "rejected": dict(sorted(self.reasons.items())),
            "prompt_tokens": sum(lengths),  # up to turn 1, as are the next
            "tokens_p50": lengths[len(lengths) // 2],
            "tokens_p90": lengths[len(lengths) * 9 // 10],
            "tokens_max": lengths[-1],
        }


def _build(recipe: Recipe, template: ChatTemplate, folder: Path) -> dict[str, dict[str, Any]]:
    check_history_reasoning(template, recipe.target.profile)
    every = recipe.prompts.turns == "every"
    rule = history_rule(template, recipe.target.profile) if every else None
    trained_on: dict[bytes, tuple[str, int]] = {}
    counts = {}
    for one in recipe.prompts.train:
        work = _SetWork(recipe, template, one, folder, rule)
        for row in work.run():
            for said in _said_by_turn(row) if every else [_said(row)]:
                trained_on.setdefault(said, (one.path, row.line))
        counts[one.name] = work.finish()
    for one in recipe.prompts.evaluation:
        work = _SetWork(recipe, template, one, folder, None)
        for row in work.run():
            # Training conversations hold no answers of their set, so those cannot tell two apart.
            if (said := _said(asked(row)[0] if every else row)) in trained_on:
                path, line = trained_on[said]
                raise BadRecipe(
                    f"the evaluation prompt {one.path}:{row.line} is also a training prompt, "
                    f"{path}:{line}",
                    expected="evaluation prompts that the draft never saw",
                    change="remove one of the two lines",
                )
        counts[one.name] = work.finish()
    return counts


class _SetWork:
    """One set on its way from its source to its parts. Holds a sixteenth of it in memory, at most.

    Rows are spilled by the first hex digit of their id, so that each pile can be sorted alone.
    With a `rule`, every user message of a conversation becomes a turn; without, the last one is
    asked.
    """

    def __init__(
        self,
        recipe: Recipe,
        template: ChatTemplate,
        one: PromptSet,
        building: Path,
        rule: HistoryRule | None,
    ) -> None:
        self._prompts, self._template, self._set = recipe.prompts, template, one
        self._rule = rule
        self._parts = building / one.name
        self._rejected = building / "_rejected" / f"{one.name}.parquet"
        self._spill = building / f".spill-{one.name}"
        self._writers: dict[str, pa.RecordBatchFileWriter] = {}
        self._seen: dict[str, tuple[str, int]] = {}  # id -> whole hash, line
        self._tally = _Tally()

    def run(self) -> Iterator[SourceRow]:
        """Work through the source; yield each row that became a prompt."""
        self._spill.mkdir(parents=True)
        rows = read_prompts(Path(self._set.path))
        while batch := list(islice(rows, _BATCH_ROWS)):
            self._tally.rows += len(batch)
            yield from self._work(batch)
        if not self._tally.rows:
            raise self._empty("no rows")
        if not self._tally.lengths:
            reason, count = self._tally.reasons.most_common(1)[0]
            raise self._empty(f"no usable prompt; {count} of {self._tally.rows} rows: {reason}")

    def finish(self) -> dict[str, Any]:
        """Write the parts and the rejected rows; return the counts."""
        for writer in self._writers.values():
            writer.close()
        for index, table in enumerate(_parts(self._piles())):
            write_parquet(self._parts / f"part-{index:05d}.parquet", table)
        shutil.rmtree(self._spill)
        if self._tally.rejected:
            self._tally.rejected.sort(key=lambda row: row["line"])
            table = pa.Table.from_pylist(self._tally.rejected, REJECTED_PROMPT_SCHEMA)
            write_parquet(self._rejected, table)
        counts = self._tally.counts()
        logger.info(
            "prepared %s: %s prompts, %s rejected, %s tokens (median %s, most %s)",
            self._set.name,
            f"{counts['prompts']:,}",
            f"{len(self._tally.rejected):,}",
            f"{counts['prompt_tokens']:,}",
            counts["tokens_p50"],
            counts["tokens_max"],
        )
        return counts

    def _work(self, batch: list[SourceRow | BadRow]) -> Iterator[SourceRow]:
        new: list[SourceRow] = []
        cut: set[int] = set()  # lines
        for row in batch:
            if isinstance(row, BadRow):
                self._reject(row)
                continue
            wanted, at_tool = (row, False) if self._rule is None else asked(row)
            if self._is_new(wanted):
                new.append(wanted)
                cut |= {row.line} if at_tool else set()
        done: dict[str, list[dict[str, Any]]] = {}
        for row, turns in zip(new, self._render(new), strict=True):
            if isinstance(turns, NotRendered):
                self._reject(BadRow(row.file, row.line, turns.reason, turns.detail))
            elif self._fits(row, len(turns.prompt_ids)):
                digest = row.content_sha256
                done.setdefault(digest[0], []).append(self._record(row, turns, digest))
                self._tally.lengths.append(len(turns.prompt_ids))
                self._tally.turns += 1 + len(turns.continuations)
                self._tally.cut_at_tool_turn += row.line in cut
                yield row
        for digit, records in done.items():
            self._writer(digit).write_table(pa.Table.from_pylist(records, PROMPT_SCHEMA))

    def _render(self, rows: list[SourceRow]) -> list[Turns | NotRendered]:
        """Texts first, then all of them tokenised together; several turns have proofs of theirs."""
        if self._rule is not None:
            rule = self._rule
            return [render_turns(self._template, rule, one.messages, one.tools) for one in rows]
        texts = [self._template.render_text(one.messages, one.tools) for one in rows]
        whole = iter(self._template.tokenise([one for one in texts if isinstance(one, str)]))
        rendered = [next(whole) if isinstance(one, str) else one for one in texts]
        return [
            Turns(one.prompt_ids, [], []) if isinstance(one, Rendered) else one for one in rendered
        ]

    def _is_new(self, row: SourceRow) -> bool:
        digest = row.content_sha256
        first, line = self._seen.setdefault(digest[:_ID_DIGITS], (digest, row.line))
        if line == row.line:
            return True
        same = first == digest
        self._reject(
            BadRow(
                row.file,
                row.line,
                "duplicate" if same else "id_collision",
                f"the same {'prompt' if same else 'id'} as line {line}",
            )
        )
        return False

    def _fits(self, row: SourceRow, tokens: int) -> bool:
        prompts = self._prompts
        # SGLang keeps one position of the context for itself.
        if tokens + prompts.min_response_tokens + 1 <= prompts.context_tokens:
            return True
        detail = (
            f"{tokens} tokens, a response of {prompts.min_response_tokens} and one more exceed "
            f"context_tokens {prompts.context_tokens}"
        )
        self._reject(BadRow(row.file, row.line, "prompt_too_long", detail))
        return False

    def _record(self, row: SourceRow, turns: Turns, digest: str) -> dict[str, Any]:
        return {
            "sample_id": f"{self._set.name}-{digest[:_ID_DIGITS]}",
            "dataset": self._set.name,
            "domain": self._set.domain,
            "messages": dump_json(row.messages),
            "tools": dump_json(row.tools),
            "tools_given": dump_json(row.tools_given),
            "repairs": dump_json(row.repairs),
            "format": row.format,
            "prompt_ids": turns.prompt_ids,
            "history": turns.history,
            "continuations": turns.continuations,
            "source": row.source,
            "license": row.license,
        }

    def _reject(self, bad: BadRow) -> None:
        detail = bad.detail[:_DETAIL_CHARACTERS]
        if self._prompts.on_bad_prompt == "stop":
            raise BadRecipe(
                f"{self._set.path}:{bad.line} is not a usable prompt: {bad.reason}: {detail}",
                expected="every row of a set to be usable, since on_bad_prompt is stop",
                change="mend or remove the row, or set prompts.on_bad_prompt to reject",
            )
        self._tally.reasons[bad.reason] += 1
        self._tally.rejected.append(
            {
                "file": bad.file,
                "line": bad.line,
                "dataset": self._set.name,
                "status": f"rejected:{bad.reason}",
                "detail": detail,
            }
        )

    def _writer(self, digit: str) -> pa.RecordBatchFileWriter:
        if digit not in self._writers:
            path = str(self._spill / digit)
            self._writers[digit] = pa.ipc.new_file(path, PROMPT_SCHEMA)
        return self._writers[digit]

    def _piles(self) -> Iterator[pa.Table]:
        for digit in _HEX:
            if digit in self._writers:
                with pa.ipc.open_file(str(self._spill / digit)) as reader:
                    yield reader.read_all().sort_by("sample_id")

    def _empty(self, seen: str) -> BadRecipe:
        return BadRecipe(
            f"the prompt set {self._set.name} ({self._set.path}) has {seen}",
            expected="at least one usable prompt in every set",
            change="correct the file or its path in the recipe",
        )


def _parts(piles: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Cut a stream of tables into tables of `_ROWS_PER_PART` rows; only the last may be shorter."""
    waiting = PROMPT_SCHEMA.empty_table()
    for pile in piles:
        waiting = pa.concat_tables([waiting, pile])
        while waiting.num_rows >= _ROWS_PER_PART:
            yield waiting.slice(0, _ROWS_PER_PART).combine_chunks()
            waiting = waiting.slice(_ROWS_PER_PART)
    if waiting.num_rows:
        yield waiting.combine_chunks()


def _said(row: SourceRow) -> bytes:
    """What a prompt says, whatever its case, spacing and tools: two that say it are one."""
    turns = [f"{one['role']}:{' '.join(one['content'].casefold().split())}" for one in row.messages]
    return hashlib.sha256("\n".join(turns).encode()).digest()


def _said_by_turn(row: SourceRow) -> Iterator[bytes]:
    """What each turn of a conversation says, its own answers aside."""
    for end, message in enumerate(row.messages, start=1):
        if message["role"] == "user":
            yield _said(replace(row, messages=row.messages[:end]))


def _check_context(recipe: Recipe, longest: int) -> None:
    wanted = recipe.prompts.context_tokens
    if wanted > longest:
        raise PreflightFailed(
            f"prompts.context_tokens is {wanted}, the target reads {longest}",
            expected="no more than the target's max_position_embeddings",
            change=f"set prompts.context_tokens to {longest} or less",
        )


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
