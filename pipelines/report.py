"""One self-contained page about a run. Every number on it is read from the run's own artefacts."""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from jinja2 import Environment, StrictUndefined

from pipelines.charts import Bar, Line, bar_chart, histogram, line_chart
from pipelines.errors import BadRecipe
from pipelines.page import TEMPLATE
from pipelines.recipe import PromptSet, Recipe, load_recipe
from pipelines.stages import STAGES
from pipelines.storage import Location, listed, readable
from pipelines.store import RunFolder, read_manifest, write_atomically
from pipelines.telemetry import duration

_SAMPLES = 20
_MAX_TEXT = 6000  # characters of one part of a sample
_DRAFTS = {"trained": "trained draft", "untrained": "untrained draft", "ngram": "n-gram look-up"}
_VERSIONED = ("eyas", "torch", "transformers", "ray", "deepspeed", "pyarrow")


def report(run: RunFolder) -> Path:
    """Write `report.html` and return its path. What is not made yet is said to be not there.

    Raises `BadRecipe` where the folder holds no run.
    """
    if not run.recipe.exists():
        raise BadRecipe(
            f"{run.root} holds no recipe.yaml",
            expected="the folder of a run",
            change="start one with `eyas run RECIPE`",
        )
    recipe = load_recipe(run.recipe)
    stages = read_manifest(run)["stages"]
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    html = page.from_string(TEMPLATE).render(
        name=recipe.name,
        lead=_lead(recipe, stages),
        big=_big(run, stages),
        funnel=_funnel(recipe, run, stages),
        **_sets(recipe, run, stages),
        training=_training(run, stages),
        acceptance=_acceptance(run, stages),
        samples=_samples(recipe, run),
        stages=[_stage(name, stages[name]) for name in STAGES if name in stages],
        facts=_facts(run, recipe, stages),
        checksums=[
            (name, file["sha256"])
            for entry in stages.values()
            for name, file in entry["files"].items()
        ],
        recipe=run.recipe.read_text(),
    )
    write_atomically(run.report, html.encode())
    return run.report


# --- header


def _lead(recipe: Recipe, stages: Mapping[str, Any]) -> str:
    target = Path(recipe.target.path).name
    shape = recipe.draft
    done = [stage for stage in STAGES if stage in stages]
    state = "all stages done" if len(done) == len(STAGES) else f"done: {', '.join(done) or 'none'}"
    return (
        f"An EAGLE-3 draft for {target}: hidden size {shape.hidden_size}, "
        f"{shape.draft_vocab_size:,} tokens of draft vocabulary; {state}."
    )


def _big(run: RunFolder, stages: Mapping[str, Any]) -> list[tuple[str, str]]:
    big = []
    if "evaluate" in stages:
        groups = _read_json(run.evaluation)["acceptance"]
        for kind in ("trained", "untrained"):
            overall = _overall(groups[kind])
            big.append((f"acceptance length, {_DRAFTS[kind]}", _two(overall["acceptance_length"])))
    if "generate" in stages:
        sets = stages["generate"]["counts"]["sets"].values()
        big.append(("answers that are ok", f"{sum(one['ok'] for one in sets):,}"))
        big.append(("output tokens in them", f"{sum(one['output_tokens'] for one in sets):,}"))
    if "train" in stages:
        big.append(("optimiser steps", f"{_read_json(run.training / 'summary.json')['steps']:,}"))
    return big


# --- funnel and sets


