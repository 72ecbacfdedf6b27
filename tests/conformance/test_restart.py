"""A stock server that ends under its requests, and the one that comes after it."""

import asyncio

import psutil
import pytest

from actors.client import Client
from actors.errors import Unreachable
from actors.protocol import identity_of
from tests.support import sglang_rig
from tests.support.conformance_requests import (
    DEADLINE,
    VOCABULARY,
    endless,
    request_of,
    wait_for_load,
    with_client,
)

pytestmark = pytest.mark.conformance


async def identity(client: Client) -> str:
    return identity_of(await client.model_info(), await client.server_info())


def test_a_killed_server_is_unreachable_and_the_next_one_is_another(engines, target, tmp_path):
    async def kill_in_flight(client: Client):
        tasks = [
            asyncio.ensure_future(client.generate(endless(f"in-{i}"), deadline_seconds=DEADLINE))
            for i in range(2)
        ]
        await wait_for_load(client, 2)
        (process,) = psutil.Process(second.process.pid).children()
        process.kill()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        later = await asyncio.gather(
            client.generate(request_of("later", [1, 2], 1), deadline_seconds=DEADLINE),
            return_exceptions=True,
        )
        return [*ended, *later]

    with sglang_rig.stock(target, tmp_path) as second:
        second.wait_until_ready(240.0)
        seen = [with_client(one.url, identity) for one in (engines["stock"], second)]
        assert seen[0] != seen[1]
        assert with_client(engines["stock"].url, identity) == seen[0]
        ended = with_client(second.url, kill_in_flight)
    assert all(isinstance(one, Unreachable) for one in ended)
    assert ended[-1].fault in ("refused", "disconnected")


def test_an_id_outside_the_vocabulary_never_reaches_a_server(engines):
    """One such id ends the stock server: its scheduler fails on it, and takes the rest along."""

    async def use(client: Client):
        with pytest.raises(Exception, match="vocabulary") as caught:
            await client.generate(
                request_of("poison", [1, VOCABULARY], 1), deadline_seconds=DEADLINE
            )
        assert not caught.value.retry_helps
        assert (await client.loads()).running == 0

    with_client(engines["stock"].url, use)
