"""The driver's watch: what it makes of reports, of silence, and of servers that are gone."""

import pytest

from actors.errors import ServerFailed
from pipelines.generate_watch import Watch
from pipelines.monitor import Monitor
from pipelines.telemetry import Progress
from tests.pipelines.test_monitor import report
from tests.support.profiles import gates

ROWS = 8


class Letters:
    """A mailbox without Ray."""

    def __init__(self):
        self.waiting, self.is_open = [], True

    def take(self):
        items, self.waiting = self.waiting, []
        return items

    def close(self):
        self.is_open = False


def watch_of(letters, *, check=lambda: None, **changes):
    counted = []
    watch = Watch(
        letters,
        Monitor(gates(canary_rows=ROWS, max_rejected_share=0.5, **changes)),
        Progress("generate", total=100, unit="rows"),
        check,
        counted.extend,
        stride=ROWS // 2,
    )
    return watch, counted


def test_good_rows_are_counted_and_the_tap_stays_open():
    letters = Letters()
    watch, counted = watch_of(letters)
    letters.waiting = [report(number) for number in range(20)]
    assert watch.look()
    assert len(counted) == 20
    assert letters.is_open
    assert not watch.is_over


def test_a_bad_window_among_many_rows_that_came_at_once_is_found_and_all_after_it_is_suspect():
    """Judged once at the end, the window would hold the last rows only, which are good."""
    letters = Letters()
    watch, counted = watch_of(letters)
    good = [report(number) for number in range(20)]
    bad = [report(number, "rejected:empty_content") for number in range(20, 40)]
    late = [report(number) for number in range(40, 80)]
    letters.waiting = [*good, *bad, *late]
    assert not watch.look()
    assert not letters.is_open
    assert watch.stop.phase == "window"
    names = set(watch.suspects["b1"])
    assert names >= {one.sample_id for one in (*bad, *late)}
    assert names <= {one.sample_id for one in (*good[-ROWS:], *bad, *late)}
    assert len(counted) == 80
    letters.waiting = [report(99), report(7, dataset="other")]
    watch.look()
    assert "b1-99" in watch.suspects["b1"]
    assert "other" not in watch.suspects


def test_turns_that_were_not_asked_say_nothing_of_a_server():
    letters = Letters()
    watch, _ = watch_of(letters)
    letters.waiting = [report(number, "failed:earlier_turn") for number in range(40)]
    assert watch.look()


def test_a_fault_of_the_watch_is_raised_where_the_run_is():
    def gone():
        raise ServerFailed("no server is left")

    letters = Letters()
    watch, _ = watch_of(letters, check=gone)
    assert not watch.look()
    assert not letters.is_open
    with pytest.raises(ServerFailed, match="no server is left"):
        watch.raise_error()


def test_it_looks_by_itself_and_once_more_at_the_end(monkeypatch):
    monkeypatch.setattr("pipelines.generate_watch._LOOK_SECONDS", 0.01)
    letters = Letters()
    watch, counted = watch_of(letters)
    with watch:
        letters.waiting = [report(1)]
        while not counted:
            pass
        letters.waiting = [report(2)]
    assert [one.sample_id for one in counted] == ["b1-1", "b1-2"]
