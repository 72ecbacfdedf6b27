"""Events stay whole lines; progress says count, rate and time left."""

import json
import logging

from pipelines.store import RunFolder
from pipelines.telemetry import EventLog, Progress, duration


def test_events_are_json_lines_in_order(tmp_path):
    run = RunFolder(tmp_path)
    for step in range(3):
        EventLog(run).append("step", number=step)
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [line["number"] for line in lines] == [0, 1, 2]
    assert all(line["event"] == "step" and line["at"] > 0 for line in lines)


def test_progress_prints_when_time_has_passed_and_at_the_end(caplog):
    caplog.set_level(logging.INFO)
    progress = Progress("rows", total=10, unit="rows", every_seconds=3600)
    progress.advance(4)
    assert caplog.messages == []
    progress.advance(6, {"ok": 9})
    assert len(caplog.messages) == 1
    assert "10/10 rows (100%)" in caplog.messages[0]
    assert "ok 9" in caplog.messages[0]


def test_durations_read_as_a_person_says_them():
    assert [duration(s) for s in (0, 59.9, 60, 185, 7800, float("nan"))] == [
        "0s",
        "59s",
        "1m00s",
        "3m05s",
        "2h10m",
        "unknown",
    ]
