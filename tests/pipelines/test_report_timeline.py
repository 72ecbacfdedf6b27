"""Restarts, stops and alarms are found in the events; long waits are cut out of the axis."""

import numpy as np
import pytest

from pipelines.report_timeline import Moment, WorkClock, moments


def event(at: float, name: str, **facts) -> dict:
    return {"at": at, "event": name, **facts}


def said(*events: dict) -> list[tuple[str, str]]:
    return [(one.kind, one.said) for one in moments(events)]


def test_a_stage_that_starts_and_ends_is_nothing_to_tell():
    start, end = event(1, "stage_started", stage="train"), event(2, "stage_finished", stage="train")
    assert said(start, end) == []
    assert said(start, end, start, end) == [], "made again, with --from"


def test_a_start_without_an_end_before_it_is_a_restart_after_a_kill():
    start = event(1, "stage_started", stage="generate")
    assert said(start, start) == [("restart", "generate went on, after it was killed")]


def test_a_stop_is_told_with_its_error_and_the_restart_after_it():
    start = event(1, "stage_started", stage="generate")
    stop = event(2, "quality_stop", scope="set chat", reason="empty")
    end = event(3, "stage_stopped", stage="generate", error="QualityStop")
    assert said(start, stop, end, start) == [
        ("stop", "quality stop, set chat: empty"),
        ("stop", "generate stopped: QualityStop"),
        ("restart", "generate went on, after it stopped (QualityStop)"),
    ]


@pytest.mark.parametrize("name", ["server_died", "server_left", "server_failed", "server_unfit"])
def test_a_lost_server_is_an_alarm_with_its_error(name):
    (one,) = moments([event(5, name, server="s0", url="", error="exit code 1")])
    assert one == Moment(5.0, "alarm", one.said)
    assert "s0" in one.said
    assert "exit code 1" in one.said


def test_the_clock_of_work_stands_still_while_nothing_comes():
    clock = WorkClock.of(np.array([0.0, 10.0, 20.0, 7220.0, 7230.0]))
    assert clock.worked.tolist() == [0, 10, 20, 20, 30]
    assert clock.waits() == [(20.0, 7200.0)]
    assert clock.read(15.0) == 15.0
    assert clock.read(4000.0) == 20.0, "in the wait"
    assert clock.read(7225.0) == 25.0
    assert clock.read(-601.0) is None
    assert clock.read(7831.0) is None
