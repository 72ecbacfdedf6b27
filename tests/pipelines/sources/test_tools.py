"""Tool declarations: one form for all sets, and no guess."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sources.row import Refused
from pipelines.sources.tools import normalise_tools

NONE = {"type": "object", "properties": {}, "required": []}


def parameters(given):
    (tool,) = normalise_tools([{"name": "f", "parameters": given}])
    return tool["function"]["parameters"]


def refused(given):
    with pytest.raises(Refused) as refusal:
        normalise_tools(given)
    assert refusal.value.detail
    return refusal.value.reason


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


BARE = {"name": "now", "description": "The time.", "parameters": NONE}
WRAPPED = {"type": "function", "function": BARE}


@pytest.mark.parametrize(
    "given",
    [
        [BARE],
        [WRAPPED],
        [{"function": BARE}],
        [{**WRAPPED, "function": {**BARE, "strict": True}}],
        json.dumps([BARE]),
        f"\n {json.dumps([WRAPPED])} ",
        [json.dumps(BARE)],
        [{"name": "now", "description": "The time.", "input_schema": NONE}],
        [{"name": "now", "description": "The time.", "inputSchema": {"type": "object"}}],
        *([{**BARE, "parameters": nothing}] for nothing in (None, {}, [], "", {"type": "object"})),
    ],
)
def test_every_way_of_writing_a_declaration_is_one(given):
    assert normalise_tools(given) == (WRAPPED,)


@pytest.mark.parametrize("given", [None, [], "", " ", "[]", "null"])
def test_no_tools_are_none(given):
    assert normalise_tools(given) == ()


def test_a_tool_without_description_or_parameters_has_empty_ones():
    (tool,) = normalise_tools([{"name": "now", "description": None}])
    assert tool["function"] == {"name": "now", "description": "", "parameters": NONE}


@pytest.mark.parametrize(
    ("flags", "required"),
    [
        ({"required": True}, ["a"]),
        ({"required": False}, []),
        ({"optional": True}, []),
        ({"optional": False}, ["a"]),
        ({"optional": True, "default": 3}, []),
        ({}, []),
    ],
)
def test_what_a_property_says_of_itself_moves_up(flags, required):
    schema = parameters({"type": "object", "properties": {"a": {"type": "int", **flags}}})
    rest = {key: one for key, one in flags.items() if key == "default"}
    assert schema["properties"] == {"a": {"type": "integer", **rest}}
    assert schema["required"] == required


def test_a_list_of_the_required_and_a_propertys_own_word_are_one_list():
    schema = parameters(
        {
            "type": "object",
            "properties": {
                name: {"type": "string", "required": True} for name in ("one", "two", "three")
            },
            "required": ["two"],
        }
    )
    assert schema["required"] == ["two", "one", "three"]


def test_an_object_within_keeps_its_own_list():
    inner = {"type": "object", "properties": {"x": {"type": "int"}}, "required": ["x"]}
    schema = parameters({"type": "object", "properties": {"in": inner}})
    assert schema["required"] == []
    assert schema["properties"]["in"]["required"] == ["x"]


@pytest.mark.parametrize(
    "given",
    [
        {"city": {"type": "str", "description": "Where."}, "type": {"type": "int"}},
        {"properties": {"city": {"type": "str", "description": "Where."}, "type": {"type": "int"}}},
    ],
)
def test_parameters_without_a_type_are_an_objects(given):
    assert parameters(given) == {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where."},
            "type": {"type": "integer"},
        },
        "required": [],
    }


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"anyOf": [{"type": "float"}, {"type": "null"}]}, {"anyOf": ["number", "null"]}),
        ({"oneOf": [{"type": "str"}]}, {"oneOf": ["string"]}),
        ({"allOf": [{"type": "long"}]}, {"allOf": ["integer"]}),
        ({"prefixItems": [{"type": "float"}]}, {"prefixItems": ["number"]}),
        ({"items": [{"type": "float"}]}, {"items": ["number"]}),
    ],
)
def test_alternatives_are_kept_each_in_json_schemas_words(given, expected):
    (key, kinds), *_ = expected.items()
    schema = parameters({"type": "object", "properties": {"a": given}})
    assert schema["properties"]["a"] == {key: [{"type": kind} for kind in kinds]}


def test_what_else_json_schema_knows_stays_as_it_is():
    said = {"type": "string", "enum": ["a", None, 3], "default": None, "pattern": "^a", "x-own": {}}
    schema = {
        **NONE,
        "properties": {
            "a": said,
            "b": {"$ref": "#/$defs/bird"},
            "c": {**NONE, "additionalProperties": {"type": "string"}},
            "d": {"type": "array", "items": True},
        },
        "$defs": {"bird": {"type": "string"}},
        "additionalProperties": False,
    }
    assert parameters(schema) == schema


@pytest.mark.parametrize(
    "given",
    [
        {"type": "matrix"},
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": None},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"a": {"type": 3}}},
        {"type": "object", "properties": {"a": {"type": [["string"]]}}},
        {"type": "object", "properties": {"a": "string"}},
        {"type": "object", "properties": {"a": {"anyOf": {"type": "string"}}}},
        {"type": "object", "properties": {"a": {"anyOf": [{"type": "bird"}]}}},
        {"type": "object", "properties": {"a": {"items": "string"}}},
        {"type": "object", "properties": {"a": {"required": True, "optional": True}}},
        {"type": "object", "properties": {"a": {"required": "yes", "type": "object"}}},
        {"type": "object", "properties": {"a": {"optional": True}}, "required": ["a"]},
        {"type": "object", "required": True},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "required": [["a"]]},
        "a city",
        ["city"],
        3,
    ],
)
def test_a_schema_without_a_certain_reading_is_refused(given):
    with pytest.raises(Refused, match="'f'") as refusal:
        normalise_tools([{"name": "f", "parameters": given}])
    assert refusal.value.reason == "bad_tools"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"name": "a"}, "bad_tools"),
        (3, "bad_tools"),
        ("not json", "bad_tools"),
        ('{"name": "a"}', "bad_tools"),
        ('[{"name": "a\\u0000"}]', "nul_character"),
        (["not json"], "bad_tools"),
        ([["a"]], "bad_tools"),
        ([{}], "bad_tools"),
        ([{"name": ""}], "bad_tools"),
        ([{"name": 3}], "bad_tools"),
        ([{"name": "a", "description": 3}], "bad_tools"),
        ([{"type": "custom", "function": {"name": "a"}}], "bad_tools"),
        ([{"name": "a"}, WRAPPED, {"name": "a"}], "bad_tools"),
        ([{"name": "a", "parameters": {"x": {}}, "input_schema": {"y": {}}}], "bad_tools"),
    ],
)
def test_declarations_without_a_certain_reading_are_refused(given, reason):
    assert refused(given) == reason


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(["object", "string", "dict", "", "["]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "type",
                    "properties",
                    "required",
                    "items",
                    "anyOf",
                    "name",
                    "parameters",
                    "optional",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
SCHEMA = (
    st.fixed_dictionaries(
        {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), JSON)}
    )
    | JSON
)


@given(
    JSON
    | st.lists(
        st.fixed_dictionaries({"name": st.sampled_from("fg"), "parameters": SCHEMA}), max_size=2
    )
)
def test_any_value_is_normalised_once_and_for_all_or_refused(given):
    try:
        tools = normalise_tools(given)
    except Refused as refusal:
        found = refusal.reason
    else:
        found = None
    if found is not None:
        assert found == "bad_tools"
        return
    assert normalise_tools(list(tools)) == tools
    for tool in tools:
        schema = tool["function"]["parameters"]
        assert schema["type"] == "object"
        assert set(schema["required"]) <= set(schema["properties"])
