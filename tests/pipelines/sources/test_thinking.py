"""Thoughts in answers: apart where they are certain, text where they are not."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.thinking import think_apart

TEXT = st.text(alphabet="ab \n<>/", max_size=12)


def answer(content, **more):
    return {"role": "assistant", "content": content, **more}


@pytest.mark.parametrize(
    ("content", "thought", "said"),
    [
        ("<think>\na\n</think>\n\nb", "a", "b"),
        (" \n<think>a</think>b\n", "a", "b\n"),
        ("<think>a</think>\n    indented", "a", "    indented"),
        ("<think>a\r\n</think>\r\n\r\nb", "a", "b"),
        ("<think>a</think>b</think>c", "a", "b</think>c"),
        ("<think>a</think>", "a", ""),
    ],
)
def test_a_thought_in_front_becomes_the_reasoning(content, thought, said):
    assert think_apart(answer(content)) == answer(said, reasoning_content=thought)


def test_an_empty_thought_is_none():
    assert think_apart(answer("<think>\n\n</think>\n\na")) == answer("a")


def test_what_else_a_message_has_stays():
    calls = [{"function": {"name": "f", "arguments": {}}}]
    given = answer("<think>a</think>", tool_calls=calls)
    assert think_apart(given) == answer("", tool_calls=calls, reasoning_content="a")


@pytest.mark.parametrize(
    "message",
    [
        answer("<think>a"),
        answer("a</think>b"),
        answer("b<think>a</think>"),
        answer("<think>a</think>b", reasoning_content="c"),
        answer(None),
        answer([{"type": "text", "text": "<think>a</think>b"}]),
        {"role": "user", "content": "<think>a</think>b"},
        "<think>a</think>b",
        None,
    ],
)
def test_anything_else_stays_as_it_is(message):
    assert think_apart(message) == message


@settings(deadline=None)
@given(TEXT, TEXT)
def test_no_letter_is_lost(thought, said):
    content = f"<think>{thought}</think>{said}"
    apart = think_apart(answer(content))
    kept = apart.get("reasoning_content", "") + "</think>" + apart["content"]
    assert "".join(kept.split()) == "".join(content.removeprefix("<think>").split())
