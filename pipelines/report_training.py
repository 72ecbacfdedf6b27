"""The page's figures of the draft: how training went, and what the evaluation measured."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelines.charts import Bar, Line, bar_chart, line_chart
from pipelines.report_look import Look, read_json, whole_lines
from pipelines.telemetry import duration

DRAFTS = {"trained": "trained draft", "untrained": "untrained draft", "ngram": "n-gram look-up"}


def training(look: Look) -> dict[str, Any] | None:
    """Curves from `metrics.jsonl`, of a training that is on its way too; None before a step."""
    metrics = look.run.training / "metrics.jsonl"
    if not metrics.exists():
        return None
    lines, bad = whole_lines(metrics)
    if bad:
        look.fault("training", f"{bad:,} lines of metrics.jsonl cannot be read")
    train = [one for one in lines if one.get("kind") == "train"]
    heldout = [one for one in lines if one.get("kind") == "heldout"]
    if not train:
        return None
    return {
        "said": look.tried("training", lambda: _said(look, train[-1])) or "",
        "charts": [_chart(*one) for one in _curves(train, heldout)],
        "steps": list(range(len(train[-1]["acceptance_rate"]))),
        "heldout": _heldout_rows(heldout[-1]) if heldout else [],
    }


_Curve = tuple[str, list[Line], float | None]


def _curves(
    train: Sequence[Mapping[str, Any]], heldout: Sequence[Mapping[str, Any]]
) -> list[_Curve]:
    steps = range(len(train[-1]["acceptance_rate"]))
    rates = [
        Line(f"step {k}", _points(train, lambda one, k=k: one["acceptance_rate"][k]))  # type: ignore[misc]
        for k in steps
    ]
    lengths = [
        Line("training rows", _points(train, lambda one: one["acceptance_length"])),
        Line("held-out rows", _points(heldout, lambda one: one["overall"]["acceptance_length"])),
    ]
    speed = [Line("tokens a second", _points(train, lambda one: one["tokens_per_second"]))]
    return [
        ("Loss", [Line("loss", _points(train, lambda one: one["loss"]))], None),
        ("Simulated acceptance length", lengths, 1.0),
        ("Acceptance rate at step k, training rows", rates, 0.0),
        ("Tokens a second", speed, 0.0),
    ]


def _chart(title: str, lines: Sequence[Line], floor: float | None) -> dict[str, Any]:
    chart = line_chart(lines, title=title, x="optimiser step", y=title, floor=floor)
    names = [line.name for line in lines] if len(lines) > 1 else []
    return {"title": title, "chart": chart, "names": names}


def _points(
    lines: Sequence[Mapping[str, Any]], pick: Callable[[Mapping[str, Any]], Any]
) -> tuple[tuple[float, float], ...]:
    pairs = ((one["step"], pick(one)) for one in lines)
    return tuple((float(step), float(value)) for step, value in pairs if value is not None)


def _said(look: Look, last: Mapping[str, Any]) -> str:
    if "train" not in look.stages:
        return f"At step {last['step']:,} of {last['total_steps']:,}."
    summary = read_json(look.run.training / "summary.json")
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
            "length": two(one["acceptance_length"]),
            "rates": [_percent(rate) for rate in one["acceptance_rate"]],
        }
        for name, one in groups.items()
    ]


def acceptance(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """Acceptance lengths by domain beside the baselines, and rates by drafted token."""
    groups, method = evaluation["acceptance"], evaluation["method"]
    domains = [name for name in groups["trained"] if name not in ("overall", "all_domains")]
    has_overall = bool(groups["trained"]["overall"]["prompts"])
    names = [*(["overall"] if has_overall else []), "all_domains", *domains]
    shown = {name: name.replace("_", " ") for name in names}
    bars = [
        (shown[name], [_bar(said, groups[kind][name]) for kind, said in DRAFTS.items()])
        for name in names
    ]
    return {
        "said": _acceptance_said(evaluation),
        "lossless": evaluation["lossless"] is True,
        "chart": bar_chart(bars, title="Acceptance length by domain", floor=1.0, unknown="unknown"),
        "rates": line_chart(
            [
                Line(said, _rate_points(overall(groups[kind])["acceptance_rates"]))
                for kind, said in DRAFTS.items()
            ],
            title="Acceptance rate at each drafted token",
            x="drafted token, counted from 0",
            y="acceptance rate",
            floor=0.0,
        ),
        "names": list(DRAFTS.values()),
        "steps": list(range(method["draft_steps"])),
        "rows": [
            {
                "name": shown[name],
                "prompts": f"{groups['trained'][name]['prompts']:,}",
                "cells": [_cell(groups[kind][name]) for kind in DRAFTS],
                "rates": [_percent(rate) for rate in groups["trained"][name]["acceptance_rates"]],
            }
            for name in names
        ],
        "method": (
            f"{method['decoding']} decoding in {method['dtype']}, {method['speculation']} "
            f"speculation of {method['draft_steps']} tokens, answers of at most "
            f"{method['max_new_tokens']} tokens. Acceptance length: "
            f"{method['acceptance_length']}. Interval: {method['interval']}. N-gram: "
            f"{method['ngram']}. Untrained: {method['untrained']}. Overall is "
            f"{', '.join(method['overall'])}."
        ),
    }


def _rate_points(rates: Sequence[float | None]) -> tuple[tuple[float, float], ...]:
    return tuple((float(at), rate) for at, rate in enumerate(rates) if rate is not None)


def _acceptance_said(evaluation: Mapping[str, Any]) -> str:
    ties = len(evaluation["numeric_ties"])
    tied = f" ({ties} numeric ties)" if ties else ""
    lossless = "unchanged by speculation" if evaluation["lossless"] else "CHANGED by speculation"
    return (
        f"Tokens per target verification on {evaluation['prompts']:,} held-out prompts; 1.00 is no "
        f"help. {evaluation['tokens_compared']:,} output tokens were compared and are "
        f"{lossless}{tied}."
    )


def overall(groups: Mapping[str, Any]) -> Mapping[str, Any]:
    """The group that sums up: chat, math and code, or where there are none all domains."""
    group: Mapping[str, Any] = groups["overall" if groups["overall"]["prompts"] else "all_domains"]
    return group


def _bar(name: str, group: Mapping[str, Any]) -> Bar:
    interval = group["interval"]
    return Bar(name, group["acceptance_length"], None if interval is None else tuple(interval))


def _cell(group: Mapping[str, Any]) -> str:
    text = two(group["acceptance_length"])
    if group["interval"] is None:
        return text
    return f"{text} ({group['interval'][0]:.2f} to {group['interval'][1]:.2f})"


def two(value: float | None) -> str:
    """A length with two digits, or that it is not known."""
    return "unknown" if value is None else f"{value:.2f}"


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"
