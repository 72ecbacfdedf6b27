"""What is in these files, are they alive, are they healthy, and what to do about it. Read-only.

Works on any JSONL, JSON, Parquet, Arrow or safetensors file, and on files that still grow.
"""

import glob
import json
import math
import random
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipelines.errors import BadRecipe
from pipelines.formats import SUFFIXES, Reading, Row, read_rows
from pipelines.health import Finding, ResponseHealth, looks_like_responses
from pipelines.telemetry import duration

_EDGE_ROWS = 256  # rows of the head and of the tail that are compared
_EXAMPLE = 44
_FRESH_SECONDS = 60.0
_VALUES_PER_TENSOR = 1 << 20


@dataclass(frozen=True)
class FieldGlance:
    """One field, nested ones by dotted path. Rows = filled + empty + null + missing."""

    name: str
    types: dict[str, int]
    filled: int
    empty: int  # "", [] or {}
    null: int
    missing: int
    example: str


@dataclass(frozen=True)
class ResponseGlance:
    """What the answers are like, in numbers."""

    answers: int
    kept_aside: dict[str, int]  # rows that are not ok, by status
    with_reasoning: int
    finish: dict[str, int]
    usage: dict[str, int]  # completion_tokens: ok, missing, null, zero, wrong type
    completion_tokens: dict[str, int]  # min, p10, p50, p90, p99, max
    histogram: tuple[tuple[int, int, int], ...]  # (from, up to, answers)


