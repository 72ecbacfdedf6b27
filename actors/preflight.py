"""Asks a running server what it is and has it answer a few prompts, before rows are sent to it."""

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actors import protocol
from actors.client import Client
from actors.config import Sampling
from actors.errors import BadReply, Overloaded, RequestFault, ServerUnfit, Unreachable
from actors.fit import (
    Expectation,
    check_clock,
    check_fit,
    check_markers,
    check_not_stuck,
    check_text,
)
from actors.protocol import Completion, GenerateRequest, ModelInfo, ServerInfo

_PROBE_TOKENS = 16
# A first request may compile kernels; a busy server queues it.
_PROBE_DEADLINE_SECONDS = 300.0
_PROBE_ATTEMPTS = 3  # one bad reply in a long run is no reason to refuse a server
_PROBE_PAUSE_SECONDS = 0.5
_GREEDY = Sampling.greedy(_PROBE_TOKENS)


@dataclass(frozen=True)
class ProbePrompt:
    """A real prompt that a server answers before rows are sent to it."""

    input_ids: tuple[int, ...]
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Admission:
    """What a server is asked before it may answer rows. Without prompts it is not asked to answer.

    `decode` is the target's tokenizer, special tokens kept; `markers` maps the text of each think
    and tool marker to its id. `gateway` leaves out what a router does not pass on.
    """

    expectation: Expectation
    vocab_size: int
    probes: tuple[ProbePrompt, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    markers: Mapping[str, int] = field(default_factory=dict)
    gateway: bool = False


@dataclass(frozen=True)
class CheckedServer:
    """A server that fits the run, and what it said of itself. `not_checked` names what it could
    not be asked. A gateway may not say what it is: then both are None."""

    url: str
    model: ModelInfo | None
    server: ServerInfo | None
    not_checked: tuple[str, ...] = ()


def check_servers(
    urls: Sequence[str], *, target: Path, need_context_tokens: int
) -> tuple[CheckedServer, ...]:
    """Ask every server what it is. Raises `ServerUnfit` for the first that does not fit."""
    expectation = Expectation(target, need_context_tokens, model_context_tokens(target))
    admission = Admission(expectation, vocab_size=0)

    async def check(url: str) -> CheckedServer:
        try:
            return await check_server(url, admission)
        except RequestFault as fault:
            raise _no_answer(url, fault) from fault

    async def check_all() -> tuple[CheckedServer, ...]:
        return tuple(await asyncio.gather(*map(check, urls)))

    return asyncio.run(check_all())


async def check_server(url: str, admission: Admission) -> CheckedServer:
    """Ask one server everything. Raises `ServerUnfit`; or `Unreachable` or `Overloaded` if it
    cannot say now, which says nothing about its fitness."""
    async with Client(url, vocab_size=admission.vocab_size) as client:
        try:
            return await _check(client, admission)
        except (Unreachable, Overloaded):
            raise
        except RequestFault as fault:
            raise _no_answer(url, fault) from fault


def model_context_tokens(target: Path) -> int | None:
    """The context length that the target's own config states; None if it states none here."""
    try:
        config = json.loads((target / "config.json").read_bytes())
    except FileNotFoundError:  # a target that only the server has, by its name
        return None
    text = config.get("text_config", config)
    return int(text["max_position_embeddings"]) if "max_position_embeddings" in text else None


async def _check(client: Client, admission: Admission) -> CheckedServer:
    url = client.url
    not_checked = []
    await client.health()
    server_seconds = await client.server_time()
    if server_seconds is None:
        not_checked.append("clock")
    else:
        check_clock(url, server_seconds, time.time())
    model, server = await _description(client, admission)
    if model is None or server is None:
        not_checked.append("identity")
    else:
        check_fit(url, model, server, admission.expectation)
    if admission.gateway:
        not_checked += ["loads", "every server behind the gateway"]
    else:
        await client.loads()  # a server without this route is too old
    completions = [await _answer(client, probe) for probe in admission.probes]
    check_not_stuck(url, completions)
    if admission.decode is not None:
        for completion in completions:
            check_text(url, completion, admission.decode)
    if admission.markers and not await _markers_checked(client, admission.markers):
        not_checked.append("markers")
    return CheckedServer(url, model, server, tuple(not_checked))


async def _description(
    client: Client, admission: Admission
) -> tuple[ModelInfo | None, ServerInfo | None]:
    try:
        return await client.model_info(), await client.server_info()
    except (Unreachable, Overloaded):
        raise
    except RequestFault:
        if not admission.gateway:
            raise
        return None, None  # a router has routes of its own


async def _answer(client: Client, probe: ProbePrompt) -> Completion:
    for attempt in range(1, _PROBE_ATTEMPTS + 1):
        try:
            return await client.generate(_question(probe), deadline_seconds=_PROBE_DEADLINE_SECONDS)
        except RequestFault as fault:
            if not fault.retry_helps or attempt == _PROBE_ATTEMPTS:
                raise
            await asyncio.sleep(_PROBE_PAUSE_SECONDS)
    raise AssertionError


def _question(probe: ProbePrompt) -> GenerateRequest:
    return GenerateRequest(
        rid=f"probe-{uuid.uuid4().hex}",
        input_ids=probe.input_ids,
        sampling_params=protocol.sampling_params(
            _GREEDY,
            max_new_tokens=_PROBE_TOKENS,
            seed=0,
            stop_token_ids=probe.stop_token_ids,
        ),
    )


async def _markers_checked(client: Client, markers: Mapping[str, int]) -> bool:
    """Whether the server could be asked. Raises `ServerUnfit` if it knows another marker."""
    try:
        texts = await client.token_texts(list(markers.values()))
    except (Unreachable, Overloaded):
        raise
    except RequestFault:
        return False  # the embedded engine and some routers have no such route
    check_markers(client.url, markers, dict(zip(markers, texts, strict=True)))
    return True


def _no_answer(url: str, fault: RequestFault) -> ServerUnfit:
    kept = " (it breaks the contract)" if isinstance(fault, BadReply) else ""
    return ServerUnfit(
        f"the server {url} does not answer as it should ({fault}){kept}",
        expected="/health, /model_info, /server_info, /v1/loads and /generate of SGLang 0.5.23 "
        "or later",
        change="start the server, or correct its URL in the recipe",
    )
