"""A capture server at the edge: SGLang's `/generate` over HTTP, states by transformers, and faults.

Requests are run one at a time, so the same ids always give the same bytes.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Literal

import torch
from aiohttp import web

from actors.capture_file import publish
from pipelines.recipe import Target
from pipelines.witness import Witness

Fault = Literal["nan", "lost", "foreign_ids"]


class CaptureServer:
    """Captures into `folder`. `faults` maps the ordinal of a request (from 0) to what goes wrong;
    `poisoned` holds first ids of sequences whose states are never finite."""

    def __init__(
        self,
        target: Target,
        folder: Path,
        *,
        layer_ids: tuple[int, ...],
        faults: dict[int, Fault] | None = None,
        poisoned: frozenset[tuple[int, ...]] = frozenset(),
        dies_after: int | None = None,
    ) -> None:
        self._witness = Witness(target, torch.float32)
        self._folder, self._layer_ids = folder, layer_ids
        self._faults, self._poisoned, self._dies_after = faults or {}, poisoned, dies_after
        self._said_layer_ids = layer_ids
        self.asked = 0

    def says(self, layer_ids: tuple[int, ...]) -> None:
        """Write these layer ids into the files, whatever layers are captured."""
        self._said_layer_ids = layer_ids

    def hand_over(self, rid: str, ids: list[int], aux: torch.Tensor, last: torch.Tensor) -> None:
        """Give one request's states to the reader, before the answer."""
        publish(self._folder, rid, ids, aux, last, self._said_layer_ids)

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        ids, number = body["input_ids"], self.asked
        self.asked += 1
        if self._dies_after is not None and number >= self._dies_after:
            return web.json_response({"error": {"message": "dead"}}, status=500)
        states = self._witness.states(ids)
        aux = torch.cat([states[layer + 1] for layer in self._layer_ids], -1)
        fault = self._faults.get(number)
        if fault == "nan" or tuple(ids) in self._poisoned:
            aux = aux.clone()
            aux[1, 2] = float("nan")
        if fault != "lost":
            sent = [*ids[:-1], ids[-1] - 1] if fault == "foreign_ids" else ids
            self.hand_over(body["rid"], sent, aux, states[-1])
        return web.json_response(
            {
                "text": "",
                "output_ids": [],
                "prompt_token_ids": ids,
                "meta_info": {
                    "id": body["rid"],
                    "finish_reason": {"type": "length", "length": 0},
                    "prompt_tokens": len(ids),
                    "completion_tokens": 0,
                    "cached_tokens": 0,
                    "weight_version": "default",
                },
            }
        )

    async def model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "model_path": "target",
                "tokenizer_path": "target",
                "weight_version": "default",
                "reasoning_parser": None,
                "preferred_sampling_params": None,
            }
        )

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {
                "version": "0.5.23",
                "context_length": None,
                "max_total_num_tokens": None,
                "max_running_requests": None,
                "allow_auto_truncate": False,
                "speculative_algorithm": None,
            }
        )


@contextmanager
def serving(server: CaptureServer) -> Iterator[str]:
    """Serve on loopback from a thread of its own; yields the URL."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[web.AppRunner, str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/generate", server.generate)
        app.router.add_get("/model_info", server.model_info)
        app.router.add_get("/server_info", server.server_info)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"

    runner, url = asyncio.run_coroutine_threadsafe(start(), loop).result()
    try:
        yield url
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
