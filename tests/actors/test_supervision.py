"""When a server is started again, when a silent one counts as gone, and what is worth an event."""

from dataclasses import replace

import pytest

from actors.config import Supervised
from actors.protocol import Load
from actors.supervision import ServerStatus, events_between, restart_delay

CONFIG = Supervised(count=1, restarts_per_hour=3, restart_seconds=5.0)
OWN = ServerStatus("generate-0", borrowed=False)
THEIRS = ServerStatus("generate-0", borrowed=True, url="http://a")
LOAD = Load(running=1, waiting=0, used_tokens=10)


def names(before, after):
    return [name for name, _ in events_between(before, after)]


def ready(status, incarnation="one", starts=1):
    return replace(
        status, state="ready", url="http://a", incarnation=incarnation, starts=starts, load=LOAD
    )


def test_the_delay_doubles_and_the_fourth_death_within_an_hour_is_the_last():
    deaths, delays = [], []
    for now in (0.0, 600.0, 1200.0, 1800.0):
        deaths.append(now)
        delays.append(restart_delay(deaths, now, CONFIG, was_ready=True))
    assert delays == [5.0, 10.0, 20.0, None]


def test_deaths_of_an_earlier_hour_are_forgiven():
    deaths = [0.0, 10.0, 20.0, 3700.0]
    assert restart_delay(deaths, 3700.0, CONFIG, was_ready=True) == 5.0


def test_the_delay_has_a_limit():
    config = CONFIG.model_copy(update={"restarts_per_hour": 100})
    assert restart_delay([0.0] * 50, 0.0, config, was_ready=True) == 300.0


def test_what_never_was_ready_is_tried_once_more_only():
    assert restart_delay([0.0], 0.0, CONFIG, was_ready=False) == 5.0
    assert restart_delay([0.0, 1.0], 1.0, CONFIG, was_ready=False) is None
    never = CONFIG.model_copy(update={"restarts_per_hour": 0})
    assert restart_delay([0.0], 0.0, never, was_ready=False) is None


def test_a_report_says_whether_to_send_and_what_is_known():
    report = replace(ready(OWN), seen_at=7.0, max_running_requests=8).report()
    assert (report.url, report.ready, report.load, report.seen_at) == ("http://a", True, LOAD, 7.0)
    assert report.max_total_num_tokens is None
    assert report.max_running_requests == 8
    for state in ("starting", "checking", "restarting", "left", "unfit", "failed"):
        assert not replace(ready(OWN), state=state).report().ready


@pytest.mark.parametrize("status", [OWN, THEIRS])
def test_a_supervisor_that_was_heard_says_how_it_is(status):
    assert ready(status).after_silence(14.0) == ready(status)


def test_after_a_silence_the_load_is_unknown_and_an_own_server_gone_with_its_supervisor():
    assert ready(THEIRS).after_silence(3600.0) == replace(ready(THEIRS), load=None)
    assert ready(OWN).after_silence(20.0) == replace(ready(OWN), load=None)
    lost = ready(OWN).after_silence(61.0)
    assert (lost.state, lost.load) == ("restarting", None)
    failed = replace(ready(OWN), state="failed", load=None)
    assert failed.after_silence(3600.0) == failed


def test_a_life_in_events():
    start = replace(OWN, starts=1)
    answering = replace(start, state="checking", url="http://a", incarnation="one")
    dead = replace(ready(OWN), state="restarting", error="code 137")
    again = replace(dead, state="starting", starts=2)
    assert names(OWN, start) == ["server_started"]
    assert names(start, answering) == []
    assert names(answering, ready(OWN)) == ["server_ready"]
    assert names(ready(OWN), ready(OWN)) == []
    assert names(ready(OWN), dead) == ["server_died", "server_restarting"]
    assert names(dead, again) == ["server_started"]
    assert names(again, replace(again, state="failed")) == ["server_failed"]
    assert names(answering, replace(answering, state="unfit")) == ["server_unfit"]
    (_, fields), *_ = events_between(ready(OWN), dead)
    assert fields == {"server": "generate-0", "url": "http://a", "error": "code 137"}


def test_a_death_between_two_looks_is_told():
    assert names(ready(OWN), ready(OWN, "two", 2)) == [
        "server_died",
        "server_started",
        "server_ready",
    ]


def test_attached_servers_join_and_leave():
    assert names(THEIRS, ready(THEIRS)) == ["server_joined"]
    assert names(ready(THEIRS), replace(ready(THEIRS), state="left")) == ["server_left"]


def test_an_events_error_keeps_its_first_sentence_and_the_end_of_the_log():
    dead = replace(ready(OWN), state="failed", error=f"code 137; {'x' * 9999} the end")
    (_, fields), *_ = events_between(ready(OWN), dead)
    assert fields["error"].startswith("code 137; xxx")
    assert fields["error"].endswith("xxx the end")
    assert len(fields["error"]) < 2100
