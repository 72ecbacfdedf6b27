"""Proves every promise of a run from its files alone, and names the first place that breaks one.

Changes nothing. What is not made yet is said to be not there, and is no failure.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines import (
    artefact_proofs,
    draft_proofs,
    evaluation_proofs,
    row_proofs,
    run_proofs,
)
from pipelines.proof import Breaks, Broken, Check, Evidence, NotThere
from pipelines.response_proofs import RESPONSE_CHECKS, judging, response_rows
from pipelines.store import RunFolder

# What a file can hold where a promise said otherwise: a key that is missing, another type.
_MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError)


@dataclass(frozen=True)
class VerifyReport:
    """Every check, in order."""

    run_folder: str
    checks: tuple[Check, ...]

    @property
    def is_sound(self) -> bool:
        """No check failed."""
        return all(one.outcome != "failed" for one in self.checks)

    def to_json(self) -> dict[str, Any]:
        """The same, as data."""
        return {"is_sound": self.is_sound, **asdict(self)}


def verify(run: RunFolder) -> VerifyReport:
    """Run every check over the folder. Memory: ids and digests of all rows, bodies by batch."""
    evidence = Evidence(run)
    checks = [_check(name, proof, evidence) for name, proof in _BEFORE.items()]
    checks += _response_checks(evidence)
    checks += [_check(name, proof, evidence) for name, proof in _AFTER.items()]
    return VerifyReport(str(run.root), tuple(checks))


def render(report: VerifyReport, console: Console) -> None:
    """Print one line for each check; failures again at the end, with what to do."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", no_wrap=True)
    table.add_column("detail", overflow="fold")
    marks = {"passed": "ok", "failed": "[bold red]FAILED[/]", "skipped": "[dim]-[/]"}
    for one in report.checks:
        table.add_row(marks[one.outcome], one.name, escape(one.detail))
    console.print(table)
    failed = [one for one in report.checks if one.outcome == "failed"]
    passed = sum(one.outcome == "passed" for one in report.checks)
    skipped = len(report.checks) - passed - len(failed)
    console.print()
    console.print(
        f"{passed} promises hold, {len(failed)} are broken, {skipped} could not be looked at"
    )
    for one in failed:
        console.print(f"[bold red]FAILED[/] {one.name}: {escape(one.detail)}", highlight=False)
    if failed:
        console.print(
            "Files of a finished stage never change by themselves: restore the named file, or make "
            "the stage again with `eyas run RECIPE --from STAGE`."
        )


# --- rows


def _response_checks(evidence: Evidence) -> Iterable[Check]:
    """One walk over all responses answers several checks."""
    started = time.monotonic()

    def ends(outcome: Any, detail: Callable[[str], str]) -> list[Check]:
        seconds = round((time.monotonic() - started) / len(RESPONSE_CHECKS), 3)
        return [Check(name, outcome, detail(name), seconds) for name in RESPONSE_CHECKS]

    try:
        breaks = response_rows(evidence)
    except NotThere as reason:
        said = str(reason)
        return ends("skipped", lambda _: said)
    except (Broken, *_MALFORMED) as error:
        said = str(error) if isinstance(error, Broken) else f"not as promised: {error!r}"
        return ends("failed", lambda _: said)
    if not evidence.rows_walked:
        return ends("skipped", lambda _: "not there yet: no committed responses")
    checks = ends("passed", lambda name: RESPONSE_CHECKS[name])
    return [_closed(check, breaks[check.name]) for check in checks]


def _closed(check: Check, breaks: Breaks) -> Check:
    try:
        breaks.raise_if_any()
    except Broken as broken:
        return Check(check.name, "failed", str(broken), check.seconds)
    return check


