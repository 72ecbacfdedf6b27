"""One self-contained page about a run. Every number on it is read from the run's own artefacts."""

from pathlib import Path

from jinja2 import Environment, StrictUndefined

from pipelines import page
from pipelines.errors import BadRecipe
from pipelines.report_facts import checksums, header, provenance, recipe_text
from pipelines.report_look import Look, look_at, read_json, read_rows
from pipelines.report_samples import samples
from pipelines.report_sets import funnel, length_charts, rejected_examples, set_table
from pipelines.report_timeline import timeline
from pipelines.report_training import acceptance, training
from pipelines.store import RunFolder, write_atomically


def report(run: RunFolder) -> Path:
    """Write `report.html` and return its path.

    What is not made yet is said to be not there, and what cannot be read is said with the reason:
    a page is written of every run. Raises `BadRecipe` where the folder holds none.
    """
    if not run.recipe.exists():
        raise BadRecipe(
            f"{run.root} holds no recipe.yaml",
            expected="the folder of a run",
            change="start one with `eyas run RECIPE`",
        )
    # Half a surrogate pair, which JSON can hold, is no text that can be written.
    write_atomically(run.report, render(look_at(run)).encode(errors="replace"))
    return run.report


def render(look: Look) -> str:
    """The page as HTML."""
    names = [one.name for one in look.sets_for("training")]
    rows = {
        name: table
        for name in names
        if (table := look.tried("rows", lambda name=name: read_rows(look, name))) is not None  # type: ignore[misc]
    }
    evaluation = None
    if "evaluate" in look.stages:
        evaluation = look.tried("acceptance", lambda: read_json(look.run.evaluation))
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(page.TEMPLATE).render(
        style=page.STYLE,
        script=page.SCRIPT,
        script_hash=page.SCRIPT_HASH,
        **header(look, evaluation),
        funnel=look.tried("funnel", lambda: funnel(look, rows)),
        sets=look.tried("sets", lambda: set_table(look, rows)),
        rejected=look.tried("sets", lambda: rejected_examples(look)),
        lengths=look.tried("lengths", lambda: length_charts(look, rows)),
        timeline=look.tried("timeline", lambda: timeline(look, rows.values())),
        training=look.tried("training", lambda: training(look)),
        acceptance=look.tried("acceptance", lambda: acceptance(evaluation) if evaluation else None),
        samples=look.tried("samples", lambda: samples(look, rows)),
        **provenance(look),
        checksums=look.tried("checksums", lambda: checksums(look)),
        recipe=look.tried("recipe", lambda: recipe_text(look)),
        faults=look.faults,  # last: everything above may add to it
    )
