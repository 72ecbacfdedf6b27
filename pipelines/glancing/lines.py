"""JSONL: rows of a growing, broken or huge file, all of them or a sample of its places."""

import json
import os
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import orjson

from pipelines.glancing.places import opened
from pipelines.glancing.reading import At, Reading, Row, short

MAX_LINE_BYTES = 16 << 20
_PLACES = 32  # random places of a large file, between its head and its tail
_KEYS_EVERY = 127  # of so many rows one is looked at for a key that comes twice
_SKIPPED_PIECES = 4  # of an endless line, before a sample gives it up
_BOM = b"\xef\xbb\xbf"
_INT64 = 1 << 63
BETWEEN = re.compile(r"[\s,]*")  # what separates values


def all_lines(reading: Reading, handle: IO[bytes]) -> Iterator[tuple[At, Row]]:
    """Every row of a stream, or those of its first `budget` bytes."""
    yield from _lines(reading, handle, 0, reading.budget, numbered=True)


def sampled_lines(reading: Reading) -> Iterator[tuple[At, Row]]:
    """Head, random places, tail: disjoint spans, so that a row seen twice is in the file twice."""
    size, budget = reading.size, reading.budget
    assert budget is not None
    edge, span = budget // 4, budget // 2 // _PLACES
    slots = (size - 2 * edge) // span
    chooser = random.Random(size)  # the same file is sampled at the same places
    middle = sorted(chooser.sample(range(slots), min(_PLACES, slots)))
    starts = [(0, edge), *((edge + slot * span, span) for slot in middle), (size - edge, edge)]
    rows = 0
    with opened(reading.place) as handle:
        if isinstance(reading.place, Path):
            _read_ahead(handle, starts)
        for start, length in starts:
            for one in lines_between(reading, handle, start, start + length):
                rows += 1
                yield one
    # Lines that begin in a span stand for the bytes of the span, however long they are.
    reading.row_count = round(rows * size / sum(length for _, length in starts))


def _read_ahead(handle: IO[bytes], spans: Iterable[tuple[int, int]]) -> None:
    """Have the disk fetch all spans at once: one after the other each would wait for it."""
    if hasattr(os, "posix_fadvise"):  # not on macOS
        for start, length in spans:
            os.posix_fadvise(handle.fileno(), start, length, os.POSIX_FADV_WILLNEED)


def lines_between(
    reading: Reading, handle: IO[bytes], start: int, end: int, *, counted: bool = False
) -> Iterator[tuple[At, Row]]:
    """The rows whose line begins in these bytes.

    A row stands at a byte, unless the bytes are the file's first. With `counted` the notes are by
    lines from `start`, for whoever knows how many lines came before.
    """
    handle.seek(max(start - 1, 0))
    if start and not handle.readline(MAX_LINE_BYTES).endswith(b"\n"):
        return  # a line that began before, and goes on
    at = handle.tell()
    if at < end:
        yield from _lines(reading, handle, at, end - at, numbered=counted)


def _lines(
    reading: Reading, handle: IO[bytes], start: int, length: int | None, *, numbered: bool
) -> Iterator[tuple[At, Row]]:
    passed, reading.lines = 0, 0
    reading.row_count = reading.row_count or 0
    while length is None or passed < length:
        line = handle.readline(MAX_LINE_BYTES)
        if not line:
            break
        reading.lines += 1
        place = At("line", reading.lines) if start == 0 else At("byte", start + passed)
        noted = At("line", reading.lines) if numbered and start else place
        size = len(line)
        if not passed:
            line = _first(reading, line, noted, is_head=start == 0)
        if size >= MAX_LINE_BYTES and not line.endswith(b"\n"):
            reading.notes.note("line_too_long", noted)
            skipped = _skip_line(handle, None if reading.budget is None else _SKIPPED_PIECES)
            if skipped is None:
                break
            passed += size + skipped
            continue
        passed += size
        for row in _rows(reading, line, noted):
            reading.row_count += 1
            yield place, row
        if reading.lines % _KEYS_EVERY == 1:
            _look_for_double_keys(reading, line, noted)


def _skip_line(handle: IO[bytes], pieces: int | None) -> int | None:
    """Past the rest of a line: its bytes, or None where it does not end in so many pieces."""
    skipped = 0
    while pieces is None or pieces > 0:
        piece = handle.readline(MAX_LINE_BYTES)
        skipped += len(piece)
        if not piece or piece.endswith(b"\n"):
            return skipped
        pieces = None if pieces is None else pieces - 1
    return None


def _first(reading: Reading, line: bytes, at: At, *, is_head: bool) -> bytes:
    if line.endswith(b"\r\n"):
        reading.notes.note("carriage_returns", at)
    if is_head and line.startswith(_BOM):
        reading.notes.note("byte_order_mark", at)
        return line[len(_BOM) :]
    return line


def _rows(reading: Reading, line: bytes, at: At) -> tuple[Row, ...]:
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        return _odd_rows(reading, line, at)
    if type(row) is dict:
        return (row,)
    if not line.endswith(b"\n"):  # a writer is in the middle of it: `12` of `123`
        reading.ends_in_half_line = True
    else:
        reading.notes.note("not_objects", at, f"{type(row).__name__}, not an object")
    return ()


def _odd_rows(reading: Reading, line: bytes, at: At) -> tuple[Row, ...]:
    """What orjson refuses: read it more patiently, and say what is odd."""
    text = line.strip()
    if not text:
        return ()
    is_half = not line.endswith(b"\n")
    if b"\0" in text:
        reading.notes.note("null_bytes", at)
        return ()
    try:
        return _patient(reading, text.decode(), at)
    except UnicodeDecodeError as error:
        name, reason = "not_utf8", short(error)
    except RecursionError:
        name, reason = "too_deep", ""
    except ValueError as error:
        rows = joined_objects(text.decode())
        if len(rows) > 1:
            reading.notes.note("not_one_a_line", at)
            return rows
        name, reason = "malformed_lines", short(error)
    if is_half and name != "too_deep":
        reading.ends_in_half_line = True
    else:
        reading.notes.note(name, at, reason)
    return ()


def _patient(reading: Reading, text: str, at: At) -> tuple[Row, ...]:
    constants: list[str] = []
    row = json.loads(text, parse_constant=constants.append)
    if not isinstance(row, dict):
        reading.notes.note("not_objects", at, f"{type(row).__name__}, not an object")
        return ()
    odd = "nan_in_json" if constants else "lone_surrogate" if "\\u" in text else "number_too_large"
    reading.notes.note(odd, at)
    return (row,)


def joined_objects(text: str) -> tuple[Row, ...]:
    """Objects that follow each other without a line end. Empty unless all of it is such."""
    decoder, place, rows = json.JSONDecoder(), 0, []
    while place < len(text):
        try:
            row, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            return ()
        if not isinstance(row, dict):
            return ()
        rows.append(row)
        if (pause := BETWEEN.match(text, place)) is not None:
            place = pause.end()
    return tuple(rows)


def _look_for_double_keys(reading: Reading, line: bytes, at: At) -> None:
    """Parsers keep one of two values without a word; the pairs tell."""

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        row = dict(found)
        if len(row) < len(found):
            doubled.append(True)
        if any(type(one) is int and not -_INT64 <= one < 2 * _INT64 for one in row.values()):
            large.append(True)
        return row

    doubled: list[bool] = []
    large: list[bool] = []
    try:
        json.loads(line, object_pairs_hook=pairs)
    except (ValueError, RecursionError):
        return  # said elsewhere
    if doubled:
        reading.notes.note("duplicate_keys", at)
    if large:
        reading.notes.note("number_too_large", at)
