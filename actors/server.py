"""One server's life: started and restarted, or borrowed; watched while it serves. Knows no Ray."""

import asyncio
import logging
import os
import shlex
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

from actors.client import Client
from actors.errors import Overloaded, RequestFault, ServerFailed, Unreachable
from actors.launch import StartPlan
from actors.protocol import identity_of
from actors.supervision import ENDED, ServerStatus, restart_delay

logger = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
_CLOSE_SECONDS = 10.0
_POLL_SECONDS = 1.0
_POLL_DEADLINE_SECONDS = 10.0
_LOOK_SECONDS = 30.0  # between two looks at health and identity: stock SGLang generates for one
_HEALTH_SECONDS = 30.0  # SGLang may take 20 s to say that it is well
_MISSES = 3  # polls without a connection, before an attached server has left
_TAIL_BYTES, _TAIL_LINES = 32_768, 20


class ServerProcess:
    """One process of one server under its guard, which ends with this process: the guard's stdin
    is a pipe that only this process holds."""

    def __init__(self, plan: StartPlan, host: str, port: int, *, start: int) -> None:
        self._plan = plan
        self._url = "" if plan.ready_file else f"http://{host}:{port}"
        plan.logs.mkdir(parents=True, exist_ok=True)
        if plan.ready_file:
            plan.ready_file.unlink(missing_ok=True)
        command = plan.command(host, port)
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with plan.log.open("ab") as output:
            self._log_start = output.tell()
            # Names of variables only: their values may be secrets that Ray's environment holds.
            output.write(f"==== start {start}, {now}: {shlex.join(command)}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                command,
                # This process's own environment: Ray has put the actor's GPUs there.
                env=plan.environment(os.environ),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def url(self) -> str:
        """Where it serves, or will serve; "" before that is known."""
        ready_file = self._plan.ready_file
        if not self._url and ready_file is not None and ready_file.exists():
            self._url = ready_file.read_text().strip()
        return self._url

    def exit_code(self) -> int | None:
        """None while the process runs."""
        return self._process.poll()

    def tail(self) -> str:
        """The end of what this start has logged, and where the rest is."""
        with self._plan.log.open("rb") as log:
            log.seek(max(self._log_start, self._plan.log.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        return f"the end of its log {self._plan.log}:\n" + "\n".join(lines)

    def close(self) -> None:
        """End the process group and wait until it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the guard; its child dies with it
            self._process.wait()
        if self._plan.ready_file:
            self._plan.ready_file.unlink(missing_ok=True)


class Supervisor:
    """Keeps one server, in a thread of its own, and publishes its status every second.

    `source` is a plan, for a server that is started, restarted with limits and ended with this
    object; or the URL of a server that somebody else runs, which is watched and never ended.
    A server that answers is not ready before `admit` says so for this very incarnation.
    """

    def __init__(
        self,
        name: str,
        source: StartPlan | str,
        publish: Callable[[ServerStatus], None],
        *,
        host: str = "127.0.0.1",
        gateway: bool = False,
    ) -> None:
        self._source, self._publish = source, publish
        self._host, self._gateway = host, gateway
        self._status = ServerStatus(name, borrowed=isinstance(source, str))
        self._was_ready = False
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] = self._loop.create_task(self._live())
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def admit(self, incarnation: str, error: str = "") -> None:
        """Say that the server fits, or why it does not. Says nothing of another incarnation."""
        self._call(lambda: self._judge(incarnation, error))

    def close(self) -> None:
        """Stop watching; end the server if it was started here."""
        self._call(self._task.cancel)
        self._thread.join()

    def _call(self, function: Callable[[], Any]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            assert self._loop.is_closed()  # closed before: there is nothing left to say or to end

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(asyncio.gather(self._task, return_exceptions=True))
            if not self._task.cancelled() and (error := self._task.exception()) is not None:
                logger.error("the supervisor of %s failed", self._status.name, exc_info=error)
                self._set(state="failed", error=f"its supervisor failed: {error!r}", load=None)
        finally:
            self._loop.close()

    async def _live(self) -> None:
        beat = asyncio.get_running_loop().create_task(self._beat())
        try:
            match self._source:
                case StartPlan() as plan:
                    await self._keep(plan)
                case str() as url:
                    await self._borrow(url)
            await beat  # given up: the last status stays known
        finally:
            beat.cancel()

    async def _beat(self) -> None:
        while True:
            self._publish(self._status)
            await asyncio.sleep(_POLL_SECONDS)

    def _set(self, **changes: Any) -> None:
        self._status = replace(self._status, **changes)
        self._publish(self._status)

    def _judge(self, incarnation: str, error: str) -> None:
        if self._status.incarnation != incarnation or self._status.state != "checking":
            return
        self._was_ready = self._was_ready or not error
        self._set(state="unfit" if error else "ready", error=error)

    # A server that is started here.

    async def _keep(self, plan: StartPlan) -> None:
        deaths: list[float] = []
        port = 0
        while True:
            port = self._port(port)
            self._set(state="starting", starts=self._status.starts + 1, load=None)
            process = ServerProcess(plan, self._host, port, start=self._status.starts)
            try:
                error = await self._serve(plan, process)
                url = process.url()
            finally:
                process.close()  # blocks this thread, which has nothing else to do
            if self._status.state == "unfit":
                return
            now = time.monotonic()
            deaths.append(now)
            port = int(url.rpartition(":")[2]) if url else 0
            delay = restart_delay(deaths, now, plan.config, was_ready=self._was_ready)
            if delay is None:
                self._set(state="failed", error=error, load=None)
                return
            self._set(state="restarting", error=error, load=None)
            await asyncio.sleep(delay)

    def _port(self, before: int) -> int:
        """The port of the last start if it is free, so that its clients find it again."""
        if before and _is_free(self._host, before):
            return before
        assert isinstance(self._source, StartPlan)
        return 0 if self._source.ready_file else _free_port(self._host)

    async def _serve(self, plan: StartPlan, process: ServerProcess) -> str:
        """From the start to the end of one process; returns why it ended."""
        try:
            url = await _until_healthy(plan, process)
        except ServerFailed as error:
            return str(error)
        self._set(state="checking", url=url, incarnation=uuid.uuid4().hex)
        async with Client(url, vocab_size=0) as client:
            return await self._watch(
                client,
                _look_at_health(client, plan.config.unhealthy_seconds),
                lambda: _death(process),
            )

    # A server that somebody else runs.

    async def _borrow(self, url: str) -> None:
        self._set(url=url)
        async with Client(url, vocab_size=0) as client:
            while True:
                fault = await _fault_of_health(client)
                if isinstance(fault, Unreachable | Overloaded):  # not there, or not ready
                    came_before = self._status.starts > 0
                    self._set(state="left" if came_before else "starting", error=str(fault))
                    await asyncio.sleep(_POLL_SECONDS)
                    continue
                self._set(
                    state="checking",
                    incarnation=uuid.uuid4().hex,
                    starts=self._status.starts + 1,
                )
                look = (
                    _look_at_health(client, _MISSES * _LOOK_SECONDS)
                    if self._gateway
                    else _look_at_identity(client)
                )
                error = await self._watch(client, look, lambda: None)
                if self._status.state in ENDED:
                    return
                self._set(state="left", error=error, load=None)

    # Both.

    async def _watch(self, client: Client, look: Any, death: Callable[[], str | None]) -> str:
        """Poll the load until the server is gone or unfit; returns why. `look` is the slow look."""
        looking = asyncio.get_running_loop().create_task(look)
        misses = 0
        try:
            while True:
                if (reason := death()) is not None:
                    return reason
                if self._status.state in ENDED:
                    return self._status.error
                if looking.done():
                    return str(looking.result())
                fault = None if self._gateway else await self._poll(client)
                gone = isinstance(fault, Unreachable) and fault.fault != "deadline"
                misses = misses + 1 if gone else 0
                if self._status.borrowed and misses >= _MISSES:
                    return str(fault)
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _poll(self, client: Client) -> RequestFault | None:
        try:
            load = await client.loads(deadline_seconds=_POLL_DEADLINE_SECONDS)
        except RequestFault as fault:
            self._set(load=None)
            return fault
        known = {
            name: value
            for name, value in (
                ("max_total_num_tokens", load.max_total_num_tokens),
                ("max_running_requests", load.max_running_requests),
            )
            if value is not None
        }
        self._set(load=load, seen_at=time.time(), **known)
        return None


async def _until_healthy(plan: StartPlan, process: ServerProcess) -> str:
    """Return the URL at the first healthy answer. Raises `ServerFailed` with the log's tail."""
    ready_seconds = plan.config.ready_seconds
    deadline = time.monotonic() + ready_seconds
    fault: RequestFault | None = None
    while not process.url():
        await _breathe(process, deadline, ready_seconds, fault)
    async with Client(process.url(), vocab_size=0) as client:
        while True:
            fault = await _fault_of_health(client)
            if fault is None:
                return process.url()
            await _breathe(process, deadline, ready_seconds, fault)


async def _breathe(
    process: ServerProcess, deadline: float, ready_seconds: float, fault: RequestFault | None
) -> None:
    if (reason := _death(process)) is not None:
        raise ServerFailed(reason)
    if time.monotonic() > deadline:
        last = "" if fault is None else f" (the last answer to /health: {fault})"
        raise ServerFailed(
            f"the server was not ready after {ready_seconds:g} s{last}; {process.tail()}"
        )
    await asyncio.sleep(_TICK_SECONDS)


def _death(process: ServerProcess) -> str | None:
    code = process.exit_code()
    return None if code is None else f"the server ended with code {code}; {process.tail()}"


async def _fault_of_health(client: Client) -> RequestFault | None:
    try:
        await client.health(deadline_seconds=_HEALTH_SECONDS)
    except RequestFault as fault:
        return fault
    return None


async def _look_at_health(client: Client, patience_seconds: float) -> str:
    """Return once there was no healthy answer for so long."""
    well_at = time.monotonic()
    while True:
        await asyncio.sleep(_LOOK_SECONDS)
        fault = await _fault_of_health(client)
        if fault is None:
            well_at = time.monotonic()
        elif time.monotonic() - well_at >= patience_seconds:
            return f"no healthy answer for {time.monotonic() - well_at:.0f} s ({fault})"


async def _look_at_identity(client: Client) -> str:
    """Return once another process or model answers behind the URL."""
    first: str | None = None
    while True:
        try:
            seen: str | None = identity_of(await client.model_info(), await client.server_info())
        except RequestFault as fault:
            logger.debug("%s does not say what it is: %s", client.url, fault)
            seen = first
        if first is not None and seen != first:
            return "another process or another model answers at this URL now"
        first = seen
        await asyncio.sleep(_LOOK_SECONDS)


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
