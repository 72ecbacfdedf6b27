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

from pipelines import artefact_proofs, row_proofs
from pipelines.errors import BadRecipe
from pipelines.proof import Breaks, Broken, Check, Evidence, NotThere, read_stages
from pipelines.recipe import fingerprint, load_recipe
from pipelines.store import RunFolder, sha256_of, stage_files

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


# --- the folder


def _recipe(evidence: Evidence) -> str:
    """The recipe is readable, and is the one that every finished stage was made with."""
    if not evidence.run.recipe.exists():
        if evidence.stages:
            raise Broken("recipe.yaml is missing, though stages are recorded as done")
        raise NotThere("not there yet: no stage was started")
    try:
        recipe = load_recipe(evidence.run.recipe)
    except BadRecipe as error:
        raise Broken(error.seen) from error
    for stage, entry in evidence.stages.items():
        if entry["fingerprint"] != fingerprint(recipe, stage):
            raise Broken(f"{stage} was made with another recipe than recipe.yaml")
    return f"{recipe.name}, {len(evidence.stages)} stages made with it"


def _manifest_files(evidence: Evidence) -> str:
    """Every listed file is there, with its checksum."""
    stages = read_stages(evidence.run)
    if not stages:
        raise NotThere("not there yet: no stage is recorded as done")
    breaks, count = Breaks(), 0
    for entry in stages.values():
        for name, promised in entry["files"].items():
            count += 1
            path = evidence.run.locate(name)
            if not path.is_file():
                breaks.add(name, "it is listed, and is missing")
            elif path.stat().st_size != promised["bytes"]:
                breaks.add(name, f"{path.stat().st_size} bytes, {promised['bytes']} were listed")
            elif sha256_of(path) != promised["sha256"]:
                breaks.add(name, "its sha256 is not the one listed")
    breaks.raise_if_any()
    return f"{count:,} files"


def _manifest_complete(evidence: Evidence) -> str:
    """No file lies among the committed ones that no stage has listed."""
    stages = read_stages(evidence.run)
    if not stages:
        raise NotThere("not there yet: no stage is recorded as done")
    breaks, count = Breaks(), 0
    for stage, entry in stages.items():
        for path in stage_files(evidence.run, stage):
            count += 1
            name = evidence.run.name_of(path)
            if name not in entry["files"]:
                breaks.add(name, f"it lies among the files of {stage}, which did not list it")
    breaks.raise_if_any()
    return f"{count:,} files"


# --- rows


def _response_checks(evidence: Evidence) -> Iterable[Check]:
    """One walk over all responses answers several checks."""
    started = time.monotonic()

    def ends(outcome: Any, detail: Callable[[str], str]) -> list[Check]:
        seconds = round((time.monotonic() - started) / len(row_proofs.RESPONSE_CHECKS), 3)
        return [Check(name, outcome, detail(name), seconds) for name in row_proofs.RESPONSE_CHECKS]

    try:
        breaks = row_proofs.response_rows(evidence)
    except NotThere as reason:
        said = str(reason)
        return ends("skipped", lambda _: said)
    except (Broken, *_MALFORMED) as error:
        said = str(error) if isinstance(error, Broken) else f"not as promised: {error!r}"
        return ends("failed", lambda _: said)
    if not evidence.rows_walked:
        return ends("skipped", lambda _: "not there yet: no committed responses")
    checks = ends("passed", lambda name: row_proofs.RESPONSE_CHECKS[name])
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
    "recipe": _recipe,
    "manifest: files": _manifest_files,
    "manifest: complete": _manifest_complete,
    "schemas": row_proofs.schemas,
    "prompts: conservation": row_proofs.prompts_conserved,
    "prompts: unique": row_proofs.prompt_ids_are_unique,
    "prompts: rendering": _rendering,
    "prompts: held out": row_proofs.evaluation_is_disjoint,
    "responses: conservation": row_proofs.conservation,
}
_AFTER: dict[str, Callable[[Evidence], str]] = {
    "responses: decoding": _decoding,
    "features: index": artefact_proofs.feature_index,
    "features: rows": artefact_proofs.feature_rows,
    "features: states": artefact_proofs.feature_states,
    "draft vocabulary": artefact_proofs.draft_vocabulary,
    "draft vocabulary: counts": artefact_proofs.draft_vocabulary_counts,
    "training: weights": artefact_proofs.training_weights,
    "export: weights": artefact_proofs.export_complete,
    "export: vocabulary": artefact_proofs.export_vocabulary,
    "export: embedding": artefact_proofs.export_embedding,
    "evaluation": artefact_proofs.evaluation_consistent,
}
