"""Rows of a chunk become prompts: parsed, selected where a row alone decides, rendered, tokenised.

Everything here is a function of the chunk and of what the process was started with, so that any
number of processes give the same prompts. What needs the other rows is decided by `prepare`.
"""

import hashlib
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import parent_process
from pathlib import Path
from threading import Thread
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from pipelines.conversation import HistoryRule
from pipelines.recipe import Prompts, Recipe, Selection
from pipelines.schema import PROMPT_SCHEMA
from pipelines.selection.contamination import EvaluationPassages
from pipelines.selection.draw import draw_key
from pipelines.selection.language import UNTOLD, language_of
from pipelines.selection.near_duplicates import signatures
from pipelines.selection.seen import ID_BYTES
from pipelines.sources.files import Chunk, rows_of
from pipelines.sources.formats import format_of
from pipelines.sources.messages import parse_row
from pipelines.sources.row import BadRow, FormatName, Reason, SourceRow, dump_json
from pipelines.template import ChatTemplate, NotRendered, Rendered, load_tokenizer
from pipelines.turns import Turns, asked, first_question, history_rule, render_turns

ID_DIGITS = 2 * ID_BYTES
NOT_DRAWN = "the recipe draws fewer rows of this set"
_PROFILED_ROWS = 200  # of each file, whose language is looked at; later on, one row in
_PROFILED_EVERY = 64

# A prompt, and what the driver needs to know of it until all are there.
PREPARED_SCHEMA = pa.schema(
    [
        *PROMPT_SCHEMA,
        pa.field("file", pa.string(), nullable=False),
        pa.field("line", pa.int64(), nullable=False),
        pa.field("draw_key", pa.uint64(), nullable=False),
        pa.field("cut_at_tool_turn", pa.bool_(), nullable=False),
        pa.field("language", pa.string()),  # null where nobody looked
    ]
)


@dataclass(frozen=True)
class SetRules:
    """How the rows of one set are read and judged."""

    name: str
    domain: str
    format: FormatName
    turns: Literal["first", "last", "every"]
    selection: Selection | None  # None for a held-out set, which is asked whole
    held_out: Path | None = None  # what evaluation prompts ask; None where nobody compares


@dataclass(frozen=True)
class Task:
    """A chunk to work through. A row whose draw key is not below `draw_below` cannot be drawn."""

    chunk: Chunk
    rules: SetRules
    draw_below: int | None


@dataclass(frozen=True, eq=False)
class Worked:
    """What became of a chunk: rows = prompts + rejected."""

    rows: int
    read_bytes: int  # of the chunk's file, for the chunk
    prompts: pa.RecordBatch  # PREPARED_SCHEMA, in order
    digests: tuple[bytes, ...]  # of each prompt: SHA-256 of its messages and tools
    said: tuple[tuple[bytes, ...], ...]  # of each prompt: what its turns say, see `said_by`
    signatures: np.ndarray | None  # [prompts, 128] uint32
    rejected: tuple[BadRow, ...]  # in order
    answer_characters: int  # of the set's own answers to these prompts


@dataclass(frozen=True)
class _Wanted:
    """A row that was not refused so far."""

    row: SourceRow
    digest: bytes  # SHA-256 of its messages and tools
    key: int
    cut_at_tool_turn: bool

    def refused(self, reason: Reason, detail: str) -> BadRow:
        """The row, as one that is no prompt."""
        return BadRow(self.row.file, self.row.line, reason, detail)


@dataclass(frozen=True)
class _Made:
    """A row that the template could render."""

    want: _Wanted
    turns: Turns
    text: str  # `asked_text`


