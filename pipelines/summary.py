"""What a run did, and what to do next: the table at its end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pipelines.recipe import Recipe
from pipelines.run import StageResult
from pipelines.stages import STAGES
from pipelines.store import RunFolder
from pipelines.telemetry import duration


@dataclass(frozen=True)
class Summary:
    """A run as it stands."""

    run_folder: str
    is_complete: bool
    is_new: bool  # something was done now
    stages: tuple[StageResult, ...]
    evaluation: Mapping[str, Any] | None
    draft: str | None
    report: str | None

    def to_json(self) -> dict[str, Any]:
        """The same, as data."""
        return asdict(self)


def summarise(
    recipe: Recipe, run: RunFolder, done: Sequence[StageResult], *, is_new: bool
) -> Summary:
    """Gather the run's state from its folder."""
    stages = {result.stage for result in done}
    return Summary(
        run_folder=recipe.run_folder,
        is_complete=stages == set(STAGES),
        is_new=is_new,
        stages=tuple(done),
        evaluation=json.loads(run.evaluation.read_bytes()) if "evaluate" in stages else None,
        draft=str(run.draft) if "export" in stages else None,
        report=str(run.report) if run.report.exists() else None,
    )


def render(summary: Summary, console: Console) -> None:
    """Print the tables of a run's end."""
    console.print(_stage_table(summary))
    if [one.stage for one in summary.stages] == ["prepare"]:
        _render_prompts(summary.stages[0].counts["sets"], console)
    if summary.evaluation is not None:
        console.print(_acceptance_table(summary.evaluation))
    if summary.draft:
        console.print(f"draft   {summary.draft}", soft_wrap=True, highlight=False)
    if summary.report:
        console.print(f"page    {summary.report}", soft_wrap=True, highlight=False)
    if not summary.is_complete:
        missing = [s for s in STAGES if s not in {result.stage for result in summary.stages}]
        console.print(f"next    {', '.join(missing)}: the same `eyas run` goes on from here")
    elif not summary.is_new:
        console.print("everything was done before; nothing was asked or trained again")
    else:
        console.print(f"next    eyas verify {summary.run_folder}", soft_wrap=True, highlight=False)


def _stage_table(summary: Summary) -> Table:
    table = Table(title="What happened", title_justify="left")
    table.add_column("stage")
    table.add_column("result")
    table.add_column("time", justify="right")
    for result in summary.stages:
        table.add_row(result.stage, headline(result), duration(result.seconds))
    return table


def _render_prompts(sets: Mapping[str, Mapping[str, Any]], console: Console) -> None:
    """What each set's prompts are like, and why rows are none."""
    table = Table(
        title="Prompts by set, with the median, 90th percentile and most of their tokens",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("set", "rows", "prompts", "p50", "p90", "max", "lengths", "language"):
        on_the_left = name in ("set", "lengths", "language")
        table.add_column(name, justify="left" if on_the_left else "right", no_wrap=True)
    for name, one in sets.items():
        language, share = next(iter(one["languages"].items()), ("", 0.0))
        table.add_row(
            name,
            *(f"{one[key]:,}" for key in ("rows", "prompts")),
            *(f"{one[key]:,}" for key in ("tokens_p50", "tokens_p90", "tokens_max")),
            one["lengths"],
            f"{language} {share:.0%}" if language else "",
        )
    console.print(table)
    for name, one in sets.items():
        for what in ("rejected", "repaired"):
            if one[what]:
                ranked = sorted(one[what].items(), key=lambda item: (-item[1], item[0]))
                told = ", ".join(f"{reason} {count:,}" for reason, count in ranked)
                console.print(f"{name}: {what} {told}", highlight=False, soft_wrap=True)


def headline(result: StageResult) -> str:
    """One stage's counts in one line."""
    text = result.counts["headline"]
    assert isinstance(text, str)
    return text


def _acceptance_table(evaluation: Mapping[str, Any]) -> Table:
    """Acceptance length by domain, the trained draft beside what it has to beat."""
    table = Table(
        title="Acceptance length: tokens per target verification, greedy, held-out prompts",
        title_justify="left",
    )
    table.add_column("domain")
    table.add_column("prompts", justify="right")
    table.add_column("draft", justify="right", style="bold")
    table.add_column("95% interval", justify="right")
    table.add_column("untrained", justify="right")
    table.add_column("n-gram", justify="right")
    acceptance = evaluation["acceptance"]
    overall = " + ".join(evaluation["method"]["overall"])
    names = {"overall": overall, "all_domains": "all domains"}
    for domain, trained in acceptance["trained"].items():
        table.add_row(
            names.get(domain, domain),
            str(trained["prompts"]),
            _length(trained["acceptance_length"]),
            "-".join(_length(end) for end in trained["interval"] or ()),
            _length(acceptance["untrained"][domain]["acceptance_length"]),
            _length(acceptance["ngram"][domain]["acceptance_length"]),
            end_section=domain == "all_domains",
        )
    return table


def _length(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}"
