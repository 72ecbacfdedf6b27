"""Conversations whose answers mark their thoughts, as those of open-thoughts do.

OpenThoughts-114k has markers of its own, OpenThoughts2-1M and OpenThoughts3-1.2M `<think>`.

The markers count where they frame a whole answer. Elsewhere they are text and stay: in what a user
says, in an answer that breaks off, and in the system prompt of OpenThoughts-114k that asks for
them.
"""

import re
from typing import Any

from pipelines.sources import sharegpt
from pipelines.sources.columns import looks_listed, opened_by_system, tools_of
from pipelines.sources.row import Given, Json
from pipelines.sources.thinking import spoken

_THOUGHT, _THOUGHT_END = "<|begin_of_thought|>", "<|end_of_thought|>"
_SOLUTION, _SOLUTION_END = "<|begin_of_solution|>", "<|end_of_solution|>"
_BETWEEN = re.compile(rf"{re.escape(_THOUGHT_END)}\s*{re.escape(_SOLUTION)}")


def recognises(row: Json) -> bool:
    """By `conversations` in which a value opens with a thought."""
    given = row.get("conversations")
    if isinstance(given, str):
        return looks_listed(given) and (_THOUGHT in given or "<think>" in given)
    turns = given if isinstance(given, list) else []
    values = [turn.get("value") for turn in turns if isinstance(turn, dict)]
    opened = (_THOUGHT, "<think>")
    return any(isinstance(value, str) and value.lstrip().startswith(opened) for value in values)


def read(row: Json) -> Given:
    """`conversations` with thoughts as reasoning and solutions as content; `system` beside it."""
    messages = [_marked_apart(message) for message in sharegpt.turns(row)]
    return Given(opened_by_system(row, messages), tools_of(row))


def _marked_apart(message: Any) -> Any:
    match message:
        case {"role": "assistant", "content": str(content)}:
            return {**message, **_unframed(content)}
        case _:
            return message


def _unframed(text: str) -> Json:
    """The thought and the solution of an answer that consists of both, the text of any other."""
    framed = text.strip()
    between = _BETWEEN.search(framed)  # a thought that quotes one marker alone is not over yet
    if not between or not (framed.startswith(_THOUGHT) and framed.endswith(_SOLUTION_END)):
        return {"content": text}
    solution = framed[between.end() :].removesuffix(_SOLUTION_END)
    return spoken(framed[: between.start()].removeprefix(_THOUGHT), solution.rstrip())
