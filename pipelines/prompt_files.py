"""The prompts of one set on their way to `prompts/<set>/`: spilled, sorted by id, cut into parts.

Memory does not grow with the set: a pile at a time is sorted, and of the rest a few MiB are held.
"""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.prepare_worker import ID_DIGITS, NOT_DRAWN, PREPARED_SCHEMA
from pipelines.schema import PROMPT_SCHEMA, REJECTED_PROMPT_SCHEMA
from pipelines.selection.language import LanguageProfile
from pipelines.selection.lengths import LengthProfile
from pipelines.sources.row import BadRow
from pipelines.store import write_parquet

_PILES = 256  # by the first two hex digits of the id's hash
_HELD_BYTES = 8 << 20  # before rows are spilled to their piles
_SORTED_BYTES = 4 << 20  # of piles that are sorted together: each by itself costs as much
_PART_ROWS, _PART_BYTES = 8192, 16 << 20  # of a file: what a reader has to hold
_DETAIL_CHARACTERS = 400


@dataclass
class PromptProfile:
    """What a set's prompts are like."""

    lengths: LengthProfile
    languages: LanguageProfile
    turns: int = 0  # answers that the prompts want
    cut_at_tool_turn: int = 0  # prompts whose conversation ends before a tool's result
    repaired: dict[str, int] = field(default_factory=dict)

    def count(self, prompts: pa.Table) -> None:
        """Count rows of `PREPARED_SCHEMA`."""
        self.lengths.add(pc.list_value_length(prompts["prompt_ids"]).to_numpy())
        self.languages.add(pc.drop_null(prompts["language"]).to_pylist())
        later = pc.sum(pc.list_value_length(prompts["continuations"])).as_py()
        self.turns += prompts.num_rows + later
        self.cut_at_tool_turn += pc.sum(prompts["cut_at_tool_turn"]).as_py()
        for one in pc.value_counts(prompts["repairs"]).to_pylist():
            if one["values"] != "[]":
                self._count_repairs(one["values"], one["counts"])

    def _count_repairs(self, repairs: str, rows: int) -> None:
        for name in sorted(set(repairs.strip("[]").replace('"', "").split(","))):
            self.repaired[name] = self.repaired.get(name, 0) + rows


