"""The commands of `eyas`: their arguments, and what each of them calls."""

import contextlib
import os
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.errors import BadRecipe
from pipelines.screen import show as show_it
from pipelines.screen import show_looks
from pipelines.stages import STAGES

# Everything else is imported where it is needed: no command waits for another one's libraries.
if TYPE_CHECKING:
    from pipelines.store import RunFolder

app = typer.Typer(
    name="eyas",
    help="Raise an EAGLE-3 draft: prompts, responses, hidden states, training, export, acceptance.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

Stage = Enum("Stage", {stage: stage for stage in STAGES}, type=str)  # type: ignore[misc]

RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="The run, as a YAML file.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key, e.g. train.epochs=2."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, nothing else.")]
Again = Annotated[bool, typer.Option("--again", help="Do it once more.")]
RetryFailed = Annotated[
    bool, typer.Option("--retry-failed", help="Ask the prompts again that no server answered.")
]


@app.command()
def run(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer reads it, nobody changes it
    first: Annotated[
        Stage | None, typer.Option("--from", help="Do this stage and all later ones once more.")
    ] = None,
    last: Annotated[Stage | None, typer.Option("--until", help="Stop after this stage.")] = None,
    retry_failed: RetryFailed = False,
    as_json: Json = False,
) -> None:
    """Run all stages; go on where the run folder is."""
    start = 0 if first is None else STAGES.index(first.value)
    end = len(STAGES) if last is None else STAGES.index(last.value) + 1
    if start >= end:
        raise BadRecipe(
            f"--from {STAGES[start]} --until {STAGES[end - 1]}",
            expected="a first stage that is not after the last",
            change=f"the order is {', '.join(STAGES)}",
        )
    # Stages before `--from` are looked at, and made if they are missing, but never made again.
    again = STAGES[start:] if first else ()
    _run(recipe, overrides, STAGES[:end], again, retry_failed=retry_failed, as_json=as_json)


@app.command()
def generate(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer reads it, nobody changes it
    again: Again = False,
    retry_failed: RetryFailed = False,
    as_json: Json = False,
) -> None:
    """Have the target answer the prompts; keep its exact tokens."""
    later = STAGES[STAGES.index("generate") :] if again else ()
    _run(recipe, overrides, ("generate",), later, retry_failed=retry_failed, as_json=as_json)


def _stage_command(stage: str, text: str) -> None:
    def command(
        recipe: RecipePath,
        overrides: Overrides = [],  # noqa: B006 - typer reads it, nobody changes it
        again: Again = False,
        as_json: Json = False,
    ) -> None:
        later = STAGES[STAGES.index(stage) :]
        _run(recipe, overrides, (stage,), later if again else (), as_json=as_json)

    command.__doc__ = text
    app.command(name=stage)(command)


@app.command()
def prepare(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer reads it, nobody changes it
    again: Again = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only look: what the prompts will be, and cost.")
    ] = False,
    tokens_per_second: Annotated[
        float, typer.Option(min=1e-3, help="With --plan: what all your servers generate together.")
    ] = 1000.0,
    answer_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="With --plan: the mean length of an answer, if you know it."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read the sources, render the chat template, tokenise once."""
    if not plan:
        _run(recipe, overrides, ("prepare",), STAGES if again else (), as_json=as_json)
        return
    from pipelines.prepare_plan import plan as look
    from pipelines.prepare_plan import render
    from pipelines.recipe import load_recipe

    found = look(
        load_recipe(recipe, overrides),
        tokens_per_second=tokens_per_second,
        answer_tokens=answer_tokens,
    )
    show_it(found, render, as_json=as_json)


@app.command()
def capture(
    recipe: RecipePath,
    overrides: Overrides = [],  # noqa: B006 - typer reads it, nobody changes it
    again: Again = False,
    plan: Annotated[
        bool, typer.Option("--plan", help="Only look: what the states will take, in each mode.")
    ] = False,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(min=1e-3, help="With --plan: what all your servers prefill together."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run the answers through the target once more; keep hidden states."""
    if not plan:
        later = STAGES[STAGES.index("capture") :]
        _run(recipe, overrides, ("capture",), later if again else (), as_json=as_json)
        return
    from pipelines.capture_estimate import plan as look
    from pipelines.capture_estimate import render
    from pipelines.recipe import load_recipe

    found = look(load_recipe(recipe, overrides), tokens_per_second=tokens_per_second)
    show_it(found, render, as_json=as_json)


_stage_command("train", "Train the draft.")
_stage_command("export", "Write the draft as SGLang loads it, and prove that it loads.")
_stage_command("evaluate", "Measure the acceptance length on held-out prompts.")


@app.command()
def glance(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="Files, folders, globs, URIs."),
    ],
    as_json: Json = False,
    full: Annotated[bool, typer.Option("--full", help="Read everything, not a sample.")] = False,
    show: Annotated[int, typer.Option("--show", metavar="N", help="Print N whole samples.")] = 0,
    field: Annotated[
        str | None,
        typer.Option("--field", metavar="NAME", help="Look into one field."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 4 if it is unhealthy.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every 2 seconds.")] = False,
) -> None:
    """See what is in files, whether they are alive and healthy; two are put side by side."""
    from pipelines.glance_command import Asked, run_glance

    code = run_glance(Asked(paths, as_json, full, show, field, strict, watch))
    if code:
        raise typer.Exit(code)


@app.command()
def status(
    folder: RunPath,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again every 2 seconds.")] = False,
) -> None:
    """How far a run is, how fast, and whether anyone is working on it."""
    from pipelines.status import status as look
    from pipelines.status_render import render

    show_looks(lambda: look(_run_folder(folder)), render, as_json=as_json, watch=watch)


@app.command()
def verify(folder: RunPath, as_json: Json = False) -> None:
    """Prove every promise of every artefact of a run. Exit 5 names what broke."""
    from pipelines.verify import render
    from pipelines.verify import verify as prove

    report = prove(_run_folder(folder))
    show_it(report, render, as_json=as_json)
    if not report.is_sound:
        raise typer.Exit(5)


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(metavar="RECIPE", help="The planned run, as a YAML file.")
    ] = None,
    overrides: Overrides = [],  # noqa: B006 - typer reads it, nobody changes it
    as_json: Json = False,
) -> None:
    """Is this machine or cluster ready for a run, and what to change if not. Exit 3: not ready."""
    from pipelines.doctor import doctor as examine
    from pipelines.doctor import render
    from pipelines.recipe import load_recipe

    planned = None if recipe is None else load_recipe(recipe, overrides)
    with contextlib.redirect_stdout(sys.stderr):
        report = examine(planned)
    show_it(report, render, as_json=as_json)
    if not report.is_ready:
        raise typer.Exit(3)