def _rendering(evidence: Evidence) -> str:
    """See `row_proofs.rendering`; the renderer is the one that prepare uses."""
    from pipelines.template import ChatTemplate, NotRendered
    from pipelines.turns import Turns, history_rule, render_turns

    profile = evidence.recipe.target.profile
    template = ChatTemplate(evidence.tokenizer, profile)
    every = evidence.recipe.prompts.turns == "every"
    rule = history_rule(template, profile) if every else None

    def again(row: Mapping[str, Any]) -> list[int]:
        said = json.loads(row["messages"]), json.loads(row["tools"])
        rendered = (
            template.render(*said)
            if rule is None or not row["continuations"]
            else render_turns(template, rule, *said)
        )
        if isinstance(rendered, NotRendered):
            raise Broken(f"{row['sample_id']}: not rendered again: {rendered.reason}")
        if isinstance(rendered, Turns) and (
            [rendered.history, rendered.continuations] != [row["history"], row["continuations"]]
        ):
            raise Broken(f"{row['sample_id']}: its later turns, rendered again, have other ids")
        return rendered.prompt_ids

    return row_proofs.rendering(evidence, again)


def _decoding(evidence: Evidence) -> str:
    """Segments, reasoning, content and tool calls, derived again from the ids."""
    from pipelines.response_row import Reader, decoder_of, derived_columns

    reader = Reader(evidence.recipe.target.profile, decoder_of(evidence.tokenizer))
    return row_proofs.decoding(evidence, lambda row: derived_columns(reader, row))


def _gates(evidence: Evidence) -> str:
    """The recipe's gates, asked once more, give a reply the status and the flags that it has."""
    from pipelines.response_row import RowMaker, decoder_of

    recipe = evidence.recipe
    decode = decoder_of(evidence.tokenizer)
    maker = RowMaker(recipe.target.profile, recipe.generate.gates, decode)
    return judging(evidence, maker)


# --- one check


def _check(name: str, proof: Callable[[Evidence], str], evidence: Evidence) -> Check:
    started = time.monotonic()

    def ended(outcome: Any, detail: str) -> Check:
        return Check(name, outcome, detail, round(time.monotonic() - started, 3))

    try:
        return ended("passed", proof(evidence))
    except NotThere as reason:
        return ended("skipped", str(reason))
    except Broken as broken:
        return ended("failed", str(broken))
    except (*_MALFORMED, OSError) as error:
        return ended("failed", f"not as promised: {error!r}"[:300])


_BEFORE: dict[str, Callable[[Evidence], str]] = {
    "recipe": run_proofs.recipe_is_the_runs,
    "manifest: files": run_proofs.manifest_files,
    "manifest: complete": run_proofs.manifest_complete,
    "events": run_proofs.events,
    "no code, no keys": run_proofs.nothing_dangerous,
    "schemas": row_proofs.schemas,
    "prompts: conservation": row_proofs.prompts_conserved,
    "prompts: unique": row_proofs.prompt_ids_are_unique,
    "prompts: rendering": _rendering,
    "prompts: held out": row_proofs.evaluation_is_disjoint,
    "responses: conservation": row_proofs.conservation,
}
_AFTER: dict[str, Callable[[Evidence], str]] = {
    "responses: decoding": _decoding,
    "responses: gates": _gates,
    "features: index": artefact_proofs.feature_index,
    "features: rows": artefact_proofs.feature_rows,
    "features: states": artefact_proofs.feature_states,
    "features: target": artefact_proofs.feature_targets,
    "draft vocabulary": artefact_proofs.draft_vocabulary,
    "draft vocabulary: counts": artefact_proofs.draft_vocabulary_counts,
    "training: weights": draft_proofs.training_weights,
    "training: checkpoints": draft_proofs.training_checkpoints,
    "training: metrics": draft_proofs.training_metrics,
    "export: weights": draft_proofs.export_complete,
    "export: values": draft_proofs.export_values,
    "export: vocabulary": draft_proofs.export_vocabulary,
    "export: embedding": draft_proofs.export_embedding,
    "export: load-back": draft_proofs.export_loads_back,
    "evaluation": evaluation_proofs.evaluation_consistent,
}
