"""Faults as values: what a retry needs to know survives a trip between processes."""

import pickle

import pytest

from actors.errors import BadReply, Overloaded, Refused, ServerUnfit, Unreachable, Unserved


@pytest.mark.parametrize("kind", [BadReply, Refused, Unreachable, Unserved, Overloaded])
def test_a_fault_survives_pickling(kind):
    fault = pickle.loads(pickle.dumps(kind("name", "detail")))
    assert type(fault) is kind
    assert (fault.fault, fault.detail, str(fault)) == ("name", "detail", "name: detail")


def test_when_to_come_back_survives_pickling():
    fault = Overloaded("http_503", "full", retry_after_seconds=2.5)
    assert pickle.loads(pickle.dumps(fault)).retry_after_seconds == 2.5


def test_an_unfit_server_survives_pickling():
    unfit = ServerUnfit("seen", expected="this", change="that")
    again = pickle.loads(pickle.dumps(unfit))
    assert (again.seen, again.expected, again.change) == ("seen", "this", "that")


def test_another_server_may_serve_what_one_does_not():
    assert isinstance(Unserved("http_401", ""), Refused)
    assert (Unserved.retry_helps, Unserved.blames_server) == (True, True)
    assert (Refused.retry_helps, Refused.blames_server) == (False, False)


def test_an_abort_is_no_sign_of_a_full_server():
    assert Overloaded("http_503", "").is_full
    assert Overloaded("http_429", "").is_full
    assert not Overloaded("abort", "").is_full
