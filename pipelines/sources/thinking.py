"""Thoughts that a data set writes into its answers."""

from typing import Any


def think_apart(message: Any) -> Any:
    """An assistant's message whose text opens with `<think>...</think>`, the thought by itself.

    Anything else stays as it is: a thought that never ends, one that starts later, and text
    beside a `reasoning_content` that is there already. The space around a thought goes.
    """
    match message:
        case {"reasoning_content": str()}:
            return message
        case {"role": "assistant", "content": str(content)}:
            thought, said = split_thought(content)
            return message if thought is None else {**message, **spoken(thought, said)}
        case _:
            return message


def split_thought(text: str) -> tuple[str | None, str]:
    """The thought that a text opens with, None without one, and the text behind it."""
    start = text.lstrip()
    thought, end, said = start.removeprefix("<think>").partition("</think>")
    return (thought, said) if end and start.startswith("<think>") else (None, text)


def spoken(thought: str, said: str) -> dict[str, str]:
    """Content and reasoning of one message; an empty thought is none."""
    message = {"content": said.lstrip("\r\n")}
    return {**message, "reasoning_content": inner} if (inner := thought.strip()) else message
