"""Policy with simulated time: who is asked, how much a server may hold, who rests how long."""

import heapq
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.config import PoolConfig
from actors.dispatch import (
    Affinity,
    Breaker,
    Demand,
    OutputLengths,
    ServerReport,
    ServerState,
    Trust,
    backoff_seconds,
    choose,
    nobody_is_usable,
    seconds_until_a_rest_ends,
)
from actors.errors import BadReply, Overloaded, Refused, Unreachable
from actors.protocol import Load

CONFIG = PoolConfig(max_in_flight_per_server=4, trip_after=3, rest_seconds=10.0)
WIDE = PoolConfig(max_in_flight_per_server=64, hung_after_seconds=20.0)
FAULT = BadReply("x", "y")
FULL = Overloaded("http_503", "full")
SMALL = Demand(prompt_tokens=10, max_new_tokens=10)


def server(url="a", limit=4.0, **fields):
    return ServerState(url, limit, is_known=True, **fields)


def report(load=None, *, at=0.0, url="a", ready=True, tokens=None, running=None):
    return ServerReport(url, ready, load, at, tokens, running)


def hear(state, load, at):
    state.hear(report(load, at=at), at)


def fill(state, now=0.0, cost=0):
    sent = 0
    while state.has_room(cost, now, 1.0):
        state.send(cost, now)
        sent += 1
    return sent


def one_round(state, now, config=WIDE):
    """Fill the server and have it answer all; how many that were."""
    sent = fill(state, now)
    for _ in range(sent):
        state.succeed(0, now, now + 1.0, config, retracted=False)
    return sent


def tripped(now: float) -> Breaker:
    breaker = Breaker()
    for _ in range(CONFIG.trip_after):
        breaker = breaker.after_fault(now, CONFIG)
    return breaker


# Trust


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


def test_a_server_that_does_not_say_what_it_is_rests_at_once():
    assert Breaker().after_no_answer(5.0, CONFIG).trust(14.9) is Trust.RESTING
    assert Breaker().after_no_answer(5.0, CONFIG).trust(15.0) is Trust.PROBE


def test_saying_what_it_is_ends_a_rest_for_not_saying_it_and_no_other():
    silent = Breaker().after_fault(0.0, CONFIG).after_no_answer(5.0, CONFIG)
    assert silent.after_identity(CONFIG) == Breaker(faults=1)
    assert tripped(0.0).after_identity(CONFIG) == tripped(0.0)


def test_a_refusal_is_an_answer():
    state = server(in_flight=1, breaker=tripped(0.0))
    assert nobody_is_usable([state])
    state.fail(Refused("http_400", "no"), 0, 0.0, 1.0, CONFIG)
    assert not nobody_is_usable([state])


def test_nothing_goes_to_a_server_that_is_closed_or_unknown():
    assert server().has_room(0, 0.0, 1.0)
    assert not server(is_open=False).has_room(0, 0.0, 1.0)
    assert not ServerState("a", 4.0).has_room(0, 0.0, 1.0)
    assert nobody_is_usable([server(is_open=False), ServerState("b", 4.0)])


# How much a server may hold


def test_the_limit_begins_small_and_doubles_every_round_up_to_what_is_allowed():
    state = replace(ServerState.first("a", WIDE), is_known=True)
    assert [one_round(state, float(now)) for now in range(4)] == [16, 32, 64, 64]
    assert ServerState.first("a", CONFIG).limit == 4.0


def test_a_limit_that_nobody_reaches_does_not_grow():
    state = server(limit=16.0)
    for now in range(50):
        state.send(0, now)
        state.succeed(0, now, now + 0.5, WIDE, retracted=False)
    assert state.limit == 16.0


def test_a_burst_of_refusals_halves_the_limit_once_and_keeps_trust():
    state = server(limit=64.0)
    assert fill(state) == 64
    for _ in range(64):
        state.fail(FULL, 0, 0.0, 1.0, WIDE)
    assert (state.limit, state.in_flight, state.breaker) == (32.0, 0, Breaker())
    assert fill(state, 2.0) == 32  # the next round says the same
    for _ in range(32):
        state.fail(FULL, 0, 2.0, 3.0, WIDE)
    assert state.limit == 16.0


