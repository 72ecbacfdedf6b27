"""How fast a run went over time, and what happened to it: restarts, stops, servers that died."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipelines.charts import Line, Mark, line_chart
from pipelines.report_look import Look
from pipelines.telemetry import duration

Kind = Literal["restart", "stop", "alarm", "note"]

_IDLE_SECONDS = 600.0  # a longer wait for a row is cut out of the axis, and marked
_BINS = 120
_PER_BIN = 4  # fewer rows in a bin show chance, not speed
_BIN_SECONDS = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
_MOMENTS = 40
_ALARMS = {
    "server_died": "server {server} died: {error}",
    "server_left": "server {server} left: {error}",
    "server_failed": "server {server} failed for good: {error}",
    "server_unfit": "server {server} does not fit the recipe: {error}",
}


@dataclass(frozen=True)
class Moment:
    """Something that happened, at a second since the epoch."""

    at: float
    kind: Kind
    said: str


def moments(events: Sequence[Mapping[str, Any]]) -> list[Moment]:
    """What a person wants to see of an event log, in order."""
    found: list[Moment] = []
    began: dict[str, str] = {}  # each stage that was started, and how that start ended
    for event in events:
        at, name = float(event["at"]), str(event["event"])
        stage = str(event.get("stage", ""))
        if name == "stage_started":
            if stage in began:
                end = began[stage] or "it was killed"
                found.append(Moment(at, "restart", f"{stage} went on, after {end}"))
            began[stage] = ""
        elif name == "stage_finished":
            began.pop(stage, None)
        elif name == "stage_stopped":
            began[stage] = f"it stopped ({event.get('error', 'unknown')})"
            found.append(Moment(at, "stop", f"{stage} stopped: {event.get('error', 'unknown')}"))
        elif name == "quality_stop":
            said = f"quality stop, {event.get('scope', '')}: {event.get('reason', '')}"
            found.append(Moment(at, "stop", said))
        elif name == "failed_reopened":
            found.append(Moment(at, "note", "failed rows were asked again"))
        elif name in _ALARMS:
            facts = {"server": event.get("server", "?"), "error": event.get("error") or "unknown"}
            found.append(Moment(at, "alarm", _ALARMS[name].format(**facts)))
    return found


def timeline(look: Look, rows: Iterable[pa.Table]) -> dict[str, Any] | None:
    """Charts of tokens a second, and the numbered moments. None where nothing has a time."""
    happened = moments(look.events)
    charts = [one for one in (_generation(rows, happened), _capture(look)) if one]
    if not charts and not happened:
        return None
    half = _MOMENTS // 2
    kept = set(range(len(happened))[:half]) | set(range(len(happened))[-half:])
    return {
        "charts": charts,
        "left_out": len(happened) - len(kept),
        "moments": [
            {"number": at + 1, "kind": one.kind, "when": said_time(one.at), "said": one.said}
            for at, one in enumerate(happened)
            if at in kept
        ],
    }


def said_time(at: float) -> str:
    """A second since the epoch for a person, in UTC."""
    return datetime.fromtimestamp(at, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


@dataclass(frozen=True)
class WorkClock:
    """Time without long waits: `at` of the first, then each, moment of work, and of the waits."""

    times: npt.NDArray[np.float64]  # ascending, seconds since the epoch
    worked: npt.NDArray[np.float64]  # seconds of work until then

    @classmethod
    def of(cls, times: npt.NDArray[np.float64]) -> "WorkClock":
        """From the times at which something was done; not empty."""
        ordered = np.sort(times)
        steps = np.diff(ordered, prepend=ordered[0])
        return cls(ordered, np.cumsum(np.where(steps > _IDLE_SECONDS, 0.0, steps)))

    def read(self, at: float) -> float | None:
        """Seconds of work until a moment; None before the first and long after the last."""
        if at < self.times[0] - _IDLE_SECONDS or at > self.times[-1] + _IDLE_SECONDS:
            return None
        return float(np.interp(at, self.times, self.worked))

    def waits(self) -> list[tuple[float, float]]:
        """Each long wait: seconds of work before it, and how long it was."""
        steps = np.diff(self.times)
        (cuts,) = np.nonzero(steps > _IDLE_SECONDS)
        return [(float(self.worked[at]), float(steps[at])) for at in cuts]


def _generation(rows: Iterable[pa.Table], happened: Sequence[Moment]) -> dict[str, Any] | None:
    answered = [one.filter(one["has_reply"]) for one in rows]
    times = np.concatenate([np.zeros(0), *(one["at"].to_numpy() for one in answered)])
    tokens = np.concatenate([np.zeros(0), *(one["output"].to_numpy() for one in answered)])
    if len(times) < 2:
        return None
    clock = WorkClock.of(times)
    marks = [(clock.read(one.at), str(at + 1), one.kind) for at, one in enumerate(happened)]
    waits = clock.waits()
    chart = _speed_chart(
        "Output tokens a second, all sets",
        clock.worked,
        tokens[np.argsort(times, kind="stable")],
        [(at, number, kind) for at, number, kind in marks if at is not None],
        [at for at, _ in waits],
    )
    first, last = said_time(times.min()), said_time(times.max())
    said = f"{int(tokens.sum()):,} tokens from {first} to {last} UTC"
    if waits:
        longest = duration(max(length for _, length in waits))
        said += f"; waits over ten minutes are cut out (dotted): {len(waits)}, at most {longest}"
    return {"title": "Generation: output tokens a second", "chart": chart, "said": said}


def _capture(look: Look) -> dict[str, Any] | None:
    shards = [
        (float(one["at"]), int(one["tokens"]))
        for one in look.events
        if one["event"] == "shard_captured" and isinstance(one.get("tokens"), int)
    ]
    if len(shards) < 3:
        return None
    times = np.array([at for at, _ in shards])
    clock = WorkClock.of(times)
    tokens = np.array([count for _, count in shards], float)
    chart = _speed_chart("Captured tokens a second", clock.worked, tokens, [], [])
    said = f"{int(tokens.sum()):,} tokens in {len(shards):,} shards"
    return {"title": "Capture: tokens a second", "chart": chart, "said": said}


def _speed_chart(
    title: str,
    worked: npt.NDArray[np.float64],  # ascending seconds
    tokens: npt.NDArray[np.float64],
    marks: Sequence[tuple[float, str, str]],
    waits: Sequence[float],
) -> Any:
    span = float(worked[-1])
    bins = max(1, min(_BINS, len(worked) // _PER_BIN))
    width = next((one for one in _BIN_SECONDS if span / one <= bins), span / bins)
    edges = np.arange(0.0, span + width, width)
    if len(edges) < 2:
        edges = np.array([0.0, float(width)])
    sums, _ = np.histogram(worked, bins=edges, weights=tokens)
    covered = np.minimum(edges[1:], max(span, width)) - edges[:-1]
    unit, seconds = _unit(span)
    middles = (edges[:-1] + covered / 2) / seconds
    points = [
        (float(x), float(y / part))
        for x, y, part in zip(middles, sums, covered, strict=True)
        if part
    ]
    return line_chart(
        [Line("tokens a second", tuple(points))],
        title=title,
        x=f"{unit} of work",
        y="tokens a second",
        floor=0.0,
        start=0.0,
        marks=[Mark(at / seconds, label, kind) for at, label, kind in marks]
        + [Mark(at / seconds, "", "wait") for at in waits],
    )


def _unit(span: float) -> tuple[str, int]:
    if span < 600:
        return "seconds", 1
    return ("minutes", 60) if span < 3 * 3600 else ("hours", 3600)
