"""Source files of prompts: JSONL or Parquet."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import BadRecipe
from pipelines.sources.messages import parse_row
from pipelines.sources.row import BadRow, Refused, SourceRow, decode_json


def read_prompts(path: Path) -> Iterator[SourceRow | BadRow]:
    """Read a source row by row, in file order. Blank JSONL lines are skipped and not counted.

    Raises `BadRecipe` where the file as a whole cannot be read.
    """
    match path.suffix:
        case ".jsonl":
            rows = _read_jsonl(path)
        case ".parquet":
            rows = _read_parquet(path)
        case _:
            raise BadRecipe(
                f"the prompt set {path} ends in {path.suffix!r}",
                expected="a .jsonl or a .parquet file",
                change="convert the file, or correct the path in the recipe",
            )
    try:
        yield from rows
    except (OSError, pa.ArrowException) as error:
        raise BadRecipe(
            f"the prompt set {path} cannot be read: {error}",
            expected="a readable .jsonl or .parquet file",
            change="correct the path in the recipe, or mend the file",
        ) from error


def _read_jsonl(path: Path) -> Iterator[SourceRow | BadRow]:
    with path.open("rb") as handle:
        for line, raw in enumerate(handle, start=1):
            content = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
            if not content.strip():
                continue
            try:
                value = decode_json(content)
            except Refused as refusal:
                yield BadRow(path.name, line, refusal.reason, refusal.detail)
            else:
                yield parse_row(value, file=path.name, line=line)


def _read_parquet(path: Path) -> Iterator[SourceRow | BadRow]:
    with pq.ParquetFile(path) as parquet:
        names = parquet.schema_arrow.names
        if "messages" not in names:
            raise BadRecipe(
                f"the prompt set {path} has the columns {', '.join(names)}",
                expected="a column messages: a list of {role, content}, or that list as JSON",
                change="rename or convert the column",
            )
        wanted = [name for name in ("messages", "tools", "source", "license") if name in names]
        line = 0
        for batch in parquet.iter_batches(batch_size=512, columns=wanted):
            for i in range(batch.num_rows):
                line += 1
                try:
                    value = {name: _cell(name, batch.column(name)[i]) for name in wanted}
                except Refused as refusal:
                    yield BadRow(path.name, line, refusal.reason, refusal.detail)
                else:
                    present = {key: cell for key, cell in value.items() if cell is not None}
                    yield parse_row(present, file=path.name, line=line)


def _cell(column: str, scalar: pa.Scalar) -> Any:
    """A Parquet cell as Python. `messages` and `tools` may be nested columns or JSON strings."""
    try:
        value = scalar.as_py()
    except UnicodeDecodeError as error:
        raise Refused("invalid_utf8", str(error)) from error
    if isinstance(value, str) and column in ("messages", "tools"):
        return decode_json(value.encode())
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all keys of its column; a null there stands for an absent key."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value
