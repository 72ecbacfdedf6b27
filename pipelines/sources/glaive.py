"""Text with labels, as glaiveai/glaive-function-calling-v2 writes a conversation with functions."""

import json
import re

from pipelines.sources.calls import calls_in, double_quoted
from pipelines.sources.columns import json_in, optional_text, text_of
from pipelines.sources.row import Given, Json, Refused

_END = "<|endoftext|>"
_CALL = "<functioncall>"
_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
_LABEL = re.compile(
    rf"(?P<end>{re.escape(_END)})?(?<!\s)(?P<gap>\s*)(?P<label>{'|'.join(_ROLES)}):"
)
_BETWEEN = re.compile(r"[\s,]*")


def recognises(row: Json) -> bool:
    """By the text of `system` and of a `chat` with a user in it."""
    chat = row.get("chat")
    return isinstance(row.get("system"), str) and isinstance(chat, str) and "USER:" in chat


def read(row: Json) -> Given:
    """`system` is prose and then declarations, `chat` is turns behind labels.

    The prose stays the system message. A result of a function goes without an id.
    """
    prose, tools = _system(optional_text(row, "system") or "")
    opening = [{"role": "system", "content": prose}] if prose else []
    return Given([*opening, *_chat(text_of(row, "chat").removeprefix("\ufeff"))], tools or None)


def _system(text: str) -> tuple[str, list[Json]]:
    """The prose, and the objects that follow it up to the end."""
    prose, brace, rest = text.strip().removeprefix("SYSTEM:").partition("{")
    return prose.strip(), _declarations(brace + rest) if brace else []


def _declarations(written: str) -> list[Json]:
    decoder, found, at = json.JSONDecoder(), [], 0
    try:
        text = double_quoted(written)
        while at < len(text):
            _, end = decoder.raw_decode(text, at)
            found.append(json_in(text[at:end], "a declaration"))
            between = _BETWEEN.match(text, end)
            at = between.end() if between else end
    except (ValueError, RecursionError) as error:
        raise Refused("bad_tools", f"declaration {len(found) + 1} is not JSON: {error}") from error
    return found


def _chat(text: str) -> list[Json]:
    """The turns. A label opens a turn behind a blank line, an end marker, or at the very start."""
    messages: list[Json] = []
    role, start = "", 0
    for found in _LABEL.finditer(text):
        lines = found["gap"].count("\n")
        if lines > 1 or found["end"] or found.start() == 0:
            _add_turn(messages, role, text[start : found.start()])
            role, start = _ROLES[found["label"]], found.end()
        elif lines:
            where = text[found.start() : found.end()].strip()
            raise Refused("wrong_format", f"{where} opens a turn, or is a line of one")
    _add_turn(messages, role, text[start:])
    return messages


def _add_turn(messages: list[Json], role: str, text: str) -> None:
    said = text.strip().removesuffix(_END).strip()
    if not role:
        if said:
            raise Refused("wrong_format", f"the chat opens with {said[:40]!r}, expected a label")
        return
    content, *calls = said.split(_CALL) if role == "assistant" else [said]
    message: Json = {"role": role, "content": content.strip()}
    if calls:
        message["tool_calls"] = [call for one in calls for call in calls_in(_unended(one))]
    messages.append(message)


def _unended(text: str) -> str:
    return text.strip().removesuffix(_END)
