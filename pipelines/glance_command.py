"""The command `eyas glance`. Usual arguments are read here: the parser of all commands takes longer
than the look itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipelines.glance import GlanceReport, glance
from pipelines.screen import show_looks

if TYPE_CHECKING:
    from rich.console import Console

UNHEALTHY = 4  # exit code, where it was asked for
_FLAGS = {"--json": "as_json", "--full": "full", "--strict": "strict", "--watch": "watch"}


@dataclass(frozen=True)
class Asked:
    """What the command was asked for."""

    paths: Sequence[str]
    as_json: bool = False
    full: bool = False
    show: int = 0
    field: str | None = None
    strict: bool = False
    watch: bool = False


def asked_plainly(arguments: Sequence[str]) -> Asked | None:
    """What these arguments ask for; None where the parser of all commands has to say it.

    That is for `--help`, for what is wrong, and for whatever is spelt in another way.
    """
    paths, given = list[str](), dict[str, bool]()
    show, field = 0, None
    left = iter(arguments)
    for one in left:
        if not one.startswith("-"):
            paths.append(one)
        elif one in _FLAGS:
            given[_FLAGS[one]] = True
        elif one == "--show" and (value := next(left, "")).isdecimal() and value.isascii():
            show = int(value)
        elif one == "--field" and (value := next(left, "")) and not value.startswith("-"):
            field = value
        else:
            return None
    return Asked(paths, show=show, field=field, **given) if all(paths) and paths else None


def run_glance(asked: Asked) -> int:
    """Look and show; the exit code."""
    seen: GlanceReport | None = None

    def look() -> GlanceReport:
        nonlocal seen
        seen = glance(asked.paths, full=asked.full, show=asked.show, field=asked.field, before=seen)
        return seen

    last = show_looks(look, _draw, as_json=asked.as_json, watch=asked.watch)
    return UNHEALTHY if asked.strict and not last.is_healthy else 0


def _draw(report: GlanceReport, console: "Console") -> None:
    from pipelines.glancing.render import render

    render(report, console)