@app.command()
def report(folder: RunPath) -> None:
    """Write one self-contained page about a run."""
    from pipelines.report import report as write

    typer.echo(write(_run_folder(folder)))


@app.command()
def serve(
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="A local model folder.")],
    draft: Annotated[Path | None, typer.Option(help="An exported draft: speculate.")] = None,
    host: Annotated[str, typer.Option(help="Address to bind.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to bind; 0 takes a free one.")] = 30000,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[int, typer.Option(help="CPU threads for the model.")] = os.cpu_count() or 1,
    max_running_requests: Annotated[int, typer.Option(help="Requests decoded at once.")] = 16,
    draft_steps: Annotated[int, typer.Option(help="Tokens drafted for one verification.")] = 3,
) -> None:
    """Serve a model on this machine with the embedded engine and SGLang's HTTP API."""
    raise typer.Exit(
        _serve(target, draft, host, port, dtype, device, threads, max_running_requests, draft_steps)
    )


@app.command()
def target() -> None:
    """Fetch and convert the quick start's target, once. Prints its folder."""
    from pipelines.target import prepare_quickstart_target

    typer.echo(prepare_quickstart_target())


def _run(
    path: Path,
    overrides: list[str],
    stages: tuple[str, ...],
    again: tuple[str, ...],
    *,
    retry_failed: bool = False,
    as_json: bool,
) -> None:
    from pipelines.recipe import load_recipe
    from pipelines.run import done_stages, run_of, run_stages
    from pipelines.summary import render, summarise

    recipe = load_recipe(path, overrides)
    # Ray prints its warnings where it likes; stdout is for what was asked for.
    with contextlib.redirect_stdout(sys.stderr):
        results = run_stages(recipe, stages=stages, again=again, retry_failed=retry_failed)
    run = run_of(recipe)
    if stages[-1] == STAGES[-1] and (
        not run.report.exists() or any(not r.was_done for r in results)
    ):
        from pipelines.report import report as write

        write(run)
    summary = summarise(
        recipe, run, done_stages(recipe), is_new=any(not r.was_done for r in results)
    )
    show_it(summary, render, as_json=as_json)


def _run_folder(path: Path) -> "RunFolder":
    if not path.is_dir():
        raise BadRecipe(
            f"there is no run folder at {path}",
            expected="the folder that run_folder names in a recipe",
            change="check the path",
        )
    from pipelines.store import open_run

    return open_run(path.resolve())


def _serve(
    target: Path,
    draft: Path | None,
    host: str,
    port: int,
    dtype: str,
    device: str,
    threads: int,
    max_running_requests: int,
    draft_steps: int,
) -> int:
    from actors.reference import main as engine

    arguments = ["--target", str(target), "--host", host, "--port", str(port), "--dtype", dtype]
    arguments += ["--device", device, "--threads", str(threads)]
    arguments += ["--max-running-requests", str(max_running_requests)]
    if draft is not None:
        arguments += ["--draft", str(draft), "--speculative-num-steps", str(draft_steps)]
    return engine(arguments)
