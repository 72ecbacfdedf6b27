"""JSON lists of any length are read item by item."""

import json

import pytest

from pipelines.glance import glance
from pipelines.glancing import values
from tests.support.faulty_files import HEALTHY, answer


@pytest.fixture
def long_list(tmp_path, monkeypatch):
    monkeypatch.setattr(values, "MAX_VALUE_BYTES", 20_000)
    monkeypatch.setattr(values, "_PIECE", 1_000)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([answer(n, content="é" * (n % 40)) for n in range(500)], indent=1))
    return path


def test_a_list_that_is_too_long_for_memory_is_read_to_its_end(long_list):
    one = glance([str(long_list)], full=True).sets[0]
    assert (one.rows, one.rows_exact, one.malformed_count) == (500, True, 0)


def test_its_head_is_a_sample_and_its_rows_are_estimated(long_list, monkeypatch):
    monkeypatch.setattr("pipelines.glance.SAMPLE_BYTES", 30_000)
    monkeypatch.setattr("pipelines.glance._LEAST_BYTES", 1_000)
    one = glance([str(long_list)]).sets[0]
    assert not one.rows_exact
    assert one.rows_read < 250
    assert one.rows == pytest.approx(500, rel=0.15)


def test_where_it_breaks_off_is_said(long_list):
    long_list.write_bytes(long_list.read_bytes()[:100_000])
    one = glance([str(long_list)], full=True).sets[0]
    (finding,) = [each for each in one.findings if each.name == "not_json"]
    assert "after item" in finding.seen


def test_one_long_value_that_is_no_list_is_refused(long_list):
    long_list.write_text(json.dumps({"data": HEALTHY * 20, "more": [1, 2]}))
    assert glance([str(long_list)]).sets[0].findings[0].name == "json_too_large"
