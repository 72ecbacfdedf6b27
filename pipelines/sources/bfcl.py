"""Questions as gorilla-llm/Berkeley-Function-Calling-Leaderboard has them."""

from typing import Any

from pipelines.sources.columns import json_in, list_of, looks_listed
from pipelines.sources.row import Given, Json, Refused, kind_of


def recognises(row: Json) -> bool:
    """By `question` as a list beside `function`, or beside the `involved_classes` of many turns."""
    return looks_listed(row.get("question")) and ("function" in row or "involved_classes" in row)


def read(row: Json) -> Given:
    """`question` is a list of turns, each a list of messages; no turn has an answer.

    The turns follow each other, as there is nothing between them. A row of `involved_classes`
    alone is refused: its functions are declared in files of their own.
    """
    messages: list[Any] = []
    for index, turn in enumerate(list_of(row, "question")):
        if not isinstance(turn, list):
            raise Refused("wrong_format", f"turn {index} is a {kind_of(turn)}, expected a list")
        messages += turn
    functions = row.get("function") or None
    if functions is None and row.get("involved_classes"):
        raise Refused("bad_tools", "the functions of involved_classes are not in the row")
    if isinstance(functions, str):
        functions = json_in(functions, "function")
    return Given(messages, [functions] if isinstance(functions, dict) else functions)
