"""Conversations of from and value."""

import json

import pytest

from pipelines.sources.row import Refused
from pipelines.sources.sharegpt import read, recognises

CALL = {"name": "f", "arguments": {"a": "b"}}
CALLED = {"type": "function", "function": CALL}


def messages(*turns, **more):
    return read({"conversations": [{"from": a, "value": b} for a, b in turns], **more}).messages


@pytest.mark.parametrize(
    ("speaker", "role"),
    [
        ("human", "user"),
        ("user", "user"),
        ("gpt", "assistant"),
        ("assistant", "assistant"),
        ("chatgpt", "assistant"),
        ("bing", "assistant"),
        ("bard", "assistant"),
        ("system", "system"),
        ("tool", "tool"),
        ("observation", "tool"),
        ("function_response", "tool"),
        ("narrator", "narrator"),
    ],
)
def test_a_speaker_becomes_a_role_and_a_strange_one_keeps_its_name(speaker, role):
    assert messages((speaker, "a")) == [{"role": role, "content": "a"}]


@pytest.mark.parametrize("value", [json.dumps(CALL), CALL, [CALL], json.dumps([CALL])])
def test_a_function_call_becomes_a_tool_call(value):
    assert messages(("human", "a"), ("function_call", value))[1:] == [
        {"role": "assistant", "content": "", "tool_calls": [CALLED]}
    ]


def test_calls_behind_an_answer_belong_to_it_and_are_parallel():
    given = messages(("gpt", "I look."), ("function_call", CALL), ("function_call", CALL))
    assert given == [{"role": "assistant", "content": "I look.", "tool_calls": [CALLED, CALLED]}]


def test_calls_with_a_result_between_them_are_not_parallel():
    given = messages(("function_call", CALL), ("observation", "1"), ("function_call", CALL))
    assert [message["role"] for message in given] == ["assistant", "tool", "assistant"]


def test_a_thought_before_a_call_is_its_reasoning():
    (message,) = messages(("function_call", f"<think>\nWhy?\n</think>\n\n{json.dumps(CALL)}"))
    assert message["reasoning_content"] == "Why?"
    assert message["tool_calls"] == [CALLED]


@pytest.mark.parametrize("value", ["f()", "", None, [], {}, {"name": "f"}, 3, '{"name": "f"'])
def test_a_call_that_cannot_be_read_for_certain_is_refused(value):
    with pytest.raises(Refused) as refused:
        messages(("human", "a"), ("function_call", value))
    assert refused.value.reason == "bad_tool_call"


@pytest.mark.parametrize("turn", ["a", None, {"from": "human"}, {"value": "a"}, {}])
def test_a_turn_without_speaker_or_value_is_refused_by_its_place(turn):
    with pytest.raises(Refused, match="turn 1 ") as refused:
        read({"conversations": [{"from": "human", "value": "a"}, turn]})
    assert refused.value.reason == "wrong_format"


def test_a_system_column_and_tools_stand_beside_the_conversation():
    row = {"conversations": [{"from": "human", "value": "a"}], "system": "b", "tools": "[]"}
    given = read(row)
    assert given.messages[0] == {"role": "system", "content": "b"}
    assert given.tools == "[]"


def test_only_a_list_of_conversations_is_recognised():
    assert recognises({"conversations": []})
    assert recognises({"conversations": "[]"})
    assert not recognises({"conversations": "a chat"})
    assert not recognises({"conversation": []})
