"""What conformance asks of a server: requests as a run sends them, and replies as they came."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from actors import protocol
from actors.client import Client
from actors.config import Sampling
from actors.protocol import GenerateRequest

VOCABULARY = 49152
CONTEXT = 8192
STOP_ID = 2
DEADLINE = 120.0
GREEDY = Sampling.greedy(CONTEXT)

T = TypeVar("T")


def request_of(
    rid: str, ids: Sequence[int], new_tokens: int, *, seed: int = 1, **changed: Any
) -> GenerateRequest:
    """A greedy request with every field, as a run sends it; `changed` fields are others."""
    params = protocol.sampling_params(
        GREEDY, max_new_tokens=new_tokens, seed=seed, stop_token_ids=[STOP_ID]
    )
    return GenerateRequest(rid, tuple(ids), {**params, **changed})


def endless(rid: str, new_tokens: int = 2000) -> GenerateRequest:
    """A request that runs until it is taken back, for all that a test cares."""
    return request_of(rid, [1, 2, 5], new_tokens, ignore_eos=True)


def with_client(url: str, use: Callable[[Client], Awaitable[T]]) -> T:
    """Run `use` with a client of its own loop."""

    async def inside() -> T:
        async with Client(url, vocab_size=VOCABULARY) as client:
            return await use(client)

    return asyncio.run(inside())


async def wait_for_load(
    client: Client, running: int, waiting: int = 0, *, seconds: float = 60.0
) -> float:
    """Wait until the server says that so many run and wait; return how long that took."""
    started = time.monotonic()
    while True:
        load = await client.loads()
        if (load.running, load.waiting) == (running, waiting):
            return time.monotonic() - started
        assert time.monotonic() - started < seconds, f"wanted {running}, {waiting}; last {load}"
        await asyncio.sleep(0.1)


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """One raw POST: the status and the JSON, or None for an empty body."""
    sent = urllib.request.Request(
        url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(sent, timeout=DEADLINE) as reply:
            return reply.status, _json(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, _json(error.read())


def get(url: str, path: str) -> tuple[int, Any]:
    """One raw GET: the status, and the JSON or None."""
    with urllib.request.urlopen(url + path, timeout=DEADLINE) as reply:
        return reply.status, _json(reply.read())


def body_of(request: GenerateRequest) -> dict[str, Any]:
    """What goes over the wire, as an object to change."""
    body: dict[str, Any] = json.loads(request.body())
    return body


def _json(body: bytes) -> Any:
    return json.loads(body) if body else None
