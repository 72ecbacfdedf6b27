"""A status report for people: 80 columns, and readable without colour."""

from collections import Counter

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.last_seen import LastSeen, ServerSeen
from pipelines.status import SetStatus, StageStatus, StatusReport
from pipelines.telemetry import duration

_SERVERS_SHOWN = 12


def render(report: StatusReport, console: Console) -> None:
    """Print the report."""
    console.print(f"[bold]{escape(report.name)}[/]  {_say_state(report)}", highlight=False)
    if report.last_error:
        console.print(f"it ended with {report.last_error}", highlight=False, markup=False)
    console.print(_stage_table(report))
    for line in _lines(report):
        console.print(line, highlight=False, markup=False)
    if report.sets:
        console.print()
        console.print(_set_table(report.sets))
        for one in report.sets:
            if one.reasons:
                reasons = ", ".join(f"{name} {count:,}" for name, count in one.reasons.items())
                console.print(f"  {one.name}: {reasons}", highlight=False, markup=False)
    if report.seen is not None:
        console.print()
        _render_seen(report.seen, report, console)
    for alarm in report.alarms:
        console.print(f"[bold yellow]ALARM[/] {escape(alarm)}", highlight=False)
    for past in report.history:
        console.print(f"past  {past} (mended since)", highlight=False, markup=False)
    console.print(f"next  {report.next_command}", highlight=False, markup=False, soft_wrap=True)


def _say_state(report: StatusReport) -> str:
    age = report.last_event_age_seconds
    ago = "" if age is None else f", last event {duration(age)} ago ({report.last_event})"
    match report.state:
        case "finished":
            return f"[green]finished[/]{ago}"
        case "running":
            host = escape(report.driver_host or "")
            return f"[green]running[/], driver pid {report.driver_pid} on {host}{ago}"
        case "dead":
            return (
                f"[bold red]dead[/]: its driver (pid {report.dead_pid}) was killed; "
                f"what was durable is kept{ago}"
            )
        case "stopped":
            return f"[yellow]stopped[/]: nobody is working on it{ago}"
        case "not started":
            return "not started"


def _stage_table(report: StatusReport) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("stage", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("progress", "speed", "time"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for one in report.stages:
        table.add_row(
            one.stage,
            one.state,
            _progress(one.done, one.total, one.unit),
            _speed(one),
            "" if one.seconds is None else duration(one.seconds),
            escape(one.headline),
        )
    return table


def _lines(report: StatusReport) -> list[str]:
    """What runs now, in words."""
    lines = []
    for one in report.stages:
        if one.state == "running" and (said := _say_speed(one)):
            lines.append(f"{one.stage}  {said}")
    training = report.training
    if training is not None and training.step < training.total_steps:
        length = training.acceptance_length
        shown = "" if length is None else f", simulated AL {length:.2f}"
        lines.append(
            f"training  step {training.step:,}/{training.total_steps:,}, "
            f"loss {training.loss:.3f}{shown}"
        )
    if report.last_row_age_seconds is not None and report.state != "finished":
        lines.append(f"last durable row  {duration(report.last_row_age_seconds)} ago")
    return lines


def _say_speed(one: StageStatus) -> str:
    parts = []
    for rows, tokens, when in (
        (one.rows_per_second_now, one.tokens_per_second_now, "now"),
        (one.rows_per_second, one.tokens_per_second, "overall"),
    ):
        said = [] if rows is None else [f"{rows:,.3g} {one.unit}/s"]
        said += [] if tokens is None else [f"{tokens:,.0f} tok/s"]
        if said:
            parts.append(f"{when} {', '.join(said)}")
    if one.eta_seconds is not None:
        parts.append(f"ETA {duration(one.eta_seconds)}")
    return "; ".join(parts)


def _progress(done: int | None, total: int | None, unit: str) -> str:
    if done is None and total is None:
        return "-"
    if total is None:
        return f"{done:,} {unit}"
    shown = "?" if done is None else f"{done:,}"  # not known is not none
    return f"{shown}/{total:,} {unit}"


def _speed(one: StageStatus) -> str:
    if one.state == "running":  # a line of its own says more
        return ""
    if one.tokens_per_second is not None:
        return f"{one.tokens_per_second:,.0f} tok/s"
    return "" if one.rows_per_second is None else f"{one.rows_per_second:.3g}/s"


def _set_table(sets: tuple[SetStatus, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("set", overflow="fold")
    for title in ("done", "ok", "rejected", "failed", "rows/s", "ETA"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in sets:
        table.add_row(
            escape(one.name),
            f"{one.done:,} / {one.total:,}",
            f"{one.ok:,}",
            f"{one.rejected:,}",
            f"{one.failed:,}",
            "-" if one.rows_per_second is None else f"{one.rows_per_second:.3g}",
            "-" if one.eta_seconds is None else duration(one.eta_seconds),
        )
    return table


def _render_seen(seen: LastSeen, report: StatusReport, console: Console) -> None:
    assert report.seen_age_seconds is not None  # what was seen was seen at a time
    age = duration(report.seen_age_seconds)
    when = f"{age} ago" if report.state == "running" else f"{age} ago, when its driver still lived"
    if seen.servers:
        states = Counter(one.state for one in seen.servers)
        shown = ", ".join(f"{count} {state}" for state, count in states.items())
        console.print(f"servers  {shown}  (seen {when})", highlight=False, markup=False)
        console.print(_server_table(seen.servers))
        left = len(seen.servers) - _SERVERS_SHOWN
        if left > 0:
            console.print(f"  and {left} more: --json has them all", highlight=False)
    for gpu in seen.gpus:
        used, whole = (
            "?" if one is None else f"{one / 1024:.1f}"
            for one in (gpu.memory_used_mib, gpu.memory_mib)
        )
        load = "?" if gpu.load is None else f"{gpu.load:.0%}"
        said = f"{gpu.name}, {used}/{whole} GiB, load {load}"
        console.print(f"GPU {gpu.index} on {seen.host}  {said}", highlight=False, markup=False)
    dead = f", {seen.ray.dead_nodes} dead" if seen.ray.dead_nodes else ""
    used = ", ".join(
        f"{name} {seen.ray.total[name] - seen.ray.free[name]:.3g}/{seen.ray.total[name]:.3g} taken"
        for name in ("CPU", "GPU")
        if name in seen.ray.total
    )
    console.print(f"Ray  {seen.ray.nodes} node(s){dead}, {used}", highlight=False, markup=False)


def _server_table(servers: tuple[ServerSeen, ...]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("server", overflow="fold")
    table.add_column("state", no_wrap=True)
    for title in ("running", "queue", "KV", "tok/s", "restarts"):
        table.add_column(title, justify="right", no_wrap=True)
    # Those that need a look first.
    for one in sorted(servers, key=lambda one: one.state == "ready")[:_SERVERS_SHOWN]:
        table.add_row(
            escape(one.name),
            one.state,
            "-" if one.running is None else f"{one.running:,}",
            "-" if one.queue is None else f"{one.queue:,}",
            "-" if one.kv_usage is None else f"{one.kv_usage:.0%}",
            "-" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
            f"{one.restarts}",
        )
    return table
