"""What is in these files, are they alive, are they healthy, and what to do about it. Read-only.

Works on any JSONL, JSON, Parquet, Arrow or safetensors file, here or in a store, and on files that
still grow. The parts are in `pipelines/glancing/`.
"""

import random
import time
from collections.abc import Callable, Iterable, Sequence

from pipelines.errors import BadRecipe
from pipelines.glancing.alive import FRESH_SECONDS, SILENT_SECONDS, Alive, Sight, alive, sight_of
from pipelines.glancing.compare import compare
from pipelines.glancing.fields import Profile
from pipelines.glancing.findings import Finding, found, in_order
from pipelines.glancing.formats import read_rows
from pipelines.glancing.health import looks_like_responses
from pipelines.glancing.look import Look, Wish
from pipelines.glancing.places import FileSet, Place, sets_of
from pipelines.glancing.reading import SAMPLE_BYTES, Reading, short
from pipelines.glancing.report import GlanceReport, ResponseGlance, SetGlance, TensorGlance
from pipelines.glancing.verdict import verdict
from pipelines.words import duration

_FILES = 64  # of a large set are opened; the others count by their bytes
_LEAST_BYTES = 256 << 10  # that are read of one of them


def glance(
    paths: Sequence[str],
    *,
    full: bool = False,
    show: int = 0,
    field: str | None = None,
    before: GlanceReport | None = None,
    clock: Callable[[], float] = time.time,
    wait_seconds: float = 0.3,
) -> GlanceReport:
    """Look at files, folders, globs and URIs.

    Large files are sampled at head, tail and random places unless `full`. `show` keeps that many
    whole samples of each set; without it no value of a row leaves this function, but for ids and
    for those of `field`. `before` is an earlier look, from which speed is told; without it a file
    that somebody writes is looked at again after `wait_seconds`.
    Raises `BadRecipe` for a path where nothing is, and for a field that no row has.
    """
    wish = Wish(show, field, full)
    earlier = {} if before is None else {one.name: one.alive for one in before.sets}
    sets = tuple(
        _look_at_set(one, wish, earlier.get(one.name), clock, wait_seconds)
        for one in sets_of(paths)
    )
    _check_field(sets, field)
    is_pair = len(paths) == len(sets) == 2
    return GlanceReport(sets, compare(*sets) if is_pair else None)


def _look_at_set(
    files: FileSet,
    wish: Wish,
    before: Alive | None,
    clock: Callable[[], float],
    wait_seconds: float,
) -> SetGlance:
    first = sight_of(files.places, clock)
    look, readings, tensors = Look(wish), list[Reading](), list[TensorGlance]()
    chosen, budget = _chosen(files.places, first.bytes, wish)
    for place in chosen:
        reading = read_rows(place, budget=budget)
        readings.append(reading)
        try:
            tensors += _read(reading, look)
        except OSError as error:
            reading.find("no_answer", short(error))
    rows, exact = _row_count(readings, first.bytes)
    since = first if before is None else Sight(before.bytes, None, before.looked_at)
    living = alive(
        files.places,
        since,
        rows_per_byte=rows / first.bytes if rows and first.bytes else None,
        clock=clock,
        wait_seconds=wait_seconds,
    )
    kind = _kind(look.profile, bool(tensors))
    findings = [
        *files.findings,
        *_file_findings(readings, living),
        *look.profile.findings(),
        *verdict(look.health, is_responses=kind == "responses"),
    ]
    if rows == 0 and not findings:
        findings.append(_no_rows(files.name))
    return SetGlance(
        name=files.name,
        files=len(files.places),
        files_read=len(readings),
        format="/".join(sorted({one.format for one in readings})) or "unknown",
        kind=kind,
        alive=living,
        ends_in_half_line=any(one.ends_in_half_line for one in readings),
        rows=rows,
        rows_exact=exact,
        rows_read=look.profile.rows,
        malformed=_malformed(readings),
        malformed_count=sum(one.notes.lost_count for one in readings),
        fields=look.profile.fields(),
        field=None if look.drill is None else look.drill.result(),
        tensors=tuple(tensors),
        responses=ResponseGlance.of(look.health, look.languages()) if kind == "responses" else None,
        findings=in_order(_joined(findings)),
        samples=look.samples(),
    )


