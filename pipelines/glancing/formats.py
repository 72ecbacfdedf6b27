"""Which format a file has, by its first bytes and then by its name; a reading of its rows."""

import bz2
import errno
import gzip
import io
import json
import lzma
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Literal

from pipelines.glancing.lines import all_lines, sampled_lines
from pipelines.glancing.places import Place, opened, suffix_of
from pipelines.glancing.reading import At, Reading, Row, short
from pipelines.glancing.values import open_values

Format = Literal["JSONL", "JSON", "Parquet", "Arrow", "safetensors", "UTF-16", "HTML", "unknown"]

_HEAD = 4096
_BY_NAME: dict[str, Format] = {
    ".jsonl": "JSONL",
    ".ndjson": "JSONL",
    ".json": "JSON",
    ".parquet": "Parquet",
    ".arrow": "Arrow",
    ".ipc": "Arrow",
    ".feather": "Arrow",
    ".safetensors": "safetensors",
}
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
_BROKEN = (EOFError, OSError, lzma.LZMAError, ValueError)


def read_rows(place: Place, *, budget: int | None) -> Reading:
    """Open a file. What cannot be read is a finding of the reading, and is not raised.

    `budget` is how many bytes may be read of it; None for all.
    """
    reading = Reading(place, 0, budget)
    try:
        reading.size = _size(place)
        if not reading.size:
            reading.find("empty_file", "0 bytes")
            reading.row_count, reading.rows_exact = 0, True
            return reading
        with opened(place) as handle:
            start = handle.read(_HEAD)
        _open(reading, start)
    except PermissionError as error:
        reading.find("not_permitted", error.strerror or str(error))
    except IsADirectoryError:
        reading.find("not_a_file", "a folder, named like a file")
    except OSError as error:
        name = "broken_link" if error.errno in (errno.ELOOP, errno.ENOENT) else "no_answer"
        reading.find(name, error.strerror or str(error))
    return reading


def _size(place: Place) -> int:
    if isinstance(place, Path):
        seen = place.stat()
        if not (stat.S_ISREG(seen.st_mode) or stat.S_ISDIR(seen.st_mode)):
            raise IsADirectoryError(errno.EISDIR, "a pipe, a socket or a device", str(place))
    size: int = place.stat().st_size
    return size


def _open(reading: Reading, start: bytes) -> None:
    packed = next((kind for magic, kind in _PACKED.items() if start.startswith(magic)), None)
    if packed is not None:
        try:
            with _unpacked(reading.place, packed) as handle:
                start = handle.read(_HEAD)
        except _BROKEN as error:
            reading.find("broken_compression", f"{packed}: {short(error)}")
            return
    named = _BY_NAME.get(suffix_of(reading.place.name))
    reading.format = form = _format_of(start, named)
    if named is not None and form not in (named, "unknown", "HTML", "UTF-16"):
        reading.find("wrong_name", f"the name says {named}, the content is {form}")
    if form in ("JSONL", "JSON"):
        _open_text(reading, packed)
    elif form in ("Parquet", "Arrow"):
        from pipelines.glancing.tables import open_arrow, open_parquet  # pyarrow takes a while

        if form == "Parquet":
            open_parquet(reading)
        else:
            open_arrow(reading, is_stream=not start.startswith(b"ARROW1"))
    elif form != "safetensors":
        _say_what_it_is(reading, start, named)


def _open_text(reading: Reading, packed: str | None) -> None:
    if reading.format == "JSON":
        _open_json(reading, packed)
    elif packed is not None:
        reading.rows = _packed_lines(reading, packed)
    elif reading.budget is None or reading.size <= reading.budget:
        reading.rows = _whole_lines(reading)
    else:
        reading.rows = sampled_lines(reading)


def _say_what_it_is(reading: Reading, start: bytes, named: Format | None) -> None:
    if reading.format == "UTF-16":
        reading.find("utf16", f"begins with {start[:4]!r}")
    elif reading.format == "HTML":
        reading.find("html_page", f"begins with {start.lstrip()[:24]!r}")
    elif not start.strip(b"\0"):
        reading.find("null_bytes", f"its first {len(start):,} bytes are NUL")
    elif named in ("Parquet", "Arrow"):
        reading.find("cut_short", f"the name says {named}, the first bytes do not")
    else:
        reading.find("unknown_format", f"it begins with {start[:12]!r}")


def _format_of(start: bytes, named: Format | None) -> Format:
    if start[:4] == b"PAR1":
        return "Parquet"
    if named == "safetensors" or (start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1e8):
        return "safetensors"
    if start[:6] == b"ARROW1" or start[:4] == b"\xff\xff\xff\xff":
        return "Arrow"
    if start[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "UTF-16"
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:1] == b"<":
        return "HTML"
    if text[:1] in (b"{", b"["):
        return _lines_or_value(text, named)
    if not start.strip(b"\0") or named in ("Parquet", "Arrow"):
        return "unknown"
    return named or "unknown"


def _lines_or_value(text: bytes, named: Format | None) -> Format:
    """JSONL is a whole value on a line; one that goes on over lines is JSON."""
    first, end, rest = text.partition(b"\n")
    if first.strip() in (b"{", b"["):  # spread over lines
        return "JSON"
    is_list_of_rows = first.startswith(b"[") and first[1:].lstrip().startswith(b"{")
    if named == "JSONL":
        return "JSON" if is_list_of_rows and not rest.strip() else "JSONL"
    return "JSONL" if end and rest.strip() and not is_list_of_rows and _parses(first) else "JSON"


def _parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _whole_lines(reading: Reading) -> Iterator[tuple[At, Row]]:
    reading.budget = None
    with opened(reading.place) as handle:
        yield from all_lines(reading, handle)
    reading.rows_exact = True


def _packed_lines(reading: Reading, packed: str) -> Iterator[tuple[At, Row]]:
    """No random access: a sample is the head, and the count is read off the place in the file."""
    with opened(reading.place) as raw, _unpack(raw, packed) as handle:
        try:
            yield from all_lines(reading, handle)
            done = reading.budget is None or not handle.read(1)
        except _BROKEN as error:
            reading.find("broken_compression", f"{packed}: {short(error)}")
            return
        reading.rows_exact = done
        if not done and reading.row_count:
            reading.row_count = round(reading.row_count * reading.size / max(raw.tell(), 1))


def _open_json(reading: Reading, packed: str | None) -> None:
    handle = opened(reading.place) if packed is None else _unpacked(reading.place, packed)
    try:
        open_values(reading, handle)
    except _BROKEN as error:
        handle.close()
        reading.find("broken_compression", f"{packed}: {short(error)}")


def _unpacked(place: Place, packed: str) -> IO[bytes]:
    return _unpack(opened(place), packed)


def _unpack(raw: IO[bytes], packed: str) -> IO[bytes]:
    """The content of a compressed stream, as a handle that reads line by line."""
    if packed == "zstd":
        import pyarrow as pa

        stream = pa.CompressedInputStream(pa.PythonFile(raw), "zstd")
        return io.BufferedReader(stream, 1 << 18)
    openers: dict[str, Callable[[Any], Any]] = {
        "gzip": gzip.open,
        "bzip2": bz2.open,
        "xz": lzma.open,
    }
    handle: IO[bytes] = openers[packed](raw)
    return handle
