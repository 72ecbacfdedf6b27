"""One decoded row becomes a `SourceRow` or a `BadRow`."""

import math
from typing import Any

from pipelines.sources.row import UNSTATED, BadRow, Json, Refused, SourceRow, decode_json, kind_of
from pipelines.sources.tools import normalise_tools

ROLES = ("system", "user", "assistant", "tool")
_MAX_DEPTH = 64


def parse_row(value: Any, *, file: str, line: int) -> SourceRow | BadRow:
    """Check one decoded row and bring it to one form. Pure.

    Trailing assistant messages are the set's own answer; they are dropped, because the target
    answers. Tool schemas are normalised, see `normalise_tools`.
    """
    try:
        if not isinstance(value, dict):
            raise Refused("not_an_object", f"a {kind_of(value)}, expected an object with messages")
        _check_values(value)
        return SourceRow(
            file=file,
            line=line,
            messages=_messages(value),
            tools=normalise_tools(value.get("tools")),
            source=_text_field(value, "source", f"{file} #{line}"),
            license=_text_field(value, "license", UNSTATED),
        )
    except Refused as refusal:
        return BadRow(file, line, refusal.reason, refusal.detail)


def _check_values(value: Any, depth: int = 0) -> None:
    """Refuse what cannot be stored as JSON in UTF-8 exactly as it came."""
    if depth > _MAX_DEPTH:
        raise Refused("bad_field", f"nested deeper than {_MAX_DEPTH} levels")
    match value:
        case str():
            _check_text(value)
        case dict():
            for key, one in value.items():
                _check_text(key)
                _check_values(one, depth + 1)
        case list():
            for one in value:
                _check_values(one, depth + 1)
        case float() if not math.isfinite(value):
            raise Refused("bad_field", f"the number {value}")
        case None | bool() | int() | float():
            pass
        case _:
            raise Refused("bad_field", f"a {kind_of(value)}, which JSON cannot hold")


def _check_text(text: str) -> None:
    if "\0" in text:
        raise Refused("nul_character", f"a NUL character in {text[:40]!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused("lone_surrogate", f"half of a UTF-16 pair: {error.reason}") from error


def _messages(row: Json) -> tuple[Json, ...]:
    given = row.get("messages")
    if not isinstance(given, list) or not given:
        seen = "no messages" if given in (None, []) else f"messages is a {kind_of(given)}"
        raise Refused("bad_messages", f"{seen}, expected a list of objects")
    for index, message in enumerate(given):
        if not isinstance(message, dict):
            raise Refused("bad_messages", f"message {index} is a {kind_of(message)}")
        if message.get("role") not in ROLES:
            raise Refused(
                "unknown_role",
                f"message {index} has the role {message.get('role')!r}, "
                f"expected one of {', '.join(ROLES)}",
            )
    end = len(given)
    while end and given[end - 1]["role"] == "assistant":
        end -= 1
    if not end or given[end - 1]["role"] not in ("user", "tool"):
        last = given[end - 1]["role"] if end else "assistant"
        raise Refused("no_question", f"the last message before an answer is from {last}")
    return tuple(_message(index, message) for index, message in enumerate(given[:end]))


def _message(index: int, message: Json) -> Json:
    calls = message.get("tool_calls")
    content = message.get("content")
    if calls is not None and message["role"] != "assistant":
        raise Refused("bad_tool_call", f"message {index}: tool_calls from {message['role']}")
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise Refused("unsupported_content", f"message {index}: content is a {kind_of(content)}")
    if not content.strip() and not calls:
        raise Refused("empty_content", f"message {index} ({message['role']}) says nothing")
    kept = {**message, "content": content}
    if calls is None:
        kept.pop("tool_calls", None)
        return kept
    if not isinstance(calls, list):
        raise Refused("bad_tool_call", f"message {index}: tool_calls is a {kind_of(calls)}")
    kept["tool_calls"] = [_tool_call(index, call) for call in calls]
    return kept


def _tool_call(index: int, call: Any) -> Json:
    """One form for all sources: arguments are a mapping. The template decides how it writes it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("bad_tool_call", f"message {index}: a tool call without a function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = decode_json(arguments.encode())
        except Refused as refusal:
            raise Refused(
                "bad_tool_call", f"message {index}: arguments are not JSON: {refusal.detail}"
            ) from refusal
    if not isinstance(arguments, dict):
        raise Refused(
            "bad_tool_call", f"message {index}: arguments are a {kind_of(arguments)}, not an object"
        )
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _text_field(row: Json, key: str, absent: str) -> str:
    value = row.get(key, absent)
    if not isinstance(value, str):
        raise Refused("bad_field", f"{key} is a {kind_of(value)}, expected a string")
    return value
