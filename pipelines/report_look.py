"""What a page is made from. What cannot be read is said on the page, and stops nothing else."""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.errors import RunError
from pipelines.recipe import Recipe, load_recipe
from pipelines.row_index import STATUSES
from pipelines.segments import committed_files
from pipelines.storage import Location, contents, listed, readable
from pipelines.store import RunFolder, read_manifest

_Made = TypeVar("_Made")

_UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError,
    AssertionError, pa.ArrowException, RunError,
)  # fmt: skip
_COLUMNS = ("sample_id", "status", "finish_reason", "usage", "finished_at")
_TOKENS = {"prompt": "prompt", "reasoning": "reasoning", "output": "completion"}
_ENTRY = ("fingerprint", "seconds", "counts", "files")  # what a manifest says of a stage
_FAULT_CHARACTERS = 300


@dataclass(frozen=True)
class PageSet:
    """A prompt set; `use` is training, evaluation, or unknown where no recipe says it."""

    name: str
    domain: str
    use: str


@dataclass(frozen=True)
class Look:
    """A run as its files say it is now. Empty where a file is not there or cannot be read."""

    run: RunFolder
    recipe: Recipe | None = None
    stages: Mapping[str, Any] = field(default_factory=dict)  # of the manifest: those that are done
    events: Sequence[Mapping[str, Any]] = ()  # without figures
    sets: Sequence[PageSet] = ()
    faults: dict[str, list[str]] = field(default_factory=dict)  # by part of the page

    def tried(self, part: str, make: Callable[[], _Made]) -> _Made | None:
        """What `make` gives; None, and a fault of that part of the page, where it cannot."""
        try:
            return make()
        except _UNREADABLE as error:
            said = error.seen if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
            self.fault(part, said)
            return None

    def fault(self, part: str, said: str) -> None:
        """Have the page say what is wrong there."""
        self.faults.setdefault(part, []).append(said[:_FAULT_CHARACTERS])

    def sets_for(self, use: str) -> list[PageSet]:
        """The sets with one use, and those whose use is unknown."""
        return [one for one in self.sets if one.use in (use, "unknown")]


def look_at(run: RunFolder) -> Look:
    """Read recipe, manifest and events."""
    first = Look(run)
    recipe = first.tried("recipe", lambda: load_recipe(run.recipe))
    stages = first.tried("manifest", lambda: _done_stages(run)) or {}
    events = first.tried("events", lambda: _events(first)) or []
    sets = _sets(recipe) if recipe else first.tried("manifest", lambda: _prepared_sets(stages))
    return Look(run, recipe, stages, events, sets or [], first.faults)


def read_rows(look: Look, name: str) -> pa.Table:
    """The durable rows of a set, each once in its best version, without their bodies.

    Columns: sample_id, status, has_reply, prompt, reasoning, output (tokens), at (seconds since the
    epoch).
    """
    segments = listed(look.run.segments / name, "*.arrow")
    tables = [
        look.tried("rows", lambda file=file: _columns(file))  # type: ignore[misc]
        for file in (*committed_files(look.run, name), *segments)
    ]
    whole = pa.concat_tables([_EMPTY, *(one for one in tables if one is not None)])
    if not segments:
        return whole.drop_columns("rank")
    whole = whole.sort_by([("sample_id", "ascending"), ("rank", "ascending")]).combine_chunks()
    ids = whole["sample_id"].combine_chunks()
    is_first = pc.fill_null(pc.not_equal(ids, pa.concat_arrays([pa.nulls(1, ids.type), ids[:-1]])),
                            True)  # fmt: skip
    return whole.filter(is_first).drop_columns("rank")


def whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects of a file of lines, and how many lines are none.

    The last line may be on its way: without a line feed it does not count.
    """
    found, bad = [], 0
    content = path.read_bytes()
    for line in content[: content.rfind(b"\n") + 1].splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            value = None
        if isinstance(value, dict):
            found.append(value)
        elif line:
            bad += 1
    return found, bad


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises `OSError` and `ValueError`."""
    value = json.loads(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return value


def cut(text: str, most: int) -> str:
    """At most so many characters of a text, and how many are left out."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[... {len(text) - most:,} more characters]"


def ranked(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """Names with what is counted of them, the most first."""
    return [(name, f"{count:,}") for name, count in Counter(counts).most_common() if count]


_EMPTY = pa.schema(
    [
        ("sample_id", pa.string()),
        ("status", pa.string()),
        ("has_reply", pa.bool_()),
        ("prompt", pa.int32()),
        ("reasoning", pa.int32()),
        ("output", pa.int32()),
        ("at", pa.float64()),
        ("rank", pa.int32()),
    ]
).empty_table()


def _columns(file: Location) -> pa.Table:
    if file.suffix == ".parquet":
        table = pq.read_table(readable(file), columns=list(_COLUMNS), partitioning=None)
    else:
        with pa.ipc.open_file(contents(file)) as opened:
            table = opened.read_all().select(_COLUMNS)
    kinds = pc.list_element(pc.split_pattern(table["status"], ":"), 0)
    tokens = {
        name: pc.struct_field(table["usage"], f"{key}_tokens")
        for name, key in {
            "prompt": "prompt",
            "reasoning": "reasoning",
            "output": "completion",
        }.items()
    }
    at = pc.divide(pc.cast(pc.cast(table["finished_at"], pa.int64()), pa.float64()), 1e6)
    columns = {
        "sample_id": table["sample_id"],
        "status": table["status"],
        "has_reply": pc.not_equal(table["finish_reason"], ""),
        **tokens,
        "at": at,
        "rank": pc.fill_null(pc.index_in(kinds, value_set=pa.array(STATUSES)), len(STATUSES)),
    }
    return pa.table(columns).cast(_EMPTY.schema)


def _done_stages(run: RunFolder) -> dict[str, Any]:
    stages = read_manifest(run)["stages"]
    return {name: {key: entry[key] for key in _ENTRY} for name, entry in stages.items()}


def _events(look: Look) -> list[Mapping[str, Any]]:
    if not look.run.events.exists():
        return []
    lines, bad = whole_lines(look.run.events)
    events = [
        one
        for one in lines
        if isinstance(one.get("event"), str) and isinstance(one.get("at"), int | float)
    ]
    bad += len(lines) - len(events)
    if bad:
        look.fault("events", f"{bad:,} lines of events.jsonl are no events")
    return [one for one in events if one["event"] != "figures"]


def _sets(recipe: Recipe) -> list[PageSet]:
    prompts = recipe.prompts
    uses = (("training", prompts.train), ("evaluation", prompts.evaluation))
    return [PageSet(one.name, one.domain, use) for use, sets in uses for one in sets]


def _prepared_sets(stages: Mapping[str, Any]) -> list[PageSet]:
    """Without a recipe: what is answered is for training, what else is prepared nobody says."""
    names = {stage: stages[stage]["counts"]["sets"] for stage in ("prepare", "generate")
             if stage in stages}  # fmt: skip
    trained = names.get("generate", ())
    other = "evaluation" if trained else "unknown"
    return [
        PageSet(name, "unknown domain", "training" if name in trained else other)
        for name in names.get("prepare", ())
    ]
