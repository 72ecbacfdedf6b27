"""What a run did, and what to do next: the table at its end."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from pipelines.recipe import Recipe
from pipelines.run import StageResult
from pipelines.store import STAGES, RunFolder
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
