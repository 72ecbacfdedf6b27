"""Columns: text, lists, lists as JSON, and one system prompt."""

import pytest

from pipelines.sources.columns import (
    json_in,
    list_of,
    looks_listed,
    opened_by_system,
    optional_text,
    text_of,
    tools_of,
)
from pipelines.sources.row import Refused

ASK = {"role": "user", "content": "Who?"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("value", [None, 3, ["a"], {"a": 1}, True])
def test_text_is_text(value):
    assert text_of({"a": "b"}, "a") == "b"
    with pytest.raises(Refused, match="expected text"):
        text_of({"a": value}, "a")


def test_of_several_columns_the_first_that_says_something_counts():
    assert optional_text({"a": None, "b": "", "c": "x"}, "a", "b", "c") == ""
    assert optional_text({"a": None}, "a", "b") is None
    with pytest.raises(Refused, match="b is a int"):
        optional_text({"b": 3}, "a", "b")


@pytest.mark.parametrize("value", [[1], "[1]", " \n[1]", "\ufeff[1]"])
def test_a_list_may_be_written_as_json(value):
    assert looks_listed(value)
    assert list_of({"a": value}, "a") == [1]


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "wrong_format"),
        ({"a": 1}, "wrong_format"),
        ('{"a": 1}', "wrong_format"),
        ("[1", "malformed_json"),
        ('[{"a": 1, "a": 2}]', "malformed_json"),
        ("[NaN]", "malformed_json"),
        ("[" * 100_000, "malformed_json"),
        ('["\ud83d"]', "lone_surrogate"),
    ],
)
def test_no_list_is_refused_and_the_column_named(value, reason):
    with pytest.raises(Refused, match="column_a") as refused:
        list_of({"column_a": value}, "column_a")
    assert refused.value.reason == reason


def test_json_is_strict():
    with pytest.raises(Refused, match="twice"):
        json_in('{"a": 1, "a": 1}', "here")


def test_tools_are_handed_on_as_they_stand():
    assert tools_of({}) is None
    assert tools_of({"tools": "", "functions": None}) is None
    assert tools_of({"tools": '[{"name": "f"}]'}) == '[{"name": "f"}]'
    assert tools_of({"functions": [{"name": "f"}]}) == [{"name": "f"}]
    assert tools_of({"tools": [], "functions": [{"name": "f"}]}) == [{"name": "f"}]
    with pytest.raises(Refused) as refused:
        tools_of({"tools": [{"name": "f"}], "functions": [{"name": "g"}]})
    assert refused.value.reason == "bad_tools"


def test_a_system_column_opens_the_conversation_once():
    assert opened_by_system({}, [ASK]) == [ASK]
    assert opened_by_system({"system": ""}, [SYSTEM, ASK]) == [SYSTEM, ASK]
    assert opened_by_system({"system": "Be brief."}, [ASK]) == [SYSTEM, ASK]
    assert opened_by_system({"system": "Be brief."}, [SYSTEM, ASK]) == [SYSTEM, ASK]
    assert opened_by_system({"system_prompt": "Be brief."}, []) == [SYSTEM]
    assert opened_by_system({"system": "Be brief."}, ["odd"]) == [SYSTEM, "odd"]


@pytest.mark.parametrize("system", ["Be long.", 3, ["Be brief."]])
def test_two_system_prompts_or_one_that_is_no_text_are_refused(system):
    with pytest.raises(Refused) as refused:
        opened_by_system({"system": system}, [SYSTEM, ASK])
    assert refused.value.reason == "wrong_format"
