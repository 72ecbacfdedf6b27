"""Runs of agents: turns of three kinds, and steps."""

import pytest

from pipelines.sources.row import Refused
from pipelines.sources.swe_agent import read, recognises

ASK = {"role": "user", "content": "Mend it."}


def test_turns_of_role_and_text_become_messages():
    turns = [
        {"role": "system", "system_prompt": "You mend.", "text": None},
        {"role": "user", "text": "Mend it.", "system_prompt": None, "mask": False},
        {"role": "ai", "text": "Done."},
    ]
    assert read({"trajectory": turns}).messages == [
        {"role": "system", "content": "You mend."},
        ASK,
        {"role": "assistant", "content": "Done."},
    ]


def test_messages_stand_before_a_trajectory():
    assert read({"messages": [ASK], "trajectory": [{"action": "ls"}]}).messages == [ASK]


def test_a_call_without_text_stays_a_call():
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert read({"trajectory": [ASK, call]}).messages == [ASK, call]


@pytest.mark.parametrize(
    ("ids", "found"), [(["a"], "a"), (["a", "b"], None), ([], None), (None, None), ("a", None)]
)
def test_a_result_takes_the_only_id_of_its_list(ids, found):
    result = {"role": "tool", "content": "x", "tool_call_ids": ids}
    (message,) = read({"messages": [result]}).messages
    assert message.get("tool_call_id") == found


def test_an_id_of_its_own_stays():
    result = {"role": "tool", "content": "x", "tool_call_ids": ["a"], "tool_call_id": "b"}
    assert read({"messages": [result]}).messages == [result]


def test_steps_become_answers_and_what_was_seen():
    steps = [
        {"query": [ASK], "thought": "I look.", "action": "ls\n", "observation": "a.py"},
        {"response": "As I said.", "thought": "no", "action": "no", "observation": None},
    ]
    assert read({"trajectory": steps}).messages == [
        ASK,
        {"role": "assistant", "content": "I look.\n```\nls\n```"},
        {"role": "user", "content": "a.py"},
        {"role": "assistant", "content": "As I said."},
    ]


def test_a_problem_statement_opens_steps_without_a_query():
    row = {"problem_statement": "Mend it.", "trajectory": [{"action": "ls"}]}
    assert read(row).messages == [ASK, {"role": "assistant", "content": "```\nls\n```"}]


@pytest.mark.parametrize(
    "row",
    [
        {},
        {"trajectory": "a"},
        {"trajectory": 3},
        {"trajectory": [3]},
        {"trajectory": [{"action": "ls"}]},
        {"trajectory": [{"query": "a", "action": "ls"}]},
        {"trajectory": [{"query": [ASK], "thought": "b"}]},
        {"trajectory": [{"query": [ASK], "action": 3}]},
        {"trajectory": [ASK, {"action": "ls"}]},
        {"trajectory": [{"action": "ls"}, ASK], "problem_statement": "a"},
    ],
)
def test_what_is_neither_turns_nor_steps_is_refused(row):
    with pytest.raises(Refused) as refused:
        read(row)
    assert refused.value.reason in ("wrong_format", "malformed_json")


def test_messages_alone_are_not_a_run():
    assert recognises({"trajectory": []})
    assert recognises({"messages": "[]", "instance_id": "a"})
    assert not recognises({"messages": []})
    assert not recognises({"instance_id": "a"})
