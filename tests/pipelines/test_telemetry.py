"""Events stay whole lines; progress says count, rate and time left."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipelines.metrics import Reading, UndeclaredMetric
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog, Figures, Progress, duration


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


def test_counters_are_handed_over_once_and_gauges_again_and_again():
    figures = Figures()
    rows = Reading("eyas_rows", 2, {"dataset": "chat", "status": "ok"})
    figures.take([rows, Reading("eyas_train_loss", 3.0), rows, Reading("eyas_train_loss", 2.5)])
    assert {one.series: one.value for one in figures.drain()} == {
        'eyas_rows{dataset="chat",status="ok"}': 4,
        "eyas_train_loss": 2.5,
    }
    assert [one.series for one in figures.drain()] == ["eyas_train_loss"]


def test_every_observation_is_handed_over_once_and_those_that_nobody_wants_do_not_grow():
    figures = Figures()
    seen = [Reading("eyas_row_latency_seconds", value) for value in (1.0, 2.0, 2.0)]
    figures.take(seen)
    assert figures.drain() == seen
    assert figures.drain() == []
    for _ in range(20):
        figures.take([seen[0]] * 1000)
    assert 1000 < len(figures.drain()) < 20_000


def test_a_summary_has_totals_and_latest_values():
    figures = Figures()
    rows = Reading("eyas_rows", 2, {"dataset": "chat", "status": "ok"})
    assert figures.summary() == {}
    figures.take([rows, Reading("eyas_train_loss", 2.5)])
    figures.drain()
    figures.take([rows])
    assert figures.summary() == {
        'eyas_rows{dataset="chat",status="ok"}': 4,
        "eyas_train_loss": 2.5,
    }


def test_readings_are_taken_all_or_none():
    figures = Figures()

    def readings():
        yield Reading("eyas_train_loss", 2.5)
        yield Reading("eyas_nothing", 1.0)

    with pytest.raises(UndeclaredMetric):
        figures.take(readings())
    assert figures.summary() == {}


def test_many_threads_lose_no_count():
    figures = Figures()

    def add(_: int) -> None:
        for _ in range(200):
            figures.take([Reading("eyas_capture_tokens", 1)])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add, range(8)))
    assert figures.summary() == {"eyas_capture_tokens": 1600}


def test_progress_shows_where_it_is():
    figures = Figures()
    progress = Progress("capture", total=10, done=3, unit="tokens", figures=figures)
    progress.advance(4)
    assert figures.summary() == {
        'eyas_progress_done{stage="capture",unit="tokens"}': 7,
        'eyas_progress_wanted{stage="capture",unit="tokens"}': 10,
    }