class PromptMaker:
    """Makes prompts with one target's tokenizer and template."""

    def __init__(self, recipe: Recipe, template: ChatTemplate) -> None:
        self._prompts: Prompts = recipe.prompts
        self._template = template
        every = recipe.prompts.turns == "every"
        self._rule: HistoryRule | None = (
            history_rule(template, recipe.target.profile) if every else None
        )

    def make(self, task: Task) -> Worked:
        """Work through a chunk."""
        rules = task.rules
        rejected: list[BadRow] = []
        wanted: list[_Wanted] = []
        rows = 0
        for one in _parsed(task):
            rows += 1
            found = one if isinstance(one, BadRow) else self._want(one, task)
            if isinstance(found, BadRow):
                rejected.append(found)
            else:
                wanted.append(found)
        made: list[_Made] = []
        rendered = self._render([one.row for one in wanted], rules)
        for want, turns in zip(wanted, rendered, strict=True):
            if isinstance(turns, NotRendered):
                rejected.append(want.refused(turns.reason, turns.detail))
            elif (too_long := self._too_long(want, turns)) is not None:
                rejected.append(too_long)
            else:
                made.append(_Made(want, turns, asked_text(want.row)))
        if rules.selection is not None:
            made, left_out = _select(made, rules.selection, rules.held_out)
            rejected += left_out
        return self._worked(task, rows, made, rejected)

    def _want(self, row: SourceRow, task: Task) -> _Wanted | BadRow:
        rules, cut = task.rules, False
        if rules.turns == "every":
            row, cut = asked(row)
        elif rules.turns == "first":
            row = first_question(row)
        seed = 0 if rules.selection is None else rules.selection.seed
        digest = row.content_sha256
        key = draw_key(seed, rules.name, digest)
        if task.draw_below is not None and key >= task.draw_below:
            return BadRow(row.file, row.line, "not_drawn", NOT_DRAWN)
        return _Wanted(row, bytes.fromhex(digest), key, cut)

    def _render(self, rows: list[SourceRow], rules: SetRules) -> list[Turns | NotRendered]:
        """Texts first, then all of them tokenised together; several turns have proofs of theirs."""
        if rules.turns == "every":
            rule = self._rule
            assert rule is not None
            return [render_turns(self._template, rule, one.messages, one.tools) for one in rows]
        texts = [self._template.render_text(one.messages, one.tools) for one in rows]
        whole = iter(self._template.tokenise([one for one in texts if isinstance(one, str)]))
        rendered = [next(whole) if isinstance(one, str) else one for one in texts]
        return [
            Turns(one.prompt_ids, [], []) if isinstance(one, Rendered) else one for one in rendered
        ]

    def _too_long(self, want: _Wanted, turns: Turns) -> BadRow | None:
        tokens, prompts = len(turns.prompt_ids), self._prompts
        # SGLang keeps one position of the context for itself.
        if tokens + prompts.min_response_tokens + 1 <= prompts.context_tokens:
            return None
        detail = (
            f"{tokens} tokens, a response of {prompts.min_response_tokens} and one more exceed "
            f"context_tokens {prompts.context_tokens}"
        )
        return want.refused("prompt_too_long", detail)

    def _worked(self, task: Task, rows: int, made: list[_Made], rejected: list[BadRow]) -> Worked:
        rules, every = task.rules, self._prompts.turns == "every"
        selection = rules.selection
        wants_signatures = selection is not None and selection.near_duplicates is not None
        said_rows = [asked(one.want.row)[0] if every else one.want.row for one in made]
        return Worked(
            rows=rows,
            read_bytes=task.chunk.read_bytes,
            prompts=pa.RecordBatch.from_pylist(
                [_record(one, rules) for one in made], PREPARED_SCHEMA
            ),
            digests=tuple(one.want.digest for one in made),
            said=tuple(said_by(row, by_turn=rules.turns == "every") for row in said_rows),
            signatures=signatures([one.text for one in made]) if wants_signatures else None,
            rejected=tuple(sorted(rejected, key=lambda bad: bad.line)),
            answer_characters=sum(len(one.want.row.answer) for one in made),
        )


def asked_text(row: SourceRow) -> str:
    """What is asked: the users' words and the tools' results. Two prompts that share it are one."""
    return "\n".join(one["content"] for one in row.messages if one["role"] in ("user", "tool"))


def said_by(row: SourceRow, *, by_turn: bool) -> tuple[bytes, ...]:
    """Hashes of what is said, whatever its case, spacing and tools; of each turn, or of the whole.

    A conversation whose turns are all asked holds no answers of its set, so those cannot tell it
    from another one, and each of its turns may be what another one asks.
    """
    if not by_turn:
        return (_said(row.messages),)
    ends = [end for end, one in enumerate(row.messages, start=1) if one["role"] == "user"]
    return tuple(_said(row.messages[:end]) for end in ends)


def _said(messages: Sequence[dict[str, Any]]) -> bytes:
    turns = [f"{one['role']}:{' '.join(one['content'].casefold().split())}" for one in messages]
    return hashlib.sha256("\n".join(turns).encode()).digest()[:16]