def test_after_a_cut_the_limit_grows_by_one_a_round():
    state = server(limit=32.0)
    fill(state)
    state.fail(FULL, 0, 0.0, 1.0, WIDE)
    for _ in range(31):
        state.take_back(0)
    limits = []
    for now in range(2, 6):
        one_round(state, float(now))
        limits.append(state.limit)
    assert limits == pytest.approx([17.0, 18.0, 19.0, 20.0], abs=0.3)


def test_a_retraction_shows_that_the_memory_is_full():
    state = server(limit=32.0)
    fill(state)
    for _ in range(32):
        state.succeed(0, 0.0, 1.0, WIDE, retracted=True)
    assert state.limit == 16.0


def test_an_abort_says_nothing_about_fullness():
    state = server(limit=32.0)
    fill(state)
    state.fail(Overloaded("abort", "somebody"), 0, 0.0, 1.0, WIDE)
    assert (state.limit, state.in_flight) == (32.0, 31)


def test_a_queue_inside_the_server_cuts_the_limit_to_what_runs_and_by_half_at_most():
    state = server(limit=40.0)
    fill(state)
    hear(state, Load(running=30, waiting=10, used_tokens=0), 1.0)
    assert state.limit == pytest.approx(40 * 33 / 40)
    hear(state, Load(running=30, waiting=10, used_tokens=0), 2.0)
    assert state.limit == pytest.approx(33.0)  # nothing has come back yet
    deep = server(limit=64.0)
    fill(deep)
    hear(deep, Load(running=8, waiting=56, used_tokens=0), 1.0)
    assert deep.limit == 32.0


def test_a_short_queue_keeps_a_server_busy_and_is_left_alone():
    state = server(limit=40.0)
    fill(state)
    hear(state, Load(running=36, waiting=3, used_tokens=0), 1.0)
    assert state.limit == 40.0


def test_the_limit_never_falls_below_one_and_a_full_server_is_left_alone_ever_longer():
    state, ends, now = server(limit=1.0), [], 0.0
    for _ in range(4):
        state.send(0, now)
        state.fail(FULL, 0, now, now, WIDE)
        ends.append(state.full_until - now)
        assert not state.has_room(0, now, 1.0)
        now = state.full_until
        assert state.has_room(0, now, 1.0)
    assert state.limit == 1.0
    assert ends == pytest.approx([0.5, 1.0, 2.0, 4.0])
    state.send(0, now)
    state.succeed(0, now, now + 1.0, WIDE, retracted=False)
    assert state.refusals == 0


def test_a_server_that_says_when_to_come_back_rests_until_then_and_keeps_trust():
    state = server(limit=8.0, in_flight=1)
    state.fail(Overloaded("http_429", "", retry_after_seconds=7.0), 0, 0.0, 1.0, WIDE)
    assert not state.has_room(0, 7.9, 1.0)
    assert seconds_until_a_rest_ends([state], 3.0) == 5.0
    assert state.has_room(0, 8.0, 1.0)
    assert state.is_usable()


def test_the_requests_in_flight_fit_into_the_servers_memory():
    state = server(limit=64.0, max_total_num_tokens=1000)
    assert fill(state, cost=100) == 9  # 950 of 1000
    halved = server(limit=64.0, max_total_num_tokens=1000)
    while halved.has_room(100, 0.0, 0.5):
        halved.send(100, 0.0)
    assert halved.in_flight == 4  # half of the memory is another pool's


def test_one_request_may_always_be_in_flight():
    state = server(limit=64.0, max_total_num_tokens=1000)
    assert fill(state, cost=5000) == 1


def test_an_answer_is_expected_to_be_as_long_as_nine_of_ten_were():
    state = server(max_total_num_tokens=10_000)
    long = Demand(prompt_tokens=100, max_new_tokens=8000)
    assert state.cost(long, 700, 1.0) == 800
    assert state.cost(replace(long, max_new_tokens=300), 700, 1.0) == 400
    # Before that is known: as long as it may be, but a quarter of the memory at most.
    assert state.cost(long, None, 1.0) == 100 + 9500 // 4
    assert state.cost(replace(long, max_new_tokens=300), None, 1.0) == 400
    assert server().cost(long, None, 1.0) == 8100


