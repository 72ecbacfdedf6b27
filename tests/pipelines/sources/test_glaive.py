"""Labelled text: turns, calls and declarations."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.glaive import read
from pipelines.sources.row import Refused

CALL = '<functioncall> {"name": "f", "arguments": \'{"a": 1}\'}'
CALLED = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
TURN = st.tuples(st.sampled_from(["USER", "ASSISTANT", "FUNCTION RESPONSE"]), st.text("ab:' \r{}"))
ROLE = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}


def messages(chat):
    return read({"chat": chat}).messages


def tools(system):
    return read({"system": system, "chat": "USER: a"}).tools


def reason(row):
    with pytest.raises(Refused) as refused:
        read(row)
    return refused.value.reason


@settings(deadline=None)
@given(
    st.lists(TURN, min_size=1), st.sampled_from(["\n\n\n", "\r\n\r\n", "\n \n", " <|endoftext|>\n"])
)
def test_turns_come_back_in_order_and_whole(turns, between):
    chat = between.join(f"{label}: {text}" for label, text in turns)
    expected = [{"role": ROLE[label], "content": text.strip()} for label, text in turns]
    assert messages(chat) == expected


def test_text_before_calls_and_several_calls_are_one_message():
    assert messages(f"ASSISTANT: I look. {CALL}\n{CALL} <|endoftext|>") == [
        {"role": "assistant", "content": "I look.", "tool_calls": [CALLED, CALLED]}
    ]


def test_a_label_within_a_line_is_text():
    chat = "USER: The label ASSISTANT: is yours, SUPERUSER: is not."
    assert messages(chat) == [{"role": "user", "content": chat.removeprefix("USER: ")}]


def test_a_user_may_write_a_call():
    assert messages(f"USER: {CALL}") == [{"role": "user", "content": CALL}]


@pytest.mark.parametrize(
    "chat",
    ["Hello.", "Hello.\n\n\nUSER: a", "USER: a\nASSISTANT: b", "USER: a\r\n  USER: b", 3, None],
)
def test_a_chat_without_certain_turns_is_refused(chat):
    assert reason({"chat": chat}) == "wrong_format"


@pytest.mark.parametrize(
    "call",
    [
        "<functioncall>",
        "<functioncall> f(1)",
        CALL[:-4],
        f"{CALL} and more",
        f"{CALL} <functioncall>",
        '<functioncall> {"name": "f", "arguments": 3',
    ],
)
def test_a_call_that_cannot_be_read_for_certain_is_refused(call):
    assert reason({"chat": f"USER: a\n\n\nASSISTANT: {call} <|endoftext|>"}) == "bad_tool_call"


@pytest.mark.parametrize("between", ["\n", "\n\n", "\r\n\r\n", ",\n", " ", ""])
def test_declarations_follow_the_prose_up_to_the_end(between):
    declared = [{"name": "f", "description": "It's {one}"}, {"name": "g", "parameters": {}}]
    written = between.join(json.dumps(one, indent=4) for one in declared)
    assert tools(f"SYSTEM: Use them if required -\n{written}\n") == declared


def test_the_prose_stays_the_system_message():
    row = {"system": 'SYSTEM: Use them -\n{"name": "f"}', "chat": "USER: a"}
    assert read(row).messages[0] == {"role": "system", "content": "Use them -"}
    assert read({**row, "system": "SYSTEM: No functions."}).tools is None
    assert len(read({**row, "system": "SYSTEM: "}).messages) == 1
    assert len(read({**row, "system": None}).messages) == 1


@pytest.mark.parametrize(
    "declared",
    ["{", '{"name": "f"', '{"name": "f"} thanks', '{"name": "f", "name": "g"}', "{'name': 'it's'}"],
)
def test_a_declaration_that_is_not_json_is_refused(declared):
    assert reason({"system": f"SYSTEM: Use -\n{declared}", "chat": "USER: a"}) == "bad_tools"
