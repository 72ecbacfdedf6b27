"""Damage for JSON bodies: bytes, numbers, keys, types, nesting, by a seeded die."""

import json
import random
import re
from collections.abc import Callable
from typing import Any

_NUMBERS = re.compile(rb"-?\d+")
_STRANGE_NUMBERS = (
    *(b"0", b"-1", b"1.0", b"1e0", b"01", b"0x1", b"1_0", b"+1", b"NaN", b"Infinity", b"-Infinity"),
    *(b"1e400", b"2147483648", b"9223372036854775808", b"-9223372036854775809", b"9" * 400),
)
_STRANGE_TEXTS = (
    *("", " ", "\u0000", "\ud800", "\udfff\ud800", "é" * 9, "\u202e", "😀", "NaN happened"),
    *("stop", "length", "abort", "null", "0", "\ufeff", "x" * 3000),
)


def damaged(body: bytes, dice: random.Random) -> bytes:
    """The body with one to three wounds."""
    for _ in range(dice.randint(1, 3)):
        body = dice.choice(_WOUNDS)(body, dice)
    return body


def _flip(body: bytes, dice: random.Random) -> bytes:
    changed = bytearray(body)
    for _ in range(dice.randint(1, 4)):
        if changed:
            changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _delete(body: bytes, dice: random.Random) -> bytes:
    start = dice.randint(0, len(body))
    return body[:start] + body[start + dice.choice((1, 1, 2, 8, 64)) :]


def _insert(body: bytes, dice: random.Random) -> bytes:
    place = dice.randint(0, len(body))
    what = (b",", b"}", b"]", b'"', b"\\", b"\xff", b"\x00", b"\xed\xa0\x80", b"\xef\xbb\xbf", b" ")
    return body[:place] + dice.choice(what) + body[place:]


def _repeat(body: bytes, dice: random.Random) -> bytes:
    start = dice.randint(0, len(body))
    piece = body[start : start + dice.randint(1, 40)]
    return body[:start] + piece + body[start:]


def _truncate(body: bytes, dice: random.Random) -> bytes:
    return body[: dice.randint(0, len(body))]


def _surround(body: bytes, dice: random.Random) -> bytes:
    return dice.choice(
        (
            b"\xef\xbb\xbf" + body,
            body + b"\n\n",
            body + body,
            b"[" + body + b"]",
            b'{"a":' * 50 + body + b"}" * 50,
            b"[" * 100_000,
            b"data: %s\n\ndata: [DONE]\n\n" % body,
            body.decode(errors="replace").encode("utf-16"),
            b"",
        )
    )


def _renumber(body: bytes, dice: random.Random) -> bytes:
    """Another number, or one beside it, in the place of one of the numbers."""
    found = list(_NUMBERS.finditer(body))
    if not found:
        return body
    one = dice.choice(found)
    near = str(int(one[0][:18]) + dice.choice((-1, 1, 10))).encode()
    return body[: one.start()] + dice.choice((*_STRANGE_NUMBERS, near)) + body[one.end() :]


def _on_tree(
    change: Callable[[Any, random.Random], None],
) -> Callable[[bytes, random.Random], bytes]:
    """A change to one object or list of the tree; what is no tree any more stays as it is."""

    def wound(body: bytes, dice: random.Random) -> bytes:
        try:
            tree = json.loads(body)
        except (ValueError, RecursionError):
            return body
        holders = _holders(tree)
        if holders:
            change(dice.choice(holders), dice)
        return json.dumps(tree).encode()

    return wound


def _holders(tree: Any) -> list[Any]:
    """Every object and list that is not empty; objects, which are few, three times."""
    found: list[Any] = []
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict | list) and one:
            found += [one] * (3 if isinstance(one, dict) else 1)
            waiting += one.values() if isinstance(one, dict) else one
    return found


def _place(holder: Any, dice: random.Random) -> Any:
    return dice.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))


def _drop(holder: Any, dice: random.Random) -> None:
    del holder[_place(holder, dice)]


def _retype(holder: Any, dice: random.Random) -> None:
    place = _place(holder, dice)
    value = holder[place]
    number = len(str(value))
    holder[place] = dice.choice(
        (None, True, False, str(value), [value], {"value": value}, float(number), number, [], {})
    )


def _retext(holder: Any, dice: random.Random) -> None:
    holder[_place(holder, dice)] = dice.choice(_STRANGE_TEXTS)


def _rekey(holder: Any, dice: random.Random) -> None:
    if isinstance(holder, dict):
        key = _place(holder, dice)
        other = (
            key.upper(),
            key + "s",
            key[:-1],
            "error",
            "finish_reason",
            "text",
            "spec_verify_ct",
        )
        holder[dice.choice(other)] = holder.pop(key)


def _swap(holder: Any, dice: random.Random) -> None:
    one, other = _place(holder, dice), _place(holder, dice)
    holder[one], holder[other] = holder[other], holder[one]


def _nest(holder: Any, dice: random.Random) -> None:
    place = _place(holder, dice)
    for _ in range(dice.choice((1, 30, 300))):
        holder[place] = [holder[place]]


def _double_key(body: bytes, dice: random.Random) -> bytes:
    """A key that comes twice in one object, with two values."""
    keys = list(re.finditer(rb'"(\w+)": ?', body))
    if not keys:
        return body
    one = dice.choice(keys)
    values = (b"null", b"3", b'"x"', b"[]", b"{}", b"[7, 8, 2]")
    return body[: one.start()] + one[0] + dice.choice(values) + b", " + body[one.start() :]


_WOUNDS = (
    *(_flip, _delete, _insert, _repeat, _truncate, _surround, _double_key),
    *(_renumber, _renumber, _renumber),
    *map(_on_tree, (_drop, _drop, _retype, _retype, _retext, _rekey, _swap, _nest)),
)
