"""JSON files: one value, a list of rows, a wrapper around a list, or objects one after another."""

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

import orjson

from pipelines.glancing.lines import BETWEEN, joined_objects
from pipelines.glancing.reading import At, Reading, Row, short

MAX_VALUE_BYTES = 32 << 20  # one value is parsed in memory; a longer list item by item
_PIECE = 1 << 20


def open_values(reading: Reading, handle: IO[bytes]) -> None:
    """Give the reading its rows. The handle stands at the beginning; its rows close it."""
    start = handle.read(MAX_VALUE_BYTES + 1)
    if len(start) > MAX_VALUE_BYTES:
        if start.lstrip(codecs.BOM_UTF8 + b" \t\r\n").startswith(b"["):
            reading.rows = _long_list(reading, start, handle)
            return
        reading.find("json_too_large", f"one JSON value of more than {MAX_VALUE_BYTES:,} bytes")
    handle.close()
    if reading.findings:
        return
    if start.startswith(codecs.BOM_UTF8):
        reading.notes.note("byte_order_mark", At("line", 1))
        start = start[len(codecs.BOM_UTF8) :]
    rows = []
    for number, item in enumerate(_items(_value(reading, start)), start=1):
        if isinstance(item, dict):
            rows.append((At("item", number), item))
        else:
            reading.notes.note("not_objects", At("item", number), f"{type(item).__name__}")
    reading.rows, reading.row_count, reading.rows_exact = iter(rows), len(rows), True


def _value(reading: Reading, content: bytes) -> Any:
    """The value; an empty list, with a finding, where it cannot be read."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        if b"\0" in content:
            reading.find("null_bytes", f"{content.count(0):,} NUL bytes")
            return []
    try:
        text = content.decode()
        return _patient(reading, text)
    except UnicodeDecodeError as error:
        reading.find("not_utf8", short(error))
    except RecursionError:
        reading.find("too_deep", "nested too deeply to be read")
    except ValueError as error:
        if len(rows := joined_objects(text)) > 1:
            reading.notes.note("not_one_a_line", At("line", 1))
            return list(rows)
        reading.find("not_json", short(error))
    return []


def _patient(reading: Reading, text: str) -> Any:
    constants: list[str] = []
    value = json.loads(text, parse_constant=constants.append)
    odd = "nan_in_json" if constants else "lone_surrogate" if "\\u" in text else "number_too_large"
    reading.notes.note(odd, At("item", 1))
    return value


def _items(value: Any) -> list[Any]:
    """The rows of a value: its items, or those of the one list inside a small object."""
    if isinstance(value, list):
        return value
    if isinstance(value, dict) and len(value) <= 3:  # {"version": 1, "data": [...]}
        inner = [one for one in value.values() if isinstance(one, list) and len(one) > 1]
        if len(inner) == 1 and all(isinstance(one, dict) for one in inner[0]):
            return inner[0]
    return [value]


def _long_list(reading: Reading, start: bytes, handle: IO[bytes]) -> Iterator[tuple[At, Row]]:
    """The items of a list that is too long for memory: all, or those in its first bytes."""
    decoder = json.JSONDecoder()
    decode = codecs.getincrementaldecoder("utf-8-sig")("replace")
    reading.row_count = number = passed = 0
    text, is_open = "", False
    with handle:
        for piece in _pieces(start, handle):
            passed += len(piece)
            text += decode.decode(piece)
            if not is_open:
                text, is_open = text.lstrip()[1:], True
            place = 0
            while (found := _next_item(decoder, text, place)) is not None:
                item, place = found
                number += 1
                if isinstance(item, dict):
                    reading.row_count += 1
                    yield At("item", number), item
                else:
                    reading.notes.note("not_objects", At("item", number), type(item).__name__)
            text = text[place:]
            if text.lstrip().startswith("]"):
                reading.rows_exact = True
                return
            if reading.budget is not None and passed >= reading.budget:
                reading.row_count = round(reading.row_count * reading.size / (passed - len(text)))
                return
            if len(text) > MAX_VALUE_BYTES:
                break
    reading.find("not_json", f"nothing can be read after item {number:,}")


def _pieces(start: bytes, handle: IO[bytes]) -> Iterator[bytes]:
    for at in range(0, len(start), _PIECE):
        yield start[at : at + _PIECE]
    while piece := handle.read(_PIECE):
        yield piece


def _next_item(decoder: json.JSONDecoder, text: str, place: int) -> tuple[Any, int] | None:
    """The next whole item and where it ends; None where the text ends before it does."""
    start = BETWEEN.match(text, place)
    assert start is not None  # it matches nothing, too
    try:
        return decoder.raw_decode(text, start.end())
    except (ValueError, RecursionError):
        return None
