"""The one retry owner, against servers that break in every way."""

import asyncio
import socket
import threading
import time
from contextlib import asynccontextmanager

import pytest

from actors.config import PoolConfig
from actors.dispatch import ServerReport
from actors.errors import ServerUnfit, Unreachable
from actors.pool import Completed, Failed, Pool
from actors.protocol import GenerateRequest, Load
from tests.support.fake_server import (
    FakeServer,
    Hang,
    Reply,
    Reset,
    ScriptedServer,
    Slow,
    always_good,
    good_reply,
)

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


# Servers that share the event loop with the pool, and may go away and come back.


class Asked(ScriptedServer):
    """Counts how often it was asked what it is."""

    identities = 0

    async def _model_info(self, http):
        self.identities += 1
        return await super()._model_info(http)


def port_of(url):
    return int(url.rsplit(":", 1)[1])


@asynccontextmanager
async def running(*servers):
    urls = [await one.start() for one in servers]
    try:
        yield urls
    finally:
        for one in servers:
            await one.stop()


def free_url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


async def ask_some(pool, numbers, **options):
    return await asyncio.gather(*(pool.generate(request(one), **options) for one in numbers))


def report(url, *, ready=True, load=None, at=None):
    return ServerReport(url, ready, load, time.time() if at is None else at, None, None)


def test_nothing_is_sent_before_a_server_has_said_what_it_is():
    class Shy(Asked):
        async def _server_info(self, http):
            assert not self.requests
            await asyncio.sleep(0.05)
            return await super()._server_info(http)

    async def story():
        server = Shy()
        async with running(server) as urls, Pool(urls, QUICK, vocab_size=1000) as pool:
            outcomes = await ask_some(pool, range(5))
        assert all(isinstance(one, Completed) for one in outcomes)
        assert server.identities == 1

    asyncio.run(story())


def test_few_rows_are_shared_out_though_one_server_says_later_what_it_is():
    class Late(ScriptedServer):
        async def _server_info(self, http):
            await asyncio.sleep(0.2)
            return await super()._server_info(http)

    async def story():
        one, two = ScriptedServer(), Late()
        config = QUICK.model_copy(update={"max_in_flight_per_server": 8})
        async with running(one, two) as urls, Pool(urls, config, vocab_size=1000) as pool:
            await ask_some(pool, range(8))
        assert (len(one.requests), len(two.requests)) == (4, 4)

    asyncio.run(story())


def test_a_server_that_comes_back_with_another_model_is_never_asked_again():
    async def story():
        well, first = ScriptedServer(), ScriptedServer()
        async with running(well, first) as urls, Pool(urls, QUICK, vocab_size=1000) as pool:
            assert {one.server for one in await ask_some(pool, range(8))} == set(urls)
            await first.stop()
            other = ScriptedServer(model_path="/models/other")
            await other.start(port_of(urls[1]))
            try:
                # The idle connections have ended, so the next request may reach the new process.
                first.requests.clear()
                since = time.monotonic()
                assert not await pool.confirm(urls[1], since)
                outcomes = await ask_some(pool, range(30))
                assert {one.server for one in outcomes} == {urls[0]}
                assert other.requests == []
                assert "/models/other" in pool.dismissed[urls[1]].seen
                assert [one.trust for one in pool.snapshot()] == ["trusted", "dismissed"]
                pool.apply([report(one) for one in urls])
                await ask_some(pool, range(30, 40))
                assert other.requests == []
            finally:
                first._runner = other._runner

    asyncio.run(story())


def test_after_a_reset_a_server_is_asked_what_it_is_before_it_gets_anything():
    async def story():
        well, first = ScriptedServer(), ScriptedServer(lambda *_: Hang())
        async with running(well, first) as urls, Pool(urls, QUICK, vocab_size=1000) as pool:
            rows = asyncio.create_task(ask_some(pool, range(8)))
            while not first.requests:
                await asyncio.sleep(0.01)
            await first.stop()  # its requests in flight are cut
            other = ScriptedServer(model_path="/models/other")
            await other.start(port_of(urls[1]))
            first._runner = other._runner
            outcomes = await rows
            assert {one.server for one in outcomes} == {urls[0]}
            while urls[1] not in pool.dismissed:
                outcomes += await ask_some(pool, range(8, 12))
            assert {one.server for one in outcomes} == {urls[0]}
            assert other.requests == []

    asyncio.run(story())


def test_a_restarted_server_with_the_same_model_goes_on():
    async def story():
        first = ScriptedServer()
        async with running(first) as urls, Pool(urls, QUICK, vocab_size=1000) as pool:
            await ask_some(pool, range(4))
            await first.stop()
            again = ScriptedServer()
            await again.start(port_of(urls[0]))
            first._runner = again._runner
            assert await pool.confirm(urls[0], time.monotonic())
            outcomes = await ask_some(pool, range(4, 8))
            assert all(isinstance(one, Completed) for one in outcomes)
            assert pool.dismissed == {}

    asyncio.run(story())


