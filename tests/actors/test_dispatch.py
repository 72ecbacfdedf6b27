"""Policy with simulated time: who is asked, who rests, how long one waits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.config import PoolConfig
from actors.dispatch import (
    Breaker,
    ServerState,
    Trust,
    backoff_seconds,
    choose,
    nobody_is_trusted,
    seconds_until_a_rest_ends,
)
from actors.errors import BadReply, Overloaded, Refused

CONFIG = PoolConfig(max_in_flight_per_server=4, trip_after=3, rest_seconds=10.0)
FAULT = BadReply("x", "y")


def tripped(now: float) -> Breaker:
    breaker = Breaker()
    for _ in range(CONFIG.trip_after):
        breaker = breaker.after_fault(now, CONFIG)
    return breaker


def test_a_server_rests_after_so_many_faults_in_a_row_and_not_before():
    breaker = Breaker()
    for _ in range(CONFIG.trip_after - 1):
        breaker = breaker.after_fault(0.0, CONFIG)
        assert breaker.trust(0.0) is Trust.TRUSTED
    assert breaker.after_fault(0.0, CONFIG).trust(0.0) is Trust.RESTING


def test_a_success_between_faults_starts_the_count_again():
    breaker = Breaker().after_fault(0.0, CONFIG).after_fault(0.0, CONFIG).after_success()
    assert breaker.after_fault(0.0, CONFIG).trust(0.0) is Trust.TRUSTED


def test_after_its_rest_a_server_gets_one_probe_at_a_time():
    breaker = tripped(0.0)
    assert breaker.trust(9.9) is Trust.RESTING
    assert breaker.trust(10.0) is Trust.PROBE
    probing = breaker.after_sending(10.0)
    assert probing.trust(11.0) is Trust.RESTING
    assert probing.after_success().trust(11.0) is Trust.TRUSTED


def test_a_failed_probe_makes_a_new_rest_and_a_cancelled_one_does_not():
    probing = tripped(0.0).after_sending(10.0)
    failed = probing.after_fault(12.0, CONFIG)
    assert failed.trust(21.9) is Trust.RESTING
    assert failed.trust(22.0) is Trust.PROBE
    assert probing.after_silence().trust(12.0) is Trust.PROBE


def test_late_faults_of_old_requests_prolong_no_rest():
    assert tripped(0.0).after_fault(9.0, CONFIG).trust(10.0) is Trust.PROBE


def test_the_server_with_the_fewest_requests_in_flight_is_chosen():
    states = [ServerState("a", 4.0, 2), ServerState("b", 4.0, 1), ServerState("c", 4.0, 3)]
    assert choose(states, 0.0) == "b"


def test_a_full_or_resting_server_is_not_chosen():
    full, resting = ServerState("a", 4.0, 4), ServerState("b", 4.0, 0, tripped(0.0))
    assert choose([full, resting], 5.0) is None
    assert choose([full, resting], 10.0) == "b"
    assert seconds_until_a_rest_ends([full, resting], 4.0) == 6.0
    assert seconds_until_a_rest_ends([full], 4.0) is None


def test_overload_lowers_the_limit_keeps_trust_and_success_restores_it():
    state = ServerState("a", 4.0).after_sending(0.0)
    state = state.after_fault(Overloaded("http_503", "full"), 0.0, CONFIG)
    assert (state.limit, state.in_flight, state.breaker) == (3.0, 0, Breaker())
    for _ in range(4):
        state = state.after_sending(0.0).after_success(CONFIG)
    assert state.limit == 4.0


def test_the_limit_never_falls_below_one():
    state = ServerState("a", 1.0)
    for _ in range(3):
        state = state.after_sending(0.0).after_fault(Overloaded("a", "b"), 0.0, CONFIG)
    assert state.limit == 1.0
    assert state.allows(0.0)


def test_a_refusal_is_an_answer():
    state = ServerState("a", 4.0, 1, tripped(0.0))
    assert nobody_is_trusted([state])
    assert not nobody_is_trusted([state.after_fault(Refused("http_400", "no"), 1.0, CONFIG)])


@given(
    attempt=st.integers(1, 2000),
    chance=st.floats(0.0, 1.0, exclude_max=True),
)
def test_backoff_is_bounded_and_grows_with_the_attempts(attempt, chance):
    wait = backoff_seconds(attempt, CONFIG, chance)
    assert 0.0 <= wait <= 30.0
    assert wait <= backoff_seconds(attempt + 1, CONFIG, chance)


@pytest.mark.parametrize(("attempt", "longest"), [(1, 0.5), (2, 1.0), (3, 2.0), (9, 30.0)])
def test_backoff_doubles_up_to_half_a_minute(attempt, longest):
    assert backoff_seconds(attempt, CONFIG, 1.0) == longest