def _funnel(recipe: Recipe, run: RunFolder, stages: Mapping[str, Any]) -> list[dict[str, Any]]:
    names = [one.name for one in recipe.prompts.train]
    steps: list[tuple[str, int, str]] = []
    if "prepare" in stages:
        sets = [stages["prepare"]["counts"]["sets"][name] for name in names]
        steps.append(("source rows", sum(one["rows"] for one in sets), ""))
        lost = sum((Counter(one["rejected"]) for one in sets), Counter[str]())
        steps.append(("prompts", sum(one["prompts"] for one in sets), _why("rejected", lost)))
    if "generate" in stages:
        sets = [stages["generate"]["counts"]["sets"][name] for name in names]
        lost = Counter[str]()
        for one in sets:
            for kind in ("rejected", "failed"):
                lost.update({f"{kind} {reason}": n for reason, n in one[kind].items()})
        steps.append(("answers ok", sum(one["ok"] for one in sets), _why("set aside", lost)))
    if "capture" in stages:
        counts = stages["capture"]["counts"]
        lost = Counter(counts["failed"]) if "failed" in counts else Counter[str]()
        steps.append(("hidden states", counts["samples"], _why("set aside", lost)))
    if "train" in stages:
        summary = _read_json(run.training / "summary.json")
        cut = f"{summary['cut_samples']:,} were cut to the longest length allowed"
        steps.append(("trained on", summary["samples"], cut if summary["cut_samples"] else ""))
        steps.append(("held out", summary["heldout_samples"], "chosen by a hash of the sample id"))
    most = max((count for _, count, _ in steps), default=0)
    return [
        {
            "name": name,
            "said": f"{count:,}",
            "percent": round(100 * count / most, 2) if most else 0,
            "why": why,
        }
        for name, count, why in steps
    ]


def _why(word: str, lost: Counter[str]) -> str:
    if not lost:
        return ""
    return f"{word}: " + ", ".join(f"{reason} {count:,}" for reason, count in lost.most_common())


def _sets(recipe: Recipe, run: RunFolder, stages: Mapping[str, Any]) -> dict[str, Any]:
    if "prepare" not in stages:
        return {"sets": [], "lengths": []}
    rows, charts = [], []
    given = [(one, "training") for one in recipe.prompts.train]
    given += [(one, "evaluation") for one in recipe.prompts.evaluation]
    for one, use in given:
        prompts = _prompt_lengths(run, one.name)
        answers = _answer_lengths(run, one.name)
        rows.append(_set_row(one, use, stages, prompts, answers))
        for title, lengths, colour in (("prompts", prompts, 1), ("answers", answers, 0)):
            if lengths and use == "training":
                caption = f"{one.name}: {title}"
                charts.append(
                    {"title": caption, "chart": histogram(lengths, title=caption, at=colour)}
                )
    return {"sets": rows, "lengths": charts}


def _set_row(
    one: PromptSet,
    use: str,
    stages: Mapping[str, Any],
    prompts: Sequence[int],
    answers: Sequence[int],
) -> dict[str, str]:
    is_answered = use == "training" and "generate" in stages
    counts = stages["generate"]["counts"]["sets"][one.name] if is_answered else None
    return {
        "name": one.name,
        "domain": one.domain,
        "use": use,
        "prompts": f"{len(prompts):,}",
        "ok": f"{counts['ok']:,}" if counts else "-",
        "rejected": f"{sum(counts['rejected'].values()):,}" if counts else "-",
        "failed": f"{sum(counts['failed'].values()):,}" if counts else "-",
        "prompt_median": _median(prompts),
        "answer_median": _median(answers),
    }


def _prompt_lengths(run: RunFolder, name: str) -> list[int]:
    lengths: list[int] = []
    for path in sorted((run.prompts / name).glob("*.parquet")):
        for batch in pq.ParquetFile(readable(path)).iter_batches(columns=["prompt_ids"]):
            lengths += pc.list_value_length(batch["prompt_ids"]).to_pylist()
    return lengths


def _answer_lengths(run: RunFolder, name: str) -> list[int]:
    lengths: list[int] = []
    for path in listed(run.responses / name, "*.parquet"):
        for batch in pq.ParquetFile(readable(path)).iter_batches(columns=["usage"]):
            lengths += pc.struct_field(batch["usage"], "completion_tokens").to_pylist()
    return lengths


def _median(values: Sequence[int]) -> str:
    return f"{sorted(values)[len(values) // 2]:,}" if values else "-"


# --- training


