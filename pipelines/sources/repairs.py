"""Named rules that bring messages to one form. Pure; each changes what it names and nothing else.

A rule mends what has one certain reading, and leaves the rest to the checks in `sources.messages`,
where the names stand in a table.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

from pipelines.sources.row import Json, Refused, dump_json, kind_of

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(
        ("gpt", "ai", "model", "bot", "chatbot", "chatgpt", "bing", "bard"), "assistant"
    ),
    "developer": "system",
    **dict.fromkeys(
        ("function", "ipython", "observation", "function_response", "tool_response"), "tool"
    ),
}

_BOM = "\ufeff"
_PARAGRAPH = "\n\n"
_REASONING_ALIASES = ("reasoning", "thinking")
_KEYS = {
    "system": {"role", "content"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id", "name"},
}
_TEXT_PARTS = {"text", "input_text", "output_text"}
_OTHER_PARTS = {
    "audio",
    "audio_url",
    "image",
    "image_url",
    "input_audio",
    "input_image",
    "video",
    "video_url",
}
_CALL_KEYS = {"name", "arguments"}
_JOINED = frozenset({"system", "user", "assistant"})

MessageRule = Callable[[Json], Json]
ConversationRule = Callable[[list[Json]], list[Json]]


def role_renamed(message: Json) -> Json:
    """The role in one of four words, whatever its case, or as it was."""
    role = message.get("role")
    if role in ROLES or not isinstance(role, str):
        return message
    word = role.strip().lower()
    return {**message, "role": ALIASES.get(word, word)}


def present(message: Json) -> Json:
    """Without keys that hold nothing (null, "" and [] are how sets write an absent one), but with
    `content`, where [] is what a tool may have found. No repair: it says the same."""
    kept = {
        key: one
        for key, one in message.items()
        if one is not None and (key == "content" or one not in ("", []))
    }
    return {"role": kept.pop("role"), "content": "", **kept}


def reasoning_renamed(message: Json) -> Json:
    """`reasoning_content` under one of its other names."""
    alias = next((one for one in _REASONING_ALIASES if one in message), None)
    if message["role"] != "assistant" or alias is None or "reasoning_content" in message:
        return message
    rest = {key: one for key, one in message.items() if key != alias}
    return {**rest, "reasoning_content": message[alias]}


def function_call_renamed(message: Json) -> Json:
    """One call in the older form."""
    if "function_call" not in message:
        return message
    if "tool_calls" in message:
        raise Refused("bad_tool_call", "a message with both function_call and tool_calls")
    rest = {key: one for key, one in message.items() if key != "function_call"}
    return {**rest, "tool_calls": [{"type": "function", "function": message["function_call"]}]}


def unknown_keys_dropped(message: Json) -> Json:
    """A template may read a key that nobody checked. Calls stay, for the check of who calls."""
    known = _KEYS[message["role"]] | {"tool_calls"}
    return {key: one for key, one in message.items() if key in known}


def parts_joined(message: Json) -> Json:
    """Parts of text as one text, a line each. Raises `Refused` for a part of another type."""
    content = message["content"]
    if not isinstance(content, list) or not (message["role"] != "tool" or _are_parts(content)):
        return message
    return {**message, "content": "\n".join(_part_text(one) for one in content)}


def result_as_json(message: Json) -> Json:
    """What a tool gave back as an object, a list, a number or a truth."""
    content = message["content"]
    if message["role"] != "tool" or isinstance(content, str):
        return message
    return {**message, "content": dump_json(content)}


def bom_removed(message: Json) -> Json:
    """Byte order marks at the start of a text: they are a file's, not the speaker's."""
    marked = {
        key: text.lstrip(_BOM)
        for key in ("content", "reasoning_content")
        if isinstance(text := message.get(key), str) and text.startswith(_BOM)
    }
    return {**message, **marked} if marked else message


def call_wrapped(message: Json) -> Json:
    """A bare {name, arguments} as a call of a function."""
    return _with_calls(
        message,
        lambda call: (
            {"type": "function", "function": call}
            if "name" in call and set(call) <= _CALL_KEYS
            else call
        ),
    )


def empty_arguments(message: Json) -> Json:
    """A call without arguments: null, an empty text, or none given."""

    def mended(call: Json) -> Json:
        function = call.get("function")
        if not isinstance(function, dict):
            return call
        given = {key: one for key, one in function.items() if one is not None}
        arguments = given.get("arguments", "")
        # Arguments under another name are not absent: the check refuses them.
        if not isinstance(arguments, str) or arguments.strip() or not set(given) <= _CALL_KEYS:
            return call
        return {**call, "function": {**given, "arguments": {}}}

    return _with_calls(message, mended)


def empty_message_dropped(messages: list[Json]) -> list[Json]:
    """Messages that say nothing; not the last, and not a tool's: a tool may have no output."""
    return [
        one
        for index, one in enumerate(messages)
        if index == len(messages) - 1
        or one["role"] == "tool"
        or "tool_calls" in one
        or one["content"].strip()
    ]


def opening_answer_dropped(messages: list[Json]) -> list[Json]:
    """What an assistant says before anybody has asked."""
    first = next((i for i, one in enumerate(messages) if one["role"] == "user"), 0)
    return [
        one for index, one in enumerate(messages) if index >= first or one["role"] != "assistant"
    ]


