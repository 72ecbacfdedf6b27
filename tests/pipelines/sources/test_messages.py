"""Source rows: every fault has a name and a line, and nothing else is lost."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.errors import BadRecipe
from pipelines.sources.files import read_prompts
from pipelines.sources.messages import parse_row
from pipelines.sources.row import BadRow, SourceRow
from pipelines.sources.tools import normalise_tools

ASK = {"role": "user", "content": "What do hawks eat?"}
ANSWER = {"role": "assistant", "content": "Voles."}
CALL = {"function": {"name": "look_up", "arguments": '{"bird": "hawk"}'}}


def parse(messages, **more):
    return parse_row({"messages": messages, **more}, file="a.jsonl", line=7)


def read(path):
    return list(read_prompts(path))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([ASK], "not_an_object"),
        ({}, "bad_messages"),
        ({"messages": []}, "bad_messages"),
        ({"messages": "hello"}, "bad_messages"),
        ({"messages": ["hello"]}, "bad_messages"),
        ({"messages": [{"role": "human", "content": "hi"}]}, "unknown_role"),
        ({"messages": [{"content": "hi"}]}, "unknown_role"),
        ({"messages": [{"role": "user"}]}, "empty_content"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "empty_content"),
        ({"messages": [{"role": "user", "content": None}]}, "empty_content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "unsupported_content"),
        ({"messages": [{"role": "user", "content": 3}]}, "unsupported_content"),
        ({"messages": [{"role": "system", "content": "Be kind."}]}, "no_question"),
        ({"messages": [ANSWER]}, "no_question"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "nul_character"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "lone_surrogate"),
        ({"messages": [ASK], "source": "\ud83d"}, "lone_surrogate"),
        ({"messages": [ASK], "source": 3}, "bad_field"),
        ({"messages": [ASK], "tools": [{"name": "a", "x": float("inf")}]}, "bad_field"),
        ({"messages": [ASK], "tools": {"name": "a"}}, "bad_tools"),
        ({"messages": [ASK], "tools": [{"name": "a"}, {"name": "a"}]}, "bad_tools"),
        ({"messages": [{**ASK, "tool_calls": [CALL]}]}, "bad_tool_call"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [{}]}, ASK]}, "bad_tool_call"),
    ],
)
def test_every_fault_of_a_row_is_named(row, reason):
    bad = parse_row(row, file="a.jsonl", line=7)
    assert isinstance(bad, BadRow)
    assert (bad.file, bad.line, bad.reason) == ("a.jsonl", 7, reason)
    assert bad.detail


@pytest.mark.parametrize("arguments", ["not json", "[1]", "3", [1], None])
def test_tool_call_arguments_have_to_be_an_object(arguments):
    call = {"function": {"name": "look_up", "arguments": arguments}}
    bad = parse([ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, ASK])
    assert isinstance(bad, BadRow)
    assert bad.reason == "bad_tool_call"


def test_the_sets_own_answer_is_dropped_and_earlier_ones_stay():
    row = parse([ASK, ANSWER, ASK, ANSWER, ANSWER])
    assert isinstance(row, SourceRow)
    assert list(row.messages) == [ASK, ANSWER, ASK]


def test_arguments_in_a_string_and_in_an_object_are_the_same_call():
    def row(arguments):
        call = {"function": {"name": "look_up", "arguments": arguments}}
        tool = {"role": "tool", "content": "voles", "name": "look_up"}
        return parse([ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, tool])

    assert row('{"bird": "hawk"}') == row({"bird": "hawk"})
    assert row({"bird": "hawk"}).messages[1]["tool_calls"][0]["function"]["arguments"] == {
        "bird": "hawk"
    }


def test_a_row_without_license_says_so():
    assert parse([ASK]).license == "unstated"
    assert parse([ASK]).source == "a.jsonl #7"
    assert parse([ASK], license="MIT", source="x #1").license == "MIT"


def test_identity_ignores_the_order_of_keys_and_nothing_else():
    one = parse([{"role": "user", "content": "hi"}])
    assert one.content_sha256 == parse([{"content": "hi", "role": "user"}]).content_sha256
    assert one.content_sha256 != parse([{"role": "user", "content": "hi "}]).content_sha256
    assert one.content_sha256 != parse([ASK]).content_sha256
    assert one.content_sha256 != parse(list(one.messages), tools=[{"name": "a"}]).content_sha256


def test_a_deeply_nested_row_is_refused_not_a_crash():
    nested = []
    for _ in range(500):
        nested = [nested]
    assert parse([ASK], tools=nested).reason == "bad_field"


def test_jsonl_faults_carry_file_and_line_and_blank_lines_are_not_rows(tmp_path):
    path = tmp_path / "set.jsonl"
    good = json.dumps({"messages": [ASK]}).encode()
    path.write_bytes(
        b"\xef\xbb\xbf" + good + b"\n"
        b"\n"
        b"{not json}\n"
        b"   \r\n" + good.replace(b"hawks", b"\xff\xfe") + b"\n"
        b'{"messages": 1, "messages": 2}\n'
        b'{"messages": NaN}\n' + b"[" * 100_000 + b"\n" + good  # no newline at the end
    )
    rows = read(path)
    assert [type(row) for row in rows] == [SourceRow, *[BadRow] * 5, SourceRow]
    assert [row.line for row in rows] == [1, 3, 5, 6, 7, 8, 9]
    assert [row.reason for row in rows[1:6]] == [
        "malformed_json",
        "invalid_utf8",
        "malformed_json",
        "malformed_json",
        "malformed_json",
    ]
    assert {row.file for row in rows} == {"set.jsonl"}
    assert "'messages' is there twice" in rows[3].detail


def test_parquet_gives_the_same_rows_nested_or_as_json(tmp_path):
    tools = [{"name": "look_up", "parameters": {"type": "dict", "properties": {}}}]
    rows = [{"messages": [ASK, ANSWER], "tools": None}, {"messages": [ASK], "tools": tools}]
    as_json = [
        {
            "messages": json.dumps(row["messages"]),
            "tools": None if row["tools"] is None else json.dumps(row["tools"]),
        }
        for row in rows
    ]
    lines = "\n".join(json.dumps({k: v for k, v in row.items() if v}) for row in rows)
    (tmp_path / "a.jsonl").write_text(lines)
    expected = [(row.messages, row.tools) for row in read(tmp_path / "a.jsonl")]
    nested = [{**rows[0]}, {**rows[1], "tools": [{"name": "look_up", "description": None}]}]
    for name, content in (("json", as_json), ("nested", nested)):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(content), path)
        found = read(path)
        assert [(row.messages, row.tools) for row in found] == [
            expected[0],
            (expected[1][0], normalise_tools([{"name": "look_up"}])),
        ]
        assert [row.line for row in found] == [1, 2]


def test_parquet_structs_do_not_gain_keys(tmp_path):
    path = tmp_path / "a.parquet"
    call = {"function": {"name": "look_up", "arguments": "{}"}}
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, ASK]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), path)
    (row,) = read(path)
    assert set(row.messages[0]) == {"role", "content"}


def test_a_parquet_cell_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    raw = pa.array([b"\xff\xfe", json.dumps([ASK]).encode()]).view(pa.string())
    pq.write_table(pa.table({"messages": raw}), path)
    bad, good = read(path)
    assert (bad.reason, bad.line) == ("invalid_utf8", 1)
    assert isinstance(good, SourceRow)


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.parquet", "set.csv"])
def test_a_file_that_cannot_be_read_is_a_bad_recipe(tmp_path, name):
    with pytest.raises(BadRecipe, match=name):
        read(tmp_path / name)


def test_a_parquet_file_without_messages_names_its_columns(tmp_path):
    pq.write_table(pa.table({"prompt": ["hi"]}), tmp_path / "a.parquet")
    with pytest.raises(BadRecipe, match="has the columns prompt"):
        read(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 but no")
    with pytest.raises(BadRecipe, match=r"b\.parquet cannot be read"):
        read(tmp_path / "b.parquet")


def test_schemas_in_a_programming_languages_words_become_json_schema():
    given = {
        "name": "area.of",
        "parameters": {
            "type": "dict",
            "properties": {
                "side": {"type": "float", "description": "one side", "default": 1.0},
                "corner": {"type": "tuple", "items": {"type": "float"}},
                "type": {"type": ["String", "null"]},
                "extra": {"type": "any"},
                "where": {"type": "HashMap", "properties": {"n": {"type": "long"}}},
            },
            "required": ["side"],
        },
    }
    before = json.dumps(given)
    (tool,) = normalise_tools([given])
    assert json.dumps(given) == before
    assert tool["type"] == "function"
    assert tool["function"] == {
        "name": "area.of",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "side": {"type": "number", "description": "one side", "default": 1.0},
                "corner": {"type": "array", "items": {"type": "number"}},
                "type": {"type": ["string", "null"]},
                "extra": {},
                "where": {
                    "type": "object",
                    "properties": {"n": {"type": "integer"}},
                    "required": [],
                },
            },
            "required": ["side"],
        },
    }
    assert normalise_tools([tool]) == (tool,)


def test_a_tool_without_parameters_takes_none():
    (tool,) = normalise_tools([{"type": "function", "function": {"name": "now"}}])
    assert tool["function"]["parameters"] == {"type": "object", "properties": {}, "required": []}


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "matrix"},
        {"type": "string"},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"a": {"type": 3}}},
        {"type": "object", "properties": {"a": "string"}},
        {"type": "object", "required": True},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
    ],
)
def test_a_schema_without_a_certain_reading_is_refused(parameters):
    with pytest.raises(ValueError, match="'f'"):
        normalise_tools([{"name": "f", "parameters": parameters}])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "tools", "role", "content", "name", "type", "function"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_any_value_is_a_row_or_a_named_refusal(value):
    row = parse_row(value, file="a.jsonl", line=1)
    if isinstance(row, SourceRow):
        assert row.messages[-1]["role"] in ("user", "tool")
        assert len(row.content_sha256) == 64
    else:
        assert row.reason
        assert row.detail