@given(st.lists(st.integers(0, 5000), max_size=1200))
def test_the_ninth_decile_is_that_of_the_last_answers(lengths):
    seen = OutputLengths()
    for one in lengths:
        seen.add(one)
    last = sorted(lengths[-512:])
    assert seen.ninth_decile == (None if len(last) < 32 else last[9 * len(last) // 10])


EVENTS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 60)), max_size=120)


@given(EVENTS)
def test_no_order_of_events_breaks_the_books(events):
    state = replace(ServerState.first("a", WIDE), is_known=True, max_total_num_tokens=5000)
    sent: list[tuple[int, float]] = []
    for step, (event, number) in enumerate(events):
        now = float(step)
        cost = number * 10
        if event <= 2:
            if state.has_room(cost, now, 1.0):
                state.send(cost, now)
                sent.append((cost, now))
        elif event == 7:
            hear(state, Load(running=number, waiting=number // 3, used_tokens=0), now)
        elif sent:
            cost, at = sent.pop(number % len(sent))
            match event:
                case 3:
                    state.succeed(cost, at, now, WIDE, retracted=number % 5 == 0)
                case 4:
                    state.fail(FULL if number % 2 else FAULT, cost, at, now, WIDE)
                case 5:
                    state.fail(Unreachable("disconnected", ""), cost, at, now, WIDE)
                case 6:
                    state.take_back(cost)
        assert 1.0 <= state.limit <= 64.0
        assert (state.in_flight, state.tokens_in_flight) == (
            len(sent),
            sum(cost for cost, _ in sent),
        )


# Lost requests


IDLE, BUSY = Load(running=0, waiting=0, used_tokens=0), Load(running=1, waiting=0, used_tokens=9)


def test_two_idle_reports_long_after_a_request_left_show_that_it_was_lost():
    state = server(in_flight=1)
    hear(state, IDLE, 25.0)
    assert not state.is_hung(0.0, WIDE)  # one report may be a moment between two batches
    hear(state, IDLE, 26.0)
    assert state.is_hung(0.0, WIDE)
    assert not state.is_hung(6.0, WIDE)  # this one left 19 s before the first idle report


def test_the_same_report_heard_twice_is_one_report():
    state = server(in_flight=1)
    state.hear(report(IDLE, at=25.0), 25.0)
    state.hear(report(IDLE, at=25.0), 25.1)
    assert not state.is_hung(0.0, WIDE)


def test_a_slow_server_that_runs_something_is_never_blamed():
    state = server(in_flight=1)
    for at in range(30, 3000, 10):
        hear(state, IDLE if at % 20 else BUSY, float(at))
        assert not state.is_hung(0.0, WIDE)


def test_a_report_without_a_load_shows_nothing():
    state = server(in_flight=1)
    for at in range(30, 300):
        hear(state, None, float(at))
    hear(state, IDLE, 300.0)
    hear(state, None, 301.0)
    hear(state, IDLE, 302.0)
    assert not state.is_hung(0.0, WIDE)


# Choice


def test_the_emptiest_server_relative_to_its_limit_is_chosen():
    states = [server("a", 4.0, in_flight=2), server("b", 16.0, in_flight=4), server("c", 4.0)]
    assert choose(states, SMALL, 0.0).url == "c"
    assert choose(states[:2], SMALL, 0.0).url == "b"


def test_what_others_send_to_a_server_counts_while_it_is_news():
    states = [server("a", 8.0), server("b", 8.0, in_flight=1)]
    load = Load(running=6, waiting=0, used_tokens=0, max_running_requests=8)
    states[0].hear(report(load, at=100.0), 100.0)
    assert choose(states, SMALL, 101.0).url == "b"
    assert choose(states, SMALL, 200.0).url == "a"


def test_a_full_or_resting_server_is_not_chosen():
    full, resting = server("a", in_flight=4), server("b", breaker=tripped(0.0))
    assert choose([full, resting], SMALL, 5.0) is None
    assert choose([full, resting], SMALL, 10.0).url == "b"
    assert seconds_until_a_rest_ends([full, resting], 4.0) == 6.0
    assert seconds_until_a_rest_ends([full], 4.0) is None
    assert seconds_until_a_rest_ends([resting], 10.0) is None  # it is over, and was acted upon


def test_a_prefix_stays_where_it_is_unless_that_server_is_clearly_fuller():
    states = [server("a", 8.0, in_flight=2), server("b", 8.0, in_flight=1)]
    assert choose(states, SMALL, 0.0, preferred="a").url == "a"
    states[0].in_flight = 6
    assert choose(states, SMALL, 0.0, preferred="a").url == "b"
    states[0].in_flight = 8
    assert choose(states, SMALL, 0.0, preferred="a").url == "b"


def test_a_server_to_avoid_is_not_chosen():
    states = [server("a", 8.0), server("b", 8.0, in_flight=7)]
    assert choose(states, replace(SMALL, avoid="a"), 0.0).url == "b"
    assert choose(states[:1], replace(SMALL, avoid="a"), 0.0) is None


def test_the_memory_of_prefixes_is_bounded_and_keeps_what_was_used_last():
    memory = Affinity(3)
    for number in range(10):
        memory.remember("first", "a")
        memory.remember(f"key-{number}", "b")
    assert len(memory) == 3
    assert memory.url_of("first") == "a"
    assert memory.url_of("key-0") is None
    assert memory.url_of("key-9") == "b"


def simulate(seconds, rows, config, *, joins=None, leaves=None):
    """Rows over servers that need so many seconds an answer, whatever they hold.

    `joins` and `leaves` give a server's first and last moment. Returns the answers of each server,
    and of each for how long it had room while rows waited.
    """
    states = {url: replace(ServerState.first(url, config), is_known=True) for url in seconds}
    for url in joins or {}:
        states[url].is_open = False
    changes = [(at, url, True) for url, at in (joins or {}).items()]
    changes += [(at, url, False) for url, at in (leaves or {}).items()]
    events = [(at, "change", url, is_open) for at, url, is_open in changes]
    heapq.heapify(events)
    done, left, now = dict.fromkeys(seconds, 0), rows, 0.0
    idle = dict.fromkeys(seconds, 0.0)
    while True:
        while left and (state := choose(states.values(), SMALL, now)) is not None:
            state.send(0, now)
            heapq.heappush(events, (now + seconds[state.url], "answer", state.url, now))
            left -= 1
        if not events or not left:
            return done, idle
        for one, other in states.items():
            if other.has_room(0, now, 1.0):
                idle[one] += events[0][0] - now
        now, kind, url, value = heapq.heappop(events)
        state = states[url]
        if kind == "change":
            state.is_open = value
        else:
            state.succeed(0, value, now, config, retracted=False)
            done[url] += 1


def test_a_server_that_is_five_times_slower_gets_a_fifth_of_the_work_and_none_idles():
    done, idle = simulate({"fast": 1.0, "slow": 5.0}, 40_000, WIDE)
    assert done["fast"] / done["slow"] == pytest.approx(5.0, rel=0.05)
    assert max(idle.values()) == 0.0


def test_a_server_that_joins_late_is_used_at_once_and_a_leaver_gets_nothing_more():
    config = PoolConfig(max_in_flight_per_server=8)
    done, idle = simulate(
        {"a": 1.0, "b": 1.0, "late": 1.0},
        8000,
        config,
        joins={"late": 100.5},
        leaves={"b": 200.5},
    )
    assert max(idle.values()) == 0.0
    # a works all the time, b until 200.5 and late from 100.5 on: 8 answers a second each.
    assert done["b"] == pytest.approx(8 * 201, abs=16)
    assert done["a"] - done["late"] == pytest.approx(8 * 100.5, abs=16)


# Waiting


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
