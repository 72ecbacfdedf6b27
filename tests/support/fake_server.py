"""A server on loopback that speaks the contract, and breaks it as a script says.

A script is a function of the request's JSON and of how often this prompt came before (0 first).
`ScriptedServer` lives in the event loop that starts it, `FakeServer` in a thread of its own.
"""

import asyncio
import os
import secrets
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

STOP_ID = 2
_PIECE = b" " * 2**20
_BACKLOG = 1024


@dataclass(frozen=True)
class Reply:
    """Answer with this status and JSON."""

    body: dict[str, Any]
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Raw:
    """Answer with these bytes."""

    body: bytes
    status: int = 200
    content_type: str = "text/html"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cut:
    """Promise a body and close the connection after so many bytes of it."""

    sent: bytes = b'{"text": "half'


@dataclass(frozen=True)
class Reset:
    """Close the connection before any answer."""


@dataclass(frozen=True)
class Hang:
    """Never answer; the event `server.hanging` is set when the request has come.

    An abort by rid ends it, as a request that waited in the queue.
    """


@dataclass(frozen=True)
class Slow:
    """Answer after so many seconds; an abort by rid ends it earlier."""

    seconds: float
    answer: "Answer"


@dataclass(frozen=True)
class Huge:
    """A 200 that goes on for so many MiB, or until the client has had enough."""

    mebibytes: int


@dataclass(frozen=True)
class Die:
    """The process of the server is killed."""


Answer = Reply | Raw | Cut | Reset | Hang | Slow | Huge | Die
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


# What a server with two data-parallel ranks says; a test that watches loads gives `ranks` None.
_RANK = {"num_running_reqs": 1, "num_waiting_reqs": 2, "num_used_tokens": 3}


@dataclass
class ScriptedServer:
    """One server's routes and what came in. It serves between `start` and `stop`."""

    script: Script = always_good
    model_path: str = "/models/tiny"
    server_info: dict[str, Any] = field(default_factory=dict)
    model_info: dict[str, Any] = field(default_factory=dict)
    ranks: Sequence[Mapping[str, Any]] | None = (_RANK, _RANK)  # None: the truth

    def __post_init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.most_in_flight = self._in_flight = 0
        self.most_mebibytes = 0  # of a huge body, taken by a client
        self.hanging, self.abort_came = threading.Event(), threading.Event()
        self.random_seed = secrets.randbits(30)  # stock SGLang draws one at each start
        self._seen: Counter[tuple[int, ...]] = Counter()
        self._at_work: dict[int, int] = {}  # a request that is worked on: its tokens
        self._taken_back: dict[str, asyncio.Event] = {}  # by rid, where an answer is waited for

    async def start(self, port: int = 0) -> str:
        """Serve on this port, or on a free one; return the URL."""
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/loads", self._loads)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, backlog=_BACKLOG, reuse_address=True)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Close the port; requests in flight are cut."""
        await self._runner.cleanup()

    async def _generate(self, http: web.Request) -> web.StreamResponse:
        request = await http.json()
        self.requests.append(request)
        key = tuple(request["input_ids"])
        nth = self._seen[key]
        self._seen[key] += 1
        self._in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self._in_flight)
        try:
            return await self._answer(http, request, self.script(request, nth))
        finally:
            self._in_flight -= 1

    async def _answer(
        self, http: web.Request, request: dict[str, Any], answer: Answer
    ) -> web.StreamResponse:
        match answer:
            case Reply(body, status, headers):
                return web.json_response(body, status=status, headers=headers)
            case Raw(body, status, content_type, headers):
                return web.Response(
                    body=body, status=status, content_type=content_type, headers=headers
                )
            case Cut(sent):
                return await self._cut(http, sent)
            case Reset():
                http.transport.abort()
                return web.Response()
            case Hang():
                self.hanging.set()
                await self._is_taken_back(request["rid"], None)
                return web.json_response(aborted_while_waiting(request))
            case Slow(seconds, then):
                self._at_work[id(request)] = len(request["input_ids"])
                try:
                    if await self._is_taken_back(request["rid"], seconds):
                        return web.json_response(aborted_while_waiting(request))
                finally:
                    del self._at_work[id(request)]
                return await self._answer(http, request, then)
            case Huge(mebibytes):
                return await self._pour(http, mebibytes)
            case Die():
                os.kill(os.getpid(), signal.SIGKILL)
                raise AssertionError

    async def _cut(self, http: web.Request, sent: bytes) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Length": str(len(sent) + 1000)})
        await reply.prepare(http)
        await reply.write(sent)
        http.transport.close()
        return reply

    async def _pour(self, http: web.Request, mebibytes: int) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(http)
        try:
            for poured in range(mebibytes):
                await reply.write(_PIECE)
                self.most_mebibytes = max(self.most_mebibytes, poured + 1)
        except ConnectionError:
            return reply  # the client has had enough
        return reply

    async def _is_taken_back(self, rid: str, seconds: float | None) -> bool:
        """Wait for an abort of this rid, for so long."""
        abort = self._taken_back.setdefault(rid, asyncio.Event())
        try:
            await asyncio.wait_for(abort.wait(), seconds)
        except asyncio.TimeoutError:
            return False
        finally:
            self._taken_back.pop(rid, None)
        return True

    async def _abort(self, http: web.Request) -> web.Response:
        prefix = (await http.json())["rid"]
        self.aborted.append(prefix)
        for rid, abort in self._taken_back.items():
            if rid.startswith(prefix):
                abort.set()
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
                "model_path": self.model_path,
                "tokenizer_path": self.model_path,
                "context_length": 512,
                "max_total_num_tokens": 10_000,
                "max_running_requests": 8,
                "allow_auto_truncate": False,
                "skip_tokenizer_init": False,
                "enable_deterministic_inference": False,
                "preferred_sampling_params": None,
                "weight_version": "default",
                "speculative_algorithm": None,
                "random_seed": self.random_seed,
                **self.server_info,
            }
        )

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.model_path, "object": "model", "max_model_len": 512}
        return web.json_response({"object": "list", "data": [card]})

    async def _loads(self, _: web.Request) -> web.Response:
        ranks = self.ranks
        if ranks is None:
            # A request that hangs is in nobody's books: that is what makes it hang.
            running, used = len(self._at_work), sum(self._at_work.values())
            rank = {"num_running_reqs": running, "num_waiting_reqs": 0, "num_used_tokens": used}
            limits = {"max_total_num_tokens": 10_000, "max_running_requests": 8}
            ranks = [{"dp_rank": 0, **rank, **limits}]
        return web.json_response({"loads": [dict(rank) for rank in ranks]})


def aborted_while_waiting(request: dict[str, Any]) -> dict[str, Any]:
    """The 200 for a request that was taken back before it ran: without its counts."""
    finish = {"type": "abort", "message": "Abort in waiting queue", "status_code": None}
    meta = {"id": request["rid"], "finish_reason": finish, "weight_version": "default"}
    return {"text": "", "output_ids": [], "meta_info": meta}


class FakeServer(ScriptedServer):
    """Serves on a free loopback port, in a thread, between `with` and its end."""

    def __enter__(self) -> "FakeServer":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self.start(), self._loop).result()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self.stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
