"""The embedded engine: SGLang's HTTP API over a Hugging Face causal LM, on a CPU or one GPU.

`python -m actors.reference --target DIR --port N` serves it. It does what `protocol_server.py`
declares and no more; everything else is refused.
"""

import argparse
import asyncio
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiohttp import web

from actors import protocol
from actors.protocol_server import (
    RequestRefused,
    ServedRequest,
    ServerLimits,
    error_body,
    generate_reply,
    loads_body,
    model_info_body,
    models_body,
    parse_abort,
    parse_generate,
    server_info_body,
    value_error_body,
    waiting_abort_reply,
)

if TYPE_CHECKING:
    from actors.reference_engine import Broken, Engine, Outcome
    from actors.reference_model import Target

logger = logging.getLogger(__name__)

VERSION = "0.5.23-eyas"  # the API's version, and whose engine it is
_CANNOT_START = 3
_MAX_BODY_BYTES = 256 * 2**20
# How long open connections may take to read their last reply.
_GOODBYE_SECONDS = 2.0


@dataclass(frozen=True)
class ServeOptions:
    """How one engine is started."""

    target: Path
    dtype: str
    device: str
    threads: int
    max_running_requests: int
    host: str = "127.0.0.1"
    port: int = 0
    ready_file: Path | None = None
    context_length: int | None = None
    draft: Path | None = None
    draft_steps: int = 3
    capture_folder: Path | None = None
    capture_layer_ids: tuple[int, ...] = ()
    served_as: str | None = None

    def __post_init__(self) -> None:
        if (self.capture_folder is None) != (not self.capture_layer_ids):
            raise ValueError("--capture-folder and --capture-layer-ids go together")
        if self.capture_folder is not None and self.draft is not None:
            raise ValueError("an engine captures or drafts, not both: leave one of them out")
        for name in ("threads", "max_running_requests", "draft_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is below 1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read the command line and serve until SIGINT or SIGTERM. Returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parser = _parser()
    values = vars(parser.parse_args(arguments))
    values["capture_layer_ids"] = tuple(values["capture_layer_ids"])
    try:
        options = ServeOptions(**values)
    except ValueError as error:
        parser.error(str(error))
    return serve(options)


def serve(options: ServeOptions) -> int:
    """Load the target and serve it until SIGINT or SIGTERM: 0; or 3 if it cannot start."""
    # Threads that spin while they wait starve the HTTP thread and every other process: on two
    # busy cores spinning was measured to be three times slower. OpenMP reads this as it is loaded,
    # with torch, which is why no file that imports torch is imported at the top of this one.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from actors.reference_draft import DraftRefused
    from actors.reference_model import TargetRefused

    try:
        listener = _bind(options.host, options.port)
    except OSError as error:
        logger.error(
            "cannot listen on %s port %d: %s; choose another --port, or 0 for any free one",
            options.host,
            options.port,
            error.strerror,
        )
        return _CANNOT_START
    with listener:
        try:
            target, engine = _load(options)
        except (TargetRefused, DraftRefused) as refusal:
            logger.error("cannot serve %s: %s", options.target, refusal)
            return _CANNOT_START
        asyncio.run(_serve_until_told(options, target, engine, listener))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m actors.reference", description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face model folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True, help="0: any free port")
    parser.add_argument("--ready-file", type=Path, help="gets the URL once it serves")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-running-requests", type=int, required=True)
    parser.add_argument("--context-length", type=int, help="the target's own unless given")
    parser.add_argument("--draft", type=Path, help="an exported EAGLE-3 draft folder")
    parser.add_argument("--speculative-num-steps", type=int, default=3, dest="draft_steps")
    parser.add_argument("--capture-folder", type=Path, help="gets each prompt's hidden states")
    parser.add_argument("--capture-layer-ids", type=int, nargs="+", default=())
    parser.add_argument("--served-as", help="the model path to answer under; --target if absent")
    return parser


def _bind(host: str, port: int) -> socket.socket:
    """Take the port before the weights are read, without answering on it yet."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def _load(options: ServeOptions) -> "tuple[Target, Engine]":
    import torch

    from actors.capture_file import sweep
    from actors.reference_draft import TargetFacts, read_draft
    from actors.reference_engine import Engine
    from actors.reference_model import DTYPES, Target, TargetRefused

    torch.set_num_threads(options.threads)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise TargetRefused("no CUDA device here; use --device cpu")
    header = None if options.draft is None else read_draft(options.draft).header
    target = Target(
        options.target,
        dtype=options.dtype,
        device=options.device,
        slots=options.max_running_requests,
        context_length=options.context_length,
        aux_layer_ids=options.capture_layer_ids if header is None else header.aux_layer_ids,
    )
    draft = None
    if options.draft is not None:
        facts = TargetFacts(target.layers, target.hidden_size, target.vocab_size, target.embedding)
        draft = read_draft(
            options.draft, target=facts, dtype=DTYPES[options.dtype], device=options.device
        )
    if options.capture_folder is not None:
        options.capture_folder.mkdir(parents=True, exist_ok=True)
        sweep(options.capture_folder)
    engine = Engine(
        target,
        slots=options.max_running_requests,
        threads=options.threads,
        draft=draft,
        draft_steps=options.draft_steps,
        capture_folder=options.capture_folder,
    )
    return target, engine


async def _serve_until_told(
    options: ServeOptions, target: "Target", engine: "Engine", listener: socket.socket
) -> None:
    loop, told = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, told.set)
    server = _Server(options, target, engine)
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,  # a client that went away takes its request back
        shutdown_timeout=_GOODBYE_SECONDS,
    )
    await runner.setup()
    engine.start()
    try:
        await web.SockSite(runner, listener, backlog=1024).start()
        url = _url(options.host, listener)
        if options.ready_file is not None:
            temporary = options.ready_file.with_name(f".{options.ready_file.name}.{os.getpid()}")
            temporary.write_text(url)
            temporary.rename(options.ready_file)
        logger.info("serving %s at %s", options.target, url)
        await told.wait()
        logger.info("told to end")
    finally:
        await asyncio.to_thread(engine.stop)  # every open request is answered
        await runner.cleanup()


def _url(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server:
    """The HTTP shell: reads requests, hands them to the engine, writes replies."""

    def __init__(self, options: ServeOptions, target: "Target", engine: "Engine") -> None:
        from actors.capture_file import can_name_a_file

        self._options = options
        self._target = target
        self._engine = engine
        self._live: set[str] = set()
        self._limits = ServerLimits(
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            greedy_only=options.draft is not None,
            allows_rid=can_name_a_file if options.capture_folder is not None else lambda _: True,
        )
        self._model_path = options.served_as or str(options.target)
        # Nothing here draws from it: requests bring their own. It tells this process from the next.
        self._random_seed = secrets.randbelow(2**30)

    def application(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.router.add_post(protocol.GENERATE, self._generate)
        app.router.add_get(protocol.HEALTH, self._health)
        app.router.add_get(protocol.READY, self._health)
        app.router.add_get(protocol.MODEL_INFO, self._model_info)
        app.router.add_get(protocol.SERVER_INFO, self._server_info)
        app.router.add_get(protocol.LOADS, self._loads)
        app.router.add_get(protocol.MODELS, self._models)
        app.router.add_post(protocol.ABORT, self._abort)
        app.router.add_post(protocol.FLUSH, self._flush)
        return app

    async def _generate(self, http: web.Request) -> web.Response:
        started = time.monotonic()
        try:
            request = parse_generate(await http.read(), self._limits)
        except RequestRefused as refused:
            return web.json_response(refused.body, status=refused.status)
        if request.rid in self._live:
            message = f"Duplicate request ID detected: {request.rid}"
            return web.json_response(value_error_body(message), status=400)
        self._live.add(request.rid)
        try:
            outcome = await self._run(request)
        finally:
            self._live.discard(request.rid)
        return self._reply(outcome, time.monotonic() - started)

    async def _run(self, request: ServedRequest) -> "Outcome | Broken":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Outcome | Broken] = loop.create_future()

        def settle(outcome: "Outcome | Broken") -> None:
            if not future.done():  # cancelled: the client is gone
                future.set_result(outcome)

        self._engine.submit(request, lambda outcome: loop.call_soon_threadsafe(settle, outcome))
        try:
            return await future
        except asyncio.CancelledError:
            # This very request: another may have taken its rid by now.
            self._engine.abort(lambda one: one is request)
            raise

    def _reply(self, outcome: "Outcome | Broken", seconds: float) -> web.Response:
        from actors.reference_engine import Broken

        if isinstance(outcome, Broken):
            status = 503 if outcome.is_shutdown else 500
            return web.json_response(error_body(status, outcome.message), status=status)
        request = outcome.request
        if not outcome.ran:
            return web.json_response(waiting_abort_reply(request, outcome.finish))
        body = generate_reply(
            request,
            outcome.output_ids,
            self._text(outcome),
            outcome.finish,
            seconds=seconds,
            speculation=outcome.speculation,
            draft_steps=self._options.draft_steps,
        )
        return web.json_response(body)

    def _text(self, outcome: "Outcome") -> str:
        request, ids = outcome.request, list(outcome.output_ids)
        if outcome.finish.stops_at_token and not request.no_stop_trim:
            ids.pop()
        text: str = self._target.tokenizer.decode(
            ids,
            skip_special_tokens=request.skip_special_tokens,
            spaces_between_special_tokens=request.spaces_between_special_tokens,
        )
        return text

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self._engine.failure is None else 503)

    async def _model_info(self, _: web.Request) -> web.Response:
        body = model_info_body(
            model_path=self._model_path,
            tokenizer_path=self._model_path,
            model_type=self._target.model_type,
            architectures=self._target.architectures,
        )
        return web.json_response(body)

    async def _server_info(self, _: web.Request) -> web.Response:
        options = self._options
        body = server_info_body(
            version=VERSION,
            model_path=self._model_path,
            tokenizer_path=self._model_path,
            dtype=options.dtype,
            device=options.device,
            context_length=self._target.context_length,
            max_running_requests=options.max_running_requests,
            draft_path=None if options.draft is None else str(options.draft),
            draft_steps=options.draft_steps,
            capture_layer_ids=options.capture_layer_ids,
            random_seed=self._random_seed,
        )
        return web.json_response(body)

    async def _loads(self, _: web.Request) -> web.Response:
        load, slots = self._engine.load(), self._options.max_running_requests
        body = loads_body(
            now=datetime.now(timezone.utc).isoformat(),
            version=VERSION,
            running=load.running,
            waiting=load.waiting,
            used_tokens=load.used_tokens,
            total_tokens=slots * self._target.context_length,
            max_running=slots,
            tokens_per_second=load.tokens_per_second,
        )
        return web.json_response(body)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response(models_body(self._model_path, self._target.context_length))

    async def _abort(self, http: web.Request) -> web.Response:
        try:
            rid, everything = parse_abort(await http.read())
        except RequestRefused as refused:
            return web.json_response(refused.body, status=refused.status)
        # As SGLang does it: a rid that is not live names nobody; one that is names every request
        # whose rid it begins.
        if everything or rid in self._live:
            self._engine.abort(lambda one: everything or one.rid.startswith(rid))
        return web.Response(status=200)

    async def _flush(self, _: web.Request) -> web.Response:
        # Nothing is kept between requests, so there is nothing to flush but the question.
        load: Any = self._engine.load()
        is_idle = load.running == load.waiting == 0
        return web.Response(status=200 if is_idle else 400)


if __name__ == "__main__":
    raise SystemExit(main())
