"""Where reasoning, content and tool calls begin and end, by ids alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.split import Close, Splitter, read_header
from tests.support.profiles import (
    CALL,
    CALL_END,
    CHANNEL,
    CLOSE,
    CONSTRAIN,
    END,
    HARMONY,
    KIMI,
    MESSAGE,
    OPEN,
    OSS,
    PLAIN,
    QWEN,
    SECTION,
    SECTION_END,
    START,
    STOP,
    THINKS,
)

SPACE, ANALYSIS, COMMENTARY, FINAL, TO = 10, 60, 61, 62, 63
NAME = "functions.look"
WORDS = {
    SPACE: " ",
    ANALYSIS: "analysis",
    COMMENTARY: "commentary",
    FINAL: "final",
    TO: " to=functions.look",
}
TEXTS = {**WORDS, CONSTRAIN: "<|constrain|>", CHANNEL: "<|channel|>", START: "<|start|>"}


def decode(ids):
    return "".join(TEXTS.get(one, f"<{one}>") for one in ids)


def cut(ids, profile=THINKS, *, prompt=(1,), stop=True):
    return Splitter(profile, decode).split(prompt, ids, ids[-1] if stop else None)


def spans(result):
    return [(one.kind, one.start, one.end) for one in result.segments]


def test_a_target_without_markers_gives_content_and_stop():
    result = cut([5, 6, STOP], PLAIN)
    assert spans(result) == [("content", 0, 2), ("stop", 2, 3)]
    assert result.close is Close.NOT_REASONING


def test_thinking_that_the_prompt_opened_ends_at_the_first_close():
    result = cut([5, CLOSE, 6, STOP], prompt=[1, OPEN])
    assert spans(result) == [
        ("reasoning", 0, 1),
        ("marker", 1, 2),
        ("content", 2, 3),
        ("stop", 3, 4),
    ]
    assert result.close is Close.EXPLICIT
    assert result.stray_markers == 0


def test_thinking_that_the_response_opens_after_white_space():
    result = cut([SPACE, OPEN, 5, CLOSE, 6, STOP])
    assert spans(result)[:3] == [("marker", 0, 2), ("reasoning", 2, 3), ("marker", 3, 4)]
    assert result.close is Close.EXPLICIT


def test_thinking_that_is_opened_by_the_prompt_and_the_response_is_opened_once():
    result = cut([OPEN, 5, CLOSE, 6, STOP], prompt=[1, OPEN, SPACE])
    assert spans(result)[:2] == [("marker", 0, 1), ("reasoning", 1, 2)]
    assert result.stray_markers == 0


@pytest.mark.parametrize(
    ("ids", "open_at_start", "stop", "close", "strays", "residual"),
    [
        ([5, 6, STOP], True, True, Close.MISSING_ON_STOP, 0, None),
        ([5, 6], True, False, Close.TRUNCATED, 0, None),
        ([OPEN, 6, STOP], False, True, Close.MISSING_ON_STOP, 0, None),
        ([OPEN, 6], False, False, Close.TRUNCATED, 0, None),
        ([5, 6, STOP], False, True, Close.NEVER_OPENED, 0, None),
        ([5, CLOSE, 6, STOP], False, True, Close.UNOPENED, 0, (1, CLOSE)),
        ([5, OPEN, 6, CLOSE, STOP], False, True, Close.UNOPENED, 0, (1, OPEN)),
        ([5, OPEN, 6, STOP], False, True, Close.NEVER_OPENED, 0, (1, OPEN)),
        ([5, CLOSE, 6, CLOSE, STOP], True, True, Close.EXPLICIT, 0, (3, CLOSE)),
        ([5, CLOSE, 6, STOP, STOP], True, True, Close.EXPLICIT, 0, (3, STOP)),
        ([5, OPEN, CLOSE, STOP], True, True, Close.EXPLICIT, 1, None),
        ([CLOSE, STOP], True, True, Close.EXPLICIT, 0, None),
        ([STOP], True, True, Close.MISSING_ON_STOP, 0, None),
        ([SPACE, SPACE], False, False, Close.NEVER_OPENED, 0, None),
    ],
)
def test_every_way_of_ending_has_its_name(ids, open_at_start, stop, close, strays, residual):
    result = cut(ids, prompt=[1, OPEN] if open_at_start else [1], stop=stop)
    assert (result.close, result.stray_markers, result.residual) == (close, strays, residual)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([1, OPEN], True),
        ([1, OPEN, SPACE, SPACE], True),
        ([1, OPEN, CLOSE], False),  # the template closes it at once: no thinking
        ([1, OPEN, SPACE, CLOSE, SPACE], False),
        ([OPEN, 5, CLOSE, 7, OPEN], True),
        ([1, OPEN, 5, 6], False),  # somebody wrote it in a message
        ([1, 2], False),
        ([], False),
    ],
)
def test_the_end_of_the_prompt_says_whether_thinking_is_open(prompt, is_open):
    assert Splitter(THINKS, decode).is_open_at_start(prompt) is is_open
    assert Splitter(PLAIN, decode).is_open_at_start(prompt) is False


# Tool calls


def test_a_tool_section_after_an_answer_is_one_segment():
    ids = [5, CLOSE, 6, SECTION, CALL, 7, CALL_END, CALL, 8, CALL_END, SECTION_END, STOP]
    result = cut(ids, KIMI, prompt=[OPEN])
    assert spans(result)[2:] == [("content", 2, 3), ("tool_call", 3, 11), ("stop", 11, 12)]
    assert result.tool_calls_closed
    assert result.residual is None


@pytest.mark.parametrize("opening", [SECTION, CALL])
def test_a_tool_call_ends_thinking_that_nothing_else_ends(opening):
    closing = SECTION_END if opening == SECTION else CALL_END
    result = cut([5, opening, 7, closing, STOP], KIMI, prompt=[OPEN])
    assert spans(result) == [("reasoning", 0, 1), ("tool_call", 1, 4), ("stop", 4, 5)]
    assert result.close is Close.IMPLICIT_TOOL


def test_a_tool_call_within_closed_thinking_is_a_thought():
    result = cut([5, CALL, 7, CALL_END, CLOSE, 6, STOP], QWEN, prompt=[OPEN])
    assert spans(result)[0] == ("reasoning", 0, 4)
    assert result.tokens("tool_call") == 0
    assert result.stray_markers == 2


def test_calls_with_white_space_between_them_are_one_segment():
    ids = [6, CALL, 7, CALL_END, SPACE, CALL, 8, CALL_END, SPACE, STOP]
    assert spans(cut(ids, QWEN)) == [
        ("content", 0, 1),
        ("tool_call", 1, 8),
        ("content", 8, 9),
        ("stop", 9, 10),
    ]


def test_content_between_calls_stays_content():
    ids = [CALL, 7, CALL_END, 5, CALL, 8, CALL_END, STOP]
    assert [one[0] for one in spans(cut(ids, QWEN))] == [
        "tool_call",
        "content",
        "tool_call",
        "stop",
    ]


@pytest.mark.parametrize("stop", [True, False])
def test_a_section_without_its_end_is_told(stop):
    ids = [SECTION, CALL, 7, CALL_END, *([STOP] if stop else [])]
    result = cut(ids, KIMI, stop=stop)
    assert spans(result)[0] == ("tool_call", 0, 4)
    assert not result.tool_calls_closed


def test_an_end_that_nothing_began_is_left_over():
    assert cut([6, CALL_END, STOP], QWEN).residual == (1, CALL_END)


# Channels


def on_channel(name, *body):
    return [CHANNEL, name, MESSAGE, *body]


def test_analysis_is_reasoning_and_final_is_content():
    ids = [*on_channel(ANALYSIS, 5, 6), END, START, 50, *on_channel(FINAL, 7), STOP]
    result = cut(ids, OSS)
    assert spans(result) == [
        ("marker", 0, 3),
        ("reasoning", 3, 5),
        ("marker", 5, 11),
        ("content", 11, 12),
        ("stop", 12, 13),
    ]
    assert result.close is Close.EXPLICIT


def test_several_analyses_and_a_call_between_them():
    call = [START, 50, CHANNEL, COMMENTARY, TO, SPACE, CONSTRAIN, 51, MESSAGE, 9]
    ids = [*on_channel(ANALYSIS, 5), END, START, 50, *on_channel(ANALYSIS, 6), END, *call, STOP]
    result = cut(ids, OSS)
    kinds = [one[0] for one in spans(result)]
    assert kinds == ["marker", "reasoning", "marker", "reasoning", "marker", "tool_call", "stop"]
    assert result.tokens("reasoning") == 2
    assert (result.close, result.tool_calls_closed) == (Close.EXPLICIT, True)


@pytest.mark.parametrize(
    ("ids", "stop", "close", "closed"),
    [
        (on_channel(ANALYSIS, 5), False, Close.TRUNCATED, True),
        ([*on_channel(ANALYSIS, 5), STOP], True, Close.MISSING_ON_STOP, True),
        ([*on_channel(ANALYSIS, 5), END, START], False, Close.TRUNCATED, True),
        ([*on_channel(FINAL, 5), STOP], True, Close.NEVER_OPENED, True),
        ([5, 6, STOP], True, Close.NEVER_OPENED, True),
        ([TO, *on_channel(COMMENTARY, 5)], False, Close.NEVER_OPENED, False),
        ([STOP], True, Close.NEVER_OPENED, True),
    ],
)
def test_every_end_on_channels_has_its_name(ids, stop, close, closed):
    result = cut(ids, OSS, stop=stop)
    assert (result.close, result.tool_calls_closed) == (close, closed)


@pytest.mark.parametrize(
    ("ids", "channel", "recipient"),
    [
        ([CHANNEL, ANALYSIS], "analysis", ""),
        (
            [START, 50, CHANNEL, COMMENTARY, TO, SPACE, CONSTRAIN, 51],
            "commentary",
            "functions.look",
        ),
        ([CHANNEL, COMMENTARY, TO, CONSTRAIN, 51], "commentary", "functions.look"),
        ([START, 50, TO, CHANNEL, COMMENTARY], "commentary", "functions.look"),
        ([START, 50], "", ""),
    ],
)
def test_a_header_names_its_channel_and_recipient(ids, channel, recipient):
    header = read_header(ids, HARMONY, decode)
    assert (header.channel, header.recipient) == (channel, recipient)


# All of them

MARKS = [OPEN, CLOSE, SPACE, STOP, 5, SECTION, SECTION_END, CALL, CALL_END]
HARMONY_MARKS = [START, CHANNEL, CONSTRAIN, MESSAGE, END, ANALYSIS, FINAL, COMMENTARY, TO, STOP, 5]


@settings(deadline=None)
@given(
    ids=st.lists(st.sampled_from(MARKS), max_size=14)
    | st.lists(st.sampled_from(HARMONY_MARKS), max_size=20),
    prompt=st.lists(st.sampled_from([OPEN, CLOSE, SPACE, 5]), max_size=3),
    stop=st.booleans(),
    profile=st.sampled_from([PLAIN, THINKS, KIMI, QWEN, OSS]),
)
def test_segments_tile_the_output_and_no_marker_is_content_unseen(ids, prompt, stop, profile):
    stop = stop and bool(ids)
    result = cut(ids, profile, prompt=prompt, stop=stop)
    position = 0
    for one in result.segments:
        assert one.start == position < one.end
        position = one.end
    assert position == len(ids)
    assert result.tokens("stop") == int(stop)
    control = {*profile.marker_ids.values(), *profile.stop_token_ids}
    content = [
        token
        for one in result.segments
        if one.kind == "content"
        for token in ids[one.start : one.end]
    ]
    assert (result.residual is not None) == any(token in control for token in content)
    if result.close in (Close.TRUNCATED, Close.MISSING_ON_STOP) and profile is not OSS:
        assert not content
    if result.close is Close.NOT_REASONING:
        assert result.tokens("reasoning") == 0
