"""Conversations of from and value, as ShareGPT, LLaMA-Factory and axolotl write them."""

from typing import Any

from pipelines.sources.calls import calls_in, calls_of
from pipelines.sources.columns import list_of, looks_listed, opened_by_system, tools_of
from pipelines.sources.row import Given, Json, Refused, kind_of
from pipelines.sources.thinking import split_thought, spoken

_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
    "function-response": "tool",
}
_CALLERS = ("function_call", "function-call")


def recognises(row: Json) -> bool:
    """By `conversations`."""
    return looks_listed(row.get("conversations"))


def read(row: Json) -> Given:
    """`conversations`, with `system` and `tools` beside it."""
    return Given(opened_by_system(row, turns(row)), tools_of(row))


def turns(row: Json) -> list[Any]:
    """The messages of `conversations`, unchecked: a speaker not known here keeps its name.

    A call belongs to the answer directly before it: what that says is said before the call, and
    its calls are parallel ones. Turns of role and content, as some sets have them, are messages.
    """
    messages: list[Any] = []
    for index, turn in enumerate(list_of(row, "conversations")):
        if isinstance(turn, dict) and "role" in turn and "from" not in turn:
            messages.append(turn)
            continue
        if not isinstance(turn, dict) or not {"from", "value"} <= turn.keys():
            seen = sorted(turn) if isinstance(turn, dict) else f"a {kind_of(turn)}"
            raise Refused("wrong_format", f"turn {index} is {seen}, expected from and value")
        speaker, value = turn["from"], turn["value"]
        if speaker in _CALLERS:
            _add_calls(messages, value)
        else:
            role = _ROLES.get(speaker, speaker) if isinstance(speaker, str) else speaker
            messages.append({"role": role, "content": value})
    return messages


def _add_calls(messages: list[Any], value: Any) -> None:
    """`{"name", "arguments"}` or a list of it, as it is or as text, there with a thought before."""
    thought, written = split_thought(value) if isinstance(value, str) else (None, value)
    calls = calls_in(written) if isinstance(written, str) else calls_of(written)
    last = messages[-1] if messages else None
    if thought is None and isinstance(last, dict) and last.get("role") == "assistant":
        earlier = last.get("tool_calls") or []
        if not isinstance(earlier, list):
            raise Refused("bad_tool_call", f"tool_calls is a {kind_of(earlier)}")
        messages[-1] = {**last, "tool_calls": [*earlier, *calls]}
    else:
        messages.append({"role": "assistant", **spoken(thought or "", ""), "tool_calls": calls})
