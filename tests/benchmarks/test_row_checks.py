"""The chaos benchmark's own eyes: each broken promise is seen, and an unbroken one is not."""

import json
from datetime import datetime, timezone

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.row_checks import Findings, committed_rows, compare, durable_replies, prompt_ids_of
from pipelines.schema import RESPONSE_SCHEMA
from tests.support.scripted_answers import ScriptedTarget

PROMPTS = [f"chat-{number:012x}" for number in range(6)]
NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def target(tiny_target):
    return ScriptedTarget.of(tiny_target, "")


def row(target, number, **changes):
    prompt = [1, 40 + number, 50]
    ids = target.answer(prompt, 32, number)
    counts = {"prompt_tokens": 3, "completion_tokens": len(ids), "total_tokens": 3 + len(ids)}
    blank = {field.name: "" if pa.types.is_string(field.type) else 0 for field in RESPONSE_SCHEMA}
    return {
        **blank,
        "sample_id": PROMPTS[number],
        "prompt_id": PROMPTS[number],
        "prompt_ids": prompt,
        "output_ids": ids,
        "text": target.decode(ids),
        "usage": {**counts, "reasoning_tokens": 0, "cached_tokens": 0},
        "segments": [],
        "params": json.dumps({"max_new_tokens": 32, "sampling_seed": number}),
        "status": "ok",
        "weight_version": "default",
        "finished_at": NOON,
        **changes,
    }


def table(rows):
    return pa.Table.from_pylist(rows, schema=RESPONSE_SCHEMA)


def calm_rows(target):
    return [row(target, number) for number in range(6)]


def judged(target, rows):
    return compare(table(rows), table(calm_rows(target)), PROMPTS, target)


def test_the_same_rows_at_another_time_from_another_server_are_the_same(target):
    later = [row(target, n, attempt=4, server="http://b", latency_ms=9) for n in range(6)]
    assert judged(target, later) == Findings(0, 0, 0, 0, 6)


@pytest.mark.parametrize(
    ("change", "findings"),
    [
        (lambda rows, _: rows[:5], Findings(1, 0, 0, 1, 5)),
        (lambda rows, _: [*rows, rows[0]], Findings(0, 1, 0, 0, 7)),
        (lambda rows, _: [*rows, {**rows[0], "sample_id": "chat-x"}], Findings(0, 0, 1, 0, 7)),
        (
            lambda rows, target: [*rows[:5], row(target, 5, output_ids=[], status="failed:nan")],
            Findings(1, 0, 1, 2, 6),
        ),
        (
            lambda rows, target: [*rows[:5], row(target, 5, weight_version="b")],
            Findings(0, 0, 1, 1, 6),
        ),
        (lambda rows, target: [*rows[:5], row(target, 5, text="x")], Findings(0, 0, 1, 1, 6)),
        (lambda rows, target: [*rows[:5], row(target, 5, detail="x")], Findings(0, 0, 0, 1, 6)),
    ],
)
def test_each_broken_promise_is_seen(target, change, findings):
    assert judged(target, change(calm_rows(target), target)) == findings


def test_another_schema_is_malformed(target):
    rows = table(calm_rows(target))
    wider = rows.set_column(
        rows.schema.get_field_index("attempt"), "attempt", rows["attempt"].cast(pa.int64())
    )
    assert compare(wider, rows, PROMPTS, target).malformed == 6


def test_rows_are_read_from_where_a_run_puts_them(tmp_path, target):
    rows = calm_rows(target)
    folders = {
        "responses/chat": rows[3:],
        "responses/_rejected/chat": [row(target, 2, status="failed:nan"), rows[1]],
        "prompts/chat": rows,
    }
    for folder, its in folders.items():
        (tmp_path / folder).mkdir(parents=True)
        pq.write_table(table(its), tmp_path / folder / "part-0.parquet")
    segments = tmp_path / "responses" / "_segments" / "chat"
    segments.mkdir(parents=True)
    with pa.ipc.new_file(str(segments / "a-000000-x.arrow"), RESPONSE_SCHEMA) as writer:
        writer.write_table(table(rows[:1]))
    assert committed_rows(tmp_path)["sample_id"].to_pylist() == PROMPTS[1:]
    assert prompt_ids_of(tmp_path) == PROMPTS
    assert durable_replies(tmp_path) == {one: NOON for one in PROMPTS if one != PROMPTS[2]}
