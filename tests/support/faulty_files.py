"""Files that are broken in every way met so far: `python -m tests.support.faulty_files FOLDER`.

Each has a name, a way to make it, and the finding by which a glance has to know it.
"""

import bz2
import gzip
import json
import os
import random
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]
_ROWS = 40


@dataclass(frozen=True)
class Faulty:
    """One kind of broken file."""

    finding: str  # the name that a glance has to give it
    file: str  # its name in its folder
    write: Callable[[Path], object]


def answer(number: int, **changes: Any) -> Row:
    """A healthy row with the six fields that people of this trade exchange."""
    row = {
        "sample_id": f"b1-{number:012x}",
        "messages": [{"role": "user", "content": f"Question {number}"}],
        "reasoning": f"First I think about {number}, then about {number + 1}.",
        "content": f"The answer is {number * 7}.",
        "finish_reason": "stop",
        "usage": {"prompt_tokens": 5, "completion_tokens": 20 + number % 37},
    }
    return {**row, **changes}


def without(number: int, *fields: str) -> Row:
    """A healthy row without some of its fields."""
    return {key: value for key, value in answer(number).items() if key not in fields}


def lines(rows: list[Row], **options: Any) -> bytes:
    """Rows as JSONL."""
    return "".join(json.dumps(row, **options) + "\n" for row in rows).encode()


HEALTHY = [answer(number) for number in range(_ROWS)]


def make_all(folder: Path) -> None:
    """Write every kind into a folder of its own name."""
    for name, kind in KINDS.items():
        place = folder / name.replace(" ", "-").replace("/", "-")
        place.mkdir(parents=True)
        kind.write(place / kind.file)


def _bytes(finding: str, content: bytes, file: str = "rows.jsonl") -> Faulty:
    return Faulty(finding, file, lambda path: path.write_bytes(content))


def _rows(finding: str, change: Callable[[int], Row], **options: Any) -> Faulty:
    return _bytes(finding, lines([change(number) for number in range(_ROWS)], **options))


def _one(finding: str, text: bytes) -> Faulty:
    """Healthy rows with one foreign line among them."""
    healthy = lines(HEALTHY)
    return _bytes(finding, healthy + text + b"\n" + lines([answer(99)]))


def _table() -> pa.Table:
    return pa.Table.from_pylist(HEALTHY)


def _cut_table(path: Path) -> None:
    pq.write_table(_table(), path)
    path.write_bytes(path.read_bytes()[:-40])


