"""Marked thoughts: apart where the markers frame the whole answer, text everywhere else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.openthoughts import read, recognises

PLAIN = st.text(alphabet="ab \n|<>", max_size=20)


def framed(thought, solution):
    return (
        f"<|begin_of_thought|>\n\n{thought}\n\n<|end_of_thought|>\n\n"
        f"<|begin_of_solution|>\n\n{solution}\n\n<|end_of_solution|>"
    )


def answer(value):
    turns = [{"from": "user", "value": "a"}, {"from": "assistant", "value": value}]
    return read({"conversations": turns}).messages[1]


def test_a_framed_answer_becomes_reasoning_and_content():
    assert answer(framed("a\nb", "c\nd")) == {
        "role": "assistant",
        "content": "c\nd",
        "reasoning_content": "a\nb",
    }


@settings(deadline=None)
@given(PLAIN, PLAIN)
def test_whatever_is_thought_and_solved_comes_back(thought, solution):
    found = answer(framed(thought, solution))
    assert found.get("reasoning_content", "") == thought.strip()
    assert found["content"] == solution.strip("\n").rstrip()


@pytest.mark.parametrize(
    "quoted",
    ["<|end_of_thought|>", "<|begin_of_solution|>", "<|end_of_solution|>", "<|begin_of_thought|>"],
)
def test_a_marker_quoted_in_an_answer_is_text(quoted):
    found = answer(framed(f"Say {quoted} here.", f"Say {quoted} there."))
    assert found["reasoning_content"] == f"Say {quoted} here."
    assert found["content"] == f"Say {quoted} there."


@pytest.mark.parametrize(
    "value",
    [
        "<|begin_of_thought|>\n\na",
        "<|begin_of_thought|>\n\na\n\n<|end_of_thought|>",
        "<|begin_of_thought|>a<|end_of_thought|><|begin_of_solution|>b",
        "b <|begin_of_thought|>a<|end_of_thought|><|begin_of_solution|>b<|end_of_solution|>",
        "<|begin_of_solution|>b<|end_of_solution|>",
        "b",
    ],
)
def test_an_answer_that_is_not_whole_stays_text(value):
    assert answer(value) == {"role": "assistant", "content": value}


def test_what_a_user_and_the_system_say_of_markers_is_text():
    turns = [{"from": "user", "value": framed("a", "b")}]
    said = read({"system": framed("c", "d"), "conversations": turns})
    assert [message["content"] for message in said.messages] == [
        framed("c", "d"),
        framed("a", "b"),
    ]


def test_conversations_without_thoughts_are_not_recognised():
    assert recognises({"conversations": [{"from": "gpt", "value": framed("a", "b")}]})
    assert recognises({"conversations": [{"from": "gpt", "value": "<think>a</think>b"}]})
    assert not recognises({"conversations": [{"from": "gpt", "value": "b"}]})
    assert not recognises({"conversations": 3})