def _training(run: RunFolder, stages: Mapping[str, Any]) -> dict[str, Any] | None:
    metrics = run.training / "metrics.jsonl"
    if not metrics.exists():
        return None
    lines = _whole_lines(metrics)
    train = [one for one in lines if one["kind"] == "train"]
    heldout = [one for one in lines if one["kind"] == "heldout"]
    if not train:
        return None
    steps = range(len(train[-1]["acceptance_rate"]))
    rates = [
        Line(f"step {k}", _points(train, lambda one, k=k: one["acceptance_rate"][k])) for k in steps
    ]
    lengths = [
        Line("training rows", _points(train, lambda one: one["acceptance_length"])),
        Line("held-out rows", _points(heldout, lambda one: one["overall"]["acceptance_length"])),
    ]
    loss = [Line("loss", _points(train, lambda one: one["loss"]))]
    charts = [
        ("Loss", loss, None),
        ("Simulated acceptance length", lengths, 1.0),
        ("Acceptance rate at step k, training rows", rates, 0.0),
    ]
    return {
        "said": _training_said(run, stages, train[-1]),
        "charts": [
            {
                "title": title,
                "chart": line_chart(drawn, title=title, x="optimiser step", y=title, floor=floor),
                "names": [line.name for line in drawn],
            }
            for title, drawn, floor in charts
        ],
        "steps": list(steps),
        "heldout": _heldout_rows(heldout[-1]) if heldout else [],
    }


def _points(lines: Sequence[Mapping[str, Any]], pick: Any) -> tuple[tuple[float, float], ...]:
    pairs = ((one["step"], pick(one)) for one in lines)
    return tuple((float(step), float(value)) for step, value in pairs if value is not None)


def _training_said(run: RunFolder, stages: Mapping[str, Any], last: Mapping[str, Any]) -> str:
    if "train" not in stages:
        return f"At step {last['step']:,} of {last['total_steps']:,}."
    summary = _read_json(run.training / "summary.json")
    averaged = "; the exported weights are averages over steps" if summary["averaged"] else ""
    return (
        f"{summary['steps']:,} steps, {summary['epochs']} epochs over {summary['samples']:,} "
        f"samples, {summary['tokens_trained']:,} tokens in all, "
        f"{duration(summary['seconds'])}. The draft vocabulary covers "
        f"{summary['draft_vocab_coverage']:.2%} of what the target said{averaged}."
    )


