"""Decoded values that can be stored exactly as they came: JSON in UTF-8."""

import math
from typing import Any

from pipelines.sources.row import Refused, decode_json, kind_of

_MAX_DEPTH = 64


def check_values(value: Any, depth: int = 0) -> None:
    """Raise `Refused` for what JSON in UTF-8 cannot hold, NUL, and deep nesting."""
    if depth > _MAX_DEPTH:
        raise Refused("bad_field", f"nested deeper than {_MAX_DEPTH} levels")
    match value:
        case str():
            check_text(value)
        case dict():
            for key, one in value.items():
                check_text(key)
                check_values(one, depth + 1)
        case list() | tuple():
            for one in value:
                check_values(one, depth + 1)
        case float() if not math.isfinite(value):
            raise Refused("bad_field", f"the number {value}")
        case None | bool() | int() | float():
            pass
        case _:
            raise Refused("bad_field", f"a {kind_of(value)}, which JSON cannot hold")


def check_text(text: Any) -> None:
    """Raise `Refused` for NUL and half of a UTF-16 pair; also for a key that is no text."""
    if not isinstance(text, str):
        raise Refused("bad_field", f"a key is a {kind_of(text)}, which JSON cannot hold")
    if "\0" in text:
        raise Refused("nul_character", f"a NUL character in {text[:40]!r}")
    if text.isascii():  # known without a look at it, and most texts are
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refused("lone_surrogate", f"half of a UTF-16 pair: {error.reason}") from error


def decode_text(text: str) -> Any:
    """Strict JSON within a field. Raises `Refused`, also for what its escapes bring in."""
    check_text(text)
    value = decode_json(text.encode())
    check_values(value)
    return value
