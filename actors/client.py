"""One server's HTTP endpoint: one attempt, one typed outcome. No retries here."""

import asyncio
import functools
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from types import TracebackType

import aiohttp
import orjson

from actors import protocol
from actors.errors import BadReply, RequestFault, ServerUnfit, Unreachable
from actors.protocol import Completion, GenerateRequest, Load, ModelInfo, ServerInfo

logger = logging.getLogger(__name__)

API_KEY_VARIABLE = "EYAS_API_KEY"

# uvicorn closes an idle connection after 5 s; reusing one in that moment is a disconnect.
_KEEPALIVE_SECONDS = 3.0
_ABORT_SECONDS = 5.0
# What a server says of itself; a fleet's /server_info lists every option of every rank.
_FACTS_BYTES = 16 * 2**20
# Reading a body in a thread costs more than reading a small one here.
_THREAD_ABOVE_BYTES = 2**20


@dataclass(frozen=True)
class _Reply:
    status: int
    body: bytes
    retry_after_seconds: float | None

    def fault(self) -> RequestFault:
        """What a status that is not 200 means."""
        return protocol.fault_of(
            self.status, self.body, retry_after_seconds=self.retry_after_seconds
        )


class Client:
    """Speaks to one server. Enter it, or open and close it, in the event loop that will use it.

    The key in the environment variable EYAS_API_KEY, if there is one, goes to the server with every
    request, and nowhere else.
    """

    def __init__(self, url: str, *, vocab_size: int, connect_seconds: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._connect_seconds = connect_seconds
        self._aborts: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """Begin, inside the event loop. Raises `ServerUnfit` for a key that no header holds."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            headers=_headers(),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # nobody asked for compression; a small body may unfold to much
            trust_env=False,
        )

    async def close(self) -> None:
        """Wait for the aborts that are under way, then close the connections."""
        await asyncio.gather(*self._aborts)
        await self._session.close()

    async def __aenter__(self) -> "Client":
        self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def generate(self, request: GenerateRequest, *, deadline_seconds: float) -> Completion:
        """Ask once. Raises the `RequestFault` that says how it broke.

        Whoever gives up, by deadline, by cancelling or on a reply that does not end, also tells the
        server to stop: otherwise a ghost goes on generating in a slot.
        """
        protocol.check_prompt(request, vocab_size=self._vocab_size)
        try:
            reply = await self._send(
                "POST",
                protocol.GENERATE,
                deadline_seconds,
                body=request.body(),
                max_bytes=request.max_reply_bytes,
            )
        except asyncio.CancelledError:
            self._abort(request.rid)
            raise
        except RequestFault as fault:
            if fault.fault in ("deadline", "too_large"):
                self._abort(request.rid)
            raise
        if reply.status != 200:
            raise reply.fault()
        if len(reply.body) <= _THREAD_ABOVE_BYTES:
            return self._completion(request, reply)
        return await asyncio.to_thread(self._completion, request, reply)

    def _completion(self, request: GenerateRequest, reply: _Reply) -> Completion:
        return protocol.parse_completion(
            request, reply.status, reply.body, vocab_size=self._vocab_size
        )

    async def health(self, *, deadline_seconds: float = 30.0) -> None:
        """Return if the server says that it is well. SGLang may take 20 s to say so."""
        reply = await self._send("GET", protocol.HEALTH, deadline_seconds)
        if reply.status != 200:
            raise reply.fault()

    async def model_info(self, *, deadline_seconds: float = 30.0) -> ModelInfo:
        """Which model the server holds."""
        reply = await self._send("GET", protocol.MODEL_INFO, deadline_seconds)
        return protocol.parse_model_info(reply.status, reply.body)

    async def server_info(self, *, deadline_seconds: float = 30.0) -> ServerInfo:
        """How the server was started."""
        reply = await self._send("GET", protocol.SERVER_INFO, deadline_seconds)
        return protocol.parse_server_info(reply.status, reply.body)

    async def loads(self, *, deadline_seconds: float = 30.0) -> Load:
        """How busy the server says it is."""
        reply = await self._send("GET", f"{protocol.LOADS}?include=core", deadline_seconds)
        return protocol.parse_loads(reply.status, reply.body)

    async def token_texts(
        self, ids: Sequence[int], *, deadline_seconds: float = 30.0
    ) -> tuple[str, ...]:
        """What the server's tokenizer writes for each of these ids alone, specials kept."""
        body = protocol.detokenize_body(ids)
        reply = await self._send("POST", protocol.DETOKENIZE, deadline_seconds, body=body)
        return protocol.parse_texts(reply.status, reply.body, count=len(ids))

    async def server_time(self, *, deadline_seconds: float = 30.0) -> float | None:
        """The server's clock, in seconds since the epoch, whole seconds; None if it does not say.

        Whatever the status is: every reply of an HTTP server has a date.
        """
        try:
            async with self._session.get(
                self.url + protocol.READY,
                allow_redirects=False,
                timeout=_timeout(deadline_seconds, self._connect_seconds),
            ) as reply:
                date = reply.headers.get("Date")
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _unreachable(error, deadline_seconds) from error
        return None if date is None else protocol.http_date_seconds(date)

    async def abort(self, rid: str) -> None:
        """Tell the server to drop every request whose rid starts with `rid`."""
        reply = await self._send(
            "POST", protocol.ABORT, _ABORT_SECONDS, body=orjson.dumps({"rid": rid})
        )
        if reply.status != 200:
            raise reply.fault()

    async def _send(
        self,
        method: str,
        path: str,
        deadline_seconds: float,
        *,
        body: bytes | None = None,
        max_bytes: int = _FACTS_BYTES,
    ) -> _Reply:
        try:
            # A redirect is answered like any other status: prompts go only where the recipe says.
            async with self._session.request(
                method,
                self.url + path,
                data=None if body is None else _json_payload(body),
                allow_redirects=False,
                timeout=_timeout(deadline_seconds, self._connect_seconds),
            ) as reply:
                content = await _read(reply, max_bytes)
                retry_after = reply.headers.get("Retry-After") if reply.status != 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise _unreachable(error, deadline_seconds) from error
        wait = (
            None if retry_after is None else protocol.retry_after_seconds(retry_after, time.time())
        )
        return _Reply(reply.status, content, wait)

    def _abort(self, rid: str) -> None:
        """Tell the server in the background; closing the client waits for it."""
        task = asyncio.get_running_loop().create_task(_quietly(self.abort(rid), self.url))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


@functools.lru_cache
def _timeout(deadline_seconds: float, connect_seconds: float) -> aiohttp.ClientTimeout:
    """The whole exchange by the caller's deadline, which replaces aiohttp's own 300 s."""
    return aiohttp.ClientTimeout(
        total=deadline_seconds, sock_connect=connect_seconds, sock_read=None
    )


def _json_payload(body: bytes) -> aiohttp.BytesPayload:
    # Bytes alone would be looked up in a registry, and their header merged into the session's.
    return aiohttp.BytesPayload(body, content_type="application/json")


def _headers() -> dict[str, str]:
    # Compressed JSON would cost both sides more than the network does, and may hide its size.
    headers = {"Accept-Encoding": "identity"}
    key = os.environ.get(API_KEY_VARIABLE)
    if key:
        if not (key.isascii() and key.isprintable()):
            raise ServerUnfit(
                f"{API_KEY_VARIABLE} holds a character that no HTTP header may hold",
                expected="printable ASCII",
                change="set it again; a line break may have come along at its end",
            )
        headers["Authorization"] = f"Bearer {key}"
    return headers


async def _read(reply: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body, piece by piece. Raises `BadReply` rather than hold more than `max_bytes`."""
    length = reply.content_length
    if length is not None and length <= max_bytes:
        return await reply.read()
    if length is None:
        pieces, held = [], 0
        async for piece in reply.content.iter_any():
            held += len(piece)
            if held > max_bytes:
                break
            pieces.append(piece)
        else:
            return b"".join(pieces)
    reply.close()  # what is still to come must not be read into the connection's buffer
    seen = "a body of unknown length" if length is None else f"a body of {length} bytes"
    raise BadReply("too_large", f"{seen}, expected at most {max_bytes} (HTTP {reply.status})")


async def _quietly(abort: Awaitable[None], url: str) -> None:
    try:
        await abort
    except RequestFault as fault:
        # The request is lost either way, and its own fault is already on its way to the caller.
        logger.debug("%s did not take an abort: %s", url, fault)


def _unreachable(error: Exception, deadline_seconds: float) -> Unreachable:
    match error:
        case aiohttp.ConnectionTimeoutError():
            name = "connect_timeout"
        case asyncio.TimeoutError():  # TimeoutError itself only from 3.11 on
            return Unreachable("deadline", f"no reply within {deadline_seconds:g} s")
        case aiohttp.ClientConnectorError():
            name = "refused"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            name = "disconnected"
        case aiohttp.ClientPayloadError():
            name = "cut_body"
        case _:
            name = "transport"
    return Unreachable(name, f"{type(error).__name__}: {error}")
