"""Tool calls that a data set writes as text. Nothing is evaluated, and nothing is guessed."""

import re
from typing import Any

from pipelines.sources.columns import json_in
from pipelines.sources.row import Json, Refused, kind_of

_QUOTED_ARGUMENTS = re.compile(
    r"""\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"arguments"\s*:\s*'(?P<json>.*)'\s*\}""",
    re.DOTALL,
)
_LITERAL = re.compile(
    r'"[^"\\]*(?:\\.[^"\\]*)*"'
    r"|'(?P<single>[^'\\]*(?:\\.[^'\\]*)*)'"
    r"|\b(?:True|False|None)\b"
    r"""|(?P<open>["'])""",
    re.DOTALL,
)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_TO_ESCAPE = re.compile(r'\\.|"', re.DOTALL)
_ESCAPES = {"\\'": "'", '"': '\\"'}


def calls_in(text: str) -> list[Json]:
    """The calls of a text: `{"name", "arguments"}`, or a list of them for parallel calls.

    Besides JSON, two spellings have a certain reading: single quotes instead of double ones, and
    arguments as JSON in single quotes, with apostrophes in it or not. The arguments of a call are
    an object, or its JSON. Raises `Refused` with bad_tool_call.
    """
    text = text.strip()
    try:
        value = _with_quoted_arguments(text) or json_in(double_quoted(text), "not JSON")
    except Refused as refusal:
        raise Refused("bad_tool_call", f"{refusal.detail}, in {text[:80]!r}") from refusal
    return calls_of(value)


def calls_of(value: Any) -> list[Json]:
    """A decoded `{"name", "arguments"}`, or a list of them, in OpenAI's words. Raises `Refused`."""
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            seen = sorted(call) if isinstance(call, dict) else f"a {kind_of(call)}"
            raise Refused("bad_tool_call", f"a call is {seen}, expected a name and arguments")
    if not calls:
        raise Refused("bad_tool_call", "an empty list of calls")
    return [{"type": "function", "function": call} for call in calls]


def double_quoted(text: str) -> str:
    """JSON for a text that writes it in single quotes, or with Python's constants; JSON as it is.

    Raises `Refused` with malformed_json for a quote that never closes.
    """
    return _LITERAL.sub(_as_json, text)


def _as_json(literal: re.Match[str]) -> str:
    if literal["open"]:  # to go on would look for its end again and again
        raise Refused("malformed_json", f"a {literal['open']} at {literal.start()} never closes")
    if literal["single"] is None:
        return _CONSTANTS.get(literal[0], literal[0])
    said = _TO_ESCAPE.sub(lambda one: _ESCAPES.get(one[0], one[0]), literal["single"])
    return f'"{said}"'


def _with_quoted_arguments(text: str) -> Json | None:
    """`{"name": "f", "arguments": '{...}'}`, where the end of the quotes is the end of the call."""
    found = _QUOTED_ARGUMENTS.fullmatch(text)
    if found is None:
        return None
    for written in (found["json"], found["json"].replace("\\'", "'")):
        try:
            arguments = json_in(written, "arguments")
        except Refused:
            continue
        if isinstance(arguments, dict):
            return {"name": found["name"], "arguments": arguments}
    return None
