"""A stock server that ends under its requests, and the one that comes after it."""

import asyncio

import psutil
import pytest

from actors.client import Client
from actors.errors import BadReply, Refused, Unreachable
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

SHORT = 128

pytestmark = pytest.mark.conformance


async def identity(client: Client) -> str:
    return identity_of(await client.model_info(), await client.server_info())


@pytest.fixture(scope="module")
def second(target, tmp_path_factory):
    """Another stock server, with little room, that may be killed."""
    folder = tmp_path_factory.mktemp("second")
    with sglang_rig.stock(target, folder, "--context-length", str(SHORT)) as one:
        one.wait_until_ready(240.0)
        yield one


def test_what_fills_the_context_is_cut_in_silence_and_known_as_such(second, prompts):
    """The last two tokens of the context are refused to no one, and given to no one."""
    prompt, room = prompts[0], SHORT - len(prompts[0])

    async def use(client: Client):
        fits = request_of("fits", prompt, room - 2, ignore_eos=True)
        assert len((await client.generate(fits, deadline_seconds=DEADLINE)).output_ids) == room - 2
        cut = request_of("cut", prompt, room - 1, ignore_eos=True)
        with pytest.raises(BadReply) as caught:
            await client.generate(cut, deadline_seconds=DEADLINE)
        assert caught.value.fault == "clipped"

    with_client(second.url, use)


def test_a_killed_server_is_unreachable_and_the_next_one_is_another(engines, second):
    async def kill_in_flight(client: Client):
        tasks = [
            asyncio.ensure_future(
                client.generate(endless(f"in-{i}", 100), deadline_seconds=DEADLINE)
            )
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

    seen = [with_client(one.url, identity) for one in (engines["stock"], second)]
    assert seen[0] != seen[1]
    assert with_client(engines["stock"].url, identity) == seen[0]
    ended = with_client(second.url, kill_in_flight)
    assert all(isinstance(one, Unreachable) for one in ended)
    assert ended[-1].fault in ("refused", "disconnected")


def test_an_id_outside_the_vocabulary_never_reaches_a_server(engines):
    """One such id ends the stock server: its scheduler fails on it, and takes the rest along."""

    async def use(client: Client):
        poison = request_of("poison", [1, VOCABULARY], 1)
        with pytest.raises(Refused) as caught:
            await client.generate(poison, deadline_seconds=DEADLINE)
        assert caught.value.fault == "prompt_id_out_of_vocabulary"
        await client.health()

    with_client(engines["stock"].url, use)
