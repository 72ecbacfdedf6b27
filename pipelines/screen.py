"""What a command saw, on stdout: drawn for a person, or as one JSON object."""

import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.console import Console

_WATCH_SECONDS = 2


class _Jsonable(Protocol):
    def to_json(self) -> dict[str, Any]: ...


_Shown = TypeVar("_Shown", bound=_Jsonable)


def show(
    seen: _Shown, draw: "Callable[[_Shown, Console], None]", *, as_json: bool, clear: bool = False
) -> None:
    """Print what was seen; on a cleared screen if it is drawn."""
    if as_json:
        sys.stdout.write(json.dumps(seen.to_json(), allow_nan=False) + "\n")
        return
    from rich.console import Console  # takes longer than a look at a file

    console = Console()
    if clear:
        console.clear()
    draw(seen, console)


def show_looks(
    look: Callable[[], _Shown],
    draw: "Callable[[_Shown, Console], None]",
    *,
    as_json: bool,
    watch: bool,
) -> _Shown:
    """Show what `look` sees, once or again and again until Ctrl-C; return the last sight."""
    while True:
        seen = look()
        show(seen, draw, as_json=as_json, clear=watch)
        if not watch:
            return seen
        time.sleep(_WATCH_SECONDS)
