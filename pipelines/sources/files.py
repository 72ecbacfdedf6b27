"""Source files of prompts: read in chunks by one process, decoded by any number of others.

What a file holds is told by its first bytes: Parquet, Arrow (file or stream), JSON Lines or one
JSON array, the two last plain or compressed with gzip or zstd. Only a file whose name ends in
.jsonl or .ndjson is JSON Lines whatever its first line holds.
"""

from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, Literal

import pyarrow as pa

from pipelines.errors import BadRecipe
from pipelines.sources.arrow_rows import is_arrow, pack, read_batches, unpack
from pipelines.sources.places import COMPRESSIONS, LINES, SourceFile, faults_of
from pipelines.sources.places import find_files as find_files
from pipelines.sources.row import BadRow, Json, Refused, decode_json, kind_of
from pipelines.sources.row_ends import BrokenFile, ElementEnds, LineEnds, cut_rows

ROW_LIMIT = 64 << 20  # bytes
_BLOCK_BYTES = 64 << 10  # looked through at once: what a processor's cache holds
_HEAD_ROWS, _HEAD_LINES = 16, 1000
_BOM = b"\xef\xbb\xbf"
_CODECS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_MAGIC_BYTES = 8


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a file, not yet decoded."""

    file: str
    first_line: int  # 1-based: line of JSON Lines, element of an array, row of any other
    rows: int  # blank lines included
    kind: Literal["lines", "elements", "arrow", "too_large"]
    payload: bytes
    ends: tuple[int, ...]  # of each line or element in the payload
    read_bytes: int  # how far the file was read for it; its share, where it is not read in order


@dataclass(frozen=True)
class _Piece:
    """A chunk that does not know its place."""

    kind: Literal["lines", "elements", "arrow", "too_large"]
    payload: bytes
    rows: int
    position: int  # in the file as stored, behind it
    ends: tuple[int, ...] = ()


def read_chunks(
    files: Iterable[SourceFile], *, chunk_bytes: int, columns: Collection[str] | None = None
) -> Generator[Chunk, None, None]:
    """All rows in file order, in chunks of about `chunk_bytes` after decompression.

    Memory is bounded by a chunk and a row of `ROW_LIMIT`, whatever the size of a file. `columns`
    are those that are read of Parquet and Arrow, all by default. Closing the generator closes the
    file. Raises `BadRecipe` where a file breaks off or is none of the known kinds.
    """
    for file in files:
        line, position = 1, 0
        try:
            with file.open() as handle:
                for one in _pieces(file, handle, chunk_bytes, columns):
                    read = one.position - position
                    yield Chunk(file.name, line, one.rows, one.kind, one.payload, one.ends, read)
                    line, position = line + one.rows, one.position
        except BadRecipe:
            raise
        except faults_of(file.filesystem) as error:
            raise BadRecipe(
                f"the prompt set {file.path} cannot be read: {error} "
                f"({line - 1:,} rows were read before that)",
                expected="a whole file: JSON Lines or a JSON array in UTF-8, Parquet or Arrow",
                change="fetch or convert the file again, or correct the path in the recipe",
            ) from error


def rows_of(chunk: Chunk) -> Iterator[tuple[int, Json | BadRow]]:
    """Each row with its line: its value, or why it has none. Blank lines are no rows. Pure."""
    for line, value in _decoded(chunk):
        if isinstance(value, dict):
            yield line, value
        elif isinstance(value, Refused):
            yield line, BadRow(chunk.file, line, value.reason, value.detail)
        else:
            seen = f"a {kind_of(value)}, expected an object"
            yield line, BadRow(chunk.file, line, "not_an_object", seen)


def columns_of(file: SourceFile) -> tuple[Json, ...]:
    """The first rows of a file that can be decoded, up to 16: what a format is recognised by.

    Reads on to the 1,000th row at most; empty where none of these can be decoded.
    """
    found: list[Json] = []
    with closing(read_chunks([file], chunk_bytes=_BLOCK_BYTES)) as chunks:
        for chunk in chunks:
            found += [value for _, value in rows_of(chunk) if isinstance(value, dict)]
            if len(found) >= _HEAD_ROWS or chunk.first_line + chunk.rows > _HEAD_LINES:
                break
    return tuple(found[:_HEAD_ROWS])


# In a worker


def _decoded(chunk: Chunk) -> Iterator[tuple[int, Any]]:
    """Each row's value, or the `Refused` that says why it has none."""
    if chunk.kind == "arrow":
        yield from enumerate(unpack(chunk.payload), start=chunk.first_line)
    elif chunk.kind == "too_large":
        yield chunk.first_line, _too_large()
    else:
        start = 0
        for line, end in enumerate(chunk.ends, start=chunk.first_line):
            content, start = chunk.payload[start:end], end + 1
            if chunk.kind == "elements" or content.strip():
                yield line, _value(content)