def _damaged_table(path: Path) -> None:
    """The footer is whole, a page is not."""
    pq.write_table(_table(), path, compression="snappy")
    content = bytearray(path.read_bytes())
    content[30 : len(content) // 2] = random.Random(3).randbytes(len(content) // 2 - 30)
    path.write_bytes(content)


def _cut_arrow_file(path: Path) -> None:
    with pa.ipc.new_file(str(path), _table().schema) as writer:
        writer.write_table(_table())
    path.write_bytes(path.read_bytes()[:-40])


def _cut_arrow_stream(path: Path) -> None:
    with pa.ipc.new_stream(str(path), _table().schema) as writer:
        writer.write_table(_table(), max_chunksize=5)
    path.write_bytes(path.read_bytes()[:-500])


def _tensors(header: Row, data: bytes) -> Callable[[Path], object]:
    text = json.dumps(header).encode()
    return lambda path: path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def _one_tensor(shape: list[int], nbytes: int) -> Row:
    return {"fc": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}


def _zstd(path: Path) -> None:
    """Whole: what is broken are its rows."""
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(lines([answer(n, reasoning="", usage=None) for n in range(_ROWS)]))


def _cut_zstd(path: Path) -> None:
    noise = random.Random(4).randbytes(40_000).hex()
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(lines([answer(n, content=noise[n * 900 :][:900]) for n in range(80)]))
    path.write_bytes(path.read_bytes()[:-9_000])


def _endless_line(path: Path) -> None:
    """Far more than a line may have, most of it a hole that needs no room."""
    with path.open("wb") as handle:
        handle.write(lines(HEALTHY) + b'{"content": "')
        handle.truncate(128 << 20)


def _deep(levels: int) -> bytes:
    return b'{"a": ' + b"[" * levels + b"]" * levels + b"}"


def _circle(path: Path) -> None:
    other = path.with_name("other")
    other.symlink_to(path)
    path.symlink_to(other)


def _unreadable(path: Path) -> None:
    path.write_bytes(lines(HEALTHY))
    path.chmod(0)


def _old_half_line(path: Path) -> None:
    path.write_bytes(lines(HEALTHY) + b'{"sample_id": "b1-0000')
    os.utime(path, (1_700_000_000, 1_700_000_000))


_LOOP = "and then again, " * 40
_NOISE = random.Random(5).randbytes(5_000)
_FIVE = lines(HEALTHY[:5])

KINDS: dict[str, Faulty] = {
    # what this project was born from
    "seed, usage null": _rows(
        "reasoning_and_usage_lost", lambda n: answer(n, reasoning="", usage=None)
    ),
    "seed, markers in content": _rows(
        "reasoning_inside_content",
        lambda n: answer(n, reasoning="", content=f"<think>I think {n}</think>So {n}."),
    ),
    "seed, no completion_tokens": _rows(
        "usage_absent", lambda n: answer(n, usage={"prompt_tokens": 5})
    ),
    "seed, no usage field": _rows(
        "reasoning_and_usage_lost", lambda n: without(n, "usage", "reasoning")
    ),
    # answers
    "usage null": _rows("usage_absent", lambda n: answer(n, usage=None)),
    "string numbers": _rows(
        "number_as_text", lambda n: answer(n, usage={"completion_tokens": str(n)})
    ),
    "negative counts": _rows(
        "usage_not_a_count", lambda n: answer(n, usage={"completion_tokens": -1})
    ),
    "zero counts": _rows("usage_not_a_count", lambda n: answer(n, usage={"completion_tokens": 0})),
    "fractions for counts": _rows(
        "usage_not_a_count", lambda n: answer(n, usage={"completion_tokens": 20.5})
    ),
    "count and ids differ": _rows(
        "usage_differs_from_ids", lambda n: answer(n, output_ids=[1, 2, 3])
    ),
    "ids below zero": _rows("ids_out_of_range", lambda n: answer(n, output_ids=[5, -100, n])),
    "ids beyond any vocabulary": _rows(
        "ids_out_of_range", lambda n: answer(n, output_ids=[5, 2**31 + n])
    ),
    "think markers": _rows(
        "think_markers_in_content", lambda n: answer(n, content=f"so</think>It is {n}.")
    ),
    "think markers of Kimi": _rows(
        "think_markers_in_content", lambda n: answer(n, content=f"◁think▷so◁/think▷It is {n}.")
    ),
    "think markers of thought": _rows(
        "think_markers_in_content",
        lambda n: answer(n, content=f"<|begin_of_thought|>so<|end_of_thought|>It is {n}."),
    ),
    "think markers of Mistral": _rows(
        "think_markers_in_content", lambda n: answer(n, content=f"[THINK]so[/THINK]It is {n}.")
    ),
    "special tokens": _rows(
        "special_tokens_in_content", lambda n: answer(n, content=f"It is {n}.<|im_end|>")
    ),
    "reserved tokens": _rows(
        "reserved_tokens", lambda n: answer(n, content=f"x <|reserved_token_{n}|> y")
    ),
    "cut everywhere": _rows("many_cut", lambda n: answer(n, finish_reason="length")),
    "cut at the server's default": _rows(
        "cut_at_one_length",
        lambda n: answer(n, finish_reason="length", usage={"completion_tokens": 128}),
    ),
    "empty content": _rows("content_empty", lambda n: answer(n, content="")),
    "content null": _rows("content_empty", lambda n: answer(n, content=None)),
    "cut inside reasoning": _rows(
        "cut_inside_reasoning", lambda n: answer(n, content="", finish_reason="length")
    ),
    "repeated phrase": _rows("repetition", lambda n: answer(n, content=f"{n} {_LOOP}")),
    "repeated token": _rows(
        "repetition",
        lambda n: answer(n, output_ids=[5] * 40, usage={"completion_tokens": 40}),
    ),
    "aborted": _rows("finish_reason", lambda n: answer(n, finish_reason={"type": "abort"})),
    "NaN in the server": _rows(
        "nan_in_server",
        lambda n: answer(n, finish_reason={"type": "stop", "matched": "NaN happened"}),
    ),
    "half characters": _rows("broken_characters", lambda n: answer(n, content=f"caf\ufffd {n}")),
    "all the same": _rows("duplicate_text", lambda n: {**answer(0), "sample_id": f"b1-{n}"}),
    "the same ids": _rows("duplicate_id", lambda n: answer(n, sample_id=f"b1-{n % 9}")),
    "answers in another script": _rows(
        "answer_in_another_script",
        lambda n: answer(
            n,
            messages=[{"role": "user", "content": f"What do you think of the number {n}, please?"}],
            content=f"这个问题的答案是{n}因为我们可以一步一步地计算出来",
        ),
    ),
    # lines
    "half a line": Faulty("half_line_at_end", "rows.jsonl", _old_half_line),
    "a broken line": _one("malformed_lines", b'{"sample_id": "b1"'),
    "nested lists for rows": _bytes("not_objects", b"[[1, 2], [3]]\n[[4], [5]]\n"),
    "numbers for rows": _bytes("not_objects", b"12\n13\n"),
    "joined objects": _one("not_one_a_line", b'{"a": 1}{"a": 2} {"a": 3}'),
    "all on one line": _bytes("not_one_a_line", _FIVE.replace(b"\n", b"")),
    "pretty printed": _bytes("wrong_name", json.dumps(HEALTHY[0], indent=2).encode()),
    "NUL bytes": _one("null_bytes", b"\0" * 5_000),
    "a byte order mark": _bytes("byte_order_mark", b"\xef\xbb\xbf" + lines(HEALTHY)),
    "Windows line ends": _bytes("carriage_returns", lines(HEALTHY).replace(b"\n", b"\r\n")),
    "Latin-1": _bytes(
        "not_utf8",
        lines([answer(n, content=f"café {n}") for n in range(9)], ensure_ascii=False)
        .decode()
        .encode("latin-1"),
    ),
    "UTF-16": _bytes("utf16", lines(HEALTHY).decode().encode("utf-16")),
    "NaN and Infinity": _rows(
        "nan_in_json", lambda n: answer(n, score=float("nan" if n % 2 else "inf"))
    ),
    "deep nesting": _one("too_deep", _deep(100_000)),
    "integers beyond 64 bits": _rows("number_too_large", lambda n: answer(n, hash=2**70 + n)),
    "lone surrogates": _one("lone_surrogate", b'{"content": "\\ud83d"}'),
    "keys that come twice": _bytes(
        "duplicate_keys", b'{"sample_id": "a", "content": "x", "content": "y"}\n' * 3
    ),
    "an endless line": Faulty("line_too_long", "rows.jsonl", _endless_line),
    "a changed schema": _bytes(
        "schema_drift", lines([*HEALTHY, *(answer(n, usage=[1, n]) for n in range(40, 80))])
    ),
    "mixed types": _rows("mixed_types", lambda n: answer(n, extra=n if n % 2 else {"a": n})),
    # files
    "nothing": _bytes("empty_file", b""),
    "only line ends": _bytes("no_rows", b"\n\n\n"),
    "an empty list": _bytes("no_rows", b"[]", "rows.json"),
    "a folder of nothing": Faulty("no_files", "folder", lambda path: path.mkdir()),
    "a folder of others": Faulty(
        "no_files", "folder", lambda path: (path.mkdir(), (path / "notes.txt").write_text("x"))
    ),
    "an error page": _bytes(
        "html_page", b"<!DOCTYPE html>\n<html><title>502 Bad Gateway</title></html>", "rows.json"
    ),
    "half a JSON": _bytes("not_json", b'[{"a": 1}, {"a"', "rows.json"),
    "JSON with NaN": _bytes("nan_in_json", b'[{"a": NaN}]', "rows.json"),
    "objects after each other": _bytes("not_one_a_line", b'{"a": 1} {"a": 2,\n"b": 3}', "r.json"),
    "gzip, broken rows": _bytes(
        "usage_absent",
        gzip.compress(lines([answer(n, usage=None) for n in range(_ROWS)])),
        "rows.jsonl.gz",
    ),
    "half a gzip": _bytes(
        "broken_compression", gzip.compress(_NOISE.hex().encode())[:-900], "rows.jsonl.gz"
    ),
    "a gzip of noise": _bytes("broken_compression", b"\x1f\x8b\x08" + _NOISE, "rows.jsonl.gz"),
    "half a bzip2": _bytes(
        "broken_compression", bz2.compress(_NOISE.hex().encode())[:-900], "rows.jsonl.bz2"
    ),
    "zstd, broken rows": Faulty("reasoning_and_usage_lost", "rows.jsonl.zst", _zstd),
    "half a zstd": Faulty("broken_compression", "rows.jsonl.zst", _cut_zstd),
    "Parquet under another name": Faulty(
        "wrong_name", "rows.jsonl", lambda path: pq.write_table(_table(), path)
    ),
    "a list named JSONL": _bytes("wrong_name", json.dumps(HEALTHY).encode()),
    "noise": _bytes("unknown_format", _NOISE, "rows"),
    "noise named Parquet": _bytes("cut_short", _NOISE, "rows.parquet"),
    "a cut Parquet": Faulty("cut_short", "rows.parquet", _cut_table),
    "a damaged Parquet": Faulty("cut_short", "rows.parquet", _damaged_table),
    "a cut Arrow file": Faulty("cut_short", "rows.arrow", _cut_arrow_file),
    "a cut Arrow stream": Faulty("cut_short", "rows.arrow", _cut_arrow_stream),
    "a Parquet without rows": Faulty(
        "no_rows", "rows.parquet", lambda path: pq.write_table(_table().slice(0, 0), path)
    ),
    "cut tensors": Faulty(
        "cut_short", "w.safetensors", _tensors(_one_tensor([100], 400), b"\0" * 90)
    ),
    "a header that lies": Faulty(
        "bad_header", "w.safetensors", _tensors(_one_tensor([999], 400), b"\0" * 400)
    ),
    "a header without end": Faulty(
        "bad_header",
        "w.safetensors",
        lambda path: path.write_bytes(b"\xff" * 7 + b"\0{" + b"x" * 90),
    ),
    "NaN among tensors": Faulty(
        "not_finite",
        "w.safetensors",
        _tensors(_one_tensor([2], 8), struct.pack("<ff", 1.0, float("nan"))),
    ),
    "links in a circle": Faulty("broken_link", "rows.jsonl", _circle),
    "a link to nowhere": Faulty(
        "broken_link", "rows.jsonl", lambda path: path.symlink_to(path.with_name("gone"))
    ),
    "a pipe": Faulty("not_a_file", "rows.jsonl", os.mkfifo),
    "no permission": Faulty("not_permitted", "rows.jsonl", _unreadable),
}

if __name__ == "__main__":
    make_all(Path(sys.argv[1]))
