"""The page's counts and lengths: what became of every source row, and how long things are."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.charts import histogram
from pipelines.report_look import Look, PageSet, ranked, read_json
from pipelines.status_rows import prompts_wanted
from pipelines.storage import readable

_EXAMPLES_PER_REASON = 3
_EXAMPLES = 30
_COLOURS = {"prompt": 6, "reasoning": 2, "answer": 0}  # as the samples have them


@dataclass(frozen=True)
class Step:
    """One step of the funnel: what is left, and what was lost since the one before."""

    name: str
    count: int
    lost: Mapping[str, int]
    note: str = ""


def funnel(look: Look, rows: Mapping[str, pa.Table]) -> list[dict[str, Any]]:
    """The steps that are there, with every loss. A loss that nothing explains is one as well."""
    steps: list[Step] = []
    for make in (_prompt_steps, _response_steps, _capture_steps, _training_steps):
        steps += look.tried("funnel", lambda make=make: make(look, rows)) or []  # type: ignore[misc]
    most = max((one.count for one in steps), default=0) or 1
    shown, before = [], None
    for one in steps:
        unexplained = 0 if before is None else before - one.count - sum(one.lost.values())
        shown.append(
            {
                "name": one.name,
                "said": f"{one.count:,}",
                "percent": round(100 * one.count / most, 2),
                "lost": ranked(one.lost),
                "unexplained": f"{unexplained:,}" if unexplained > 0 else "",
                "note": one.note,
            }
        )
        before = one.count
    return shown


def _prompt_steps(look: Look, _rows: Mapping[str, pa.Table]) -> list[Step]:
    if "prepare" not in look.stages:
        return []
    counts = look.stages["prepare"]["counts"]["sets"]
    sets = [counts[one.name] for one in look.sets_for("training")]
    lost = _added([{f"rejected {why}": n for why, n in one["rejected"].items()} for one in sets])
    prompts = sum(one["prompts"] for one in sets)
    return [
        Step("source rows", sum(one["rows"] for one in sets), {}),
        Step("prompts", prompts, lost),
    ]


def _response_steps(look: Look, rows: Mapping[str, pa.Table]) -> list[Step]:
    """From the rows themselves: a run that was killed has them as well."""
    sets = look.sets_for("training")
    statuses = {one.name: _statuses(rows[one.name]) for one in sets if one.name in rows}
    if not any(statuses.values()):
        return []
    if "generate" in look.stages:
        promised = look.stages["generate"]["counts"]["sets"]
        for name, seen in statuses.items():
            if promised[name]["ok"] != seen["ok"]:
                look.fault(
                    "rows",
                    f"{name}: {seen['ok']:,} ok rows can be read, the manifest promises "
                    f"{promised[name]['ok']:,}",
                )
    lost = _added([{status: n for status, n in one.items() if status != "ok"}
                   for one in statuses.values()])  # fmt: skip
    ok = sum(one["ok"] for one in statuses.values())
    wanted = look.tried("prompts", lambda: sum(_wanted(look, one) for one in sets))
    if wanted is None:
        return [Step("responses ok", ok, lost)]
    lost["not answered yet"] = max(0, wanted - ok - sum(lost.values()))
    return [
        Step("responses wanted", wanted, {}, "one for each turn and sample of a prompt"),
        Step("responses ok", ok, lost),
    ]


def _capture_steps(look: Look, _rows: Mapping[str, pa.Table]) -> list[Step]:
    if "capture" not in look.stages:
        return []
    counts = look.stages["capture"]["counts"]
    lost = _added([{f"failed {why}": n for why, n in counts.get("failed", {}).items()}])
    return [Step("hidden states", counts["samples"], lost)]


def _training_steps(look: Look, _rows: Mapping[str, pa.Table]) -> list[Step]:
    if "train" not in look.stages:
        return []
    summary = read_json(look.run.training / "summary.json")
    cut = f"{summary['cut_samples']:,} of them were cut to the longest length allowed; "
    note = f"{summary['rows']:,} tokens of theirs may teach"
    note = (cut if summary["cut_samples"] else "") + note
    return [
        Step("training rows", summary["samples"], {"held out": summary["heldout_samples"]}, note)
    ]


def _wanted(look: Look, one: PageSet) -> int:
    samples = look.recipe.generate.samples_per_prompt if look.recipe else 1
    return samples * sum(prompts_wanted(path) for path in _prompt_files(look, one.name))


def set_table(look: Look, rows: Mapping[str, pa.Table]) -> list[dict[str, str]]:
    """A line for each set; what is not known yet is a dash."""
    prepared = look.stages["prepare"]["counts"]["sets"] if "prepare" in look.stages else {}
    lines = []
    for one in look.sets:
        counts = prepared.get(one.name)
        line = {"name": one.name, "domain": one.domain, "use": one.use}
        line |= {key: f"{counts[key]:,}" if counts else "-" for key in ("rows", "prompts")}
        seen = _statuses(rows[one.name]) if one.name in rows else Counter[str]()
        line["ok"] = f"{seen['ok']:,}" if seen else "-"
        for kind in ("rejected", "failed"):
            total = sum(n for status, n in seen.items() if status.startswith(f"{kind}:"))
            line[kind] = f"{total:,}" if seen else "-"
        lines.append(line)
    return lines


def length_charts(look: Look, rows: Mapping[str, pa.Table]) -> list[dict[str, Any]]:
    """Histograms of each training set: prompts, and of ok rows reasoning and the rest of the
    output; then of all held-out sets, their prompts."""
    figures, heldout = [], []
    for one in look.sets:
        lengths = {"prompt": _prompt_lengths(look, one.name)}
        if one.use == "evaluation":
            heldout += _histograms(one.name, {one.name: lengths["prompt"]})
            continue
        if one.name in rows:
            ok = rows[one.name].filter(pc.equal(rows[one.name]["status"], "ok"))
            reasoning, output = (ok[key].to_numpy() for key in ("reasoning", "output"))
            lengths |= {"reasoning": reasoning[reasoning > 0], "answer": output - reasoning}
        if any(map(len, lengths.values())):
            said = "" if one.domain == one.name else one.domain
            charts = _histograms(one.name, lengths)
            figures.append({"name": one.name, "said": said, "charts": charts})
    if heldout:
        figures.append({"name": "held-out sets", "said": "prompts only", "charts": heldout})
    return figures


def _histograms(title: str, lengths: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "said": _length_words(values),
            "chart": histogram(
                values.tolist(), title=f"{title}: {name} tokens", at=_COLOURS.get(name, 6)
            ),
        }
        for name, values in lengths.items()
    ]


def rejected_examples(look: Look) -> list[dict[str, Any]]:
    """A few source rows that became no prompts, for each set and reason."""
    found: list[dict[str, Any]] = []
    for one in look.sets:
        path = look.run.prompts / "_rejected" / f"{one.name}.parquet"
        table = look.tried("rejected", lambda path=path: pq.read_table(path, partitioning=None)  # type: ignore[misc]
                           if path.exists() else None)  # fmt: skip
        taken = Counter[str]()
        for row in table.to_pylist() if table else []:
            taken[row["status"]] += 1
            if taken[row["status"]] <= _EXAMPLES_PER_REASON:
                found.append(row)
    return found[:_EXAMPLES]


def _prompt_files(look: Look, name: str) -> list[Any]:
    return sorted((look.run.prompts / name).glob("*.parquet"))


def _prompt_lengths(look: Look, name: str) -> Any:
    found = [
        look.tried("prompts", lambda path=path: _lengths_in(path))  # type: ignore[misc]
        for path in _prompt_files(look, name)
    ]
    return np.concatenate([np.zeros(0, np.int32), *(one for one in found if one is not None)])


def _lengths_in(path: Any) -> Any:
    batches = pq.ParquetFile(readable(path)).iter_batches(columns=["prompt_ids"])
    return np.concatenate(
        [
            np.zeros(0, np.int32),
            *(pc.list_value_length(b["prompt_ids"]).to_numpy() for b in batches),
        ]
    )


def _length_words(values: Any) -> str:
    if not len(values):
        return "none"
    middle, most = (int(np.quantile(values, q, method="lower")) for q in (0.5, 0.9))
    return f"median {middle:,}, 90% up to {most:,}"


def _statuses(rows: pa.Table) -> Counter[str]:
    counted = pc.value_counts(rows["status"]).to_pylist()
    return Counter({one["values"]: one["counts"] for one in counted})


def _added(parts: Sequence[Mapping[str, int]]) -> Counter[str]:
    total = Counter[str]()
    for one in parts:
        total.update(one)
    return total