def test_what_does_not_fit_is_not_used_from_the_beginning():
    def fit(url, model, server):
        assert server.context_length == 512
        if model.model_path != "/models/tiny":
            raise ServerUnfit(f"{url} serves {model.model_path}", expected="tiny", change="it")

    async def story():
        well, other = ScriptedServer(), ScriptedServer(model_path="/models/other")
        async with running(well, other) as urls, Pool(urls, QUICK, vocab_size=1000, fit=fit) as p:
            outcomes = await ask_some(p, range(12))
            assert {one.server for one in outcomes} == {urls[0]}
            assert list(p.dismissed) == [urls[1]]

    asyncio.run(story())


def test_a_confirmation_is_one_question_for_all_who_ask_at_the_same_time():
    async def story():
        server = Asked()
        async with running(server) as urls, Pool(urls, QUICK, vocab_size=1000) as pool:
            await ask_some(pool, range(2))
            since = time.monotonic()
            answers = await asyncio.gather(*(pool.confirm(urls[0], since) for _ in range(50)))
            assert set(answers) == {True}
            assert server.identities == 2
            assert await pool.confirm(urls[0], since)  # that question began after this moment too
            assert server.identities == 2
            assert await pool.confirm(urls[0], time.monotonic())
            assert server.identities == 3

    asyncio.run(story())


def test_a_question_that_began_earlier_confirms_nothing():
    class Slowly(Asked):
        async def _server_info(self, http):
            await asyncio.sleep(0.1)
            return await super()._server_info(http)

    async def story():
        server = Slowly()
        async with running(server) as urls, Pool(urls, QUICK, vocab_size=1000) as pool:
            await asyncio.sleep(0.05)  # the first question is under way
            assert await pool.confirm(urls[0], time.monotonic())
            assert server.identities == 2

    asyncio.run(story())


def test_a_server_that_is_gone_is_still_the_one_that_it_was():
    async def story():
        server = ScriptedServer()
        async with running(server) as urls, Pool(urls, QUICK, vocab_size=1000) as pool:
            await ask_some(pool, range(2))
            await server.stop()
            assert await pool.confirm(urls[0], time.monotonic())

    asyncio.run(story())


def test_a_server_that_answers_something_else_is_not_confirmed():
    async def story():
        server = Asked()
        async with running(server) as urls, Pool(urls, QUICK, vocab_size=1000) as pool:
            await ask_some(pool, range(2))
            server.server_info["version"] = None
            assert not await pool.confirm(urls[0], time.monotonic())
            del server.server_info["version"]
            assert await pool.confirm(urls[0], time.monotonic())

    asyncio.run(story())


def test_behind_a_gateway_nobody_is_asked_what_it_is():
    async def story():
        server = Asked()
        async with running(server) as urls, Pool(urls, QUICK, vocab_size=9, gateway=True) as pool:
            assert isinstance(await pool.generate(request(1)), Completed)
            assert await pool.confirm(urls[0], time.monotonic())
        assert server.identities == 0

    asyncio.run(story())


def test_a_reply_of_another_weight_version_is_asked_again_elsewhere():
    async def story():
        well = ScriptedServer()
        updated = ScriptedServer(lambda one, _: Reply(good_reply(one, weight_version="2")))
        config = QUICK.model_copy(update={"trip_after": 100})
        async with running(well, updated) as urls, Pool(urls, config, vocab_size=1000) as pool:
            outcomes = await ask_some(pool, range(8))
            assert {one.server for one in outcomes} == {urls[0]}
            faults = {one.url: one.faults for one in pool.snapshot()}
            assert faults[urls[1]]["weight_version"] >= 1
            updated.model_info["weight_version"] = "2"  # and now it says so
            assert not await pool.confirm(urls[1], time.monotonic())

    asyncio.run(story())


def test_a_bad_reply_is_asked_again_on_another_server_where_there_is_one():
    async def story():
        bad, well = ScriptedServer(lambda *_: Reply({"text": ""})), ScriptedServer()
        config = QUICK.model_copy(update={"trip_after": 1000, "attempts": 2})
        async with running(bad, well) as urls, Pool(urls, config, vocab_size=1000) as pool:
            outcomes = await ask_some(pool, range(40))
            assert {one.server for one in outcomes} == {urls[1]}
            assert bad.requests

    asyncio.run(story())


def test_a_full_server_does_not_use_up_a_rows_attempts():
    config = QUICK.model_copy(update={"attempts": 2, "overload_attempts": 12})
    with FakeServer(lambda http, nth: FULL if nth < 10 else always_good(http, nth)) as server:
        (outcome,) = ask_all([server.url], 1, config)
    assert isinstance(outcome, Completed)
    assert outcome.attempt == 11


