"""One decoded row becomes a `SourceRow` or a `BadRow`: one checked form for all conversations.

What is kept: the messages up to and including the last of a user or a tool, the tools, source and
license. The set's own answer after that is dropped unchecked. Earlier answers stay as history.

Mended, by name:

| name | what |
|---|---|
| `role_renamed` | human, gpt, developer (system), function, observation (tool) ...; other case |
| `reasoning_renamed` | `reasoning` or `thinking` is `reasoning_content` |
| `function_call_renamed` | the older `function_call` is one of `tool_calls` |
| `unknown_keys_dropped` | a message keeps what its role may have, of role, content, tool_calls, reasoning_content, tool_call_id, name |
| `parts_joined` | content parts of text are one text, a line each |
| `result_as_json` | a tool's result that is no text is its JSON |
| `bom_removed` | a byte order mark at the start of a text |
| `call_wrapped` | a bare `{name, arguments}` is a call |
| `empty_arguments` | arguments that are null, empty or absent are `{}` |
| `empty_message_dropped` | an empty message that is not the question |
| `opening_answer_dropped` | what an assistant says before the first question |
| `same_role_joined` | neighbours of one role are one, a blank line between. Not the questions of a set without any answers: each is a turn |
| `call_ids_given` | calls without ids get `call_0` ...; results without ids answer in order |

Not worth a name: null, "" and [] as an absent key, arguments as JSON text.
Left as it is: CRLF, which the tokenizer knows; a later system message, which the template decides
on; a tool's empty result, which is what a silent command gives; blanks around a text.

Refused: `unknown_role`, `unsupported_content` (a part that is no text), `empty_content` (the
question), `no_question`, `page_markup` (an earlier answer; a user may ask about HTML),
`bad_tool_call`, `orphan_tool_result` (a result whose id or name fits no waiting call of the message
before), `unanswered_tool_call` (one of several is enough: the target would answer in its place),
`bad_tools`, and text that cannot be stored: `nul_character`, `lone_surrogate`, `bad_field`.
"""  # noqa: E501  (a table's row is a line)

import re
from typing import Any

from pipelines.sources.formats import format_of
from pipelines.sources.repairs import (
    KEY_RULES,
    ROLES,
    VALUE_RULES,
    mend_each,
    mend_together,
    present,
    role_renamed,
)
from pipelines.sources.row import UNSTATED, BadRow, Format, Json, Refused, SourceRow, kind_of
from pipelines.sources.tools import normalise_tools
from pipelines.sources.values import check_values, decode_text

# A page of a chat as a browser holds it: its answer's frame, or paragraphs from end to end.
_PAGE = re.compile(
    r"\s*(<div class=\"[^\"]*markdown|<p>.*</(p|div|pre|ol|ul|table|blockquote|h[1-6])>\s*\Z)",
    re.DOTALL,
)


_MESSAGES = format_of("messages")


def parse_row(
    value: Any, reader: Format = _MESSAGES, *, file: str, line: int
) -> SourceRow | BadRow:
    """Read one decoded row by its format, mend it and check it. Pure; never raises for a row."""
    try:
        return _row(value, reader, file, line)
    except Refused as refusal:
        return BadRow(file, line, refusal.reason, refusal.detail)


def _row(value: Any, reader: Format, file: str, line: int) -> SourceRow:
    if not isinstance(value, dict):
        raise Refused("not_an_object", f"a {kind_of(value)}, expected an object with messages")
    given = reader.read(value)
    source = _text_field(value, "source", f"{file} #{line}")
    license = _text_field(value, "license", UNSTATED)
    said = _objects(given.messages)
    messages = [role_renamed(one) for one in said]
    renamed = ["role_renamed"] if messages != said else []
    end = _end_of_question(messages)
    kept, keys = mend_each([present(one) for one in messages[:end]], KEY_RULES)
    check_values([kept, given.tools, source, license])
    mended, values = mend_each(kept, VALUE_RULES)
    checked = [_checked(index, one) for index, one in enumerate(mended)]
    answered = any(one["role"] == "assistant" for one in messages)
    together, whole = mend_together(checked, answered=answered)
    _check_conversation(together)
    return SourceRow(
        file=file,
        line=line,
        messages=tuple(together),
        tools=normalise_tools(given.tools),
        source=source,
        license=license,
        format=reader.name,
        tools_given=given.tools,
        repairs=(*renamed, *keys, *values, *whole),
        answer="\n".join(text for one in messages[end:] for text in _texts(one)),
    )


