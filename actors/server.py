"""Owns server processes, or borrows running ones; checks both. The only owner that may kill one."""

import asyncio
import json
import logging
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.client import Client
from actors.config import AttachedServers, EmbeddedServers, Servers
from actors.errors import RequestFault, ServerFailed, ServerUnfit
from actors.launch import EngineOptions, embedded_command, embedded_environment
from actors.protocol import ModelInfo, ServerInfo

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.05
_CLOSE_SECONDS = 10.0
# A server actor holds a process and does nothing itself: its CPUs are the server's own matter, and
# Ray Data and Train need theirs on a machine with two.
_ACTOR_CPUS = 0.01


@dataclass(frozen=True)
class CheckedServer:
    """A server that fits the run, and what it said of itself."""

    url: str
    model: ModelInfo
    server: ServerInfo


@contextmanager
def running_servers(
    config: Servers, *, target: Path, options: EngineOptions, logs: Path, label: str
) -> Iterator[tuple[str, ...]]:
    """Yield the URLs of servers that answer. Started ones are ended on every path; attached never.

    Needs an initialised Ray for embedded servers. Raises `ServerFailed` with the tail of a log.
    """
    match config:
        case AttachedServers():
            yield config.urls
        case EmbeddedServers():
            with _embedded_servers(config, target, options, logs, label) as urls:
                yield urls


def check_servers(
    urls: Sequence[str], *, target: Path, need_context_tokens: int
) -> tuple[CheckedServer, ...]:
    """Ask every server what it is. Raises `ServerUnfit` for the first that does not fit."""
    return asyncio.run(_check_all(urls, target, need_context_tokens))


class ServerProcess:
    """One embedded server under its guard. As a Ray actor it dies with its owner: the guard's
    stdin is a pipe that only this process holds."""

    def __init__(
        self, command: Sequence[str], config: EmbeddedServers, ready_file: Path, log: Path
    ) -> None:
        self._ready_file, self._log = ready_file, log
        log.parent.mkdir(parents=True, exist_ok=True)
        ready_file.unlink(missing_ok=True)
        self._url = ""
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command),
                # This process's own environment: Ray has put the actor's GPU there.
                env=embedded_environment(config, os.environ),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_until_ready(self, ready_seconds: float) -> str:
        """Return the URL once the server serves. Raises `ServerFailed` with the log's tail."""
        deadline = time.monotonic() + ready_seconds
        while not self._ready_file.exists():
            try:
                code = self._process.wait(_TICK_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
            if code is not None:
                raise ServerFailed(f"the server ended with code {code}; {self._tail()}")
            if time.monotonic() > deadline:
                self.close()
                raise ServerFailed(
                    f"the server was not ready after {ready_seconds:g} s; {self._tail()}"
                )
        self._url = self._ready_file.read_text().strip()
        return self._url

    def url(self) -> str:
        """Where it serves; "" before it is ready."""
        return self._url

    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process group and wait until it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the guard; its child dies with it
            self._process.wait()
        self._ready_file.unlink(missing_ok=True)

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-20:]
        return f"the end of its log {self._log}:\n" + "\n".join(lines)


@contextmanager
def _embedded_servers(
    config: EmbeddedServers, target: Path, options: EngineOptions, logs: Path, label: str
) -> Iterator[tuple[str, ...]]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # They listen on loopback, so they live where their users are: on this node.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    remote = ray.remote(ServerProcess).options(
        num_cpus=_ACTOR_CPUS,
        num_gpus=1 if config.device == "cuda" else 0,
        max_restarts=0,
        max_concurrency=2,  # `close` must not wait for `wait_until_ready`
        scheduling_strategy=here,
    )
    servers: list[Any] = []
    try:
        for index in range(config.count):
            ready_file = logs.absolute() / f".{label}-{index}.ready"
            log = logs.absolute() / f"{label}-{index}.log"
            command = embedded_command(config, target, options, ready_file)
            servers.append(remote.remote(command, config, ready_file, log))
        urls = _ray_get([one.wait_until_ready.remote(config.ready_seconds) for one in servers])
        logger.info("%s: %d server(s) ready", label, len(urls))
        yield tuple(urls)
    finally:
        _end(servers)


def _end(servers: Sequence[Any]) -> None:
    """Close all at once, then kill the actors: the second also ends what the first could not."""
    import ray

    closing = [one.close.remote() for one in servers]
    _, unfinished = ray.wait(closing, num_returns=len(closing), timeout=2 * _CLOSE_SECONDS)
    if unfinished:
        logger.warning("%d server(s) did not close in time; killed", len(unfinished))
    for one in servers:
        ray.kill(one)


def _ray_get(references: list[Any]) -> Any:
    """`ray.get` that raises a `ServerFailed` as itself, not wrapped in a remote traceback."""
    import ray

    try:
        return ray.get(references)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ServerFailed):
            raise error.cause from None
        raise
    except ray.exceptions.RayActorError as error:
        raise ServerFailed(f"the actor of a server died: {error}") from error


async def _check_all(
    urls: Sequence[str], target: Path, need_context_tokens: int
) -> tuple[CheckedServer, ...]:
    return tuple(await asyncio.gather(*(_check(url, target, need_context_tokens) for url in urls)))


async def _check(url: str, target: Path, need_context_tokens: int) -> CheckedServer:
    try:
        async with Client(url, vocab_size=0) as client:
            await client.health()
            model, server = await client.model_info(), await client.server_info()
    except RequestFault as fault:
        raise ServerUnfit(
            f"the server {url} does not answer as it should ({fault})",
            expected="/health, /model_info and /server_info of SGLang 0.5.23 or later",
            change="start the server, or correct its URL in the recipe",
        ) from fault
    _check_model(url, model, target)
    _check_context(url, server, target, need_context_tokens)
    if server.allow_auto_truncate:
        raise ServerUnfit(
            f"the server {url} runs with --allow-auto-truncate",
            expected="a server that refuses what is too long; this one cuts prompts in silence",
            change="restart it without that option",
        )
    return CheckedServer(url, model, server)


def _check_model(url: str, model: ModelInfo, target: Path) -> None:
    served = Path(model.model_path)
    if served != target and served.name != target.name:
        raise ServerUnfit(
            f"the server {url} serves {model.model_path}",
            expected=f"the recipe's target, {target}",
            change="start the server with that target, or set target.path to what it serves",
        )
    if model.preferred_sampling_params:
        raise ServerUnfit(
            f"the server {url} has preferred sampling parameters {model.preferred_sampling_params}",
            expected="none: every parameter is the recipe's",
            change="restart it without --preferred-sampling-params",
        )


def _check_context(url: str, server: ServerInfo, target: Path, need: int) -> None:
    context = server.context_length
    if context is None:  # the server's own argument was left out, so the model's length applies
        context = _model_context(target)
    limits = {"context_length": context, "max_total_num_tokens": server.max_total_num_tokens}
    for name, tokens in limits.items():
        if tokens is not None and tokens < need:
            raise ServerUnfit(
                f"the server {url} has {name} {tokens}",
                expected=f"at least {need} tokens for a prompt and its response together",
                change=f"restart it with room for {need}, or lower prompts.context_tokens",
            )


def _model_context(target: Path) -> int:
    config = json.loads((target / "config.json").read_bytes())
    text = config.get("text_config", config)
    tokens: int = text["max_position_embeddings"]
    return tokens
