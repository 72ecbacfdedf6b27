"""Eight sets of made-up rows, each in the form and file type of a set that people train on.

The words are those of the training prompts in `recipes/prompts`, sentence by sentence, put together
anew for each row; lengths are lognormal around medians of our own choice. Rows of a set share no
more than their sentences, so that copies are rare; a few rows are broken on purpose.
"""

import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import ROOT

Json = dict[str, Any]
BROKEN_EVERY = 500  # rows
_ROWS_AT_ONCE = 500
_SPREAD = 0.7  # sigma of the logarithm of a length


class Writer:
    """Makes texts of natural words, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._sentences = sentences()

    def text(self, median_characters: int) -> str:
        """Sentences of natural language or code; a length around the median."""
        wanted = median_characters * self._random.lognormvariate(0.0, _SPREAD)
        parts: list[str] = []
        size = 0.0
        while size < wanted:
            one = self._random.choice(self._sentences)
            parts.append(f"{one} {self._random.randrange(100_000)}." if size % 7 < 1 else one)
            size += len(parts[-1]) + 1
        return " ".join(parts)

    def number(self, below: int) -> int:
        """Uniform."""
        return self._random.randrange(below)


@lru_cache(maxsize=1)
def sentences() -> tuple[str, ...]:
    """The sentences of the training prompts in `recipes/prompts`, each once."""
    found: dict[str, None] = {}
    for path in sorted((ROOT / "recipes" / "prompts").glob("train-*.jsonl")):
        for line in path.read_text().splitlines():
            for message in json.loads(line)["messages"]:
                for one in re.split(r"(?<=[.!?])\s+|\n{2,}", message["content"]):
                    if len(one) > 20:
                        found[one.strip()] = None
    return tuple(found)


def _glaive(w: Writer, number: int) -> Json:
    declared = {
        "name": f"look_up_{number % 97}",
        "description": w.text(80),
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": w.text(60)}},
            "required": ["query"],
        },
    }
    call = json.dumps({"name": declared["name"], "arguments": "@"}).replace(
        '"@"', "'" + json.dumps({"query": f"hawks {number}"}) + "'"
    )
    system = "SYSTEM: You are a helpful assistant with access to the following functions. "
    return {
        "system": f"{system}Use them if required -\n{json.dumps(declared, indent=4)}\n",
        "chat": (
            f"USER: {w.text(200)}\n\n\nASSISTANT: <functioncall> {call} <|endoftext|>\n\n\n"
            f'FUNCTION RESPONSE: {{"found": {number}}}\n\n\n'
            f"ASSISTANT: {w.text(200)} <|endoftext|>\n\n\nUSER: {w.text(300)}\n\n\n"
            f"ASSISTANT: {w.text(300)} <|endoftext|>\n\n\n"
        ),
    }


def _opencode(w: Writer, number: int) -> Json:
    return {
        "id": f"{number:032x}",
        "input": w.text(900),
        "output": w.text(1500),
        "domain": "generic",
        "generation_algorithm": "self-instruct",
        "llm_judgement": w.text(400),
        "unit_tests": w.text(400),
        "tests_execution_status": "[]",
        "average_test_score": "1.0",
    }


def _magicoder(w: Writer, number: int) -> Json:
    return {
        "lang": "python",
        "raw_index": number,
        "index": number,
        "seed": w.text(400),
        "openai_fingerprint": "eyas",
        "problem": w.text(900),
        "solution": w.text(1200),
    }


def _mixture(w: Writer, number: int) -> Json:
    answer = f"<think>\n{w.text(6000)}\n</think>\n\n{w.text(800)}"
    return {
        "messages": [
            {"role": "user", "content": w.text(700)},
            {"role": "assistant", "content": answer},
        ],
        "num_tokens": number,
        "source": "made up",
    }


def _openthoughts(w: Writer, number: int) -> Json:
    del number
    answer = (
        f"<|begin_of_thought|>\n\n{w.text(6000)}\n\n<|end_of_thought|>\n\n"
        f"<|begin_of_solution|>\n\n{w.text(800)}\n\n<|end_of_solution|>"
    )
    return {
        "system": "Think about the question step by step before you answer it. " * 12,
        "conversations": [
            {"from": "user", "value": w.text(700)},
            {"from": "assistant", "value": answer},
        ],
    }


def _ultrachat(w: Writer, number: int) -> Json:
    messages = [
        {"role": ("user", "assistant")[turn % 2], "content": w.text((250, 1200)[turn % 2])}
        for turn in range(2 * (1 + w.number(4)))
    ]
    return {
        "prompt": messages[0]["content"],
        "prompt_id": f"{number:064x}",
        "messages": messages,
    }


def _sharegpt(w: Writer, number: int) -> Json:
    turns = [
        {"from": ("human", "gpt")[turn % 2], "value": w.text((250, 1200)[turn % 2])}
        for turn in range(2 * (1 + w.number(5)))
    ]
    return {"id": f"chat_{number}", "conversations": turns}


def _swe_agent(w: Writer, number: int) -> Json:
    steps: list[Json] = [
        {"role": "system", "text": None, "system_prompt": w.text(2500)},
        {"role": "user", "text": w.text(2000)},
    ]
    for _ in range(2 + w.number(6)):
        steps.append({"role": "ai", "text": w.text(400)})
        steps.append({"role": "user", "text": w.text(1200)})
    steps.append({"role": "ai", "text": w.text(300)})
    return {
        "instance_id": f"owner__project-{number}",
        "model_name": "made-up",
        "target": True,
        "trajectory": steps,
        "exit_status": "submitted",
        "generated_patch": w.text(600),
        "eval_logs": w.text(800),
    }


@dataclass(frozen=True)
class Kind:
    """One set: its name and domain in a recipe, its file, how a row is made, how it is broken."""

    name: str
    domain: str
    file: str
    make: Callable[[Writer, int], Json]
    text_column: str  # an empty list or text there makes the row unusable


KINDS = (
    Kind("glaive", "tools", "glaive.json", _glaive, "chat"),
    Kind("opencode", "code", "opencode.parquet", _opencode, "input"),
    Kind("magicoder", "code", "magicoder.jsonl", _magicoder, "problem"),
    Kind("mixture-of-thoughts", "math", "mixture.parquet", _mixture, "messages"),
    Kind("openthoughts", "math", "openthoughts.jsonl.gz", _openthoughts, "conversations"),
    Kind("ultrachat", "chat", "ultrachat.parquet", _ultrachat, "messages"),
    Kind("sharegpt", "chat", "sharegpt.json", _sharegpt, "conversations"),
    Kind("swe-agent", "code", "swe-agent.jsonl", _swe_agent, "trajectory"),
)


def write_sets(folder: Path, rows: int) -> dict[str, int]:
    """Write all sets, `rows` rows together; how many each has."""
    folder.mkdir(parents=True)
    written = {}
    for place, kind in enumerate(KINDS):
        count = rows // len(KINDS) + (place < rows % len(KINDS))
        _write(folder / kind.file, _rows(kind, count, seed=place))
        written[kind.name] = count
    return written


def _rows(kind: Kind, count: int, *, seed: int) -> Iterator[Json]:
    writer = Writer(seed)
    for number in range(count):
        row = kind.make(writer, number)
        if number % BROKEN_EVERY == BROKEN_EVERY - 1:
            row[kind.text_column] = type(row[kind.text_column])()
        yield row


def _write(path: Path, rows: Iterator[Json]) -> None:
    if path.suffix == ".parquet":
        _write_parquet(path, rows)
    elif path.suffix == ".json":
        with path.open("w") as file:
            for number, row in enumerate(rows):
                file.write(("[\n" if number == 0 else ",\n") + json.dumps(row, indent=1))
            file.write("\n]\n")
    else:
        with (
            gzip.open(path, "wt", compresslevel=1)
            if path.suffix == ".gz"
            else path.open("w") as file
        ):
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _write_parquet(path: Path, rows: Iterator[Json]) -> None:
    writer: pq.ParquetWriter | None = None
    for some in _batches(rows):
        table = pa.Table.from_pylist(list(some))
        if writer is None:
            writer = pq.ParquetWriter(path, table.schema)
        writer.write_table(table.cast(writer.schema))
    assert writer is not None
    writer.close()


def _batches(rows: Iterator[Json]) -> Iterator[Sequence[Json]]:
    held: list[Json] = []
    for row in rows:
        held.append(row)
        if len(held) == _ROWS_AT_ONCE:
            yield held
            held = []
    if held:
        yield held
