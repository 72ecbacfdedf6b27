"""Formats: each reads its fixture to the golden messages, and knows its own rows from others'.

The golden files say what every row of a fixture becomes. After a change that is meant, read the
difference that this command makes: `python -m tests.pipelines.sources.test_formats --write-golden`
"""

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.errors import BadRecipe
from pipelines.sources.formats import format_of, recognise
from pipelines.sources.row import FORMAT_NAMES, Refused, decode_json

FIXTURES = Path(__file__).parent / "fixtures"
WORDS = (
    "",
    "user",
    "assistant",
    "system",
    "gpt",
    "ai",
    "function_call",
    "<think>a</think>b",
    "<think>",
    "<|begin_of_thought|>a<|end_of_thought|><|begin_of_solution|>b<|end_of_solution|>",
    '{"name": "f", "arguments": \'{"a": "it\'s"}\'}',
    "{'name': 'f', 'arguments': {}}",
    "USER: a\n\n\nASSISTANT: <functioncall> {<|endoftext|>",
    "SYSTEM: Use these - {",
    '[{"role": "user", "content": "a"}]',
    '[{"from": "human", "value": "a"}]',
    "[",
    "[" * 2000,
    "\ufeff[]",
    "\0",
    "\ud83d",
    "'",
)


def rows_of(name):
    return [decode_json(line) for line in (FIXTURES / f"{name}.jsonl").read_bytes().splitlines()]


def keys_in(value):
    """Every key at any depth, as a set."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return set(value if isinstance(value, dict) else ()).union(*map(keys_in, inner))


ROWS_OF_ALL = [row for name in FORMAT_NAMES for row in rows_of(name)]
COLUMNS = sorted({column for row in ROWS_OF_ALL for column in row})
KEYS = sorted(keys_in(ROWS_OF_ALL))
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(WORDS)
    | st.text()
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
ROWS = st.dictionaries(st.sampled_from(COLUMNS) | st.text(max_size=3), VALUES, max_size=6)


def read(name, row):
    """What a row becomes, as the golden files have it."""
    try:
        found = format_of(name).read(row)
    except Refused as refusal:
        return {"refused": refusal.reason}
    plain = {"messages": list(found.messages)}
    return plain if found.tools is None else {**plain, "tools": found.tools}


def golden_text(name):
    return json.dumps([read(name, row) for row in rows_of(name)], indent=1) + "\n"


def reason(name, row):
    with pytest.raises(Refused) as refused:
        format_of(name).read(row)
    assert refused.value.detail
    return refused.value.reason


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_every_row_of_a_fixture_becomes_what_the_golden_file_says(name):
    golden = json.loads((FIXTURES / f"{name}.golden.json").read_text())
    assert [read(name, row) for row in rows_of(name)] == golden
    assert any("messages" in one for one in golden)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_format_is_recognised_by_its_rows_alone(name):
    rows = rows_of(name)
    assert recognise(rows, file="a.jsonl") is format_of(name)
    assert recognise(rows[:1], file="a.jsonl") is format_of(name)
    assert format_of(name).name == name


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_format_by_name_refuses_the_rows_of_another_shape(name):
    for row in ({}, {"text": "a"}, {"messages": 3, "conversations": 3, "prompt": 3, "problem": 3}):
        assert reason(name, row) == "wrong_format"


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_reading_changes_no_row(name):
    for row in rows_of(name):
        before = json.dumps(row)
        read(name, row)
        assert json.dumps(row) == before


@settings(deadline=None)
@given(ROWS)
def test_any_row_is_read_or_refused_by_every_format(row):
    for name in FORMAT_NAMES:
        assert isinstance(format_of(name).recognises(row), bool)
        assert read(name, row).keys() & {"messages", "refused"}


def test_a_few_broken_rows_hide_no_format():
    good = {"instruction": "a", "output": "b"}
    assert recognise([{}, good, {"x": 1}, good, good], file="a").name == "alpaca"
    with pytest.raises(BadRecipe):
        recognise([{}, good], file="a")


def test_an_unknown_shape_lists_what_was_seen_and_every_format():
    with pytest.raises(BadRecipe) as refused:
        recognise([{"text": "a"}, {"text": "b", "score": 1}], file="birds.jsonl")
    assert "birds.jsonl" in refused.value.seen
    assert "text (str), score (int)" in refused.value.seen
    for name in FORMAT_NAMES:
        assert f"{name}:" in refused.value.expected


def test_no_rows_are_in_no_format():
    with pytest.raises(BadRecipe, match="no columns"):
        recognise([], file="a.jsonl")


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"messages": [], "conversations": []}, "sharegpt"),
        ({"problem": "a", "solution": "b", "messages": []}, "messages"),
        ({"instruction": "a", "input": "b", "output": "c", "prompt": "d"}, "alpaca"),
        ({"messages": [], "prompt": "a", "prompt_id": "b", "chosen": []}, "ultrachat"),
        ({"messages": [], "trajectory": [], "instance_id": "a"}, "swe_agent"),
    ],
)
def test_of_two_shapes_the_more_telling_one_wins(row, name):
    assert recognise([row], file="a").name == name


@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Sum it up.", "context": "A tale.", "response": "b"},
        {"question": "Which?", "choices": ["a"], "answer": "a"},
        {"prompt": "Who?", "context": "A tale.", "completion": "b"},
    ],
)
def test_a_set_that_keeps_half_its_question_elsewhere_is_not_recognised(row):
    with pytest.raises(BadRecipe):
        recognise([row], file="a")


def test_a_turn_of_two_megabytes_passes_through_every_kind_of_text():
    long = "It's <|begin_of_thought|> a 'long' tale {\n " * 50_000
    user, answer = {"role": "user", "content": long}, {"role": "assistant", "content": long}
    plain = [user, answer]
    turns = [{"from": "human", "value": long}, {"from": "gpt", "value": long}]
    for name, row in {
        "messages": {"messages": json.dumps(plain)},
        "sharegpt": {"conversations": turns},
        "openthoughts": {"conversations": turns},
        "prompt_completion": {"prompt": long, "completion": long},
        "ultrachat": {"id": "0", "data": [long, long]},
        "swe_agent": {"trajectory": [{"role": "user", "text": long}, {"role": "ai", "text": long}]},
    }.items():
        assert format_of(name).read(row).messages == plain, name
    chat = f"USER: {long}\n\n\nASSISTANT: {long}"
    stripped = long.strip()
    assert format_of("glaive").read({"chat": chat}).messages == [
        {"role": "user", "content": stripped},
        {"role": "assistant", "content": stripped},
    ]


if __name__ == "__main__" and sys.argv[1:] == ["--write-golden"]:
    for one in FORMAT_NAMES:
        (FIXTURES / f"{one}.golden.json").write_text(golden_text(one))
