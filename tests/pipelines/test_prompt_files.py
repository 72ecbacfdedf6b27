"""Prompts on their way to parts: ordered, cut by rows and bytes, in memory that does not grow."""

import hashlib
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import prompt_files as module
from pipelines.prepare_worker import NOT_DRAWN, PREPARED_SCHEMA
from pipelines.prompt_files import PromptFiles
from pipelines.schema import PROMPT_SCHEMA, REJECTED_PROMPT_SCHEMA
from pipelines.sources.row import BadRow


def prompt(number: int, *, ids: int = 3, repairs: tuple[str, ...] = ()) -> dict:
    digest = hashlib.sha256(str(number).encode()).hexdigest()
    return {
        "sample_id": f"birds-{digest[:12]}",
        "dataset": "birds",
        "domain": "chat",
        "messages": f'[{{"role":"user","content":"{number}"}}]',
        "tools": "[]",
        "tools_given": "null",
        "repairs": json.dumps(repairs, separators=(",", ":")),
        "format": "messages",
        "prompt_ids": [number] * ids,
        "history": [],
        "continuations": [[1], [2]] if number % 2 else [],
        "source": "s",
        "license": "l",
        "file": "b.jsonl" if number % 2 else "a.jsonl",
        "line": number + 1,
        "draw_key": number,
        "cut_at_tool_turn": number == 0,
        "language": "en" if number < 4 else None,
    }


def batch(*rows: dict) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), PREPARED_SCHEMA)


@pytest.fixture
def write(tmp_path):
    """A function that writes prompts and returns the profile and the parts."""

    def run(rows, *, drawn_below=None, at_once=7):
        files = PromptFiles(tmp_path / f"of-{len(list(tmp_path.iterdir()))}", "birds")
        for start in range(0, len(rows), at_once):
            files.add(batch(*rows[start : start + at_once]))
        files.set_aside([BadRow("b.jsonl", 90, "empty_content", "x" * 500)])
        files.set_aside([])
        profile = files.finish(drawn_below=drawn_below, context_tokens=64)
        folder = files._parts
        return profile, files, [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]

    return run


def test_rows_come_out_ordered_by_id_with_the_pinned_schema_and_no_more(write):
    _, files, (table,) = write([prompt(n) for n in range(50)])
    assert table.schema.equals(PROMPT_SCHEMA, check_metadata=True)
    ids = table["sample_id"].to_pylist()
    assert ids == sorted(ids)
    assert set(ids) == {prompt(n)["sample_id"] for n in range(50)}
    rejected = pq.read_table(files._rejected)
    assert rejected.schema.equals(REJECTED_PROMPT_SCHEMA, check_metadata=True)
    assert rejected.to_pylist()[0]["detail"] == "x" * 400
    assert not files._spill.exists()


def test_what_is_held_and_how_rows_arrive_changes_nothing(write, monkeypatch):
    rows = [prompt(n) for n in range(50)]
    _, _, (table,) = write(rows)
    monkeypatch.setattr(module, "_HELD_BYTES", 500)
    for together in (1, 2000, 1 << 20):
        monkeypatch.setattr(module, "_SORTED_BYTES", together)
        _, _, (other,) = write(rows[::-1], at_once=3)
        assert other.equals(table)


def test_a_part_ends_by_rows_or_by_bytes_and_the_next_begins_there(write, monkeypatch):
    rows = [prompt(n, ids=60) for n in range(20)]
    monkeypatch.setattr(module, "_PART_ROWS", 8)
    _, _, parts = write(rows)
    assert [part.num_rows for part in parts] == [8, 8, 4]
    monkeypatch.setattr(module, "_PART_BYTES", 1000)  # a row is some 275 bytes
    _, _, parts = write(rows)
    assert [part.num_rows for part in parts] == [4, 4, 4, 4, 4]
    ids = [one for part in parts for one in part["sample_id"].to_pylist()]
    assert ids == sorted(ids)


def test_what_is_not_drawn_is_set_aside_in_the_order_of_the_source(write):
    profile, files, (table,) = write([prompt(n) for n in range(20)], drawn_below=5)
    assert table.num_rows == profile.lengths.count == 5
    assert (files.not_drawn, files.rejected) == (15, 16)
    aside = pq.read_table(files._rejected).to_pylist()
    places = [(row["file"], row["line"]) for row in aside]
    assert places == sorted(places)
    undrawn = [row for row in aside if row["status"] == "rejected:not_drawn"]
    assert {row["detail"] for row in undrawn} == {NOT_DRAWN}
    assert {row["line"] for row in undrawn} == set(range(6, 21))


def test_the_profile_is_of_the_rows_that_stay(write):
    rows = [prompt(n, ids=n + 1, repairs=("bom_removed", "parts_joined")) for n in range(3)]
    rows += [prompt(n, ids=n + 1, repairs=("bom_removed",)) for n in range(3, 6)]
    profile, _, _ = write(rows, drawn_below=5)
    assert profile.lengths.max == 5
    assert profile.turns == 5 + 2 * 2  # the odd ones have two further turns
    assert profile.cut_at_tool_turn == 1
    assert profile.repaired == {"bom_removed": 5, "parts_joined": 3}
    assert profile.languages.shares(top=5) == {"en": 1.0}


def test_closing_releases_what_was_not_finished(tmp_path):
    files = PromptFiles(tmp_path, "birds")
    files.add(batch(prompt(1)))
    files.set_aside([BadRow("a", 1, "no_question", "")])
    files.close()
    files.close()
