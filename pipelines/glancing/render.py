"""A glance on a screen: alive, what, healthy, so what. Reads without colour, in 80 columns."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.glancing.alive import Alive
from pipelines.glancing.distribution import Bin
from pipelines.glancing.drill import FieldDrill
from pipelines.glancing.report import (
    Difference,
    GlanceReport,
    Lengths,
    ResponseGlance,
    SetGlance,
)
from pipelines.glancing.words import byte_size, mix, number, one_line, printable, rows_text, share
from pipelines.words import duration

_MARKS = {"fault": "[bold red]FAULT[/]", "warning": "[yellow]WARNING[/]", "note": "NOTE"}
_TENSORS = 60
_PARTS = ("messages", "reasoning", "reasoning_content", "content", "tool_calls")


def render(report: GlanceReport, console: Console) -> None:
    """Print the report."""
    if report.comparison is not None:
        _print_comparison(report, report.comparison, console)
    elif len(report.sets) > 1:
        _print_overview(report, console)
    for one in report.sets:
        if len(report.sets) == 1 or one.findings or one.responses or one.samples or one.field:
            _print_set(one, console, with_fields=len(report.sets) == 1 and one.field is None)


def _print_overview(report: GlanceReport, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("set", overflow="fold", ratio=1)
    for title in ("rows", "size", "written", "health"):
        table.add_column(title, justify="left" if title == "health" else "right", no_wrap=True)
    common = _common_folder([one.name for one in report.sets])
    for one in report.sets:
        table.add_row(
            escape(one_line(one.name.removeprefix(common))),
            rows_text(one),
            byte_size(one.alive.bytes),
            _age(one.alive),
            _worst(one),
        )
    if common:
        console.print(f"in {printable(common)}", style="bold", highlight=False, markup=False)
    console.print(table)


def _print_comparison(report: GlanceReport, lines: Sequence[Difference], console: Console) -> None:
    """Two sets side by side; a star where they differ."""
    first, second = report.sets
    common = _common_folder([first.name, second.name])
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("", overflow="fold", max_width=28)
    for one in (first, second):
        name = escape(one_line(one.name.removeprefix(common)))
        table.add_column(name, overflow="fold", ratio=1)
    for line in lines:
        mark = "" if line.first == line.second else "*"
        table.add_row(mark, *(escape(one_line(t)) for t in (line.what, line.first, line.second)))
    console.print(table)


def _common_folder(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    same = 0
    while same < min(len(first), len(last)) and first[same] == last[same]:
        same += 1
    return first[: first.rfind("/", 0, same) + 1]


def _worst(one: SetGlance) -> str:
    severities = {finding.severity for finding in one.findings}
    for severity in ("fault", "warning"):
        if severity in severities:
            return _MARKS[severity]
    return "ok"


def _print_set(one: SetGlance, console: Console, *, with_fields: bool) -> None:
    console.print()
    console.print(printable(one.name), style="bold", highlight=False, markup=False)
    lines = [("verdict", _verdict(one)), ("alive", _alive(one)), ("what", _what(one))]
    lines += [("broken" if at == 0 else "", text) for at, text in enumerate(one.malformed)]
    console.print(_grid(lines))
    if with_fields and one.fields:
        console.print(_field_table(one))
    if with_fields and one.tensors:
        console.print(_tensor_table(one))
    if one.field is not None:
        console.print(_grid(_drill_lines(one.field)))
    elif one.responses is not None:
        console.print(_grid(_response_lines(one.responses)))
    _print_findings(one, console)
    for row in one.samples:
        _print_sample(row, console)


def _grid(lines: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in lines:
        grid.add_row(title, escape(printable(text)))
    return grid


def _verdict(one: SetGlance) -> str:
    """The worst first, by name: who reads one line has read what matters."""
    for severity, said in (("fault", "NOT HEALTHY"), ("warning", "healthy, with warnings")):
        names = [finding.name for finding in one.findings if finding.severity == severity]
        if names:
            return f"{said}: {', '.join(names)}"
    return "healthy" if one.rows_read or one.tensors else "nothing to judge"


def _alive(one: SetGlance) -> str:
    living = one.alive
    said = [f"last write {_age(living)} ago" if living.age_seconds is not None else "age unknown"]
    if living.writers:
        held = ", ".join(f"{each.name} (pid {each.pid})" for each in living.writers[:3])
        said.append(f"held for writing by {held}")
    elif living.writers is not None:
        said.append("no process seen that writes it")
    if living.bytes_per_second:
        rows = "" if living.rows_per_second is None else f", {living.rows_per_second:,.3g} rows/s"
        said.append(f"growing by {byte_size(living.bytes_per_second)}/s{rows}")
    elif living.bytes_per_second is not None:
        said.append("did not grow between two looks")
    if one.ends_in_half_line:
        state = ": being written" if living.is_fresh or living.writers else ""
        said.append(f"ends in half a line{state}")
    return "; ".join(said)


def _what(one: SetGlance) -> str:
    size = byte_size(one.alive.bytes)
    if one.tensors and not one.rows:
        return f"{one.format}: {len(one.tensors):,} tensors, {size}"
    read = "all read" if one.rows_read == one.rows else f"{one.rows_read:,} read as a sample"
    files = "" if one.files == one.files_read else f" of {one.files_read} of {one.files} files"
    return f"{rows_text(one)} rows ({read}{files}), {size}, {one.format}, {one.kind}"


def _response_lines(answers: ResponseGlance) -> Iterable[tuple[str, str]]:
    if answers.answers:
        part = (
            ""
            if answers.reasoning_share is None
            else (f"; it is {answers.reasoning_share:.0%} of the text")
        )
        yield "tokens", f"usage.completion_tokens is {mix(answers.usage, answers.answers)}"
        yield (
            "reason",
            f"{share(answers.with_reasoning, answers.answers)} of {answers.answers:,} answers "
            f"have reasoning{part}",
        )
        yield "finish", mix(answers.finish, answers.answers)
        yield "script", mix(answers.scripts, answers.answers) or "too little text to tell"
    if answers.languages:
        shares = ", ".join(f"{name} {one:.0%}" for name, one in answers.languages.items())
        yield "language", f"{shares} (of a sample)"
    if answers.kept_aside:
        yield "aside", ", ".join(f"{kind} {n:,}" for kind, n in answers.kept_aside.items())
    if answers.completion_tokens.quantiles:
        yield from _length_lines("length", "completion tokens", answers.completion_tokens)
    elif answers.characters.quantiles:
        yield from _length_lines("length", "characters", answers.characters)


def _length_lines(title: str, unit: str, lengths: Lengths) -> Iterable[tuple[str, str]]:
    yield title, "  ".join(f"{name} {number(n)}" for name, n in lengths.quantiles.items())
    yield from _bars(lengths.histogram, unit)


def _bars(bins: Sequence[Bin], unit: str) -> Iterable[tuple[str, str]]:
    most = max((one.count for one in bins), default=1)
    for at, one in enumerate(bins):
        bar = "#" * math.ceil(22 * one.count / most)
        said = f"  {unit}" if at == 0 else ""
        yield "", f"{number(one.low):>8} to {number(one.high):<8} {bar:<22} {one.count:,}{said}"


def _drill_lines(field: FieldDrill) -> Iterable[tuple[str, str]]:
    seen = sum(field.types.values()) + field.empty + field.null + field.missing
    yield "field", field.name
    yield "types", mix(field.types, seen) or "no value"
    absent = {"missing": field.missing, "null": field.null, "empty": field.empty}
    yield "absent", mix({name: n for name, n in absent.items() if n}, seen) or "nowhere"
    if field.absent_first:
        yield "", f"first at {', '.join(field.absent_first)}"
        parts = " ".join(f"{one:.0%}" for one in field.absent_by_part)
        yield "", f"by tenths of the rows read: {parts}"
    if field.measured:
        quantiles = "  ".join(f"{name} {number(n)}" for name, n in field.quantiles.items())
        yield field.measured, quantiles
        yield from _bars(field.histogram, "")
    for at, (value, count) in enumerate(field.top.items()):
        yield "top" if at == 0 else "", f"{one_line(value)}  {count:,}"


def _field_table(one: SetGlance) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("field", overflow="ellipsis", no_wrap=True, min_width=_widest(one))
    table.add_column("type", overflow="fold", min_width=9)
    table.add_column("filled", justify="right", no_wrap=True)
    table.add_column("otherwise", overflow="fold", min_width=10)
    with_examples = any(field.example for field in one.fields)
    if with_examples:
        table.add_column("example", overflow="ellipsis", no_wrap=True, ratio=1)
    for field in one.fields:
        rest = [("empty", field.empty), ("null", field.null), ("missing", field.missing)]
        cells = [
            escape(one_line(field.name)),
            "/".join(field.types) or "-",
            share(field.filled, one.rows_read),
            " ".join(f"{count:,} {name}" for name, count in rest if count) or "-",
        ]
        table.add_row(*cells, *([escape(one_line(field.example))] if with_examples else []))
    return table


def _widest(one: SetGlance) -> int:
    return min(28, max(cell_len(one_line(field.name)) for field in one.fields))


def _tensor_table(one: SetGlance) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "type", "shape", "values"):
        table.add_column(title, overflow="fold")
    for tensor in one.tensors[:_TENSORS]:
        shape = " x ".join(f"{size:,}" for size in tensor.shape) or "scalar"
        table.add_row(
            escape(one_line(tensor.name)), escape(one_line(tensor.dtype)), shape, tensor.values
        )
    if len(one.tensors) > _TENSORS:
        table.add_row(f"and {len(one.tensors) - _TENSORS:,} more", "", "", "")
    return table


def _print_findings(one: SetGlance, console: Console) -> None:
    for finding in one.findings:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        seen = escape(one_line(finding.seen))
        grid.add_row(_MARKS[finding.severity], f"[bold]{finding.name}[/]: {seen}")
        grid.add_row("  why", escape(finding.cause))
        grid.add_row("  do", escape(finding.cure))
        console.print(grid, highlight=False)


def _print_sample(row: Mapping[str, Any], console: Console) -> None:
    name = row.get("sample_id", row.get("id", "sample"))
    console.print(f"--- {one_line(str(name))[:70]}", style="bold", markup=False)
    for key in _PARTS:
        if row.get(key):
            value = row[key]
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            console.print(f"[{key}]", style="bold", markup=False)
            console.print(printable(text), markup=False, highlight=False)
    tokens = row.get("usage")
    if tokens is not None:
        said = tokens if isinstance(tokens, str) else json.dumps(tokens, ensure_ascii=False)
        console.print("[tokens]", style="bold", markup=False)
        console.print(printable(said), markup=False, highlight=False)
    rest = {key: value for key, value in row.items() if key not in (*_PARTS, "usage")}
    text = json.dumps(rest, ensure_ascii=False)
    console.print(printable(text), markup=False, highlight=False, style="dim")


def _age(living: Alive) -> str:
    return "unknown" if living.age_seconds is None else duration(living.age_seconds)
