"""How one check of `eyas doctor` ends: what was seen, what was expected, what mends it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from actors.errors import ServerUnfit
from pipelines.errors import RunError


@dataclass(frozen=True)
class Finding:
    """One check. `expected` and `change` are empty where it passed."""

    name: str
    outcome: Literal["pass", "warn", "fail"]
    seen: str
    expected: str = ""
    change: str = ""


def passed(name: str, seen: str) -> Finding:
    """Nothing to mend."""
    return Finding(name, "pass", seen)


def warned(name: str, seen: str, *, expected: str, change: str) -> Finding:
    """A run may work, slower or with less room than it should have."""
    return Finding(name, "warn", seen, expected, change)


def failed(name: str, seen: str, *, expected: str, change: str) -> Finding:
    """A run would stop here."""
    return Finding(name, "fail", seen, expected, change)


def proved(name: str, look: Callable[[], str]) -> Finding:
    """What `look` saw, or the refusal that a run would have ended with."""
    try:
        return passed(name, look())
    except (RunError, ServerUnfit) as error:
        return failed(name, error.seen, expected=error.expected, change=error.change)


def size(count: float) -> str:
    """Bytes for people, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"