def _chosen(places: Sequence[Place], size: int, wish: Wish) -> tuple[Sequence[Place], int | None]:
    """The files to open, and how many bytes to read of each; None for all."""
    if wish.full:
        return places, None
    if size <= SAMPLE_BYTES:
        return places, SAMPLE_BYTES
    if len(places) > _FILES:
        middle = random.Random(len(places)).sample(range(1, len(places) - 1), _FILES - 2)
        places = [places[at] for at in (0, *sorted(middle), len(places) - 1)]
    return places, max(SAMPLE_BYTES // len(places), _LEAST_BYTES)


def _read(reading: Reading, look: Look) -> Iterable[TensorGlance]:
    if reading.format == "safetensors" and not reading.findings:
        from pipelines.glancing.tensors import look_at_tensors  # NumPy takes a while

        return look_at_tensors(reading)
    if reading.budget is None:
        from pipelines.glancing.whole import is_worth_it, look_at_all  # so does multiprocessing

        if is_worth_it(reading):
            look_at_all(reading, look)
            return ()
    look.add(reading.rows)
    return ()


def _row_count(readings: Sequence[Reading], size: int) -> tuple[int | None, bool]:
    """Rows of all files, and whether that is exact; files not opened count by their bytes."""
    counted = [one for one in readings if one.row_count is not None]
    if not counted:
        return None, False
    rows = sum(one.row_count for one in counted if one.row_count is not None)
    seen = sum(one.size for one in readings)
    exact = len(counted) == len(readings) and all(one.rows_exact for one in counted)
    if seen < size:
        return round(rows * size / max(seen, 1)), False
    return rows, exact


def _kind(profile: Profile, has_tensors: bool) -> str:
    names = profile.top_level()
    if looks_like_responses(names):
        return "responses"
    if {"messages", "prompt_ids"} & names:
        return "prompts"
    return "tensors" if has_tensors else "rows"


def _file_findings(readings: Sequence[Reading], living: Alive) -> Iterable[Finding]:
    several = len(readings) > 1
    for one in readings:
        yield from one.findings
        yield from one.notes.findings(f"{one.place.name}: " if several else "")
        is_old = living.age_seconds is not None and living.age_seconds > FRESH_SECONDS
        if one.ends_in_half_line and is_old and not living.writers:
            age = duration(living.age_seconds or 0.0)
            yield found("half_line_at_end", f"the last line is cut, nothing was written for {age}")
    if living.writers and living.age_seconds is not None and living.age_seconds > SILENT_SECONDS:
        who = ", ".join(f"{one.name} (pid {one.pid})" for one in living.writers[:3])
        yield found("writer_silent", f"{who} wrote last {duration(living.age_seconds)} ago")


def _no_rows(name: str) -> Finding:
    aside = "_rejected" in name
    seen = "there is no row" + (": nothing was rejected" if aside else "")
    return found("no_rows", seen, "note" if aside else "fault")


def _joined(findings: Iterable[Finding]) -> Iterable[Finding]:
    """One finding of each name and severity, which tells of a few files and counts the others."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for one in findings:
        groups.setdefault((one.name, one.severity), []).append(one)
    for (name, _), members in groups.items():
        more = f"; and {len(members) - 3} more" if len(members) > 3 else ""
        seen = "; ".join(one.seen for one in members[:3]) + more
        yield found(name, seen, members[0].severity)


def _malformed(readings: Sequence[Reading]) -> tuple[str, ...]:
    several = len(readings) > 1
    return tuple(
        f"{reading.place.name + ' ' if several else ''}{lost.at}: {lost.reason}"
        for reading in readings
        for lost in reading.notes.lost
    )[:10]


def _check_field(sets: Sequence[SetGlance], field: str | None) -> None:
    drills = [one.field for one in sets if one.field is not None]
    if not any(one.rows for one in drills) or any(one.missing < one.rows for one in drills):
        return
    names = list(dict.fromkeys(one.name for each in sets for one in each.fields))
    raise BadRecipe(
        f"no row that was read has a field {field}",
        expected=f"one of {', '.join(names[:20])}",
        change="mend --field, or read all rows with --full",
    )
