"""Several processes see what one sees, to the line."""

import json
from pathlib import Path

import pytest

from pipelines.glance import glance
from pipelines.glancing import whole
from pipelines.glancing.look import Look, Wish
from pipelines.glancing.reading import Reading
from tests.support.faulty_files import answer, lines


@pytest.fixture
def mixed(tmp_path) -> Path:
    """Rows with faults in several parts of the file, and half a line at its end."""
    rows = [answer(number, content=f"{number} " * (number % 50)) for number in range(900)]
    rows[700] = rows[100]
    rows[800]["usage"] = None
    content = lines(rows).split(b"\n")
    content[450] = b"{broken"
    content[880] = b"[1]"
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join(content) + b'{"half": ')
    return path


def test_parts_together_say_what_one_pass_says(mixed, monkeypatch):
    whole_wish = Wish(show=2, field="usage.completion_tokens", full=True)
    alone = glance([str(mixed)], full=True, show=2, field="usage.completion_tokens").sets[0]
    monkeypatch.setattr(whole, "SPAN_BYTES", 9_000)
    reading = Reading(mixed, mixed.stat().st_size, None, "JSONL")
    assert whole.is_worth_it(reading)
    look = Look(whole_wish)
    whole.look_at_all(reading, look)
    assert (reading.row_count, reading.rows_exact) == (alone.rows, True)
    assert reading.ends_in_half_line
    assert look.profile.fields()[0].filled == alone.rows
    assert {one.name: one.missing for one in look.profile.fields()} == {
        one.name: one.missing for one in alone.fields
    }
    assert [str(one.at) for one in reading.notes.lost] == ["line 451", "line 881"]
    assert look.health.same_id.twice().first == "b1-000000000064"
    assert look.drill is not None
    assert alone.field is not None
    assert look.drill.result().quantiles == alone.field.quantiles
    assert look.drill.result().null + look.drill.result().missing == 1
    assert look.health.tokens.histogram() == (alone.responses.completion_tokens.histogram)


def test_the_command_reads_a_large_file_by_parts(mixed, monkeypatch):
    monkeypatch.setattr(whole, "SPAN_BYTES", 40_000)
    one = glance([str(mixed)], full=True).sets[0]
    assert (one.rows, one.rows_exact, one.malformed_count) == (898, True, 2)
    assert one.malformed[1].startswith("line 881")
    assert {"duplicate_id", "usage_absent", "malformed_lines"} <= {f.name for f in one.findings}
    json.dumps(glance([str(mixed)], full=True).to_json())


def test_only_long_plain_lines_are_worth_more_processes(tmp_path):
    path, size = tmp_path / "rows.jsonl", 3 * whole.SPAN_BYTES
    assert whole.is_worth_it(Reading(path, size, None, "JSONL"))
    assert not whole.is_worth_it(Reading(path, size, 1_000, "JSONL"))
    assert not whole.is_worth_it(Reading(path, size, None, "JSON"))
    assert not whole.is_worth_it(Reading(path, whole.SPAN_BYTES, None, "JSONL"))
