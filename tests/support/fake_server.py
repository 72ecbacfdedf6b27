"""A server on loopback that speaks the contract, and breaks it as a script says.

A script is a function of the request's JSON and of how often this prompt came before (0 first).
"""

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

STOP_ID = 2


@dataclass(frozen=True)
class Reply:
    """Answer with this status and JSON."""

    body: dict[str, Any]
    status: int = 200


@dataclass(frozen=True)
class Raw:
    """Answer with these bytes."""

    body: bytes
    status: int = 200
    content_type: str = "text/html"


@dataclass(frozen=True)
class Cut:
    """Promise a body and close the connection inside it."""


@dataclass(frozen=True)
class Reset:
    """Close the connection before any answer."""


@dataclass(frozen=True)
class Hang:
    """Never answer; the event `server.hanging` is set when the request has come."""


Answer = Reply | Raw | Cut | Reset | Hang
Script = Callable[[dict[str, Any], int], Answer]


def good_reply(
    request: dict[str, Any],
    output_ids: list[int] | None = None,
    *,
    text: str = "",
    finish: dict[str, Any] | None = None,
    **meta: Any,
) -> dict[str, Any]:
    """The body of a reply that keeps the contract; keywords replace fields of `meta_info`."""
    asked = request["sampling_params"]["max_new_tokens"]
    ids = output_ids if output_ids is not None else ([7, 8, STOP_ID] if asked >= 3 else [7] * asked)
    if finish is None:
        stopped = bool(ids) and ids[-1] == STOP_ID
        finish = (
            {"type": "stop", "matched": STOP_ID} if stopped else {"type": "length", "length": asked}
        )
    return {
        "text": text,
        "output_ids": ids,
        "prompt_token_ids": request["input_ids"],
        "meta_info": {
            "id": request["rid"],
            "finish_reason": finish,
            "prompt_tokens": len(request["input_ids"]),
            "completion_tokens": len(ids),
            "cached_tokens": 0,
            "weight_version": "default",
            **meta,
        },
    }


def always_good(request: dict[str, Any], nth: int) -> Answer:
    """A script without a fault."""
    del nth
    return Reply(good_reply(request))


@dataclass
class FakeServer:
    """Serves on a free loopback port, in a thread, between `with` and its end."""

    script: Script = always_good
    model_path: str = "/models/tiny"
    server_info: dict[str, Any] = field(default_factory=dict)
    model_info: dict[str, Any] = field(default_factory=dict)

    def __enter__(self) -> "FakeServer":
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.most_in_flight = self._in_flight = 0
        self.hanging, self.abort_came = threading.Event(), threading.Event()
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> str:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/loads", self._loads)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        request = await http.json()
        self.requests.append(request)
        key = tuple(request["input_ids"])
        nth = self._seen[key]
        self._seen[key] += 1
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            return await self._answer(http, self.script(request, nth))
        finally:
            self._in_flight -= 1

    async def _answer(self, http: web.Request, answer: Answer) -> web.StreamResponse:
        match answer:
            case Reply(body, status):
                return web.json_response(body, status=status)
            case Raw(body, status, content_type):
                return web.Response(body=body, status=status, content_type=content_type)
            case Cut():
                reply = web.StreamResponse(headers={"Content-Length": "1000"})
                await reply.prepare(http)
                await reply.write(b'{"text": "half')
                http.transport.close()
                return reply
            case Reset():
                http.transport.abort()
                return web.Response()
            case Hang():
                self.hanging.set()
                await asyncio.Event().wait()
                raise AssertionError

    async def _abort(self, http: web.Request) -> web.Response:
        self.aborted.append((await http.json())["rid"])
        self.abort_came.set()
        return web.Response()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": self.model_path,
                "tokenizer_path": self.model_path,
                "weight_version": "default",
                "reasoning_parser": None,
                "preferred_sampling_params": None,
                **self.model_info,
            }
        )

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.23",
                "context_length": 512,
                "max_total_num_tokens": 10_000,
                "max_running_requests": 8,
                "allow_auto_truncate": False,
                "speculative_algorithm": None,
                **self.server_info,
            }
        )

    async def _loads(self, _: web.Request) -> web.Response:
        rank = {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_used_tokens": 3}
        return web.json_response({"loads": [rank, rank]})