def test_a_server_that_is_full_for_ever_ends_a_row_by_its_name():
    config = QUICK.model_copy(update={"attempts": 2, "overload_attempts": 4})
    with FakeServer(lambda *_: FULL) as server:
        (outcome,) = ask_all([server.url], 1, config)
    assert isinstance(outcome, Failed)
    assert (outcome.fault, outcome.attempt) == ("http_503", 4)


def test_a_server_that_says_when_to_come_back_is_left_alone_until_then():
    moments = []

    def script(http, nth):
        moments.append(time.monotonic())
        wait = {"Retry-After": "1"}
        return Reply({}, 429, headers=wait) if len(moments) == 1 else always_good(http, nth)

    with FakeServer(script) as server:
        first, second = ask_all([server.url], 2, QUICK.model_copy(update={"attempts": 1}))
    assert isinstance(first, Completed)
    assert isinstance(second, Completed)
    assert max(moments) - moments[0] >= 0.9


def test_a_burst_of_503_from_a_full_server_loses_no_row():
    full_until = time.monotonic() + 0.5

    def script(http, nth):
        return FULL if time.monotonic() < full_until else always_good(http, nth)

    with FakeServer(script) as server:
        outcomes = ask_all([server.url], 64)
    assert all(isinstance(one, Completed) for one in outcomes)


def test_without_a_key_no_row_is_answered_and_the_fault_says_why():
    with FakeServer(lambda *_: Reply({"error": "no key"}, 401)) as server:
        (outcome,) = ask_all([server.url], 1)
    assert isinstance(outcome, Failed)
    assert outcome.fault == "http_401"
    assert "EYAS_API_KEY" in outcome.detail


def test_a_pool_may_begin_without_a_server_and_wait_for_the_first():
    async def story():
        server = ScriptedServer()
        async with running(server) as urls, Pool([], QUICK, vocab_size=1000) as pool:
            rows = asyncio.create_task(ask_some(pool, range(10)))
            await asyncio.sleep(0.05)
            assert not rows.done()
            pool.apply([report(urls[0], ready=False)])
            await asyncio.sleep(0.05)
            assert not server.requests
            pool.apply([report(urls[0])])
            assert all(isinstance(one, Completed) for one in await rows)

    asyncio.run(story())


def test_a_pool_that_never_gets_a_server_gives_its_rows_up():
    async def story():
        config = QUICK.model_copy(update={"deadline_base_seconds": 0.2})
        async with Pool([], config, vocab_size=1000) as pool:
            outcomes = await ask_some(pool, range(10))
            later = await pool.generate(request(11))
        assert {one.fault for one in (*outcomes, later)} == {"no_server"}
        assert {one.server for one in outcomes} == {""}

    asyncio.run(story())


def test_a_server_that_was_down_at_the_start_is_used_when_it_comes():
    async def story():
        well, url = ScriptedServer(), free_url()
        async with running(well) as urls, Pool([*urls, url], QUICK, vocab_size=1000) as pool:
            assert {one.server for one in await ask_some(pool, range(8))} == {urls[0]}
            late = ScriptedServer()
            await late.start(port_of(url))
            try:
                while pool.snapshot()[1].trust != "trusted":
                    await asyncio.sleep(0.02)
                outcomes = await ask_some(pool, range(8))
                assert {one.server for one in outcomes} == {urls[0], url}
            finally:
                await late.stop()

    asyncio.run(story())


def test_a_server_that_leaves_gets_nothing_new_and_may_finish_what_it_holds():
    async def story():
        slow = ScriptedServer(lambda one, _: Slow(0.2, Reply(good_reply(one))))
        stays = ScriptedServer()
        async with running(slow, stays) as urls, Pool(urls, QUICK, vocab_size=1000) as pool:
            rows = asyncio.create_task(ask_some(pool, range(8)))
            while len(slow.requests) < 4:
                await asyncio.sleep(0.01)
            pool.apply([report(urls[1])])
            more = await ask_some(pool, range(8, 40))
            assert {one.server for one in more} == {urls[1]}
            assert {one.server for one in await rows} == set(urls)
            assert len(slow.requests) == 4
            assert pool.snapshot()[0].trust == "closed"

    asyncio.run(story())


IDLE, BUSY = Load(0, 0, 0), Load(1, 0, 9)


