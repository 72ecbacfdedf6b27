"""Read the tool calls of a response out of the ids of its tool_call segments. Pure.

Arguments stay the JSON text that the target wrote.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipelines.recipe import ChannelMarkers, TargetProfile, ToolMarkers
from pipelines.split import Decode, Split, read_header

Fault = Literal["truncated_tool_call", "malformed_tool_call", "invalid_tool_json"]

_KIMI_ID = re.compile(r"(?:functions\.)?(?P<name>[\w.\-]+):\d+")
_FENCED = re.compile(r"```(?:json)?\n(?P<json>.*?)\n?```", re.DOTALL)
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class ToolCall:
    """One call. `arguments` is JSON text, as written."""

    call_id: str
    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """The call as chat APIs write it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolCalls:
    """The calls of one response in order, and what is wrong with the first that is broken."""

    calls: tuple[ToolCall, ...] = ()
    fault: Fault | None = None
    detail: str = ""

    def undeclared(self, declared: Collection[str]) -> list[str]:
        """The names that are called and not declared."""
        return sorted({one.name for one in self.calls} - set(declared))

    def as_json(self) -> str:
        """A JSON list."""
        if not self.calls:  # as most responses have it
            return "[]"
        return json.dumps([one.as_json() for one in self.calls], ensure_ascii=False)


class _Broken(Exception):
    """This call cannot be read."""

    def __init__(self, fault: Fault, detail: str) -> None:
        super().__init__(detail)
        self.fault, self.detail = fault, detail


NO_CALLS = ToolCalls()


def read_calls(
    output_ids: Sequence[int],
    cut: Split,
    profile: TargetProfile,
    decode: Decode,
    declared: Sequence[str],
) -> ToolCalls:
    """The calls within the tool_call segments of `cut`; `declared` are the tools of the prompt.

    A broken call does not hide the ones before it; those after it are not read.
    """
    calls: list[ToolCall] = []
    try:
        for one in cut.segments:
            if one.kind != "tool_call":
                continue
            ids = output_ids[one.start : one.end]
            if profile.channels is not None:
                calls.append(_channel_call(ids, profile.channels, decode, len(calls)))
            elif profile.tool_markers is not None:
                for inner in _inner_ids(ids, profile.tool_markers):
                    calls.append(
                        _marked_call(inner, profile.tool_markers, decode, len(calls), declared)
                    )
        if not cut.tool_calls_closed:
            raise _Broken("truncated_tool_call", f"call {len(calls)} or its section has no end")
    except _Broken as broken:
        if not cut.tool_calls_closed:  # what is cut short is not JSON either
            return ToolCalls(tuple(calls), "truncated_tool_call", broken.detail)
        return ToolCalls(tuple(calls), broken.fault, broken.detail)
    return ToolCalls(tuple(calls)) if calls else NO_CALLS


def _inner_ids(ids: Sequence[int], markers: ToolMarkers) -> list[Sequence[int]]:
    """What stands between the markers of each call. Raises `_Broken` for a call without its end."""
    found: list[Sequence[int]] = []
    at = 0
    while markers.call_open_id in ids[at:]:
        start = ids.index(markers.call_open_id, at) + 1
        if markers.call_close_id not in ids[start:]:
            raise _Broken("malformed_tool_call", f"call {len(found)} has no end")
        at = ids.index(markers.call_close_id, start)
        found.append(ids[start:at])
    if not found:
        raise _Broken("malformed_tool_call", "a section without a call")
    return found


def _marked_call(
    ids: Sequence[int],
    markers: ToolMarkers,
    decode: Decode,
    number: int,
    declared: Sequence[str],
) -> ToolCall:
    if markers.arguments_id is None:
        return _hermes_call(decode(ids), number)
    if markers.arguments_id not in ids:
        raise _Broken("malformed_tool_call", f"call {number} has no arguments: {decode(ids)[:80]}")
    at = ids.index(markers.arguments_id)
    head, arguments = decode(ids[:at]).strip(), decode(ids[at + 1 :])
    call_id, name = f"call_{number}", head
    match markers.format:
        case "kimi":
            call_id, name = head, _kimi_name(head, number, declared)
        case "deepseek_v3":  # head is "function"; the name is the first line after it
            name, _, fenced = arguments.partition("\n")
            body = _FENCED.fullmatch(fenced.strip())
            if body is None:
                raise _Broken("malformed_tool_call", f"call {number}: {arguments[:80]}")
            name, arguments = name.strip(), body["json"]
        case "deepseek_v31" | "hermes":
            pass
    return _checked(call_id, name, arguments.strip(), number)


def _kimi_name(head: str, number: int, declared: Sequence[str]) -> str:
    named = _KIMI_ID.fullmatch(head)
    if named:
        return named["name"]
    if head.isdecimal() and len(declared) == 1:  # a bare counter, and only one tool it can mean
        return declared[0]
    raise _Broken("malformed_tool_call", f"call {number} is named {head[:80]!r}")


def _hermes_call(text: str, number: int) -> ToolCall:
    members = _members(text, number)
    if not {"name", "arguments"} <= members.keys():
        raise _Broken("malformed_tool_call", f"call {number} has the keys {sorted(members)}")
    (name, _), (arguments, written) = members["name"], members["arguments"]
    if not isinstance(name, str):
        raise _Broken("malformed_tool_call", f"call {number} has the name {name!r}")
    # Some write the arguments as a string that holds JSON.
    return _checked(
        f"call_{number}", name, arguments if isinstance(arguments, str) else written, number
    )


def _members(text: str, number: int) -> dict[str, tuple[Any, str]]:
    """The members of the JSON object that `text` is: each value, and as it is written."""
    decoder = json.JSONDecoder()
    members: dict[str, tuple[Any, str]] = {}
    try:
        json.loads(text)  # whole and valid, so that the walk below needs no checks of its own
        at = _skip(text, 0)
        if text[at] != "{":
            raise _Broken("malformed_tool_call", f"call {number} is no object: {text[:80]}")
        at = _skip(text, at + 1)
        while text[at] != "}":
            key, at = decoder.raw_decode(text, at)
            start = _skip(text, _skip(text, at) + 1)
            value, at = decoder.raw_decode(text, start)
            members[key] = (value, text[start:at])
            at = _skip(text, at)
            at = _skip(text, at + 1) if text[at] == "," else at
    except (ValueError, RecursionError) as error:
        raise _Broken("invalid_tool_json", f"call {number}: {error}") from error
    return members


def _skip(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _channel_call(
    ids: Sequence[int], channels: ChannelMarkers, decode: Decode, number: int
) -> ToolCall:
    at = ids.index(channels.message_id)
    recipient = read_header(ids[:at], channels, decode).recipient
    name = recipient.removeprefix("functions.")
    return _checked(f"call_{number}", name, decode(ids[at + 1 :]).strip(), number)


def _checked(call_id: str, name: str, arguments: str, number: int) -> ToolCall:
    if not name or len(name.split()) != 1:
        raise _Broken("malformed_tool_call", f"call {number} is named {name[:80]!r}")
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise _Broken("invalid_tool_json", f"call {number}: {error}") from error
    if not isinstance(value, dict):
        raise _Broken("invalid_tool_json", f"call {number}: arguments are {arguments[:80]}")
    return ToolCall(call_id, name, arguments)
