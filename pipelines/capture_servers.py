"""The servers of a capture: started here, told to hand states over, ended on every path."""

import hashlib
import json
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast, get_args

from actors.capture_file import LATE_SECONDS
from actors.config import AttachedServers, EmbeddedServers, LaunchedServers
from actors.errors import ServerFailed, ServerUnfit
from actors.fit import Expectation
from actors.fleet import Fleet, running_servers
from actors.launch import EngineOptions
from actors.launch_capture import CaptureOptions, architecture_of, place_hook, served_layer_ids
from actors.preflight import Admission
from pipelines.capture_plan import Dtype
from pipelines.errors import PreflightFailed
from pipelines.recipe import Recipe
from pipelines.state_reader import Handover
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog
from training.config import DraftConfig

logger = logging.getLogger(__name__)

# SGLang keeps some tokens of its context to itself: six of the input's, and `check_fit` counts four
# of them as room for a response (managers/scheduler.py, max_req_input_len).
_BEYOND_INPUT, _SPARE_CONTEXT = 4, 16


def own_servers(recipe: Recipe) -> EmbeddedServers | LaunchedServers:
    """The servers that a capture starts. Raises `PreflightFailed` where they are somebody's, or not
    known to hand over the target's layers."""
    servers = recipe.capture.servers
    if isinstance(servers, AttachedServers):
        raise PreflightFailed(
            f"capture.servers.kind is {servers.kind}",
            expected="embedded or launch: hidden states are handed over in this machine's memory",
            change="set capture.servers.kind to launch",
        )
    if isinstance(servers, LaunchedServers):
        _served_ids(recipe)
    return servers


@contextmanager
def capture_servers(
    recipe: Recipe, run: RunFolder, events: EventLog, config: DraftConfig, *, longest: int
) -> Iterator[tuple[Fleet, Handover]]:
    """Servers that run and fit, and where they hand over the states of up to `longest` tokens.

    Raises `PreflightFailed` where they do not start, and for as long as they are in use.
    """
    servers = own_servers(recipe)
    need = handover_bytes(recipe, config, longest=longest)
    with handover_folder(run, need_bytes=need) as folder:
        admission: Admission | None = None
        context: int | None = None
        served_ids: tuple[int, ...] = ()
        late_seconds = 0.0  # the embedded engine writes a file before it answers
        if isinstance(servers, LaunchedServers):
            place_hook(folder)
            late_seconds, served_ids = LATE_SECONDS, _served_ids(recipe)
            admission, context = _demands(recipe, config, longest)
        else:
            # A prefill of some hundred tokens fills the cores: batches win little here.
            servers = servers.model_copy(update={"max_running_requests": 1})
        nonce = secrets.token_hex(8)
        try:
            with running_servers(
                servers,
                target=Path(recipe.target.path),
                options=EngineOptions(
                    capture=CaptureOptions(folder, config.aux_layer_ids, served_ids, nonce),
                    context_length=context,
                ),
                logs=run.logs,
                label="capture",
                admission=admission,
                on_event=lambda name, fields: events.append(name, **fields),
            ) as fleet:
                events.figures.servers = fleet.states
                yield fleet, Handover.of(config, folder, nonce, late_seconds=late_seconds)
        except ServerUnfit as error:
            raise PreflightFailed(
                error.seen, expected=error.expected, change=error.change
            ) from error
        except ServerFailed as error:
            raise PreflightFailed(
                f"the capture server failed: {error}",
                expected="a server that loads the target and stays up",
                change="the log above says why; the same command goes on from here",
            ) from error


def handover_bytes(recipe: Recipe, config: DraftConfig, *, longest: int) -> int:
    """What the states of all requests in flight take in memory, and of those being read."""
    in_flight = recipe.capture.pool.max_in_flight_per_server * own_servers(recipe).count
    row_bytes = 2 * (len(config.aux_layer_ids) + 1) * config.target_hidden_size
    return 2 * in_flight * longest * row_bytes


def dtype_of(servers: EmbeddedServers | LaunchedServers) -> Dtype:
    """What a server computes in."""
    if isinstance(servers, EmbeddedServers):
        return servers.dtype
    dtype = servers.arguments["dtype"]
    assert dtype in get_args(Dtype), "the recipe was checked"
    return cast(Dtype, dtype)


def _demands(recipe: Recipe, config: DraftConfig, longest: int) -> tuple[Admission, int | None]:
    """What a stock server must be and have room for, and the context that it is given if the
    target's own is too short for what a server keeps to itself of it."""
    own, roomy = config.max_position_embeddings, longest + _SPARE_CONTEXT
    expectation = Expectation(Path(recipe.target.path), longest + _BEYOND_INPUT, max(own, roomy))
    admission = Admission(expectation, vocab_size=config.vocab_size)
    return admission, roomy if roomy > own else None


def _served_ids(recipe: Recipe) -> tuple[int, ...]:
    """What SGLang is told for the layers."""
    path = Path(recipe.target.path) / "config.json"
    try:
        architecture, layers = architecture_of(json.loads(path.read_text()))
        return served_layer_ids(architecture, layers, recipe.target.profile.aux_layer_ids)
    except ValueError as error:
        raise PreflightFailed(
            f"{path}: {error}",
            expected="a target whose layers SGLang 0.5.23 is known to capture",
            change="set target.profile.aux_layer_ids, or capture.servers.kind to embedded",
        ) from error


@contextmanager
def handover_folder(run: RunFolder, *, need_bytes: int) -> Iterator[Path]:
    """A folder in memory where there is room, else in the temp folder. Gone on every path.

    Its name follows from the run folder, which has one writer: what a killed call left behind is
    removed by the next.
    """
    name = f"eyas-capture-{hashlib.sha256(str(run.root.resolve()).encode()).hexdigest()[:16]}"
    memory, disk = Path("/dev/shm"), Path(tempfile.gettempdir())
    for place in (memory, disk):
        shutil.rmtree(place / name, ignore_errors=True)
    fits = (
        memory.is_dir()
        and os.access(memory, os.W_OK)
        and shutil.disk_usage(memory).free >= need_bytes
    )
    if not fits:
        logger.info("capture: /dev/shm has no %s bytes free; using %s", f"{need_bytes:,}", disk)
    folder = (memory if fits else disk) / name
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