def test_what_a_server_has_lost_is_taken_back_and_asked_elsewhere():
    async def story():
        lost, well = ScriptedServer(lambda *_: Hang()), ScriptedServer()
        config = QUICK.model_copy(update={"hung_after_seconds": 0.2, "rest_seconds": 60.0})
        async with running(lost, well) as urls, Pool(urls, config, vocab_size=1000) as pool:
            rows = asyncio.create_task(ask_some(pool, range(8)))
            while len(lost.requests) < 4:
                await asyncio.sleep(0.01)
            for load in (BUSY, BUSY):  # as long as it says that it works, it is waited for
                await asyncio.sleep(0.15)
                pool.apply([report(urls[0], load=load), report(urls[1])])
            assert not rows.done()
            pool.apply([report(urls[0], load=IDLE), report(urls[1])])
            await asyncio.sleep(0.05)
            assert not rows.done()
            pool.apply([report(urls[0], load=IDLE), report(urls[1])])
            outcomes = await rows
            assert {one.server for one in outcomes} == {urls[1]}
            first = pool.snapshot()[0]
            assert (first.faults["hung"], first.trust, first.in_flight) == (4, "resting", 0)
        assert sorted(lost.aborted) == sorted(one["rid"] for one in lost.requests)

    asyncio.run(story())


def test_a_row_that_is_cancelled_while_its_request_is_lost_stays_cancelled():
    async def story():
        lost = ScriptedServer(lambda *_: Hang())
        config = QUICK.model_copy(update={"hung_after_seconds": 0.01})
        async with running(lost) as urls, Pool(urls, config, vocab_size=1000) as pool:
            row = asyncio.create_task(pool.generate(request(1)))
            while not lost.requests:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            pool.apply([report(urls[0], load=IDLE)])
            await asyncio.sleep(0.01)
            row.cancel()
            pool.apply([report(urls[0], load=IDLE)])
            with pytest.raises(asyncio.CancelledError):
                await row
            assert pool.snapshot()[0].in_flight == 0

    asyncio.run(story())


def test_requests_with_one_prefix_go_to_one_server():
    async def story():
        one, two = ScriptedServer(), ScriptedServer()
        async with running(one, two) as urls, Pool(urls, QUICK, vocab_size=1000) as pool:
            await ask_some(pool, range(4))
            keys = {}
            for turn in range(5):
                for number in range(6):
                    key = f"conversation-{number}"
                    outcome = await pool.generate(request(10 * number + turn), affinity=key)
                    keys.setdefault(key, set()).add(outcome.server)
            assert all(len(servers) == 1 for servers in keys.values())

    asyncio.run(story())


def test_a_waiting_row_is_not_passed_over_for_ever():
    order = []

    def script(http, nth):
        order.append(http["input_ids"][1])
        return Slow(0.005, always_good(http, nth))

    async def story():
        config = QUICK.model_copy(update={"max_in_flight_per_server": 1})
        server = ScriptedServer(script)
        async with running(server) as urls, Pool(urls, config, vocab_size=1000) as pool:
            await pool.generate(request(0), affinity="here")
            rows = [asyncio.create_task(pool.generate(request(1)))]
            rows += [
                asyncio.create_task(
                    pool.generate(request(one), affinity="elsewhere" if one == 2 else "here")
                )
                for one in range(2, 60)
            ]
            await asyncio.gather(*rows)

    asyncio.run(story())
    assert order.index(2) <= 20


def test_a_snapshot_adds_up():
    with FakeServer(lambda http, nth: Reset() if nth == 0 else always_good(http, nth)) as server:

        async def story():
            config = QUICK.model_copy(update={"trip_after": 100})
            async with Pool([server.url], config, vocab_size=1000) as pool:
                await ask_some(pool, range(6))
                return pool.snapshot()

        (seen,) = asyncio.run(story())
    assert (seen.url, seen.trust, seen.in_flight) == (server.url, "trusted", 0)
    assert (seen.completed, seen.output_tokens) == (6, 18)
    assert seen.faults == {"disconnected": 6}


def test_the_requests_in_flight_fit_into_the_servers_memory():
    script = lambda one, _: Slow(0.01, Reply(good_reply(one)))  # noqa: E731
    with FakeServer(script, server_info={"max_total_num_tokens": 100}) as server:
        config = QUICK.model_copy(update={"max_in_flight_per_server": 16})

        async def story():
            async with Pool([server.url], config, vocab_size=1000) as pool:
                rows = (pool.generate(request(one, tokens=40)) for one in range(12))
                return await asyncio.gather(*rows)

        outcomes = asyncio.run(story())
    assert all(isinstance(one, Completed) for one in outcomes)
    assert server.most_in_flight == 3  # 2 + 23 tokens each, of 95


def test_rows_that_find_no_server_say_why():
    class Locked(ScriptedServer):
        async def _model_info(self, _):
            from aiohttp import web

            return web.json_response({"error": "no key"}, status=401)

    async def story():
        config = QUICK.model_copy(update={"deadline_base_seconds": 0.2})
        async with running(Locked()) as urls, Pool(urls, config, vocab_size=1000) as pool:
            return await pool.generate(request(1))

    outcome = asyncio.run(story())
    assert outcome.fault == "no_server"
    assert "EYAS_API_KEY" in outcome.detail
