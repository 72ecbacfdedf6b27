"""Calls as text: every certain spelling is read, and nothing is guessed."""

import contextlib
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.calls import calls_in, calls_of, double_quoted
from pipelines.sources.row import Refused

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(), VALUES, max_size=4)


def only_call(text):
    (call,) = calls_in(text)
    assert call["type"] == "function"
    return call["function"]


def refused(text):
    with pytest.raises(Refused) as refusal:
        calls_in(text)
    return refusal.value.reason


@settings(deadline=None)
@given(ARGUMENTS)
def test_arguments_in_json_come_back_as_they_were(arguments):
    text = json.dumps({"name": "f", "arguments": arguments})
    assert only_call(text) == {"name": "f", "arguments": arguments}


@settings(deadline=None)
@given(ARGUMENTS)
def test_arguments_in_single_quotes_come_back_with_every_apostrophe(arguments):
    text = '{"name": "f", "arguments": \'' + json.dumps(arguments, ensure_ascii=False) + "'}"
    assert only_call(text) == {"name": "f", "arguments": arguments}


@settings(deadline=None)
@given(ARGUMENTS)
def test_a_call_in_pythons_quotes_comes_back_or_is_refused(arguments):
    text = repr({"name": "f", "arguments": arguments})
    if re.search(r"\\[xU]", text):  # no escapes of JSON, where they are not text themselves
        with contextlib.suppress(Refused):
            assert only_call(text)["arguments"] == arguments
    else:
        assert only_call(text)["arguments"] == arguments


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"name": "f", "arguments": {}}', {}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
        ("{'name': 'f', 'arguments': {'a': \"it's\"}}", {"a": "it's"}),
        ("{'name': 'f', 'arguments': {'a': 'it\\'s \"so\"'}}", {"a": 'it\'s "so"'}),
        ('{"name": "f", "arguments": \'{"a": "it\\\'s"}\'}', {"a": "it's"}),
        ('{"name": "f", "arguments": \'{"a": "x\'}"}\'}', {"a": "x'}"}),
        ('{"name": "f", "arguments": \'{\\"a\\": 1}\'}', '{"a": 1}'),
        ('{"arguments": \'{"a": 1}\', "name": "f"}', '{"a": 1}'),
        ('{"name": "f", "arguments": \'{"a": "one\\ntwo"}\'}', {"a": "one\ntwo"}),
        (
            "{'name': 'f', 'arguments': {'a': [True, False, None, 'True']}}",
            {"a": [1, 0, None, "True"]},
        ),
    ],
)
def test_each_spelling_has_its_one_reading(text, arguments):
    assert only_call(text) == {"name": "f", "arguments": arguments}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f(a=1)",
        '{"name": "f"}',
        '{"name": "f", "arguments": {}, "then": {}}',
        '{"name": "f", "arguments": {"a": 1, "a": 2}}',
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "f", "arguments": \'[1]\', "more": \'{}\'}',
        "{'name': 'f', 'arguments': {'a': 'it's'}}",
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": {"a": 1}} {"name": "g", "arguments": {}}',
        '{"name": "f", "arguments": {"a": (1, 2)}}',
        '{"name": "f", "arguments": {"a": __import__}}',
        "[]",
        "[1]",
        "[" * 100_000,
        "'" * 100_001,
        '{"name": "\ud83d", "arguments": {}}',
    ],
)
def test_what_has_no_certain_reading_is_refused(text):
    assert refused(text) == "bad_tool_call"


def test_a_list_is_parallel_calls_in_order():
    calls = [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": 1}}]
    assert [call["function"] for call in calls_in(json.dumps(calls))] == calls
    assert [call["function"] for call in calls_of(calls)] == calls


@settings(deadline=None)
@given(VALUES)
def test_json_stays_as_it_is(value):
    text = json.dumps(value, ensure_ascii=False)
    assert double_quoted(text) == text