@dataclass(frozen=True)
class TensorGlance:
    """One tensor of a safetensors file; `values` is the range of a sample, or what is wrong."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: str


@dataclass(frozen=True)
class SetGlance:
    """One file, or the files of one format in one folder."""

    name: str
    files: int
    bytes: int
    format: str
    kind: str  # responses, prompts, tensors, rows
    age_seconds: float  # since the last write
    ends_in_half_line: bool
    rows: int | None
    rows_exact: bool
    rows_read: int
    malformed: tuple[str, ...]
    malformed_count: int
    fields: tuple[FieldGlance, ...]
    tensors: tuple[TensorGlance, ...]
    responses: ResponseGlance | None
    findings: tuple[Finding, ...]
    samples: tuple[Mapping[str, Any], ...]

    @property
    def is_healthy(self) -> bool:
        """No finding is a fault."""
        return all(one.severity != "fault" for one in self.findings)


@dataclass(frozen=True)
class GlanceReport:
    """Everything that was looked at."""

    sets: tuple[SetGlance, ...]

    @property
    def is_healthy(self) -> bool:
        """No finding of any set is a fault."""
        return all(one.is_healthy for one in self.sets)

    def to_json(self) -> dict[str, Any]:
        """The same, as data."""
        return {
            "is_healthy": self.is_healthy,
            "sets": [{"is_healthy": one.is_healthy, **asdict(one)} for one in self.sets],
        }


def glance(
    paths: Sequence[Path], *, full: bool = False, show: int = 0, now: float | None = None
) -> GlanceReport:
    """Look at files, folders and globs. Raises `BadRecipe` for a path that is not there.

    Large files are sampled at head, tail and random places unless `full`. `show` keeps that many
    whole samples of each set; otherwise no value longer than a short example leaves this function.
    """
    at = time.time() if now is None else now
    return GlanceReport(
        tuple(
            _look_at_set(name, files, full=full, show=show, now=at)
            for name, files in _sets_of(paths)
        )
    )


def render(report: GlanceReport, console: Console) -> None:
    """Print the report: alive, what, healthy, so what. Reads without colour, in 80 columns."""
    if len(report.sets) > 1:
        _print_overview(report, console)
    for one in report.sets:
        if len(report.sets) == 1 or one.findings or one.responses or one.samples:
            _print_set(one, console, with_fields=len(report.sets) == 1)


# --- which files


def _sets_of(paths: Sequence[Path]) -> list[tuple[str, list[Path]]]:
    sets: dict[str, list[Path]] = {}
    for path in paths:
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if _is_data(file, path))
            if not found:
                raise BadRecipe(
                    f"{path} holds no file that glance knows",
                    expected=f"files named {', '.join(SUFFIXES)}, or .gz of them",
                    change="name a file, or another folder",
                )
            for file in found:
                name = f"{file.parent}/*{_suffix(file)}"
                sets.setdefault(name, []).append(file)
        elif path.exists():
            sets.setdefault(str(path), []).append(path)
        else:
            matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))  # noqa: PTH207 - the pattern may be absolute
            files = [match for match in matches if match.is_file()]
            if not files:
                raise BadRecipe(
                    f"there is nothing at {path}",
                    expected="a file, a folder, or a pattern that matches files",
                    change="check the path",
                )
            sets.setdefault(str(path), []).extend(files)
    return [
        (str(files[0]) if len(files) == 1 else f"{name} ({len(files)} files)", files)
        for name, files in sets.items()
    ]


def _is_data(file: Path, root: Path) -> bool:
    inside = file.relative_to(root).parts
    hidden = any(part.startswith(".") for part in inside)
    return not hidden and _suffix(file) in SUFFIXES and file.is_file()


def _suffix(file: Path) -> str:
    return Path(file.name.lower().removesuffix(".gz")).suffix


# --- one set


def _look_at_set(name: str, files: list[Path], *, full: bool, show: int, now: float) -> SetGlance:
    findings: list[Finding] = []
    profile, health, shown = _Profile(), ResponseHealth(), _Reservoir(show)
    readings: list[Reading] = []
    tensors: list[TensorGlance] = []
    size, newest = 0, 0.0
    for file in files:
        try:
            stat = file.stat()
            reading = read_rows(file, full=full)
        except OSError as error:
            findings.append(_unreadable(file, error.strerror or str(error)))
            continue
        size, newest = size + stat.st_size, max(newest, stat.st_mtime)
        readings.append(reading)
        if reading.format == "safetensors" and reading.fault is None:
            tensors.extend(_look_at_tensors(reading, stat.st_size, findings))
        _read(reading, profile, health, shown)
        if reading.fault:
            findings.append(_unreadable(file, reading.fault))
    age = max(0.0, now - newest) if readings else math.inf
    malformed = sum(one.malformed_count for one in readings)
    kind = _kind(profile, bool(tensors))
    rows, exact = _row_count(readings)
    half = any(one.ends_in_half_line for one in readings)
    findings += _file_findings(name, kind, rows, malformed, half, age, readings)
    findings += _drift(profile)
    if kind == "responses":
        findings += health.findings()
    elif health.same_id.twice.count:
        findings += [one for one in health.findings() if one.name == "duplicate_id"]
    order = {"fault": 0, "warning": 1, "note": 2}
    return SetGlance(
        name=name,
        files=len(files),
        bytes=size,
        format="/".join(sorted({one.format for one in readings})) or "unknown",
        kind=kind,
        age_seconds=age if math.isfinite(age) else -1.0,
        ends_in_half_line=half,
        rows=rows,
        rows_exact=exact,
        rows_read=profile.rows,
        malformed=tuple(
            f"{one.path.name + ' ' if len(files) > 1 else ''}{place}: {reason}"
            for one in readings
            for place, reason in one.malformed
        )[:10],
        malformed_count=malformed,
        fields=profile.fields(),
        tensors=tuple(tensors),
        responses=_response_glance(health) if kind == "responses" else None,
        findings=tuple(sorted(findings, key=lambda one: order[one.severity])),
        samples=tuple(_sample(row) for row in shown.rows),
    )


def _read(
    reading: Reading, profile: "_Profile", health: ResponseHealth, shown: "_Reservoir"
) -> None:
    for at, row in enumerate(reading.rows, start=1):
        profile.add(row)
        health.add(row, _row_name(row, reading, at))
        shown.add(row)


def _row_name(row: Row, reading: Reading, at: int) -> str:
    for key in ("sample_id", "id", "uuid"):
        if isinstance(row.get(key), str | int):
            return str(row[key])[:60]
    return f"{reading.path.name} row {at}"


def _kind(profile: "_Profile", has_tensors: bool) -> str:
    names = profile.top_level()
    if looks_like_responses(names):
        return "responses"
    if {"messages", "prompt_ids"} & names:
        return "prompts"
    return "tensors" if has_tensors else "rows"


def _row_count(readings: Sequence[Reading]) -> tuple[int | None, bool]:
    counted = [one for one in readings if one.format != "safetensors"]
    known = [one.row_count for one in counted if one.row_count is not None]
    if not known:
        return None, False
    return sum(known), len(known) == len(counted) and all(one.rows_exact for one in counted)


def _file_findings(
    name: str,
    kind: str,
    rows: int | None,
    malformed: int,
    half: bool,
    age: float,
    readings: Sequence[Reading],
) -> list[Finding]:
    found = []
    if malformed:
        found.append(
            Finding(
                "fault",
                "malformed_lines",
                f"{malformed:,} lines are no JSON objects",
                "two writers on one file, a disk that filled up, or a file of another kind",
                "the places are listed; make those rows again rather than mend them by hand",
            )
        )
    if half and age > _FRESH_SECONDS:
        found.append(
            Finding(
                "warning",
                "half_line_at_end",
                f"the last line is cut, and nothing was written for {duration(age)}",
                "the writer died in the middle of a row",
                "drop the half line and make that row again",
            )
        )
    if rows == 0 and all(one.fault is None for one in readings) and kind != "tensors":
        aside = "_rejected" in name
        found.append(
            Finding(
                "note" if aside else "fault",
                "no_rows",
                "there is no row",
                "nothing was rejected" if aside else "the writer has not begun, or lost everything",
                "nothing" if aside else "check the stage that should have written it",
            )
        )
    return found


def _unreadable(file: Path, reason: str) -> Finding:
    return Finding(
        "fault",
        "unreadable",
        f"{file.name}: {reason}",
        "cut short while it was copied, still being written without its footer, or another format",
        "copy or make the file again; a file that is being written can be read when it is closed",
    )


# --- fields


class _Profile:
    """Types, fill and an example of every field; head and tail kept apart to see a change."""

    def __init__(self) -> None:
        self.rows = 0
        self._types: dict[str, Counter[str]] = {}
        self._examples: dict[str, str] = {}
        self._places: dict[str, tuple[int, int]] = {}  # order of the top-level field, depth
        self._head: list[dict[str, str]] = []
        self._tail: deque[dict[str, str]] = deque(maxlen=_EDGE_ROWS)

    def add(self, row: Row) -> None:
        self.rows += 1
        kinds: dict[str, str] = {}
        for key, value in row.items():
            place = self._places[key][0] if key in self._places else len(self._places)
            self._walk({key: value}, "", kinds, place)
        for name, kind in kinds.items():
            self._types.setdefault(name, Counter())[kind] += 1
        if len(self._head) < _EDGE_ROWS:
            self._head.append(kinds)
        self._tail.append(kinds)

    def _walk(
        self, row: Row, prefix: str, kinds: dict[str, str], place: int, depth: int = 0
    ) -> None:
        for key, value in row.items():
            name = f"{prefix}{key}"
            kinds[name] = kind = _kind_of(value)
            self._places.setdefault(name, (place, depth))
            if kind not in ("null", "empty") and name not in self._examples:
                self._examples[name] = _shorten(value)
            if isinstance(value, Mapping) and value and depth < 3 and len(self._types) < 400:
                self._walk(value, f"{name}.", kinds, place, depth + 1)

    def top_level(self) -> set[str]:
        return {name for name, (_, depth) in self._places.items() if depth == 0}

    def fields(self) -> tuple[FieldGlance, ...]:
        result = []
        for name in sorted(self._types, key=self._order):
            kinds = self._types[name]
            empty, null = kinds["empty"], kinds["null"]
            total = sum(kinds.values())
            result.append(
                FieldGlance(
                    name=name,
                    types={k: n for k, n in kinds.items() if k not in ("empty", "null")},
                    filled=total - empty - null,
                    empty=empty,
                    null=null,
                    missing=self.rows - total,
                    example=self._examples.get(name, ""),
                )
            )
        return tuple(result)

    def _order(self, name: str) -> tuple[int, int, str]:
        return (*self._places[name], name)

    def edges(self) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
        """Head and tail rows that do not overlap."""
        size = min(_EDGE_ROWS, self.rows // 2)
        return self._head[:size], list(self._tail)[len(self._tail) - size :]


def _kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "bool"
        case int():
            return "int"
        case float():
            return "float"
        case str():
            return ("JSON text" if _is_json_text(value) else "text") if value else "empty"
        case Mapping():
            return "object" if value else "empty"
        case np.ndarray():
            return "list of int" if len(value) else "empty"
        case list() | tuple():
            return f"list of {_kind_of(value[0])}" if value else "empty"
        case _:
            return type(value).__name__


def _is_json_text(value: str) -> bool:
    """By its edges only: a person wants to know that it is packed, not that it parses."""
    return (value[0], value[-1]) in (("[", "]"), ("{", "}"))


def _shorten(value: Any) -> str:
    if isinstance(value, np.ndarray):
        value = value[:12].tolist()
    if isinstance(value, str):
        text = value[: 4 * _EXAMPLE]
    else:
        text = json.dumps(_trim(value), default=str, ensure_ascii=False)
    text = _one_line(text)
    return text if len(text) <= _EXAMPLE else text[: _EXAMPLE - 3] + "..."


def _trim(value: Any) -> Any:
    """Cut a nested value down before it is turned into text."""
    if isinstance(value, str):
        return value[:_EXAMPLE]
    if isinstance(value, list | tuple):
        return [_trim(one) for one in value[:12]]
    if isinstance(value, Mapping):
        return {str(key): _trim(one) for key, one in list(value.items())[:12]}
    return value


def _drift(profile: _Profile) -> list[Finding]:
    head, tail = profile.edges()
    if len(head) < 4:
        return []
    changes = []
    names = list(dict.fromkeys(name for row in (*head, *tail) for name in row))
    for name in names:
        before, after = _state(head, name), _state(tail, name)
        if before != after and before and after and not before & after:
            changes.append(f"{name}: {_say(before)} in the head, {_say(after)} in the tail")
    if not changes:
        return []
    more = f" and {len(changes) - 4} more" if len(changes) > 4 else ""
    return [
        Finding(
            "fault",
            "schema_drift",
            "; ".join(changes[:4]) + more,
            "another writer, version or server took over in the middle of the file",
            "find out when it changed; do not mix the two halves",
        )
    ]


def _state(rows: Sequence[Mapping[str, str]], name: str) -> set[str]:
    """The kinds that a field has in more than a tenth of these rows; missing is a kind."""
    kinds = Counter(row.get(name, "missing") for row in rows)
    return {kind for kind, count in kinds.items() if count > 0.1 * len(rows)}


def _say(kinds: Iterable[str]) -> str:
    return "/".join(sorted(kinds))


class _Reservoir:
    """A uniform sample of rows, the same for the same file."""

    def __init__(self, size: int) -> None:
        self.rows: list[Row] = []
        self._size = size
        self._seen = 0
        self._chooser = random.Random(0)

    def add(self, row: Row) -> None:
        self._seen += 1
        if len(self.rows) < self._size:
            self.rows.append(row)
        elif self._size and (at := self._chooser.randrange(self._seen)) < self._size:
            self.rows[at] = row


def _sample(row: Row) -> dict[str, Any]:
    """A whole row as JSON can say it."""
    return {
        key: value.tolist()
        if isinstance(value, np.ndarray)
        else json.loads(json.dumps(value, default=str))
        for key, value in row.items()
    }


# --- answers


def _response_glance(health: ResponseHealth) -> ResponseGlance:
    lengths = np.array(health.kept_lengths, dtype=np.int64)
    numbers: dict[str, int] = {}
    if len(lengths):
        points = {"min": 0.0, "p10": 0.1, "p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
        numbers = {
            name: int(np.quantile(lengths, at, method="nearest")) for name, at in points.items()
        }
    return ResponseGlance(
        answers=health.rows,
        kept_aside=dict(health.not_ok.most_common()),
        with_reasoning=health.with_reasoning,
        finish=dict(health.finish.most_common()),
        usage=dict(health.usage.most_common()),
        completion_tokens=numbers,
        histogram=_histogram(lengths),
    )


def _histogram(lengths: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """At most eight bins of equal width, in tokens."""
    if not len(lengths):
        return ()
    low, high = int(lengths.min()), int(lengths.max())
    if low == high:
        return ((low, high, len(lengths)),)
    width = max(1, math.ceil((high - low + 1) / 8))
    counts = np.bincount((lengths - low) // width)
    return tuple(
        (low + at * width, min(low + (at + 1) * width - 1, high), int(count))
        for at, count in enumerate(counts)
    )


# --- tensors

_DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("<f8", 8),
    "F32": ("<f4", 4),
    "F16": ("<f2", 2),
    "BF16": ("<u2", 2),
    "I64": ("<i8", 8),
    "I32": ("<i4", 4),
    "I16": ("<i2", 2),
    "I8": ("<i1", 1),
    "U8": ("<u1", 1),
    "BOOL": ("<u1", 1),
}


def _look_at_tensors(reading: Reading, size: int, findings: list[Finding]) -> list[TensorGlance]:
    """Names, shapes and a sample of the values, from the file's own header. No torch needed."""
    path = reading.path
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        try:
            header = json.loads(handle.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: (one["dtype"], tuple(one["shape"]), *map(int, one["data_offsets"]))
                for name, one in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reading.fault = f"the safetensors header cannot be read: {error}"
            return []
    end = max((one[3] for one in entries.values()), default=0)
    if 8 + length + end > size:
        reading.fault = f"cut short: {size:,} bytes, the header promises {8 + length + end:,}"
        return []
    tensors, broken = [], []
    for name, (dtype, shape, start, stop) in entries.items():
        said, is_broken = _values(path, dtype, 8 + length + start, stop - start)
        tensors.append(TensorGlance(name, dtype, shape, said))
        if is_broken:
            broken.append(f"{name} ({said})")
    if broken:
        findings.append(
            Finding(
                "fault",
                "not_finite",
                f"{path.name}: {', '.join(broken[:4])}",
                "training or capture met a NaN, or an overflow in a small dtype",
                "do not use it; go back to the last checkpoint or capture again",
            )
        )
    return tensors


def _values(path: Path, dtype: str, start: int, nbytes: int) -> tuple[str, bool]:
    if dtype not in _DTYPES or not nbytes:
        return "", False
    code, width = _DTYPES[dtype]
    data = np.memmap(path, dtype=code, mode="r", offset=start, shape=(nbytes // width,))
    pieces = 16  # spread over the tensor: a bad shard of a tensor is contiguous
    step = max(1, len(data) // pieces)
    per_piece = _VALUES_PER_TENSOR // pieces
    sample = np.concatenate([data[at : at + per_piece] for at in range(0, len(data), step)])
    if dtype == "BF16":
        sample = (sample.astype(np.uint32) << 16).view(np.float32)
    if dtype == "BOOL":
        return f"{sample.mean():.0%} true", False
    bad = ~np.isfinite(sample) if sample.dtype.kind == "f" else np.zeros(1, dtype=bool)
    if bad.any():
        return f"{int(bad.sum()):,} of {len(sample):,} values are NaN or infinite", True
    if not sample.any():
        return "all zero", False
    return f"{sample.min():.4g} to {sample.max():.4g}", False


# --- printing

_MARKS = {"fault": "[bold red]FAULT[/]", "warning": "[yellow]WARNING[/]", "note": "NOTE"}


def _print_overview(report: GlanceReport, console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    table.add_column("set", overflow="fold", ratio=1)
    for title in ("rows", "size", "written", "health"):
        table.add_column(title, justify="left" if title == "health" else "right", no_wrap=True)
    common = _common_folder([one.name for one in report.sets])
    for one in report.sets:
        table.add_row(
            escape(one.name.removeprefix(common)),
            _rows_text(one),
            _size(one.bytes),
            f"{_age(one)} ago",
            _worst(one),
        )
    if common:
        console.print(f"in {common}", style="bold", highlight=False, markup=False)
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
    console.print(one.name, style="bold", highlight=False, markup=False)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("alive", _alive(one))
    grid.add_row("what", _what(one))
    if one.malformed:
        grid.add_row("broken", escape("\n".join(one.malformed)))
    console.print(grid)
    if with_fields and one.fields:
        console.print(_field_table(one))
    if with_fields and one.tensors:
        console.print(_tensor_table(one))
    if one.responses:
        console.print(_response_grid(one.responses))
    _print_findings(one, console)
    for row in one.samples:
        _print_sample(row, console)


def _response_grid(health: ResponseGlance) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in _response_lines(health):
        grid.add_row(title, escape(text))
    return grid


def _alive(one: SetGlance) -> str:
    is_fresh = 0 <= one.age_seconds < _FRESH_SECONDS
    state = "at rest" if not is_fresh else "being written" if one.ends_in_half_line else "fresh"
    half = "; ends in half a line" if one.ends_in_half_line else ""
    return f"last write {_age(one)} ago ({state}), {_size(one.bytes)}{half}"


def _what(one: SetGlance) -> str:
    if one.tensors and not one.rows:
        return f"{one.format}: {len(one.tensors):,} tensors"
    read = "all read" if one.rows_read == one.rows else f"{one.rows_read:,} read as a sample"
    return f"{_rows_text(one)} rows ({read}), {one.format}, {one.kind}"


def _rows_text(one: SetGlance) -> str:
    if one.rows is None:
        return "-" if one.tensors else "unknown"
    return f"{one.rows:,}" if one.rows_exact else f"about {one.rows:,}"


def _response_lines(health: ResponseGlance) -> list[tuple[str, str]]:
    lines = []
    if health.answers:
        reasoning = health.with_reasoning / health.answers
        lines += [
            ("tokens", f"usage.completion_tokens is {_mix(health.usage, health.answers)}"),
            ("reason", f"{reasoning:.0%} of {health.answers:,} answers have reasoning"),
            ("finish", _mix(health.finish, health.answers)),
        ]
    if health.kept_aside:
        lines.append(("aside", ", ".join(f"{k} {n:,}" for k, n in health.kept_aside.items())))
    if health.completion_tokens:
        lines.append(
            ("length", "  ".join(f"{k} {n:,}" for k, n in health.completion_tokens.items()))
        )
        most = max(count for _, _, count in health.histogram)
        for low, high, count in health.histogram:
            bar = "#" * math.ceil(24 * count / most)
            lines.append(("", f"{low:>7,} to {high:<7,} {bar:<24} {count:,}"))
    return lines


def _mix(counts: Mapping[str, int], total: int) -> str:
    return ", ".join(f"{name} {count:,} ({count / total:.0%})" for name, count in counts.items())


def _field_table(one: SetGlance) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("field", overflow="ellipsis", no_wrap=True, min_width=_widest(one))
    table.add_column("type", overflow="fold", min_width=9)
    table.add_column("filled", justify="right", no_wrap=True)
    table.add_column("otherwise", overflow="fold", min_width=10)
    table.add_column("example", overflow="ellipsis", no_wrap=True, ratio=1)
    for field in one.fields:
        rest = [("empty", field.empty), ("null", field.null), ("missing", field.missing)]
        table.add_row(
            escape(_one_line(field.name)),
            "/".join(field.types) or "-",
            f"{field.filled / one.rows_read:.0%}",
            " ".join(f"{count:,} {name}" for name, count in rest if count) or "-",
            escape(field.example),
        )
    return table


def _widest(one: SetGlance) -> int:
    return min(28, max(cell_len(_one_line(field.name)) for field in one.fields))


def _tensor_table(one: SetGlance) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("tensor", "type", "shape", "values"):
        table.add_column(title, overflow="fold")
    for tensor in one.tensors[:60]:
        shape = " x ".join(f"{size:,}" for size in tensor.shape) or "scalar"
        table.add_row(escape(_one_line(tensor.name)), tensor.dtype, shape, tensor.values)
    if len(one.tensors) > 60:
        table.add_row(f"and {len(one.tensors) - 60:,} more", "", "", "")
    return table


def _print_findings(one: SetGlance, console: Console) -> None:
    if not one.findings:
        console.print("healthy: nothing to report" if one.rows_read or one.tensors else "")
        return
    for finding in one.findings:
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold")
        grid.add_row(_MARKS[finding.severity], f"{finding.name}: {escape(finding.seen)}")
        grid.add_row("  why", escape(finding.cause))
        grid.add_row("  do", escape(finding.cure))
        console.print(grid, highlight=False)


def _print_sample(row: Mapping[str, Any], console: Console) -> None:
    name = row.get("sample_id", row.get("id", "sample"))
    console.print(f"--- {_one_line(str(name))[:70]}", style="bold", markup=False)
    for key in ("messages", "reasoning", "reasoning_content", "content", "tool_calls"):
        if row.get(key):
            value = row[key]
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            console.print(f"[{key}]", style="bold", markup=False)
            console.print(_printable(text), markup=False, highlight=False)
    rest = {
        key: value
        for key, value in row.items()
        if key not in ("messages", "reasoning", "reasoning_content", "content", "tool_calls")
    }
    text = json.dumps(rest, ensure_ascii=False)
    console.print(_printable(text), markup=False, highlight=False, style="dim")


def _one_line(text: str) -> str:
    return _printable(" ".join(text.split()))


def _printable(text: str) -> str:
    """No control character of somebody's data reaches the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "�" for char in text)


def _age(one: SetGlance) -> str:
    return duration(one.age_seconds) if one.age_seconds >= 0 else "unknown"


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
