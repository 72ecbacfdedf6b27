"""One server's HTTP endpoint: one attempt, one typed outcome. No retries here."""

import asyncio
import json
import logging
from collections.abc import Awaitable
from types import TracebackType

import aiohttp

from actors import protocol
from actors.errors import RequestFault, Unreachable
from actors.protocol import Completion, GenerateRequest, Load, ModelInfo, ServerInfo

logger = logging.getLogger(__name__)

# uvicorn closes an idle connection after 5 s; reusing one in that moment is a disconnect.
_KEEPALIVE_SECONDS = 3.0
_ABORT_SECONDS = 5.0


class Client:
    """Speaks to one server. Enter it inside the event loop that will use it."""

    def __init__(self, url: str, *, vocab_size: int, connect_seconds: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self._vocab_size = vocab_size
        self._connect_seconds = connect_seconds
        self._aborts: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Client":
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            # Deadlines are the caller's; aiohttp's own total of 300 s would cut long answers.
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._connect_seconds, sock_read=None
            ),
            trust_env=False,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*self._aborts)
        await self._session.close()

    async def generate(self, request: GenerateRequest, *, deadline_seconds: float) -> Completion:
        """Ask once. Raises the `RequestFault` that says how it broke.

        Whoever gives up, by deadline or by cancelling, also tells the server to stop: otherwise a
        ghost goes on generating in a slot.
        """
        try:
            status, body = await self._send(
                "POST", protocol.GENERATE, deadline_seconds, body=request.body()
            )
        except asyncio.CancelledError:
            self._abort(request.rid)
            raise
        except Unreachable as fault:
            if fault.fault == "deadline":
                self._abort(request.rid)
            raise
        return protocol.parse_completion(request, status, body, vocab_size=self._vocab_size)

    async def health(self, *, deadline_seconds: float = 30.0) -> None:
        """Return if the server says that it is well. SGLang may take 20 s to say so."""
        status, body = await self._send("GET", protocol.HEALTH, deadline_seconds)
        if status != 200:
            raise protocol.fault_of(status, body)

    async def model_info(self, *, deadline_seconds: float = 30.0) -> ModelInfo:
        """Which model the server holds."""
        return protocol.parse_model_info(
            *await self._send("GET", protocol.MODEL_INFO, deadline_seconds)
        )

    async def server_info(self, *, deadline_seconds: float = 30.0) -> ServerInfo:
        """How the server was started."""
        return protocol.parse_server_info(
            *await self._send("GET", protocol.SERVER_INFO, deadline_seconds)
        )

    async def loads(self, *, deadline_seconds: float = 30.0) -> Load:
        """How busy the server says it is."""
        path = f"{protocol.LOADS}?include=core"
        return protocol.parse_loads(*await self._send("GET", path, deadline_seconds))

    async def abort(self, rid: str) -> None:
        """Tell the server to drop every request whose rid starts with `rid`."""
        status, body = await self._send(
            "POST", protocol.ABORT, _ABORT_SECONDS, body=json.dumps({"rid": rid}).encode()
        )
        if status != 200:
            raise protocol.fault_of(status, body)

    async def _send(
        self, method: str, path: str, deadline_seconds: float, *, body: bytes | None = None
    ) -> tuple[int, bytes]:
        try:
            return await asyncio.wait_for(self._exchange(method, path, body), deadline_seconds)
        except aiohttp.ClientError as error:
            raise _unreachable(error) from error
        except asyncio.TimeoutError as error:  # TimeoutError itself only from 3.11 on
            raise Unreachable("deadline", f"no reply within {deadline_seconds:g} s") from error
        except OSError as error:
            raise _unreachable(error) from error

    async def _exchange(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes]:
        # A redirect is answered like any other status: prompts go only where the recipe says.
        async with self._session.request(
            method,
            self.url + path,
            data=body,
            headers={"Content-Type": "application/json"} if body is not None else None,
            allow_redirects=False,
        ) as reply:
            return reply.status, await reply.read()

    def _abort(self, rid: str) -> None:
        """Tell the server in the background; closing the client waits for it."""
        task = asyncio.get_running_loop().create_task(_quietly(self.abort(rid), self.url))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


async def _quietly(abort: Awaitable[None], url: str) -> None:
    try:
        await abort
    except RequestFault as fault:
        # The request is lost either way, and its own fault is already on its way to the caller.
        logger.debug("%s did not take an abort: %s", url, fault)


def _unreachable(error: aiohttp.ClientError | OSError) -> Unreachable:
    match error:
        case aiohttp.ConnectionTimeoutError():
            name = "connect_timeout"
        case aiohttp.ClientConnectorError():
            name = "refused"
        case aiohttp.ServerDisconnectedError() | aiohttp.ClientOSError():
            name = "disconnected"
        case aiohttp.ClientPayloadError():
            name = "cut_body"
        case _:
            name = "transport"
    return Unreachable(name, f"{type(error).__name__}: {error}")
