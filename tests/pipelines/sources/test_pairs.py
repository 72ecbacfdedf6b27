"""One question and one answer: the question whole, or refused."""

import pytest

from pipelines.sources.pairs import (
    has_texts,
    read_alpaca,
    read_columns,
    read_problem,
    read_prompt,
    recognises_problem,
    recognises_prompt,
)
from pipelines.sources.row import Refused

READERS = {
    "input": read_columns("input", "output"),
    "instruction": read_alpaca,
    "prompt": read_prompt,
    "problem": read_problem,
}


def said(given):
    return [(message["role"], message["content"]) for message in given.messages]


@pytest.mark.parametrize("column", READERS)
def test_a_question_alone_is_a_prompt(column):
    assert said(READERS[column]({column: "a"})) == [("user", "a")]


@pytest.mark.parametrize("column", READERS)
@pytest.mark.parametrize("more", ["context", "passage", "choices", "options"])
def test_a_question_with_a_part_elsewhere_is_refused(column, more):
    with pytest.raises(Refused, match=more) as refused:
        READERS[column]({column: "a", more: ["b"]})
    assert refused.value.reason == "wrong_format"
    assert said(READERS[column]({column: "a", more: ""})) == [("user", "a")]


@pytest.mark.parametrize("column", READERS)
def test_system_and_tools_stand_beside_it(column):
    given = READERS[column]({column: "a", "system": "b", "tools": [{"name": "f"}]})
    assert said(given) == [("system", "b"), ("user", "a")]
    assert given.tools == [{"name": "f"}]


def test_an_input_stands_on_the_line_below_its_instruction():
    assert said(read_alpaca({"instruction": "a", "input": "b", "output": "c"})) == [
        ("user", "a\nb"),
        ("assistant", "c"),
    ]


def test_history_comes_before_the_question():
    row = {"instruction": "a", "output": "b", "history": [["c", "d"], ["e", "f"]], "system": "s"}
    assert [text for _, text in said(read_alpaca(row))] == ["s", "c", "d", "e", "f", "a", "b"]


@pytest.mark.parametrize("history", ["a", [["a"]], [["a", "b", "c"]], ["ab"], {"a": "b"}])
def test_history_has_to_be_pairs(history):
    with pytest.raises(Refused):
        read_alpaca({"instruction": "a", "output": "b", "history": history})


@pytest.mark.parametrize(
    ("row", "answer"),
    [
        ({"solution": "s", "answer": "a"}, "s"),
        ({"solution": None, "answer": "a"}, "a"),
        ({"answers": ["a", "b"]}, "a"),
        ({"answer": 7}, "7"),
        ({"response": "r"}, "r"),
        ({"answers": []}, None),
    ],
)
def test_a_solution_stands_before_a_result(row, answer):
    answers = [] if answer is None else [("assistant", answer)]
    for column in ("problem", "question"):
        assert said(read_problem({column: "q", **row})) == [("user", "q"), *answers]


def test_prompts_may_be_messages():
    ask, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    assert read_prompt({"prompt": [ask], "completion": [answer]}).messages == [ask, answer]
    assert read_prompt({"prompt": "a", "response": "b"}).messages == [ask, answer]
    assert read_prompt({"prompt": "a", "chosen": "b", "rejected": "c"}).messages == [ask]


@pytest.mark.parametrize("value", [None, 3, {"a": 1}, ["a", "b"]])
@pytest.mark.parametrize("column", ["input", "instruction", "problem"])
def test_a_question_that_is_no_text_is_refused(column, value):
    with pytest.raises(Refused) as refused:
        READERS[column]({column: value, "output": "b", "answer": "b"})
    assert refused.value.reason == "wrong_format"


def test_columns_are_recognised_by_text_and_by_what_is_not_there():
    knows = has_texts("a", "b", without=("c",))
    assert knows({"a": "x", "b": None})
    assert not knows({"a": "x"})
    assert not knows({"a": "x", "b": 3})
    assert not knows({"a": "x", "b": "y", "c": None})
    assert not knows({"a": "x", "b": "y", "context": ""})
    assert recognises_prompt({"prompt": []})
    assert not recognises_prompt({"prompt": "a", "question": "b"})
    assert recognises_problem({"question": "a", "answers": None})
    assert not recognises_problem({"question": ["a"], "answer": "b"})
    assert not recognises_problem({"question": "a"})
