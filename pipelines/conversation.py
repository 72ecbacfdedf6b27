"""A conversation in the target's own words: what its next turn is asked with. Ids only; pure.

The texts around the answers were rendered, tokenised and proved by `pipelines.turns`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipelines.schema import response_id
from pipelines.sources.row import dump_json

Decode = Callable[[Sequence[int]], str]  # ids to text, special tokens shown

EARLIER_TURN = "earlier_turn"
HISTORY_NOT_EXACT = "history_not_exact"
NO_ROOM = "no_room"  # the context is full of earlier turns


@dataclass(frozen=True)
class HistoryRule:
    """What a target's template makes of an earlier answer; `turns.history_rule` finds it."""

    reasoning: Literal["kept", "dropped"]
    # The template writes a message's `reasoning_content` where reasoning is kept; and without any
    # it writes the content alone, not an empty block of reasoning.
    writes_reasoning: bool
    may_be_bare: bool
    # Characters that the template takes off an answer: off its start, off its start where
    # reasoning that is dropped came before it, off its end.
    off_start: str
    off_start_after_reasoning: str
    off_end: str
    reasoning_ids: frozenset[int]  # what bounds reasoning; where it is dropped, none may stay


@dataclass(frozen=True)
class Answer:
    """What a later turn needs of an earlier response row."""

    sample_id: str
    status: str
    finish_reason: str
    output_ids: tuple[int, ...]
    segments: tuple[tuple[str, int, int], ...]  # kind, start, end
    reasoning: str
    content: str

    @staticmethod
    def of(row: Mapping[str, Any]) -> "Answer":
        """Take it from a row of `RESPONSE_SCHEMA`."""
        segments = tuple((one["kind"], one["start"], one["end"]) for one in row["segments"])
        texts = ("sample_id", "status", "finish_reason", "reasoning", "content")
        return Answer(
            output_ids=tuple(row["output_ids"]),
            segments=segments,
            **{name: row[name] for name in texts},
        )


@dataclass(frozen=True)
class NotAsked:
    """Why a turn cannot be asked; its row is `failed:<fault>`."""

    fault: str
    detail: str


def turns_of(prompt: Mapping[str, Any]) -> int:
    """How many answers a prompt row wants."""
    return 1 + len(prompt["continuations"])


def expected_ids(prompt: Mapping[str, Any], samples: int) -> list[str]:
    """The ids of all responses to a prompt row: every sample of turn 1, then of turn 2, ..."""
    return [
        response_id(prompt["sample_id"], turn, sample)
        for turn in range(1, turns_of(prompt) + 1)
        for sample in range(1, samples + 1)
    ]


def next_prompt_ids(
    prompt: Mapping[str, Any], answers: Sequence[Answer], rule: HistoryRule, decode: Decode
) -> tuple[int, ...] | NotAsked:
    """What turn `len(answers) + 1` is asked with, or why it is not asked.

    `answers` are those of the same sample, from turn 1 on. A turn needs every earlier one to be
    ok and whole: not rejected, not failed, not cut by length, and no call that waits for a tool's
    result: nobody gives one, and templates keep the reasoning of an unfinished call.
    """
    if not answers:
        return tuple(prompt["prompt_ids"])
    assert len(answers) < turns_of(prompt)
    ids: list[int] = []
    for turn, answer in enumerate(answers, start=1):
        if (why := _ends_the_conversation(answer)) is not None:
            return NotAsked(EARLIER_TURN, f"turn {turn}, {answer.sample_id}, {why}")
        said = _in_history(answer, rule, decode)
        if not said:
            detail = (
                f"turn {turn}, {answer.sample_id}: no run of this answer's ids is what the "
                "template makes of it"
            )
            return NotAsked(HISTORY_NOT_EXACT, detail)
        ids += [*prompt["history"][turn - 1], *said]
    return (*ids, *prompt["continuations"][len(answers) - 1])


def messages_before(
    prompt: Mapping[str, Any], answers: Sequence[Answer], turn: int, rule: HistoryRule
) -> str:
    """The messages before the answer of a turn, as JSON, with the target's own earlier answers."""
    if turns_of(prompt) == 1:
        messages: str = prompt["messages"]
        return messages
    found: list[dict[str, Any]] = []
    users = 0
    for message in json.loads(prompt["messages"]):
        found.append(message)
        if message["role"] == "user":
            users += 1
            if users == turn:
                return dump_json(found)
            found.append(_message(answers[users - 1], rule))
    raise AssertionError(f"{prompt['sample_id']} has {users} turns, turn {turn} was wanted")


def _message(answer: Answer, rule: HistoryRule) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content}
    if rule.reasoning == "kept" and answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    elif rule.reasoning == "dropped":
        start, end = _off(answer, rule)
        message["content"] = answer.content.lstrip(start).rstrip(end)
    return message


def _ends_the_conversation(answer: Answer) -> str | None:
    if answer.status != "ok":
        return f"is {answer.status}"
    if answer.finish_reason != "stop":
        return f"ended by {answer.finish_reason}"
    if any(kind == "tool_call" for kind, _, _ in answer.segments):
        return "calls a tool"
    return None


def _in_history(answer: Answer, rule: HistoryRule, decode: Decode) -> tuple[int, ...] | None:
    """An answer's ids as history holds them: a run of its own ids, without the stop id.

    None where the template takes off characters that are only a part of a token, where what stays
    is in pieces, where it holds a marker that the template would read as the end of reasoning, or
    where the template would write reasoning that is not there.
    """
    kept = rule.reasoning == "kept"
    if not rule.may_be_bare and not _reasoned(answer):
        return None
    ids = _span(answer, lambda kind: kind != "stop" if kept else kind == "content")
    if ids is None or (not kept and rule.reasoning_ids.intersection(ids)):
        return None
    start, end = _off(answer, rule)
    return _without(ids, start, end, decode) if start or end else ids


def _span(answer: Answer, stays: Callable[[str], bool]) -> tuple[int, ...] | None:
    """The ids of the segments that stay; None if something between them does not."""
    staying = [(start, end) for kind, start, end in answer.segments if stays(kind)]
    if not staying:
        return ()
    start, end = staying[0][0], staying[-1][1]
    whole = sum(last - first for first, last in staying) == end - start
    return answer.output_ids[start:end] if whole else None


def _off(answer: Answer, rule: HistoryRule) -> tuple[str, str]:
    if rule.reasoning == "dropped" and _reasoned(answer):
        return rule.off_start_after_reasoning, rule.off_end
    # Reasoning that the template writes begins after an opening of the template's own.
    begins_with_reasoning = rule.writes_reasoning and _reasoned(answer)
    return "" if begins_with_reasoning else rule.off_start, rule.off_end


def _reasoned(answer: Answer) -> bool:
    return any(kind in ("reasoning", "marker") for kind, _, _ in answer.segments)


def _without(ids: tuple[int, ...], start: str, end: str, decode: Decode) -> tuple[int, ...] | None:
    """Drop whole tokens from both ends until the text is as the template would trim it."""
    wanted = decode(ids).lstrip(start).rstrip(end)
    first, last = 0, len(ids)
    while start and first < last and not decode(ids[first : first + 1]).strip(start):
        first += 1
    while end and first < last and not decode(ids[last - 1 : last]).strip(end):
        last -= 1
    return ids[first:last] if decode(ids[first:last]) == wanted else None