def _value(content: bytes) -> Any:
    if len(content) > ROW_LIMIT:
        return _too_large()
    try:
        return decode_json(content)
    except Refused as refusal:
        return refusal


def _too_large() -> Refused:
    return Refused("row_too_large", f"more than {ROW_LIMIT:,} bytes")


# In the driver


def _pieces(
    file: SourceFile, handle: pa.NativeFile, chunk_bytes: int, columns: Collection[str] | None
) -> Iterator[_Piece]:
    magic = handle.read(_MAGIC_BYTES)
    handle.seek(0)
    if is_arrow(magic):
        limit = min(chunk_bytes, ROW_LIMIT)
        for batch, done in read_batches(handle, magic, columns=columns, limit=limit):
            position, rows = int(done * file.size), batch.num_rows
            if batch.nbytes > ROW_LIMIT:
                yield _Piece("too_large", b"", rows, position)
            else:
                yield _Piece("arrow", pack(batch), rows, position)
        return
    codec = next((name for start, name in _CODECS.items() if magic.startswith(start)), None)
    if codec is not None:
        with pa.CompressedInputStream(handle, codec) as stream:
            yield from _text_pieces(file, handle, stream, chunk_bytes)
    elif file.name.lower().endswith(COMPRESSIONS) and len(magic) < _MAGIC_BYTES:
        raise BrokenFile("it is shorter than any compressed file")
    else:
        yield from _text_pieces(file, handle, handle, chunk_bytes)


def _text_pieces(
    file: SourceFile, handle: pa.NativeFile, stream: BinaryIO, chunk_bytes: int
) -> Iterator[_Piece]:
    head = _head_of(stream)
    kind, start = _layout(file, head)
    if kind == "elements" and head[start:].strip() == b"]" and len(head) < _BLOCK_BYTES:
        return
    rest = iter(partial(stream.read, min(_BLOCK_BYTES, chunk_bytes)), b"")
    found = cut_rows(
        chain([head[start:]], rest),
        ElementEnds() if kind == "elements" else LineEnds(),
        chunk_bytes=chunk_bytes,
        row_limit=ROW_LIMIT,
    )
    for one in found:
        if one is None:
            yield _Piece("too_large", b"", 1, handle.tell())
        else:
            payload, ends = one
            yield _Piece(kind, payload, len(ends), handle.tell(), ends)


def _layout(file: SourceFile, head: bytes) -> tuple[Literal["lines", "elements"], int]:
    """How rows follow each other, and where the first one starts. Raises `BrokenFile`."""
    start = len(_BOM) if head.startswith(_BOM) else 0
    content = head[start:].lstrip()
    if file.suffix in LINES or (not content and file.suffix == ".json"):
        return "lines", start
    if content.startswith(b"["):
        return "elements", head.index(b"[") + 1
    if not content.startswith(b"{"):
        raise BrokenFile(f"it begins with {content[:20]!r}" if content else "it is empty")
    if _goes_on(content):
        raise BrokenFile("it is one object over several lines, not a row for each line")
    return "lines", start


def _goes_on(content: bytes) -> bool:
    """Whether what begins in the first line ends in a later one."""
    first, _, rest = content.partition(b"\n")
    if not rest or rest.lstrip().startswith(b"{"):
        return False
    return isinstance(_value(first), Refused)


def _head_of(stream: BinaryIO) -> bytes:
    """The first block; the whole content where that is shorter."""
    head = b""
    while len(head) < _BLOCK_BYTES and (more := stream.read(_BLOCK_BYTES - len(head))):
        head += more
    return head
