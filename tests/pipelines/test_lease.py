"""A store has one writer, and a dead one does not hold it for ever."""

import dataclasses
import threading

import pytest

from pipelines import lease
from pipelines.errors import PreflightFailed, StorageFailed
from pipelines.lease import EXPIRES_SECONDS, check_lease, hold_lease, read_lease
from pipelines.storage import location_of, write_atomically


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path, object_store):
    where = object_store.uri if request.param == "bucket" else str(tmp_path / "store")
    return location_of(where) / "_lease.json"


def hold(place, mark, now=1000.0, sleep=lambda _: None):
    return hold_lease(place, mark, clock=lambda: now, sleep=sleep)


def leave_behind(place, mark, now):
    """A lease whose owner was killed."""
    with hold(place, mark, now):
        held = read_lease(place)
    lease._write(place, held)
    return held


def test_a_second_run_is_refused_and_told_who_holds_the_store(place, tmp_path):
    with hold(place, tmp_path / "mine"):
        held = read_lease(place)
        with (
            pytest.raises(PreflightFailed, match=f"{held.owner}, pid {held.pid}"),
            hold(place, tmp_path / "theirs", now=1000 + EXPIRES_SECONDS - 1),
        ):
            pass
        check_lease(place, tmp_path / "mine")
    assert read_lease(place) is None
    with hold(place, tmp_path / "theirs"):
        pass


def test_a_dead_owner_holds_it_until_its_lease_ends(place, tmp_path):
    leave_behind(place, tmp_path / "mine", now=1000)
    with pytest.raises(PreflightFailed, match="ends in 5 s"), hold(place, tmp_path / "b", 1055):
        pass
    with hold(place, tmp_path / "b", now=1061):
        check_lease(place, tmp_path / "b")


def test_the_next_run_in_the_same_folder_follows_at_once(place, tmp_path):
    leave_behind(place, tmp_path / "mine", now=1000)
    with hold(place, tmp_path / "mine", now=1001):
        check_lease(place, tmp_path / "mine")


def test_of_two_that_start_at_once_the_later_writer_holds_it(place, tmp_path):
    other = []

    def sleep(_):
        if not other:
            other.append(hold(place, tmp_path / "other"))
            place.unlink()  # the other one looked before this one wrote
            other[0].__enter__()

    with pytest.raises(PreflightFailed), hold(place, tmp_path / "mine", sleep=sleep):
        pass
    check_lease(place, tmp_path / "other")
    other[0].__exit__(None, None, None)


def test_who_lost_the_store_may_not_commit_and_does_not_take_the_lease_along(place, tmp_path):
    with hold(place, tmp_path / "mine"):
        taken = dataclasses.replace(read_lease(place), nonce="another", owner="somebody@else")
        lease._write(place, taken)
        with pytest.raises(StorageFailed, match="somebody@else"):
            check_lease(place, tmp_path / "mine")
    assert read_lease(place) == taken
    place.unlink()
    with pytest.raises(StorageFailed, match="nobody"):
        check_lease(place, tmp_path / "mine")


def test_the_heartbeat_goes_on_through_an_outage(place, tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    beats, wrote, seen = iter(range(2000, 10**6)), lease._write, threading.Event()

    def write(where, one):
        match one.heartbeat:
            case 2001:
                raise OSError("out of reach")
            case 2003:
                seen.set()
        wrote(where, one)

    monkeypatch.setattr(lease, "_write", write)
    with hold_lease(place, tmp_path / "mine", clock=lambda: next(beats), sleep=lambda _: None):
        assert seen.wait(30)


def test_a_lease_that_is_no_json_is_not_overwritten(place, tmp_path):
    write_atomically(place, b"{")
    with pytest.raises(PreflightFailed, match="no lease"), hold(place, tmp_path / "mine"):
        pass


def test_a_store_that_is_gone_at_the_end_does_not_hide_why_the_run_ended(
    place, tmp_path, monkeypatch, caplog
):
    def gone(_):
        raise OSError("out of reach")

    def fail():
        monkeypatch.setattr(lease, "read_lease", gone)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), hold(place, tmp_path / "mine"):
        fail()
    assert "stays for 60 s" in caplog.text
