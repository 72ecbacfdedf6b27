"""The columns of a row as a format needs them. What is not of its shape is `Refused`."""

from collections.abc import Sequence
from typing import Any

from pipelines.sources.row import Json, Refused, decode_json, kind_of


def text_of(row: Json, column: str) -> str:
    """A column that has to hold text."""
    value = row.get(column)
    if not isinstance(value, str):
        raise Refused("wrong_format", f"{column} is a {kind_of(value)}, expected text")
    return value


def optional_text(row: Json, *columns: str) -> str | None:
    """The text of the first of these columns that is there and not null; None without one."""
    for column in columns:
        if row.get(column) is not None:
            return text_of(row, column)
    return None


def list_of(row: Json, column: str) -> list[Any]:
    """A column that has to hold a list, or a list as JSON text."""
    value = row.get(column)
    if isinstance(value, str):
        value = json_in(value, column)
    if not isinstance(value, list):
        raise Refused("wrong_format", f"{column} is a {kind_of(value)}, expected a list")
    return value


def looks_listed(value: Any) -> bool:
    """Whether `list_of` may find a list in this cell, without decoding it."""
    start = value.lstrip("\ufeff \t\r\n")[:1] if isinstance(value, str) else ""
    return isinstance(value, list) or start == "["


def json_in(text: str, where: str) -> Any:
    """JSON that a row holds as text. A byte order mark before it says nothing and is skipped."""
    try:
        return decode_json(text.removeprefix("\ufeff").encode())
    except UnicodeEncodeError as error:
        detail = f"{where}: half of a UTF-16 pair: {error.reason}"
        raise Refused("lone_surrogate", detail) from error
    except Refused as refusal:
        raise Refused(refusal.reason, f"{where}: {refusal.detail}") from refusal


def tools_of(row: Json) -> Any:
    """What a row declares in `tools` or `functions`, as it stands there; None if both are empty."""
    columns = (row.get("tools"), row.get("functions"))
    given = [value for value in columns if value not in (None, "", [])]
    if len(given) > 1:
        raise Refused("bad_tools", "both tools and functions declare something")
    return given[0] if given else None


def opened_by_system(row: Json, messages: Sequence[Any]) -> list[Any]:
    """The messages behind the text of a column `system` or `system_prompt`, if there is one.

    A conversation that opens with a system message of its own has to say the same in it.
    """
    system = optional_text(row, "system", "system_prompt")
    if not system:
        return list(messages)
    opening = {"role": "system", "content": system}
    first = messages[0] if messages else None
    if not isinstance(first, dict) or first.get("role") != "system":
        return [opening, *messages]
    if first.get("content") != system:
        raise Refused("wrong_format", "the system column and the first message say two things")
    return list(messages)
