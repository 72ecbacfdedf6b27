"""The one retry owner, against servers that break in every way."""

import asyncio
import threading

import pytest

from actors.config import PoolConfig
from actors.errors import Unreachable
from actors.pool import Completed, Failed, Pool
from actors.protocol import GenerateRequest
from tests.support.fake_server import FakeServer, Hang, Reply, Reset, always_good, good_reply

QUICK = PoolConfig(
    max_in_flight_per_server=4,
    attempts=3,
    trip_after=3,
    rest_seconds=0.05,
    backoff_seconds=0.001,
)
FULL = Reply({"message": "full"}, 503)


def request(number: int, tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(f"row-{number}", (5, number), {"max_new_tokens": tokens})


def ask_all(urls, count, config=QUICK, check=None):
    async def story():
        async with Pool(urls, config, vocab_size=1000) as pool:
            return await asyncio.gather(*(pool.generate(request(i), check) for i in range(count)))

    return asyncio.run(story())


def test_every_row_gets_its_own_reply_and_no_server_more_than_its_permits():
    def script(http, _):
        return Reply(good_reply(http, [http["input_ids"][1], 2]))

    with FakeServer(script) as one, FakeServer(script) as two:
        outcomes = ask_all([one.url, two.url], 60)
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, Completed)
        assert outcome.completion.output_ids == (number, 2)
        assert outcome.attempt == 1
    assert one.most_in_flight <= 4
    assert two.most_in_flight <= 4
    assert one.requests
    assert two.requests


@pytest.mark.parametrize("bad", [Reset(), FULL, Reply({}, 500), Reply({"text": ""})])
def test_a_fault_that_passes_is_asked_again(bad):
    with FakeServer(lambda http, nth: bad if nth == 0 else always_good(http, nth)) as server:
        (outcome,) = ask_all([server.url], 1)
    assert isinstance(outcome, Completed)
    assert outcome.attempt == 2


def test_a_refusal_is_not_asked_again():
    with FakeServer(lambda *_: Reply({"error": "too long"}, 400)) as server:
        (outcome,) = ask_all([server.url], 1)
    assert isinstance(outcome, Failed)
    assert (outcome.fault, outcome.attempt, outcome.server) == ("http_400", 1, server.url)
    assert "too long" in outcome.detail
    assert len(server.requests) == 1


def test_attempts_are_limited_and_the_last_fault_is_kept():
    with FakeServer(lambda *_: Reply({"text": ""})) as server:
        (outcome,) = ask_all([server.url], 1)
    assert isinstance(outcome, Failed)
    assert (outcome.fault, outcome.attempt) == ("missing_meta_info", 3)
    assert len(server.requests) == 3


def test_each_attempt_has_its_own_name_and_none_is_a_prefix_of_another():
    with FakeServer(lambda http, nth: FULL if nth == 0 else always_good(http, nth)) as server:
        ask_all([server.url], 12)
        ask_all([server.url], 12)  # another pool, perhaps while the first one's requests live on
    rids = [http["rid"] for http in server.requests]
    assert len(set(rids)) == len(rids) == 36
    assert len({len(rid) for rid in rids}) == 1


def test_a_dead_server_rests_and_its_rows_go_to_the_other():
    with FakeServer(lambda *_: Reset()) as dead, FakeServer() as well:
        outcomes = ask_all(
            [dead.url, well.url], 40, QUICK.model_copy(update={"rest_seconds": 60.0})
        )
    assert all(isinstance(one, Completed) and one.server == well.url for one in outcomes)
    assert len(dead.requests) <= QUICK.trip_after + QUICK.max_in_flight_per_server


def test_a_server_that_recovers_is_probed_and_trusted_again():
    broken = iter(range(6))
    lock = threading.Lock()

    def script(http, nth):
        with lock:
            still_broken = next(broken, None) is not None
        return Reset() if still_broken else always_good(http, nth)

    with FakeServer(script) as server:
        outcomes = ask_all([server.url], 20, QUICK.model_copy(update={"attempts": 8}))
    assert all(isinstance(one, Completed) for one in outcomes)


def test_when_no_server_answers_any_more_the_waiting_rows_fail_by_name():
    config = QUICK.model_copy(update={"deadline_base_seconds": 0.1, "attempts": 50})
    with FakeServer(lambda *_: Reset()) as server:
        outcomes = ask_all([server.url], 20, config)
    assert {type(one) for one in outcomes} == {Failed}
    assert "no_server" in {one.fault for one in outcomes}


def test_the_deadline_grows_with_the_tokens_that_were_asked():
    config = QUICK.model_copy(
        update={"attempts": 1, "deadline_base_seconds": 0.1, "deadline_per_token_seconds": 0.01}
    )
    with FakeServer(lambda *_: Hang()) as server:
        (outcome,) = ask_all([server.url], 1, config)
        assert server.aborted == [server.requests[0]["rid"]]
    assert isinstance(outcome, Failed)
    assert outcome.fault == "deadline"
    assert "0.18 s" in outcome.detail


def test_a_fault_of_the_check_counts_as_the_attempts_own():
    seen = []

    def check(completion, attempt):
        seen.append(attempt.rid)
        assert completion.rid == attempt.rid
        if len(seen) == 1:
            raise Unreachable("file_lost", "no file")
        return len(completion.output_ids)

    with FakeServer() as server:
        (outcome,) = ask_all([server.url], 1, check=check)
    assert isinstance(outcome, Completed)
    assert (outcome.value, outcome.attempt) == (3, 2)
    assert len(set(seen)) == 2


def test_a_bug_in_the_check_is_no_fault_and_gives_its_permit_back():
    async def story(url):
        async with Pool([url], QUICK, vocab_size=1000) as pool:
            for number in range(10):  # more than there are permits
                with pytest.raises(ZeroDivisionError):
                    await pool.generate(request(number), lambda *_: 1 // 0)
            return await pool.generate(request(99))

    with FakeServer() as server:
        assert isinstance(asyncio.run(story(server.url)), Completed)


def test_cancelled_rows_give_their_permits_and_turns_back():
    hold = threading.Event()

    def script(http, nth):
        return always_good(http, nth) if hold.is_set() else Hang()

    async def story(server):
        async with Pool([server.url], QUICK, vocab_size=1000) as pool:
            tasks = [asyncio.create_task(pool.generate(request(i))) for i in range(20)]
            await asyncio.to_thread(server.hanging.wait)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            hold.set()
            return await asyncio.gather(*(pool.generate(request(i)) for i in range(20)))

    with FakeServer(script) as server:
        assert all(isinstance(one, Completed) for one in asyncio.run(story(server)))
