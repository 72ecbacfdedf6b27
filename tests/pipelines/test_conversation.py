"""Conversation: ids of later turns, which turns are asked, and what a run has to hold."""

import json
from dataclasses import replace

import pytest

from pipelines.conversation import (
    Answer,
    HistoryRule,
    NotAsked,
    expected_ids,
    messages_before,
    next_prompt_ids,
    turns_of,
)

OPEN, CLOSE, STOP, BLANK, LINE = 10, 11, 2, 20, 21
TEXTS = {OPEN: "<think>", CLOSE: "</think>", STOP: "<stop>", BLANK: " ", LINE: "\n\n", 22: ".\n"}
KEPT = HistoryRule("kept", False, True, "", "", "", frozenset((OPEN, CLOSE)))
DROPPED = replace(KEPT, reasoning="dropped")
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "one"},
    {"role": "user", "content": "two"},
    {"role": "user", "content": "three"},
]
PROMPT = {
    "sample_id": "birds-1",
    "messages": json.dumps(MESSAGES),
    "prompt_ids": [100],
    "history": [[101], [102]],
    "continuations": [[201], [202]],
}
SINGLE = {**PROMPT, "messages": json.dumps(MESSAGES[:2]), "history": [], "continuations": []}


def decode(ids):
    return "".join(TEXTS.get(one, f"w{one}") for one in ids)


def answer(*parts, sample_id="birds-1", status="ok", finish="stop"):
    """An answer of (kind, ids) parts, with its stop id."""
    row = {
        "sample_id": sample_id,
        "status": status,
        "finish_reason": finish,
        "output_ids": [],
        "segments": [],
    }
    for kind, ids in (*parts, ("stop", [STOP])):
        start = len(row["output_ids"])
        row["output_ids"] += ids
        row["segments"].append({"kind": kind, "start": start, "end": start + len(ids)})
    for kind in ("reasoning", "content"):
        row[kind] = decode([one for name, ids in parts if name == kind for one in ids])
    return Answer.of(row)


THOUGHT = answer(
    ("marker", [OPEN]), ("reasoning", [31]), ("marker", [CLOSE]), ("content", [LINE, 32])
)
PLAIN = answer(("content", [33]))


def test_the_first_turn_is_asked_with_the_prompt():
    assert next_prompt_ids(PROMPT, [], KEPT, decode) == (100,)


def test_a_later_turn_follows_the_answers_without_their_stop_ids():
    assert next_prompt_ids(PROMPT, [PLAIN], KEPT, decode) == (101, 33, 201)
    ids = next_prompt_ids(PROMPT, [THOUGHT, PLAIN], KEPT, decode)
    assert ids == (101, OPEN, 31, CLOSE, LINE, 32, 102, 33, 202)


def test_reasoning_that_the_template_drops_is_left_out():
    ids = next_prompt_ids(PROMPT, [THOUGHT, PLAIN], DROPPED, decode)
    assert ids == (101, LINE, 32, 102, 33, 202)


@pytest.mark.parametrize(
    ("changes", "parts", "said"),
    [
        ({"off_start": "\n"}, [LINE, 33], (33,)),
        ({"off_start": "\n"}, [BLANK, LINE, 33], (BLANK, LINE, 33)),
        ({"off_end": "\n "}, [33, BLANK, LINE], (33,)),
        ({"off_end": " "}, [33, 22], (33, 22)),
        ({"off_start_after_reasoning": "\n"}, [LINE, 33], (LINE, 33)),
    ],
)
def test_blanks_that_the_template_takes_off_go_with_their_tokens(changes, parts, said):
    ids = next_prompt_ids(PROMPT, [answer(("content", parts))], replace(DROPPED, **changes), decode)
    assert ids == (101, *said, 201)


def test_blanks_after_dropped_reasoning_have_a_rule_of_their_own():
    rule = replace(DROPPED, off_start_after_reasoning="\n")
    assert next_prompt_ids(PROMPT, [THOUGHT], rule, decode) == (101, 32, 201)
    assert json.loads(messages_before(PROMPT, [THOUGHT], 2, rule))[2]["content"] == "w32"


@pytest.mark.parametrize(
    "said",
    [
        answer(("content", [33, 22])),  # the template would take half of the last token
        answer(("content", [33, CLOSE, 34])),  # and read this as the end of reasoning
        answer(("content", [33]), ("marker", [36]), ("content", [34])),  # in pieces
        answer(("reasoning", [33])),  # nothing stays
        answer(("content", [LINE])),
    ],
)
def test_an_answer_that_no_choice_of_ids_gives_is_not_followed(said):
    found = next_prompt_ids(PROMPT, [said], replace(DROPPED, off_end="\n"), decode)
    assert isinstance(found, NotAsked)
    assert found.fault == "history_not_exact"
    assert "turn 1, birds-1" in found.detail


def test_an_answer_without_reasoning_is_not_followed_where_the_template_would_write_some():
    rule = replace(KEPT, writes_reasoning=True, may_be_bare=False)
    assert next_prompt_ids(PROMPT, [THOUGHT], rule, decode) == (
        *[101, OPEN, 31, CLOSE, LINE, 32],
        201,
    )
    found = next_prompt_ids(PROMPT, [PLAIN], rule, decode)
    assert isinstance(found, NotAsked)
    assert found.fault == "history_not_exact"


@pytest.mark.parametrize(
    ("said", "how"),
    [
        (replace(PLAIN, status="rejected:repetition"), "is rejected:repetition"),
        (replace(PLAIN, status="failed:no_server"), "is failed:no_server"),
        (replace(PLAIN, status="failed:earlier_turn"), "is failed:earlier_turn"),
        (replace(PLAIN, finish_reason="length"), "ended by length"),
        (answer(("content", [33]), ("tool_call", [34])), "calls a tool"),
    ],
)
def test_a_turn_without_a_whole_answer_before_it_is_not_asked(said, how):
    second = replace(said, sample_id="birds-1.t2.s1")
    assert next_prompt_ids(PROMPT, [PLAIN, second], KEPT, decode) == NotAsked(
        "earlier_turn", f"turn 2, birds-1.t2.s1, {how}"
    )
    assert next_prompt_ids(PROMPT, [said, PLAIN], KEPT, decode) == NotAsked(
        "earlier_turn", f"turn 1, birds-1, {how}"
    )


def test_messages_hold_the_targets_own_answers():
    assert json.loads(messages_before(PROMPT, [], 1, KEPT)) == MESSAGES[:2]
    found = json.loads(messages_before(PROMPT, [THOUGHT, PLAIN], 3, KEPT))
    assert found == [
        *MESSAGES[:2],
        {"role": "assistant", "content": "\n\nw32", "reasoning_content": "w31"},
        MESSAGES[2],
        {"role": "assistant", "content": "w33"},
        MESSAGES[3],
    ]
    dropped = json.loads(messages_before(PROMPT, [THOUGHT], 2, DROPPED))
    assert dropped[2] == {"role": "assistant", "content": "\n\nw32"}


def test_the_messages_of_a_single_turn_are_those_of_the_prompt():
    assert messages_before(SINGLE, [], 1, KEPT) == SINGLE["messages"]


def test_a_run_has_to_hold_every_sample_of_every_turn():
    assert (turns_of(PROMPT), turns_of(SINGLE)) == (3, 1)
    assert expected_ids(SINGLE, 1) == ["birds-1"]
    assert expected_ids(PROMPT, 2) == [
        "birds-1",
        "birds-1.t1.s2",
        "birds-1.t2.s1",
        "birds-1.t2.s2",
        "birds-1.t3.s1",
        "birds-1.t3.s2",
    ]
