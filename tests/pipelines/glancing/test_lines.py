"""Lines of large, growing and broken files, at the head, the tail and between."""

import os
import random

import pytest

from pipelines.glancing import lines as module
from pipelines.glancing.lines import all_lines, joined_objects, lines_between, sampled_lines
from pipelines.glancing.places import opened
from pipelines.glancing.reading import At, Reading
from tests.support.faulty_files import answer, lines


def reading_of(path, content: bytes, budget: int | None = None) -> Reading:
    path.write_bytes(content)
    return Reading(path, len(content), budget, "JSONL")


def test_spans_that_tile_a_file_give_every_row_once_wherever_they_meet(tmp_path):
    rows = [answer(n, content="x" * (n * 37 % 400)) for n in range(60)]
    reading = reading_of(tmp_path / "rows.jsonl", lines(rows))
    for seed in range(20):
        cuts = sorted(random.Random(seed).sample(range(1, reading.size), 12))
        ids = []
        with opened(reading.place) as handle:
            for start, end in zip([0, *cuts], [*cuts, reading.size], strict=True):
                ids += [row["sample_id"] for _, row in lines_between(reading, handle, start, end)]
        assert ids == [row["sample_id"] for row in rows]


def test_a_row_stands_at_its_line_in_the_head_and_at_its_byte_elsewhere(tmp_path):
    content = lines([answer(n) for n in range(9)])
    reading = reading_of(tmp_path / "rows.jsonl", content)
    second = content.index(b"\n") + 1
    with opened(reading.place) as handle:
        head = [at for at, _ in lines_between(reading, handle, 0, second)]
        rest = [at for at, _ in lines_between(reading, handle, second, second + 1)]
    assert head == [At("line", 1)]
    assert rest == [At("byte", second)]


@pytest.mark.parametrize("longest", [200, 20_000])
def test_the_rows_of_a_sample_stand_for_its_bytes_however_long_they_are(tmp_path, longest):
    chooser = random.Random(longest)
    rows = [answer(n, content="x" * chooser.randrange(longest)) for n in range(2_000)]
    reading = reading_of(tmp_path / "rows.jsonl", lines(rows), 500_000 if longest > 200 else 60_000)
    read = len({row["sample_id"] for _, row in sampled_lines(reading)})
    assert read < 700
    assert reading.row_count == pytest.approx(2_000, rel=0.15)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no such advice")
def test_all_places_of_a_sample_are_fetched_before_the_first_is_read(tmp_path, monkeypatch):
    fetched = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, *span: fetched.append(span))
    reading = reading_of(tmp_path / "rows.jsonl", lines([answer(n) for n in range(2_000)]), 60_000)
    first, *rest = sampled_lines(reading)
    spans = [(start, start + length) for start, length, _ in fetched]
    assert {advice for *_, advice in fetched} == {os.POSIX_FADV_WILLNEED}
    assert first[0] == At("line", 1)
    for at, _ in rest:
        if at.unit == "byte":
            assert any(start <= at.number < end for start, end in spans)
    assert spans[-1][1] == reading.size


def test_what_a_writer_has_not_finished_is_no_fault(tmp_path):
    whole = lines([answer(1), answer(2)])
    for end in range(len(whole) - 1, whole.index(b"\n") + 1, -7):
        reading = reading_of(tmp_path / "rows.jsonl", whole[:end])
        with opened(reading.place) as handle:
            list(all_lines(reading, handle))
        assert reading.row_count == 2 if end == len(whole) - 1 else reading.ends_in_half_line
        assert reading.notes.lost_count == 0


def test_rows_go_on_after_a_line_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 1_000)
    content = lines([answer(1), answer(2, content="x" * 30_000), answer(3)])
    reading = reading_of(tmp_path / "rows.jsonl", content)
    with opened(reading.place) as handle:
        rows = list(all_lines(reading, handle))
    assert [(at.number, row["sample_id"][-1]) for at, row in rows] == [(1, "1"), (3, "3")]
    assert reading.notes.first["line_too_long"] == At("line", 2)


def test_joined_objects_are_all_of_a_text_or_none():
    assert joined_objects('{"a": 1}{"a": 2},\n {"a": 3}') == ({"a": 1}, {"a": 2}, {"a": 3})
    assert joined_objects('{"a": 1}{"a": ') == ()
    assert joined_objects('{"a": 1} 5') == ()
