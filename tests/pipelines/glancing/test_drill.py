"""One field in depth."""

import json

import pytest

from pipelines.errors import BadRecipe
from pipelines.glance import glance
from pipelines.glancing.drill import Drill
from pipelines.glancing.reading import At
from tests.support.faulty_files import answer, lines, without


def drilled(path, rows):
    drill = Drill(path)
    for number, row in enumerate(rows, start=1):
        drill.add(row, At("line", number))
    return drill.result()


def test_a_nested_number_has_quantiles_and_a_histogram():
    field = drilled("usage.completion_tokens", [answer(n) for n in range(37)])
    assert field.types == {"int": 37}
    assert field.measured == "value"
    assert (field.quantiles["min"], field.quantiles["p50"], field.quantiles["max"]) == (20, 38, 56)
    assert sum(one.count for one in field.histogram) == 37
    assert field.absent_first == ()


def test_missing_null_and_empty_are_three_things_and_have_their_places():
    rows = [answer(n) for n in range(20)]
    rows[10] = without(10, "content")
    rows[15]["content"], rows[17]["content"] = None, ""
    field = drilled("content", rows)
    assert (field.missing, field.null, field.empty) == (1, 1, 1)
    assert field.absent_first == ("line 11", "line 16", "line 18")
    assert field.absent_by_part == (0, 0, 0, 0, 0, 0.5, 0, 0.5, 0.5, 0)
    assert field.measured == "length"


def test_a_path_goes_through_lists_and_json_texts():
    rows = [{"messages": json.dumps([{"role": "user"}, {"role": "assistant"}])}] * 3
    assert drilled("messages.role", rows).top == {"user": 3, "assistant": 3}
    assert drilled("a.b", [{"a.b": 1}, {"a": {"b": 1}}]).types == {"int": 2}


def test_values_are_shown_if_they_come_again_and_are_short():
    rows = [{"kind": "stop", "id": n, "text": "a secret that is long " * 5} for n in range(9)]
    assert drilled("kind", rows).top == {"stop": 9}
    assert drilled("id", rows).top == {}
    assert drilled("text", rows).top == {}


def test_the_command_refuses_a_field_that_no_row_has(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(lines([answer(1)]))
    with pytest.raises(BadRecipe, match=r"usage\.completion_tokens"):
        glance([str(path)], field="usage.tokens")
    (one,) = glance([str(path)], field="usage.completion_tokens").sets
    assert one.field is not None
    assert one.field.quantiles["max"] == 21


def test_extreme_numbers_do_no_harm():
    rows = [{"n": n} for n in (1e308, -1e308, float("nan"), float("inf"), 0, 2**80)]
    json.dumps(drilled("n", rows).quantiles, allow_nan=False)
