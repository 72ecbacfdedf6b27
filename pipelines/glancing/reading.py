"""What is known of one file while its rows are read, and what was odd about them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pipelines.glancing.findings import Finding, found
from pipelines.glancing.places import Place

Row = Mapping[str, Any]

SAMPLE_BYTES = 8 << 20  # up to this size all is read; of more, this much
_KEPT = 10

# Rows that are lost to any reader, and what is said of them.
LOST = {
    "malformed_lines": "are no JSON",
    "null_bytes": "hold NUL bytes",
    "not_utf8": "are not UTF-8",
    "not_objects": "are no objects",
    "line_too_long": "are longer than 16 MiB",
    "too_deep": "are nested too deeply",
}
# Rows that are read, but not by everybody in the same way.
_ODD = {
    "not_one_a_line": "are not one object each",
    "nan_in_json": "hold NaN or Infinity",
    "duplicate_keys": "of those looked at say a key twice",
    "number_too_large": "hold a number beyond 64 bits",
    "lone_surrogate": "hold half a character",
    "byte_order_mark": "begins with a byte order mark",
    "carriage_returns": "ends in a carriage return",
}


class At(NamedTuple):
    """Where a row stands: a line, item or row from 1, or the byte at which its line begins."""

    unit: str
    number: int

    def __str__(self) -> str:
        return f"{self.unit} {self.number:,}"


class Lost(NamedTuple):
    """A row that cannot be read."""

    at: At
    reason: str


@dataclass
class Notes:
    """Odd things by the name of their finding: how many, and where the first is."""

    counts: dict[str, int] = field(default_factory=dict)
    first: dict[str, At] = field(default_factory=dict)
    lost: list[Lost] = field(default_factory=list)  # the first few
    lost_count: int = 0

    def note(self, name: str, at: At, reason: str = "") -> None:
        """Count one odd thing."""
        self.counts[name] = self.counts.get(name, 0) + 1
        self.first.setdefault(name, at)
        if name in LOST:
            self.lost_count += 1
            if len(self.lost) < _KEPT:
                self.lost.append(Lost(at, reason or LOST[name]))

    def merge(self, other: "Notes", lines_before: int) -> None:
        """Add what was seen in a later part of the file, whose line numbers begin at 1 again."""
        for name, count in other.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
            self.first.setdefault(name, _later(other.first[name], lines_before))
        self.lost_count += other.lost_count
        moved = [Lost(_later(one.at, lines_before), one.reason) for one in other.lost]
        self.lost = [*self.lost, *moved][:_KEPT]

    def findings(self, file: str) -> Iterable[Finding]:
        """One for each kind of oddity."""
        for name, count in self.counts.items():
            said = {**LOST, **_ODD}[name]
            yield found(name, f"{file}{count:,} lines {said}; first: {self.first[name]}")


def _later(at: At, lines: int) -> At:
    return At(at.unit, at.number + lines) if at.unit == "line" else at


@dataclass
class Reading:
    """One file. Its counts are final once `rows` is exhausted."""

    place: Place
    size: int  # bytes
    budget: int | None  # bytes that may be read of it; None for all
    format: str = "unknown"
    rows: Iterator[tuple[At, Row]] = field(default_factory=lambda: iter(()))
    row_count: int | None = None
    rows_exact: bool = False
    lines: int = 0  # of the span that was read last
    ends_in_half_line: bool = False
    notes: Notes = field(default_factory=Notes)
    findings: list[Finding] = field(default_factory=list)

    def find(self, name: str, seen: str) -> None:
        """Say what is wrong with the file."""
        self.findings.append(found(name, f"{self.place.name}: {seen}"))


def short(error: BaseException) -> str:
    """An error's text on one line of a terminal."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 90 else text[:87] + "..."
