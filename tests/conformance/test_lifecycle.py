"""Requests that end early, loads, connections: what a run that lasts for days depends on."""

import asyncio
import time

import aiohttp
import pytest

from actors.client import Client
from actors.config import PoolConfig
from actors.errors import Overloaded, Refused, Unreachable
from actors.pool import Completed, Pool
from tests.support.conformance_requests import (
    DEADLINE,
    STOP_ID,
    VOCABULARY,
    body_of,
    endless,
    post,
    request_of,
    wait_for_load,
    with_client,
)
from tests.support.sglang_rig import SLOTS

pytestmark = pytest.mark.conformance

# The stock server notices within 4 s that a client is gone, and publishes loads now and then.
NOTICES_WITHIN = 30.0


def outcome_of(client: Client, request):
    return asyncio.ensure_future(client.generate(request, deadline_seconds=DEADLINE))


async def outcomes(*tasks):
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_an_abort_takes_back_the_named_request_and_what_its_rid_begins(server):
    """Which is why a pool's rids all have the same width."""

    async def use(client: Client):
        tasks = [outcome_of(client, endless(rid)) for rid in ("ab1", "ab12")]
        tasks.append(outcome_of(client, endless("other", 30)))
        await wait_for_load(client, 3)
        await client.abort("ab1")
        return await outcomes(*tasks)

    first, longer, other = with_client(server.url, use)
    for one in (first, longer):
        assert isinstance(one, Overloaded)
        assert one.fault == "abort"
    assert len(other.output_ids) == 30


def test_an_abort_of_nobody_takes_nothing_back(server):
    """The beginning of a rid counts only if it is itself the rid of a live request."""

    async def use(client: Client):
        task = outcome_of(client, endless("begun-1", 30))
        await wait_for_load(client, 1)
        for rid in ("begun", "nobody"):
            await client.abort(rid)
        return await task

    assert len(with_client(server.url, use).output_ids) == 30


def test_an_abort_of_a_waiting_request_is_an_abort_without_counts(server):
    async def use(client: Client):
        tasks = [outcome_of(client, endless(f"fill-{i}")) for i in range(SLOTS)]
        await wait_for_load(client, SLOTS)
        waiting = asyncio.ensure_future(
            asyncio.to_thread(post, server.url, "/generate", body_of(endless("waiting")))
        )
        typed = outcome_of(client, endless("queued"))
        await wait_for_load(client, SLOTS, 2)
        for rid in ("waiting", "queued", *(f"fill-{i}" for i in range(SLOTS))):
            await client.abort(rid)
        return await waiting, (await outcomes(typed, *tasks))

    (status, reply), ended = with_client(server.url, use)
    assert status == 200
    meta = reply["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert reply["output_ids"] == []
    assert "prompt_tokens" not in meta
    assert "cached_tokens" not in meta
    assert meta["completion_tokens"] == 0
    assert all(isinstance(one, Overloaded) and one.fault == "abort" for one in ended)


def test_the_rid_of_a_live_request_is_refused(server):
    async def use(client: Client):
        first = outcome_of(client, endless("twice", 30))
        await wait_for_load(client, 1)
        with pytest.raises(Refused, match="Duplicate request ID detected"):
            await client.generate(request_of("twice", [1, 2], 1), deadline_seconds=DEADLINE)
        return await first

    assert len(with_client(server.url, use).output_ids) == 30


def test_a_deadline_frees_the_slot(server):
    async def use(client: Client):
        with pytest.raises(Unreachable) as caught:
            await client.generate(endless("late"), deadline_seconds=1.5)
        assert caught.value.fault == "deadline"
        return await wait_for_load(client, 0)

    with_client(server.url, use)


def test_a_cancelled_request_frees_the_slot(server):
    async def use(client: Client):
        task = outcome_of(client, endless("cancelled"))
        await wait_for_load(client, 1)
        task.cancel()
        await outcomes(task)
        return await wait_for_load(client, 0)

    with_client(server.url, use)


def test_a_client_that_is_gone_frees_the_slot_too(server):
    """Nobody told the server: a killed worker, say."""

    async def use(client: Client):
        async with aiohttp.ClientSession() as session:
            lost = asyncio.ensure_future(
                session.post(f"{server.url}/generate", data=endless("gone").body(), headers=JSON)
            )
            await wait_for_load(client, 1)
            lost.cancel()
            await outcomes(lost)
        return await wait_for_load(client, 0, seconds=NOTICES_WITHIN)

    with_client(server.url, use)


def test_loads_tell_what_runs_and_waits(server):
    async def use(client: Client):
        idle = await client.loads()
        tasks = [outcome_of(client, endless(f"load-{i}")) for i in range(SLOTS + 1)]
        await wait_for_load(client, SLOTS, 1)
        busy = await client.loads()
        for i in range(SLOTS, -1, -1):
            await client.abort(f"load-{i}")
        await outcomes(*tasks)
        return idle, busy

    idle, busy = with_client(server.url, use)
    assert (idle.running, idle.waiting) == (0, 0)
    assert (busy.running, busy.waiting) == (SLOTS, 1)
    assert busy.used_tokens >= 3  # three prompt ids, shared by a prefix cache if there is one


def test_a_connection_that_idled_longer_than_the_server_keeps_it_does_no_harm(server):
    async def use(client: Client):
        await client.loads()
        await asyncio.sleep(6.0)  # uvicorn closes after 5
        return await client.loads()

    assert with_client(server.url, use).running == 0


def test_health_comes_within_the_time_a_client_gives_it(server):
    started = time.monotonic()
    with_client(server.url, lambda client: client.health())
    assert time.monotonic() - started < 20.0


def test_more_requests_than_slots_all_keep_the_contract(server, prompts):
    """Through the pool: 16 at once, half of them waiting in the server."""
    config = PoolConfig(max_in_flight_per_server=16)
    requests = [
        request_of(f"many-{i:02d}", prompts[i % len(prompts)], 8, seed=i) for i in range(16)
    ]

    async def all_of_them():
        async with Pool([server.url], config, vocab_size=VOCABULARY) as pool:
            return await asyncio.gather(*(pool.generate(one) for one in requests))

    ended = asyncio.run(all_of_them())
    assert all(isinstance(one, Completed) and one.attempt == 1 for one in ended)
    for first, second in zip(ended[:8], ended[8:], strict=True):
        assert first.completion.output_ids == second.completion.output_ids
        assert len(first.completion.output_ids) == 8 or first.completion.output_ids[-1] == STOP_ID


JSON = {"Content-Type": "application/json"}
