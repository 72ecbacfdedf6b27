"""Is this machine, or the cluster that a recipe names, ready for a run; and what mends it if not.

Nothing is started and nothing stays: a probe file is removed, a port released, a cluster left.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.doctor_checks import check_machine, check_plan
from pipelines.doctor_finding import Finding, passed
from pipelines.doctor_machine import Machine, look_at_machine
from pipelines.doctor_programs import check_sglang, check_token, join_cluster
from pipelines.doctor_reach import (
    check_attached,
    check_kinds,
    check_prompts,
    check_run_folder,
    check_store,
    check_target,
    sizes_of,
)
from pipelines.recipe import Recipe

_MARKS = {"pass": "ok", "warn": "[yellow]warn[/]", "fail": "[bold red]FAIL[/]"}


@dataclass(frozen=True)
class DoctorReport:
    """Every finding, in order."""

    recipe: str | None
    findings: tuple[Finding, ...]

    @property
    def is_ready(self) -> bool:
        """Nothing failed; warnings do not count."""
        return all(one.outcome != "fail" for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        """The same, as data."""
        return {"is_ready": self.is_ready, **asdict(self)}


def doctor(recipe: Recipe | None, machine: Machine | None = None) -> DoctorReport:
    """Look at this machine, and at everything that the recipe names."""
    machine = machine or look_at_machine()
    name = None if recipe is None else recipe.name
    return DoctorReport(name, tuple(_findings(recipe, machine)))


def render(report: DoctorReport, console: Console) -> None:
    """Print one line for each check, then what mends those that did not pass."""
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("check", overflow="fold", max_width=24)
    table.add_column("seen", overflow="fold")
    for one in report.findings:
        table.add_row(_MARKS[one.outcome], escape(one.name), escape(one.seen))
    console.print(table)
    for one in report.findings:
        if one.outcome != "pass":
            console.print(f"\n{_MARKS[one.outcome]} {escape(one.name)}", highlight=False)
            console.print(f"  expected: {escape(one.expected)}", highlight=False)
            console.print(f"  change:   {escape(one.change)}", highlight=False)
    console.print()
    console.print(_verdict(report.findings), highlight=False)


def _verdict(findings: Iterable[Finding]) -> str:
    outcomes = [one.outcome for one in findings]
    failures, warnings = outcomes.count("fail"), outcomes.count("warn")
    ready = "not ready" if failures else "ready"
    return f"{ready}: {len(outcomes)} checks, {failures} failed, {warnings} warn"


def _findings(recipe: Recipe | None, machine: Machine) -> Iterator[Finding]:
    yield from check_machine(machine)
    if recipe is None:
        yield from check_plan(machine, None, None, None)
        yield check_token(None, os.environ, Path.home())
        return
    about_target, weights = check_target(recipe)
    about_prompts, prompts = check_prompts(recipe)
    sizes = sizes_of(recipe, weights, prompts)
    about_ray, nodes = _cluster(recipe)
    yield from check_plan(machine, recipe, sizes, nodes)
    yield from about_ray
    yield from about_target
    yield from about_prompts
    yield from check_run_folder(recipe, sizes)
    yield from check_store(recipe)
    yield from check_kinds(recipe)
    yield from check_sglang(recipe)
    yield from check_attached(recipe)


def _cluster(recipe: Recipe) -> tuple[list[Finding], dict[str, int] | None]:
    address = recipe.ray.address
    token = check_token(address, os.environ, Path.home())
    if address is None:
        return [token, passed("ray", "the run starts one on this machine")], None
    if token.outcome == "fail":
        return [token], None  # without one nobody is let in
    joined, nodes = join_cluster(address)
    return [token, joined], nodes
