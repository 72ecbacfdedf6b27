"""The event log says which stage is open, and which stops are past."""

import pytest

from pipelines.errors import BadRecipe
from pipelines.status_events import (
    last_error,
    open_stage,
    quality_stops,
    read_events,
    started_at,
)
from pipelines.store import RunFolder

STOP = {"event": "quality_stop", "at": 2.0, "scope": "set chat", "reason": "bad"}


def event(name: str, stage: str = "generate", at: float = 1.0, **facts) -> dict:
    return {"event": name, "at": at, "stage": stage, **facts}


def test_a_stage_is_open_until_it_says_how_it_ended():
    assert open_stage([]) is None
    assert open_stage([event("stage_started"), event("server_ready")]) == "generate"
    assert open_stage([event("stage_started"), event("stage_stopped")]) is None
    again = [event("stage_started"), event("stage_finished"), event("stage_started", "capture")]
    assert open_stage(again) == "capture"


def test_a_stage_began_when_it_began_the_last_time():
    events = [event("stage_started", at=1.0), event("stage_started", at=5.0)]
    assert started_at(events, "generate") == 5.0
    assert started_at(events, "train") is None


def test_a_stop_is_past_once_the_canary_passed_or_the_stage_is_done():
    assert quality_stops([STOP]) == ([], ["quality stop, set chat: bad"])
    assert quality_stops([STOP, event("stage_started")])[1] == ["quality stop, set chat: bad"]
    for mended in (event("canary_passed"), event("stage_finished")):
        assert quality_stops([STOP, mended]) == (["quality stop, set chat: bad"], [])
    assert quality_stops([STOP, event("stage_finished", "prepare")])[0] == []
    past, current = quality_stops([STOP, event("canary_passed"), STOP])
    assert (len(past), len(current)) == (1, 1)


def test_an_error_is_the_last_one_only():
    stopped = event("stage_stopped", error="QualityStop")
    assert last_error([stopped]) == "QualityStop in generate"
    assert last_error([stopped, event("stage_started")]) is None
    assert last_error([]) is None


def test_a_half_line_is_forgiven_at_the_end_and_nowhere_else(tmp_path):
    run = RunFolder(tmp_path)
    assert read_events(run) == []
    run.events.write_text('{"at": 1, "event": "a"}\n{"at": 2, "ev')
    assert [one["event"] for one in read_events(run)] == ["a"]
    for broken in ('{"at": 2, "ev\n{"at": 1, "event": "a"}\n', '{"at": 2}\n', "[]\n", "[]\n{"):
        run.events.write_text(broken)
        with pytest.raises(BadRecipe, match=r"events\.jsonl:1"):
            read_events(run)


def test_figures_are_no_change_of_state(tmp_path):
    run = RunFolder(tmp_path)
    run.events.write_text('{"at": 1, "event": "a"}\n{"at": 2, "event": "figures"}\n')
    assert [one["event"] for one in read_events(run)] == ["a"]