class PromptFiles:
    """Writes one set below `building`; the caller renames or removes that folder."""

    def __init__(self, building: Path, name: str) -> None:
        self._name = name
        self._parts, self._spill = building / name, building / f".spill-{name}"
        self._rejected = building / "_rejected" / f"{name}.parquet"
        self._spill.mkdir(parents=True)
        self._held: list[pa.RecordBatch] = []
        self._held_bytes = 0
        self._piles: dict[int, pa.RecordBatchStreamWriter] = {}
        self._aside: pa.RecordBatchStreamWriter | None = None
        self.rejected = self.not_drawn = 0  # the first holds the second

    def add(self, prompts: pa.RecordBatch) -> None:
        """Take rows of `PREPARED_SCHEMA`."""
        self._held.append(prompts)
        self._held_bytes += prompts.nbytes
        if self._held_bytes >= _HELD_BYTES:
            self._spill_held()

    def set_aside(self, bad: Iterable[BadRow]) -> None:
        """Take rows that are no prompts."""
        rows = [
            {
                "file": one.file,
                "line": one.line,
                "dataset": self._name,
                "status": f"rejected:{one.reason}",
                "detail": one.detail[:_DETAIL_CHARACTERS],
            }
            for one in bad
        ]
        if not rows:
            return
        if self._aside is None:
            path = str(self._spill / "rejected")
            self._aside = pa.ipc.new_stream(path, REJECTED_PROMPT_SCHEMA)
        self._aside.write_batch(pa.RecordBatch.from_pylist(rows, REJECTED_PROMPT_SCHEMA))
        self.rejected += len(rows)

    def finish(self, *, drawn_below: int | None, context_tokens: int) -> PromptProfile:
        """Write the parts, ordered by sample id, and the rejected rows, ordered as they were read.

        Rows whose draw key is not below `drawn_below` are set aside as `not_drawn`.
        """
        profile = PromptProfile(LengthProfile(context_tokens), LanguageProfile())
        self._spill_held()
        for pile in self._piles.values():
            pile.close()
        piles = (self._read(some, drawn_below, profile) for some in self._pile_groups())
        for index, part in enumerate(_parts(piles)):
            write_parquet(self._parts / f"part-{index:05d}.parquet", part)
            del part  # before the next is put together
            pa.default_memory_pool().release_unused()
        self._write_rejected()
        shutil.rmtree(self._spill)
        return profile

    def close(self) -> None:
        """Release what is open, where a set is not finished."""
        for pile in self._piles.values():
            pile.close()
        if self._aside is not None:
            self._aside.close()

    def _spill_held(self) -> None:
        if not self._held:
            return
        table = pa.Table.from_batches(self._held, PREPARED_SCHEMA)
        self._held, self._held_bytes = [], 0
        numbers = _pile_numbers(table["sample_id"])
        order = np.argsort(numbers, kind="stable")
        ends = np.searchsorted(numbers[order], np.arange(_PILES + 1))
        sorted_rows = table.take(pa.array(order))
        for number in np.flatnonzero(np.diff(ends)).tolist():
            start, end = ends[number], ends[number + 1]
            if number not in self._piles:
                path = str(self._pile_path(number))
                self._piles[number] = pa.ipc.new_stream(path, PREPARED_SCHEMA)
            self._piles[number].write_table(sorted_rows.slice(start, end - start))
        del table, sorted_rows
        pa.default_memory_pool().release_unused()

    def _pile_path(self, number: int) -> Path:
        return self._spill / f"{number:03d}"

    def _pile_groups(self) -> Iterator[list[int]]:
        """Numbers of neighbouring piles, in order."""
        group: list[int] = []
        size = 0
        for number in sorted(self._piles):
            group.append(number)
            size += self._pile_path(number).stat().st_size
            if size >= _SORTED_BYTES:
                yield group
                group, size = [], 0
        if group:
            yield group

    def _read(self, piles: list[int], drawn_below: int | None, profile: PromptProfile) -> pa.Table:
        """Their rows that are drawn, ordered by sample id."""
        tables = []
        for number in piles:
            with pa.ipc.open_stream(str(self._pile_path(number))) as reader:
                tables.append(reader.read_all())
        pile = pa.concat_tables(tables).combine_chunks()
        if drawn_below is not None:
            drawn = pc.less(pile["draw_key"], pa.scalar(drawn_below, pa.uint64()))
            left = _not_drawn(pile.filter(pc.invert(drawn)))
            self.not_drawn += len(left)
            self.set_aside(left)
            pile = pile.filter(drawn)
        if pile.num_rows:
            profile.count(pile)
        pile = pile.select(PROMPT_SCHEMA.names).cast(PROMPT_SCHEMA)
        # In this thread: `sort_by` asks others, whose memory nobody can give back.
        return pile.take(pc.sort_indices(pile["sample_id"]))

    def _write_rejected(self) -> None:
        if self._aside is None:
            return
        self._aside.close()
        with pa.ipc.open_stream(str(self._spill / "rejected")) as reader:
            table = reader.read_all()
        # Files in the order in which they were read: the names of a folder are read sorted.
        table = table.sort_by([("file", "ascending"), ("line", "ascending")])
        write_parquet(self._rejected, table)


def _parts(piles: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Cut a stream of ordered tables into parts of bounded size; the same rows, the same parts."""
    waiting = PROMPT_SCHEMA.empty_table()
    for pile in piles:
        waiting = pa.concat_tables([waiting, pile])
        while (end := _end_of_part(waiting)) is not None:
            yield waiting.slice(0, end).combine_chunks()
            waiting = waiting.slice(end)
    if waiting.num_rows:
        yield waiting.combine_chunks()


def _end_of_part(rows: pa.Table) -> int | None:
    """Where the first part of these rows is full; None while there is room for more."""
    texts = [pc.binary_length(rows[name]).to_numpy() for name in ("messages", "tools")]
    size = 4 * pc.list_value_length(rows["prompt_ids"]).to_numpy().astype(np.int64)
    for one in texts:
        size += one
    end = int(np.searchsorted(np.cumsum(size), _PART_BYTES)) + 1
    end = min(end, _PART_ROWS)
    return end if rows.num_rows >= end else None


def _pile_numbers(sample_ids: pa.ChunkedArray) -> np.ndarray:
    """The first byte of each id's hash: piles in order, rows in order within them."""
    hexes = pc.utf8_slice_codeunits(sample_ids, -ID_DIGITS, 2 - ID_DIGITS)
    return np.fromiter((int(one, 16) for one in hexes.to_pylist()), np.int64, len(sample_ids))


def _not_drawn(rows: pa.Table) -> list[BadRow]:
    places = zip(rows["file"].to_pylist(), rows["line"].to_pylist(), strict=True)
    return [BadRow(file, line, "not_drawn", NOT_DRAWN) for file, line in places]
