"""What the event log says of a run: which stage is open, what stopped it, what is past."""

import json
from typing import Any

from pipelines.errors import BadRecipe
from pipelines.store import RunFolder

Events = list[dict[str, Any]]

_STAGE_EVENTS = ("stage_started", "stage_finished", "stage_stopped")


def read_events(run: RunFolder) -> Events:
    """Every change of state, in order. Raises `BadRecipe` for a line that is none.

    A half line at the end is a writer's that was killed. Lines of figures say that time goes by,
    and nothing of the run's state: they are left out.
    """
    if not run.events.exists():
        return []
    events = []
    content = run.events.read_bytes()
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line:
            continue
        try:
            event = json.loads(line)
            events.append({"event": event["event"], "at": event["at"], **event})
        except (ValueError, KeyError, TypeError) as error:
            if not content.endswith(b"\n") and number == content.count(b"\n") + 1:
                break
            raise BadRecipe(
                f"{run.events}:{number} is not an event: {error!r}",
                expected="one JSON object a line, with at and event",
                change="take that line out",
            ) from error
    return [event for event in events if event["event"] != "figures"]


def started_at(events: Events, stage: str) -> float | None:
    """When a stage began the last time."""
    for event in reversed(events):
        if event["event"] == "stage_started" and event["stage"] == stage:
            return float(event["at"])
    return None


def open_stage(events: Events) -> str | None:
    """The stage that began and has not said how it ended."""
    for event in reversed(events):
        if event["event"] in _STAGE_EVENTS:
            return str(event["stage"]) if event["event"] == "stage_started" else None
    return None


def last_error(events: Events) -> str | None:
    """What ended the last stage, if it ended by itself and early."""
    if not events or events[-1]["event"] != "stage_stopped":
        return None
    return f"{events[-1]['error']} in {events[-1]['stage']}"


def quality_stops(events: Events) -> tuple[list[str], list[str]]:
    """What gates stopped the run for: past stops, which rows have passed since, and current ones.

    A stop is past once the canary has passed again, or the stage is done.
    """
    past: list[str] = []
    current: list[str] = []
    for event in events:
        done = event["event"] == "stage_finished" and event["stage"] == "generate"
        if event["event"] == "quality_stop":
            current.append(f"quality stop, {event['scope']}: {event['reason']}")
        elif done or event["event"] == "canary_passed":
            past, current = past + current, []
    return past, current
