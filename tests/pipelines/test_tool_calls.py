"""Tool calls, read from ids in every format that a profile can name."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.split import Splitter
from pipelines.tool_calls import ToolCall, read_calls
from tests.support.profiles import (
    ARGUMENTS,
    CALL,
    CALL_END,
    CHANNEL,
    CONSTRAIN,
    KIMI,
    MESSAGE,
    OSS,
    PLAIN,
    QWEN,
    SECTION,
    SECTION_END,
    START,
    STOP,
    profile,
    sectioned,
)

V3 = profile(tool_markers=sectioned("deepseek_v3"))
V31 = profile(tool_markers=sectioned("deepseek_v31"))
TEXT = 1000  # ids from here on are characters
LOOK = '{"bird": "kite"}'


def ids(*parts):
    """Marker ids as they are, text as one id for each character."""
    flat = []
    for one in parts:
        flat += [one] if isinstance(one, int) else [TEXT + ord(letter) for letter in one]
    return flat


def decode(tokens):
    return "".join(chr(one - TEXT) if one >= TEXT else f"<|{one}|>" for one in tokens)


def calls(output, of, declared=("look",), *, stop=True):
    output = [*output, STOP] if stop else output
    cut = Splitter(of, decode).split([], output, STOP if stop else None)
    return read_calls(output, cut, of, decode, declared)


def kimi(*inner):
    return ids(SECTION, *inner, SECTION_END)


@pytest.mark.parametrize(
    ("of", "output", "call_id"),
    [
        (KIMI, kimi(CALL, "functions.look:3", ARGUMENTS, LOOK, CALL_END), "functions.look:3"),
        (KIMI, kimi(CALL, " look:0 ", ARGUMENTS, LOOK, CALL_END), "look:0"),
        (
            KIMI,
            ids("I look.", CALL, "functions.look:0", ARGUMENTS, LOOK, CALL_END),
            "functions.look:0",
        ),
        (KIMI, kimi(CALL, "3", ARGUMENTS, LOOK, CALL_END), "3"),
        (QWEN, ids(CALL, '\n{"name": "look", "arguments": ', LOOK, "}\n", CALL_END), "call_0"),
        (QWEN, ids(CALL, '{"arguments" :', LOOK, ' , "name":"look" }', CALL_END), "call_0"),
        (
            V3,
            ids(
                SECTION,
                CALL,
                "function",
                ARGUMENTS,
                f"look\n```json\n{LOOK}\n```",
                CALL_END,
                SECTION_END,
            ),
            "call_0",
        ),
        (V31, ids(SECTION, CALL, "look", ARGUMENTS, LOOK, CALL_END, SECTION_END), "call_0"),
        (
            OSS,
            ids(CHANNEL, "commentary to=functions.look ", CONSTRAIN, "json", MESSAGE, LOOK),
            "call_0",
        ),
        (OSS, ids(" to=functions.look", CHANNEL, "commentary json", MESSAGE, LOOK), "call_0"),
    ],
)
def test_every_format_gives_name_id_and_arguments_as_written(of, output, call_id):
    found = calls(output, of)
    assert found.fault is None, found.detail
    assert found.calls == (ToolCall(call_id, "look", LOOK),)
    assert json.loads(found.as_json()) == [
        {"id": call_id, "type": "function", "function": {"name": "look", "arguments": LOOK}}
    ]
    assert found.undeclared(["look"]) == []
    assert found.undeclared(["other"]) == ["look"]


def test_arguments_keep_their_spacing_order_and_escapes():
    written = '{"b" :1,  "a":"\\u00e9 \\"}", "c": [1,2 ]}'
    found = calls(ids(CALL, f'{{"name":"look","arguments":{written}}}', CALL_END), QWEN)
    assert found.calls[0].arguments == written


def test_arguments_that_hermes_writes_as_a_string_are_what_it_holds():
    text = json.dumps({"name": "look", "arguments": LOOK})
    assert calls(ids(CALL, text, CALL_END), QWEN).calls[0].arguments == LOOK


def test_several_calls_come_in_order():
    one = [CALL, "functions.look:0", ARGUMENTS, "{}", CALL_END]
    two = [CALL, "functions.see:1", ARGUMENTS, "{}", CALL_END]
    assert [call.name for call in calls(kimi(*one, *two), KIMI).calls] == ["look", "see"]
    hermes = '{"name": "look", "arguments": {}}'
    found = calls(ids(CALL, hermes, CALL_END, "\n", CALL, hermes, CALL_END), QWEN)
    assert [call.call_id for call in found.calls] == ["call_0", "call_1"]


@pytest.mark.parametrize(
    ("of", "output", "stop", "fault"),
    [
        (
            KIMI,
            ids(SECTION, CALL, "functions.look:0", ARGUMENTS, '{"bi'),
            False,
            "truncated_tool_call",
        ),
        (
            KIMI,
            ids(SECTION, CALL, "functions.look:0", ARGUMENTS, LOOK),
            True,
            "truncated_tool_call",
        ),
        (QWEN, ids(CALL, '{"name": "lo'), False, "truncated_tool_call"),
        (
            OSS,
            ids(CHANNEL, "commentary to=functions.look", MESSAGE, "{"),
            False,
            "truncated_tool_call",
        ),
        (
            KIMI,
            kimi(CALL, "functions.look:0", ARGUMENTS, "{bird: 1}", CALL_END),
            True,
            "invalid_tool_json",
        ),
        (
            KIMI,
            kimi(CALL, "functions.look:0", ARGUMENTS, "[1]", CALL_END),
            True,
            "invalid_tool_json",
        ),
        (QWEN, ids(CALL, '{"name": "look", "arguments": {}', CALL_END), True, "invalid_tool_json"),
        (
            QWEN,
            ids(CALL, '{"name": "look", "arguments": "no"}', CALL_END),
            True,
            "invalid_tool_json",
        ),
        (QWEN, ids(CALL, "[" * 100_000, CALL_END), True, "invalid_tool_json"),
        (
            V31,
            ids(SECTION, CALL, "look", ARGUMENTS, "", CALL_END, SECTION_END),
            True,
            "invalid_tool_json",
        ),
        (KIMI, kimi(CALL, "look", CALL_END), True, "malformed_tool_call"),
        (KIMI, kimi(CALL, "look at it", ARGUMENTS, LOOK, CALL_END), True, "malformed_tool_call"),
        (KIMI, kimi("nothing"), True, "malformed_tool_call"),
        (KIMI, kimi(CALL, "functions.look:0", ARGUMENTS, LOOK), True, "malformed_tool_call"),
        (QWEN, ids(CALL, '{"tool": "look"}', CALL_END), True, "malformed_tool_call"),
        (QWEN, ids(CALL, '{"name": 3, "arguments": {}}', CALL_END), True, "malformed_tool_call"),
        (QWEN, ids(CALL, "[]", CALL_END), True, "malformed_tool_call"),
        (
            V3,
            ids(SECTION, CALL, "function", ARGUMENTS, f"look {LOOK}", CALL_END, SECTION_END),
            True,
            "malformed_tool_call",
        ),
    ],
)
def test_a_broken_call_has_its_name(of, output, stop, fault):
    found = calls(output, of, stop=stop)
    assert found.fault == fault
    assert found.detail


def test_a_bare_counter_is_named_only_where_one_tool_is_declared():
    output = kimi(CALL, "3", ARGUMENTS, LOOK, CALL_END)
    assert calls(output, KIMI, ("look", "see")).fault == "malformed_tool_call"


def test_a_broken_call_does_not_hide_the_ones_before_it():
    good = '{"name": "look", "arguments": {}}'
    found = calls(ids(CALL, good, CALL_END, CALL, "{", CALL_END), QWEN)
    assert [call.name for call in found.calls] == ["look"]
    assert found.fault == "invalid_tool_json"


def test_a_target_that_writes_calls_as_text_has_content_only():
    text = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    assert calls(ids(text), PLAIN).calls == ()


MARKS = [SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS, START, CHANNEL, CONSTRAIN, MESSAGE]
PARTS = st.lists(
    st.sampled_from(
        [*MARKS, LOOK, "look", "{", "\n", '{"name": "look", "arguments": {}}', " to=x"]
    ),
    max_size=10,
)


@settings(deadline=None)
@given(parts=PARTS, of=st.sampled_from([KIMI, QWEN, V3, V31, OSS]), stop=st.booleans())
def test_no_reply_breaks_the_reader(parts, of, stop):
    found = calls(ids(*parts), of, stop=stop)
    assert (found.fault is None) == (found.detail == "")
    for one in found.calls:
        assert isinstance(json.loads(one.arguments), dict)
