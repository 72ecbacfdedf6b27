"""The real generate stage, as a user runs it: `eyas generate` on a run folder with prompts."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks.fake_fleet import Work
from benchmarks.harness import ROOT, TreeCost, run_measured
from pipelines.recipe import fingerprint, load_recipe
from pipelines.schema import PROMPT_SCHEMA
from pipelines.store import RunFolder, record_stage, write_parquet
from tests.support.road import write_recipe

_ROWS_PER_PART = 8192  # as prepare writes them
_SET = "chat"


@dataclass(frozen=True)
class StageRun:
    """One finished stage: its cost, and when each row was finished (seconds since the epoch)."""

    cost: TreeCost
    started_at: float  # of the stage: Ray is up
    seconds: float  # of the stage, commit included
    finished: tuple[float, ...]

    @property
    def rows(self) -> int:
        """Rows that were committed as ok."""
        return len(self.finished)

    def cpu_after(self, rows: int) -> float:
        """CPU-seconds of the whole tree from when so many rows were finished to the very end."""
        return self.cost.cpu_since(sorted(self.finished)[rows - 1])

    @property
    def steady_cpu_per_row(self) -> float:
        """CPU-seconds of the whole tree per row, in the middle four fifths of the rows."""
        times = sorted(self.finished)
        first, last = len(times) // 10, len(times) - len(times) // 10 - 1
        used = self.cost.cpu_at(times[last]) - self.cost.cpu_at(times[first])
        return used / (last - first)


def run_stage(
    folder: Path, target: Path, urls: Sequence[str], work: Work, rows: int, *, in_flight: int
) -> StageRun:
    """Write `rows` prompts into a new folder and have `eyas generate` answer them.

    Raises `RuntimeError` if the command fails or a row is not ok.
    """
    recipe_path = write_run(folder, target, urls, work, rows, in_flight)
    command = [sys.executable, "-m", "pipelines.cli", "generate", str(recipe_path), "--json"]
    log = folder / "eyas.log"
    cost = run_measured(command, log=log, role_of=role_of, environment={"PYTHONPATH": str(ROOT)})
    if cost.code != 0:
        raise RuntimeError(f"eyas generate ended with {cost.code}:\n{log.read_text()[-3000:]}")
    started_at, seconds = _stage_times(folder / "run" / "events.jsonl")
    finished = _finished(folder / "run" / "responses" / _SET)
    if len(finished) != rows:
        raise RuntimeError(f"{len(finished)} of {rows} rows are ok; see {log}")
    return StageRun(cost, started_at, seconds, tuple(finished))


def role_of(command_line: Sequence[str]) -> str | None:
    """Which of Eyas's processes a command line is: driver, generate worker, or another of Ray's."""
    line = " ".join(command_line)
    if "ray::" in line:
        return "generate_worker" if "GenerateWorker" in line else "other_workers"
    return "driver" if "pipelines.cli generate" in line else None


def write_run(
    folder: Path, target: Path, urls: Sequence[str], work: Work, rows: int, in_flight: int
) -> Path:
    """A run folder `folder/run` whose prepare is done, and the recipe beside it; its path."""
    folder.mkdir(parents=True)
    recipe_path = write_recipe(folder, target)
    mapping: dict[str, Any] = yaml.safe_load(recipe_path.read_text())
    mapping["ray"]["object_store_bytes"] = 300_000_000
    mapping["prompts"] |= {"context_tokens": 2048}
    mapping["generate"]["servers"] = {"kind": "attach", "urls": list(urls)}
    mapping["generate"]["pool"] = {"max_in_flight_per_server": in_flight}
    mapping["generate"]["sampling"] |= {"temperature": 1.0, "max_new_tokens": 1000}
    recipe_path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    recipe = load_recipe(recipe_path)
    run = RunFolder(Path(recipe.run_folder))
    run.create()
    for part, first in enumerate(range(0, rows, _ROWS_PER_PART)):
        numbers = range(first, min(rows, first + _ROWS_PER_PART))
        table = pa.Table.from_pylist([_prompt(work, one) for one in numbers], schema=PROMPT_SCHEMA)
        write_parquet(run.prompts / _SET / f"part-{part:05d}.parquet", table)
    mark = fingerprint(recipe, "prepare")
    record_stage(run, "prepare", fingerprint=mark, counts={"headline": "made here"}, seconds=0.0)
    return recipe_path


def _prompt(work: Work, number: int) -> dict[str, Any]:
    content = f"question {number} " + "and so on " * (work.prompt_tokens // 10)
    return {
        "sample_id": f"{_SET}-{number:012x}",
        "dataset": _SET,
        "domain": "chat",
        "messages": json.dumps([{"role": "user", "content": content}]),
        "tools": "[]",
        "tools_given": "null",
        "repairs": "[]",
        "format": "messages",
        "prompt_ids": work.prompt_ids(number),
        "history": [],
        "continuations": [],
        "source": "made for the benchmark",
        "license": "Apache-2.0",
    }


def _stage_times(events: Path) -> tuple[float, float]:
    """When the generate stage began (seconds since the epoch), and how long it took."""
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    own = [one for one in lines if "stage" in one and one["stage"] == "generate"]
    begun = next(one["at"] for one in own if one["event"] == "stage_started")
    ended = next(one for one in own if one["event"] == "stage_finished")
    return begun, ended["at"] - begun


def prompts_of(folder: Path) -> Path:
    """Where `write_run` put the prompt files."""
    return folder / "run" / "prompts" / _SET


def _finished(folder: Path) -> list[float]:
    tables = [
        pq.read_table(path, columns=["finished_at"], partitioning=None)
        for path in sorted(folder.glob("*.parquet"))
    ]
    moments = pa.concat_tables(tables)["finished_at"].cast(pa.int64()).to_pylist()
    return [one / 1e6 for one in moments]