def _parsed(task: Task) -> Iterator[SourceRow | BadRow]:
    reader = format_of(task.rules.format)
    for line, value in rows_of(task.chunk):
        if isinstance(value, BadRow):
            yield value
        else:
            yield parse_row(value, reader, file=task.chunk.file, line=line)


def _select(
    made: list[_Made], selection: Selection, held_out: Path | None
) -> tuple[list[_Made], list[BadRow]]:
    """What the recipe wants of the usable rows, and the others."""
    overlaps: Sequence[tuple[str, str] | None] = [None] * len(made)
    if held_out is not None and selection.shared_words is not None:
        passages = passages_of(held_out, selection.shared_words)
        overlaps = passages.overlaps([one.text for one in made])
    kept, left_out = [], []
    for one, overlap in zip(made, overlaps, strict=True):
        why = _unwanted(one, selection, overlap)
        if why is None:
            kept.append(one)
        else:
            left_out.append(one.want.refused(*why))
    return kept, left_out


@lru_cache(maxsize=1)
def passages_of(held_out: Path, words: int) -> EvaluationPassages:
    """Every run of so many words in a JSON file of texts by name, made once in a process."""
    return EvaluationPassages(json.loads(held_out.read_bytes()), words)


def _unwanted(
    one: _Made, selection: Selection, overlap: tuple[str, str] | None
) -> tuple[Reason, str] | None:
    tokens = len(one.turns.prompt_ids)
    if tokens < selection.min_prompt_tokens:
        return "prompt_too_short", f"{tokens} tokens, least are {selection.min_prompt_tokens}"
    if selection.max_prompt_tokens is not None and tokens > selection.max_prompt_tokens:
        return "prompt_too_long", f"{tokens} tokens, most are {selection.max_prompt_tokens}"
    if selection.languages is not None:
        language = language_of(one.text)
        if language not in {*selection.languages, *UNTOLD}:
            return "other_language", f"it reads as {language}"
    if overlap is not None:
        evaluated, passage = overlap
        return "contaminated", f"evaluation prompt {evaluated} has the same words: {passage}"
    return None


def _record(one: _Made, rules: SetRules) -> dict[str, Any]:
    want, row, turns, selection = one.want, one.want.row, one.turns, rules.selection
    looked_at = row.line <= _PROFILED_ROWS or want.key % _PROFILED_EVERY == 0
    looked_at |= selection is not None and selection.languages is not None
    return {
        "sample_id": f"{rules.name}-{want.digest.hex()[:ID_DIGITS]}",
        "dataset": rules.name,
        "domain": rules.domain,
        "messages": dump_json(row.messages),
        "tools": dump_json(row.tools) if row.tools else "[]",
        "tools_given": "null" if row.tools_given is None else dump_json(row.tools_given),
        "repairs": dump_json(row.repairs) if row.repairs else "[]",
        "format": row.format,
        "prompt_ids": turns.prompt_ids,
        "history": turns.history,
        "continuations": turns.continuations,
        "source": row.source,
        "license": row.license,
        "file": row.file,
        "line": row.line,
        "draw_key": want.key,
        "cut_at_tool_turn": want.cut_at_tool_turn,
        "language": language_of(one.text) if looked_at else None,
    }


# A process of the pool: one maker, made once

_MAKER: PromptMaker | None = None


def start_worker(recipe: Recipe) -> None:
    """Make this process's maker. The tokenizer is single-threaded: there is a process per core."""
    global _MAKER
    Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if not recipe.target.trust_remote_code:
        # A tokenizer has no use for torch, and transformers imports what it can: 4 s, 180 MiB.
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type]  # None: not to be found
    tokenizer = load_tokenizer(recipe.target)
    _MAKER = PromptMaker(recipe, ChatTemplate(tokenizer, recipe.target.profile))


def is_ready() -> bool:
    """Whether this process has its maker."""
    return _MAKER is not None


def _end_with_parent() -> None:
    """A killed parent closes no queue that its children hold too: they would wait for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    signal.raise_signal(signal.SIGKILL)


def work(task: Task) -> Worked:
    """`PromptMaker.make` in a process that `start_worker` has set up."""
    assert _MAKER is not None
    return _MAKER.make(task)