def same_role_joined(messages: list[Json], roles: frozenset[str] = _JOINED) -> list[Json]:
    """Neighbours of one role as one message, a blank line between; calls end theirs."""
    found: list[Json] = []
    for one in messages:
        before = found[-1] if found else None
        if before and before["role"] == one["role"] in roles and "tool_calls" not in before:
            found[-1] = _join(before, one)
        else:
            found.append(one)
    return found


def call_ids_given(messages: list[Json]) -> list[Json]:
    """Ids for the calls that have none, and for each result the id of the call that it answers.

    A result answers a call of the message before it: the one with its id, or the first that waits,
    of its name where it has one. Raises `Refused` for a result that answers none, and for a call
    that nothing answers.
    """
    taken = {call.get("id") for one in messages for call in one.get("tool_calls", ())}
    free = (name for name in (f"call_{n}" for n in count()) if name not in taken)
    found: list[Json] = []
    waiting: list[Json] = []
    for one in messages:
        if one["role"] == "tool":
            call = _answered(one, waiting)
            waiting.remove(call)
            one = {**one, "tool_call_id": call["id"]}
        else:
            _check_answered(waiting)
            if "tool_calls" in one:
                one = {**one, "tool_calls": list(_with_ids(one["tool_calls"], free))}
                waiting = list(one["tool_calls"])
        found.append(one)
    _check_answered(waiting)
    return found


KEY_RULES: tuple[MessageRule, ...] = (
    reasoning_renamed,
    function_call_renamed,
    unknown_keys_dropped,
)
# For messages whose values were checked: they may be nested, and are written as JSON.
VALUE_RULES: tuple[MessageRule, ...] = (
    parts_joined,
    result_as_json,
    bom_removed,
    call_wrapped,
    empty_arguments,
)


def mend_each(messages: list[Json], rules: Sequence[MessageRule]) -> tuple[list[Json], list[str]]:
    """Messages of `present`, mended one by one, and the names of the rules that changed some."""
    if all(map(_is_plain, messages)):
        return messages, []
    return _mended(messages, {rule.__name__: partial(_each, rule) for rule in rules})


def mend_together(messages: list[Json], *, answered: bool) -> tuple[list[Json], list[str]]:
    """Checked messages as one conversation, and the names of the rules that changed it.

    In a set that holds no answers each question is a turn of its own; where it holds some, two
    questions in a row are one.
    """
    roles = _JOINED if answered else _JOINED - {"user"}
    rules: dict[str, ConversationRule] = {
        "empty_message_dropped": empty_message_dropped,
        "opening_answer_dropped": opening_answer_dropped,
        "same_role_joined": partial(same_role_joined, roles=roles),
        "call_ids_given": call_ids_given,
    }
    return _mended(messages, rules)


def _mended(
    messages: list[Json], rules: dict[str, ConversationRule]
) -> tuple[list[Json], list[str]]:
    names = []
    for name, rule in rules.items():
        after = rule(messages)
        if after != messages:
            names.append(name)
        messages = after
    return messages, names


def _is_plain(message: Json) -> bool:
    """Whether a message is a role and a text, of which no rule changes anything."""
    content = message["content"]
    return len(message) == 2 and isinstance(content, str) and not content.startswith(_BOM)


def _each(rule: MessageRule, messages: list[Json]) -> list[Json]:
    return [rule(one) for one in messages]


def _with_calls(message: Json, rule: MessageRule) -> Json:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [rule(one) if isinstance(one, dict) else one for one in calls]}


def _are_parts(content: Sequence[Any]) -> bool:
    """Whether a tool's list is parts of a message, rather than what the tool gave back."""
    return bool(content) and all(
        isinstance(one, dict)
        and isinstance(kind := one.get("type"), str)
        and (kind in _OTHER_PARTS or (kind in _TEXT_PARTS and isinstance(one.get("text"), str)))
        for one in content
    )


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise Refused("unsupported_content", f"a content part is a {kind_of(part)}")
    kind = part.get("type", "text")
    if not isinstance(kind, str) or kind not in _TEXT_PARTS:
        raise Refused("unsupported_content", f"a content part of type {kind!r}, expected text")
    if not isinstance(part.get("text"), str):
        raise Refused("unsupported_content", f"the text of a part is a {kind_of(part.get('text'))}")
    return part["text"]


def _join(first: Json, second: Json) -> Json:
    joined = {**first, **second}
    for key in ("content", "reasoning_content"):
        texts = [one[key] for one in (first, second) if one.get(key, "").strip()]
        if key in joined:
            joined[key] = _PARAGRAPH.join(texts)
    return joined


def _with_ids(calls: Sequence[Json], free: Iterator[str]) -> Iterator[Json]:
    for call in calls:
        yield call if "id" in call else {"id": next(free), **call}


def _answered(result: Json, waiting: Sequence[Json]) -> Json:
    wanted, name = result.get("tool_call_id"), result.get("name")
    for call in waiting:
        if wanted in (None, call["id"]) and name in (None, call["function"]["name"]):
            return call
    said = " ".join(
        f"{key} {one!r}" for key, one in (("id", wanted), ("name", name)) if one is not None
    )
    ids = ", ".join(f"{one['function']['name']} ({one['id']})" for one in waiting) or "no call"
    raise Refused("orphan_tool_result", f"a result {said or 'without id'}, {ids} waits for one")


def _check_answered(waiting: Sequence[Json]) -> None:
    if waiting:
        name, one = waiting[0]["function"]["name"], waiting[0]["id"]
        raise Refused("unanswered_tool_call", f"the call {one!r} of {name!r} has no result")
