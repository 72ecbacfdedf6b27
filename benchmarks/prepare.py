"""What `eyas prepare` costs beside the tokenizer alone: `python benchmarks/prepare.py [--short]`.

Eight sets in eight forms and five kinds of files (`prompt_sets.py`), 100,000 rows, prepared with
the real command for SmolLM2-135M-Instruct: read, recognised, normalised, checked, copies removed
(near ones too), compared with evaluation prompts, rendered, tokenised, proved by decoding, sorted,
written.

* vs_tokenizer: seconds that the tokenizers library takes for the texts of the same prompts, in
  batches on all cores, over the command's seconds, its start included.
* cpu_vs_tokenizer: the same of CPU-seconds, which other work on the machine moves less.
* memory_growth: the most private memory (USS) of the driver or of a worker with 100,000 rows over
  the same with 10,000; the worse of the two.
* lost: rows that are neither a prompt nor rejected by name.
"""

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script

import pyarrow.parquet as pq  # noqa: E402
import yaml  # noqa: E402

from benchmarks import harness  # noqa: E402
from benchmarks.harness import Bar, Options, TreeCost, run_measured  # noqa: E402
from benchmarks.prompt_sets import KINDS, write_sets  # noqa: E402
from pipelines.recipe import cache_folder  # noqa: E402
from pipelines.target import QUICKSTART_TARGET, prepare_quickstart_target  # noqa: E402

logger = logging.getLogger(__name__)

BARS: dict[str, Bar | None] = {
    "vs_tokenizer": Bar("at least", 0.6),
    "cpu_vs_tokenizer": None,
    "memory_growth": Bar("at most", 1.1),
    "lost": Bar("at most", 0.0, in_any_form=True),
}
_BATCH_ROWS = 1000


@dataclass(frozen=True)
class Prepared:
    """One finished stage."""

    cost: TreeCost
    folder: Path
    counts: dict[str, Any]

    @property
    def cpu_seconds(self) -> float:
        """Of all its processes."""
        return self.cost.samples[-1][1]

    @property
    def lost(self) -> int:
        """Rows of which nothing is known."""
        sets = self.counts["sets"].values()
        known = sum(one["prompts"] + sum(one["rejected"].values()) for one in sets)
        return int(self.counts["rows"] - known)


def measure(options: Options) -> dict[str, float]:
    """All figures."""
    few, many = (4_000, 8_000) if options.short else (10_000, 100_000)
    prepare_quickstart_target()
    with tempfile.TemporaryDirectory(prefix="eyas-prepare-") as name:
        runs = {rows: prepare(Path(name) / str(rows), rows) for rows in (few, many)}
        alone = tokenizer_alone(runs[many].folder / "run" / "prompts")
    small, large = runs[few].cost.peak_bytes, runs[many].cost.peak_bytes
    assert {"driver", "worker"} <= small.keys() & large.keys(), (small, large)
    logger.info("tokenizer alone: %.1f s, %.1f CPU-seconds, %d tokens", *alone)
    return {
        "vs_tokenizer": alone.seconds / runs[many].cost.seconds,
        "cpu_vs_tokenizer": alone.cpu_seconds / runs[many].cpu_seconds,
        "memory_growth": max(large[role] / small[role] for role in ("driver", "worker")),
        "lost": float(sum(abs(run.lost) for run in runs.values())),
    }


def prepare(folder: Path, rows: int) -> Prepared:
    """Write the sets and a recipe, and run the command. Raises `RuntimeError` if it fails."""
    written = write_sets(folder / "sets", rows)
    recipe = write_recipe(folder)
    command = [sys.executable, "-m", "pipelines.cli", "prepare", str(recipe), "--json"]
    log = folder / "eyas.log"
    cost = run_measured(
        command,
        log=log,
        every_seconds=2.0,  # looking costs CPU that both cores want
        role_of=role_of,
        memory_every_seconds=2.0,
        environment={"PYTHONPATH": str(ROOT)},
    )
    if cost.code != 0:
        raise RuntimeError(f"eyas prepare ended with {cost.code}:\n{log.read_text()[-3000:]}")
    manifest = json.loads((folder / "run" / "manifest.json").read_bytes())
    counts = manifest["stages"]["prepare"]["counts"]
    assert counts["rows"] == rows + counts["sets"]["held-out"]["rows"], (counts["rows"], written)
    mib = {role: size // 2**20 for role, size in cost.peak_bytes.items()}
    done = Prepared(cost, folder, counts)
    spent = f"{cost.seconds:.1f} s, {done.cpu_seconds:.1f} CPU-seconds"
    logger.info("%d rows: %s, %s, MiB %s", rows, spent, counts["headline"], mib)
    return done


def write_recipe(folder: Path) -> Path:
    """The quick start's recipe with our sets; its path."""
    mapping: dict[str, Any] = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    profile = yaml.safe_load((ROOT / "recipes" / mapping["target"]["profile"]).read_text())
    mapping["run_folder"] = str(folder / "run")
    mapping["target"] |= {"path": str(cache_folder() / QUICKSTART_TARGET), "profile": profile}
    mapping["prompts"] |= {
        "train": [
            {"name": kind.name, "path": str(folder / "sets" / kind.file), "domain": kind.domain}
            for kind in KINDS
        ],
        "evaluation": [
            {
                "name": "held-out",
                "path": str(ROOT / "recipes" / "prompts" / "eval-chat.jsonl"),
                "domain": "chat",
            }
        ],
        "context_tokens": 8192,
        "on_bad_prompt": "reject",
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    return path


def role_of(command_line: Sequence[str]) -> str | None:
    """Which of the command's processes this is."""
    line = " ".join(command_line)
    if "multiprocessing.spawn" in line:
        return "worker"
    return "driver" if "pipelines.cli prepare" in line else None


class Alone(NamedTuple):
    """What the tokenizers library takes for the texts of all prompts."""

    seconds: float
    cpu_seconds: float
    tokens: int


def tokenizer_alone(prompts: Path) -> Alone:
    """Tokenise the texts of all prompts, and see that they give the same ids."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(cache_folder() / QUICKSTART_TARGET / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    seconds, cpu_seconds, tokens = 0.0, 0.0, 0
    for path in sorted(prompts.glob("[!_]*/*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(_BATCH_ROWS, columns=["prompt_ids"]):
            ids = batch.column(0).to_pylist()
            texts = tokenizer.decode_batch(ids, skip_special_tokens=False)
            started, cpu_started = time.perf_counter(), time.process_time()
            found = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            seconds += time.perf_counter() - started
            cpu_seconds += time.process_time() - cpu_started
            tokens += sum(map(len, ids))
            assert [one.ids for one in found] == ids, f"{path} holds other ids than the text's"
    return Alone(seconds, cpu_seconds, tokens)


if __name__ == "__main__":
    raise SystemExit(harness.main("prepare", BARS, measure))