def _heldout_rows(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    groups = {"all": line["overall"], **line["domains"]}
    return [
        {
            "name": name,
            "length": _two(one["acceptance_length"]),
            "rates": ["-" if rate is None else f"{rate:.1%}" for rate in one["acceptance_rate"]],
        }
        for name, one in groups.items()
    ]


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """Every line that ends; a run that is on its way may be writing the last one."""
    text = path.read_bytes()
    return [json.loads(line) for line in text[: text.rfind(b"\n") + 1].splitlines() if line]


# --- acceptance


def _acceptance(run: RunFolder, stages: Mapping[str, Any]) -> dict[str, Any] | None:
    if "evaluate" not in stages:
        return None
    page = _read_json(run.evaluation)
    groups = page["acceptance"]
    method = page["method"]
    domains = [name for name in groups["trained"] if name not in ("overall", "all_domains")]
    has_overall = bool(groups["trained"]["overall"]["prompts"])
    names = [*(["overall"] if has_overall else []), "all_domains", *domains]
    shown = {name: name.replace("_", " ") for name in names}
    bars = [
        (shown[name], [_bar(_DRAFTS[kind], groups[kind][name]) for kind in _DRAFTS])
        for name in names
    ]
    ties = len(page["numeric_ties"])
    tied = f" ({ties} numeric ties)" if ties else ""
    lossless = "unchanged by speculation" if page["lossless"] else "CHANGED by speculation"
    return {
        "said": (
            f"Tokens per target verification on {page['prompts']:,} held-out prompts; 1.00 is no "
            f"help. {page['tokens_compared']:,} output tokens were compared and are {lossless}"
            f"{tied}."
        ),
        "chart": bar_chart(bars, title="Acceptance length by domain", floor=1.0, unknown="unknown"),
        "names": list(_DRAFTS.values()),
        "rows": [
            {
                "name": shown[name],
                "prompts": f"{groups['trained'][name]['prompts']:,}",
                "cells": [_cell(groups[kind][name]) for kind in _DRAFTS],
            }
            for name in names
        ],
        "method": (
            f"{method['decoding']} decoding in {method['dtype']}, {method['speculation']} "
            f"speculation of {method['draft_steps']} tokens, answers of at most "
            f"{method['max_new_tokens']} tokens. Acceptance length: "
            f"{method['acceptance_length']}. Interval: {method['interval']}. N-gram: "
            f"{method['ngram']}. Overall is {', '.join(method['overall'])}."
        ),
    }


def _overall(groups: Mapping[str, Any]) -> Mapping[str, Any]:
    group: Mapping[str, Any] = groups["overall" if groups["overall"]["prompts"] else "all_domains"]
    return group


def _bar(name: str, group: Mapping[str, Any]) -> Bar:
    interval = group["interval"]
    return Bar(name, group["acceptance_length"], None if interval is None else tuple(interval))


def _cell(group: Mapping[str, Any]) -> str:
    text = _two(group["acceptance_length"])
    if group["interval"] is None:
        return text
    return f"{text} ({group['interval'][0]:.2f} to {group['interval'][1]:.2f})"


def _two(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


# --- samples


def _samples(recipe: Recipe, run: RunFolder) -> list[dict[str, Any]]:
    """About twenty rows: most of them ok, some kept aside, the same ones each time."""
    names = [one.name for one in recipe.prompts.train]
    each = max(1, _SAMPLES // max(1, len(names)))
    samples = []
    for name in names:
        aside = _some_rows(run.rejected_responses / name, max(1, each // 5))
        samples += _some_rows(run.responses / name, each - len(aside)) + aside
    return [_sample(row) for row in samples]


def _some_rows(folder: Location, count: int) -> list[dict[str, Any]]:
    files = listed(folder, "*.parquet")
    sizes = [pq.read_metadata(readable(path)).num_rows for path in files]
    chosen = sorted(random.Random(0).sample(range(sum(sizes)), min(count, sum(sizes))))
    rows: list[dict[str, Any]] = []
    start = 0
    columns = ["sample_id", "messages", "reasoning", "content", "finish_reason", "usage"]
    columns += ["status", "detail"]
    for path, size in zip(files, sizes, strict=True):
        wanted = [at - start for at in chosen if start <= at < start + size]
        start += size
        for batch in pq.ParquetFile(readable(path)).iter_batches(batch_size=256, columns=columns):
            here = [at for at in wanted if 0 <= at < batch.num_rows]
            rows += batch.take(pa.array(here, pa.int64())).to_pylist()
            wanted = [at - batch.num_rows for at in wanted if at >= batch.num_rows]
            if not wanted:
                break
    return rows


def _sample(row: Mapping[str, Any]) -> dict[str, Any]:
    usage = row["usage"]
    said = (
        f"{usage['prompt_tokens']:,} prompt tokens, {usage['completion_tokens']:,} out, "
        f"{usage['reasoning_tokens']:,} of them reasoning, ended by {row['finish_reason']}"
        if row["finish_reason"]
        else "no reply"
    )
    return {
        "sample_id": row["sample_id"],
        "status": row["status"],
        "detail": row["detail"],
        "said": said,
        "messages": [
            {"role": one["role"], "text": _cut(one["content"])}
            for one in json.loads(row["messages"])
        ],
        "reasoning": _cut(row["reasoning"]),
        "content": _cut(row["content"]),
    }


def _cut(text: Any) -> str:
    whole = text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
    if len(whole) <= _MAX_TEXT:
        return whole
    return f"{whole[:_MAX_TEXT]}\n[... {len(whole) - _MAX_TEXT:,} more characters]"


# --- provenance


def _stage(name: str, entry: Mapping[str, Any]) -> dict[str, str]:
    counts = entry["counts"]
    return {
        "name": name,
        "time": duration(entry["seconds"]),
        "files": f"{len(entry['files']):,}",
        "bytes": f"{sum(one['bytes'] for one in entry['files'].values()):,}",
        "fingerprint": entry["fingerprint"],
        "headline": str(counts["headline"]) if "headline" in counts else "",
    }


def _facts(run: RunFolder, recipe: Recipe, stages: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = [("target", recipe.target.path)]
    if "evaluate" in stages:
        facts.append(("draft measured, sha256", _read_json(run.evaluation)["draft_sha256"]))
    for event in _whole_lines(run.events) if run.events.exists() else []:
        if event["event"] == "server_checked":
            facts.append(
                ("server", f"version {event['version']}, weights {event['weight_version']}")
            )
    facts = list(dict.fromkeys(facts))
    installed = ", ".join(f"{name} {_version(name)}" for name in _VERSIONED)
    return [*facts, ("this page was written with", installed)]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "not installed"


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_bytes())
    return value