def _objects(given: Any) -> list[Json]:
    if not isinstance(given, list | tuple) or not given:
        seen = "no messages" if given in (None, [], ()) else f"messages is a {kind_of(given)}"
        raise Refused("bad_messages", f"{seen}, expected a list of objects")
    for index, message in enumerate(given):
        if not isinstance(message, dict):
            raise Refused("bad_messages", f"message {index} is a {kind_of(message)}")
    return list(given)


def _end_of_question(messages: list[Json]) -> int:
    """Where the set's own answer begins."""
    for index, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise Refused(
                "unknown_role",
                f"message {index} has the role {message.get('role')!r}, "
                f"expected one of {', '.join(ROLES)}",
            )
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    if not end or messages[end - 1]["role"] == "system":
        last = messages[end - 1]["role"] if end else "assistant"
        raise Refused("no_question", f"the last message before an answer is from {last}")
    return end


def _checked(index: int, message: Json) -> Json:
    """A mended message with keys in one order; nothing but its own is in it."""
    for key in ("content", "reasoning_content"):
        if not isinstance(message.get(key, ""), str):
            seen = kind_of(message[key])
            raise Refused("unsupported_content", f"message {index}: {key} is a {seen}")
    for key in ("tool_call_id", "name"):
        if not isinstance(message.get(key, ""), str):
            raise Refused("bad_field", f"message {index}: {key} is a {kind_of(message[key])}")
    if "tool_calls" not in message:
        return message
    calls = message["tool_calls"]
    if message["role"] != "assistant":
        raise Refused("bad_tool_call", f"message {index}: tool_calls from {message['role']}")
    if not isinstance(calls, list):
        raise Refused("bad_tool_call", f"message {index}: tool_calls is a {kind_of(calls)}")
    checked = [_call(index, call) for call in calls]
    ids = [call["id"] for call in checked if "id" in call]
    if len(set(ids)) != len(ids):
        raise Refused("bad_tool_call", f"message {index}: two calls have one id: {', '.join(ids)}")
    return {**message, "tool_calls": checked}


def _call(index: int, call: Any) -> Json:
    """A call with arguments as an object. The template decides how it writes them."""
    where = f"message {index}"
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise Refused("bad_tool_call", f"{where}: a tool call without a function name")
    if not name or call.get("type", "function") not in ("function", None):
        raise Refused("bad_tool_call", f"{where}: a call of {name!r} of type {call.get('type')!r}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = decode_text(arguments)
        except Refused as refusal:
            reason = "bad_tool_call" if refusal.reason == "malformed_json" else refusal.reason
            raise Refused(reason, f"{where}: arguments: {refusal.detail}") from refusal
    if not isinstance(arguments, dict):
        raise Refused(
            "bad_tool_call", f"{where}: arguments are a {kind_of(arguments)}, not an object"
        )
    given = call.get("id")
    if not isinstance(given, str | None):
        raise Refused("bad_tool_call", f"{where}: the id of a call is a {kind_of(given)}")
    named = {"id": given} if given else {}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


def _check_conversation(messages: list[Json]) -> None:
    if not any(one["role"] == "user" for one in messages):
        raise Refused("no_question", "no message of a user")
    last = messages[-1]
    if last["role"] == "user" and not last["content"].strip():
        raise Refused("empty_content", "the last question says nothing")
    for one in messages:
        if one["role"] == "assistant" and _PAGE.match(one["content"]):
            raise Refused("page_markup", f"an answer as a web page: {one['content'][:60]!r}")


def _texts(answer: Json) -> list[str]:
    """The texts of an answer that is dropped, whatever its form."""
    found = [answer.get("reasoning_content"), answer.get("content")]
    parts = [
        part.get("text") if isinstance(part, dict) else part
        for one in found
        for part in (one if isinstance(one, list) else [one])
    ]
    return [_storable(one) for one in parts if isinstance(one, str)]


def _storable(text: str) -> str:
    return text if text.isascii() else text.encode(errors="replace").decode()


def _text_field(row: Json, key: str, absent: str) -> str:
    value = row.get(key)
    if value is None:
        return absent
    if not isinstance(value, str):
        raise Refused("bad_field", f"{key} is a {kind_of(value)}, expected a string")
    return value
