"""The servers of one stage as Ray actors: one supervisor each, and a directory of their reports.

Control only: what is known of a server passes through here, rows never do.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from actors.config import AttachedServers, EmbeddedServers, LaunchedServers, Servers
from actors.dispatch import ServerReport
from actors.errors import RequestFault, ServerFailed, ServerUnfit
from actors.fit import record_of
from actors.launch import EngineOptions, StartPlan
from actors.preflight import Admission, CheckedServer, check_server
from actors.server import Supervisor
from actors.supervision import ENDED, ServerStatus, events_between

logger = logging.getLogger(__name__)

OnEvent = Callable[[str, Mapping[str, Any]], None]

# An actor here only waits and asks: its CPUs are the server's own matter, and Ray Data and Train
# need theirs on a machine with two.
_ACTOR_CPUS = 0.01
_LOOK_SECONDS = 0.25
_CALM_SECONDS = 1.0  # while nothing is about to change
_ASK_AGAIN_SECONDS = 2.0
_SAY_SECONDS = 30.0
_CLOSE_SECONDS = 20.0
_DIRECTORY_SECONDS = 60.0


class Directory:
    """The latest status of every server. Forgets nothing but with its own death, and then only
    until the supervisors' next word, a second later."""

    def __init__(self) -> None:
        self._latest: dict[str, tuple[ServerStatus, float]] = {}

    def put(self, status: ServerStatus) -> None:
        """Take a supervisor's word."""
        self._latest[status.name] = (status, time.monotonic())

    def statuses(self) -> tuple[ServerStatus, ...]:
        """Every server that has been heard of."""
        now = time.monotonic()
        return tuple(status.after_silence(now - at) for status, at in self._latest.values())

    def reports(self) -> tuple[ServerReport, ...]:
        """What a pool needs to know of every server whose URL is known."""
        return tuple(status.report() for status in self.statuses() if status.url)


class Keeper:
    """The actor of one server."""

    def __init__(
        self, name: str, source: StartPlan | str, directory: str, *, network: bool, gateway: bool
    ) -> None:
        import ray

        # By its name: an actor that is started again finds no handle among its arguments.
        put = ray.get_actor(directory).put.remote
        self._supervisor = Supervisor(
            name,
            source,
            put,
            host=ray.util.get_node_ip_address() if network else "127.0.0.1",
            gateway=gateway,
        )

    def admit(self, incarnation: str, error: str) -> None:
        """The driver's word on whether the server fits."""
        self._supervisor.admit(incarnation, error)

    def close(self) -> None:
        """End the server if it is ours."""
        self._supervisor.close()


@dataclass(frozen=True)
class Subscription:
    """Tells any process of the Ray cluster what is known of the servers now: one small call."""

    directory: Any

    def __call__(self) -> tuple[ServerReport, ...]:
        """One report per server with a URL. Raises Ray's errors if the driver's node is gone."""
        import ray

        reports: tuple[ServerReport, ...] = ray.get(
            self.directory.reports.remote(), timeout=_DIRECTORY_SECONDS
        )
        return reports


class Fleet:
    """The servers of one stage, seen from the driver. A thread follows them and admits them."""

    def __init__(
        self,
        unheard: Sequence[ServerStatus],
        keepers: Mapping[str, Any],
        directory: Any,
        admission: Admission | None,
        on_event: OnEvent | None,
    ) -> None:
        self.subscription = Subscription(directory)
        self._keepers, self._directory = keepers, directory
        self._admission, self._on_event = admission, on_event
        self._statuses = {one.name: one for one in unheard}
        self._checked: dict[str, CheckedServer] = {}
        self._unfit: list[ServerUnfit] = []
        self._asked: set[str] = set()  # incarnations
        self._stopping = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleet")
        self._following = self._thread.submit(lambda: asyncio.run(self._tend()))

    @property
    def urls(self) -> tuple[str, ...]:
        """Where rows may be sent now."""
        return tuple(one.url for one in self.states() if one.state == "ready")

    def states(self) -> tuple[ServerStatus, ...]:
        """Every server, also one whose actor waits for its GPUs."""
        return tuple(self._statuses.values())

    def checked(self) -> tuple[CheckedServer, ...]:
        """What the admitted servers said of themselves."""
        return tuple(self._checked.values())

    def check(self) -> None:
        """Raise `ServerFailed` once every server has ended for good, with the reasons."""
        if self._following.done():
            self._following.result()  # raises: it ends by itself only if something broke
        states = self.states()
        if all(one.state in ENDED for one in states):
            reasons = "\n".join(f"{one.name}: {one.error}" for one in states)
            raise ServerFailed(f"no server is left\n{reasons}")

    def close(self) -> None:
        """Follow no more."""
        self._stopping.set()
        self._thread.shutdown()
        if (error := self._following.exception()) is not None:
            logger.error("the servers were no longer followed", exc_info=error)

    def is_open(self, *, wait_for: Literal["first", "all"], patient: bool) -> bool:
        """Whether the stage may begin. Raises `ServerUnfit` or `ServerFailed` if it never may.

        `patient` is whether attached servers that have not answered may still be waited for.
        """
        for unfit in self._unfit:
            raise unfit
        self.check()
        states = self.states()
        failed = [one for one in states if one.state in ENDED]
        if failed and wait_for == "all":
            raise ServerFailed("\n".join(f"{one.name}: {one.error}" for one in failed))
        ready = sum(one.state == "ready" for one in states)
        if ready == len(states):
            return True
        borrowed = [one for one in states if one.borrowed]
        # Whoever answers is judged before the stage begins; whoever does not may come later.
        silent = [one for one in borrowed if one.state in ("starting", "left") and one.error]
        undecided = len(borrowed) - len(silent) - ready if borrowed else 0
        if undecided == 0 and not patient and silent and (not ready or wait_for == "all"):
            raise ServerUnfit(
                f"{len(silent)} of {len(states)} attached servers do not answer: "
                + "; ".join(f"{one.url}: {one.error}" for one in silent),
                expected="a running server at every URL"
                if wait_for == "all"
                else "at least one running server",
                change="start the servers, correct the URLs in the recipe, or raise ready_seconds "
                "of these servers",
            )
        return wait_for == "first" and ready > 0 and undecided == 0

    async def _tend(self) -> None:
        asking: set[asyncio.Task[None]] = set()
        while not self._stopping.is_set():
            for task in [one for one in asking if one.done()]:
                asking.discard(task)
                task.result()
            for status in await self._directory.statuses.remote():
                before = self._statuses[status.name]
                self._statuses = {**self._statuses, status.name: status}
                self._tell(before, status)
                if status.state == "checking" and status.incarnation not in self._asked:
                    self._asked.add(status.incarnation)
                    asking.add(asyncio.create_task(self._admit(status)))
            settled = all(one.state in ("ready", *ENDED) for one in self.states())
            await asyncio.sleep(_CALM_SECONDS if settled else _LOOK_SECONDS)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def _tell(self, before: ServerStatus, after: ServerStatus) -> None:
        for name, fields in events_between(before, after):
            logger.info("%s %s", name, fields["server"])
            if self._on_event is not None:
                self._on_event(name, fields)

    async def _admit(self, status: ServerStatus) -> None:
        """Check one incarnation until it fits, does not, or is no more."""
        error = ""
        if self._admission is not None:
            try:
                checked = await self._checked_when_it_can(status, self._admission)
            except ServerUnfit as unfit:
                self._unfit.append(unfit)
                error = str(unfit)
            else:
                if checked is None:
                    return
                self._checked[status.url] = checked
                if self._on_event is not None:
                    self._on_event(*_checked_event(checked))
        self._keepers[status.name].admit.remote(status.incarnation, error)

    async def _checked_when_it_can(
        self, status: ServerStatus, admission: Admission
    ) -> CheckedServer | None:
        while self._statuses[status.name].incarnation == status.incarnation:
            try:
                return await check_server(status.url, admission)
            except RequestFault as fault:  # it cannot say now
                logger.info("%s cannot be checked now: %s", status.url, fault)
            await asyncio.sleep(_ASK_AGAIN_SECONDS)
        return None


@contextmanager
def running_servers(
    config: Servers,
    *,
    target: Path,
    options: EngineOptions,
    logs: Path,
    label: str,
    wait_for: Literal["first", "all"] = "all",
    admission: Admission | None = None,
    on_event: OnEvent | None = None,
) -> Iterator[Fleet]:
    """Yield servers that answer, and fit if `admission` says what that is.

    With "first" the stage begins with the first of them and the others join through the
    subscription; an attached server that answers is judged before, in both cases. Started servers
    are ended on every path, attached ones never. `on_event` is called from a thread of its own.
    Needs an initialised Ray. Raises `ServerFailed` with the tail of a log, or `ServerUnfit`.
    """
    import ray

    logs = logs.absolute()
    _check_gpus(config)
    directory: Any = (
        ray.remote(Directory)
        .options(
            name=(directory_name := f"servers-{label}-{uuid.uuid4().hex}"),
            num_cpus=_ACTOR_CPUS,
            max_restarts=-1,
            max_task_retries=-1,
            **_here(hard=True),
        )
        .remote()
    )
    keepers: dict[str, Any] = {}
    fleet: Fleet | None = None
    try:
        sources = _sources(config, target, options, logs, label)
        for name, source in sources.items():
            keepers[name] = _keeper(name, source, config, directory_name)
        unheard = [
            ServerStatus(name, borrowed=isinstance(source, str)) for name, source in sources.items()
        ]
        fleet = Fleet(unheard, keepers, directory, admission, on_event)
        patience = config.ready_seconds if isinstance(config, AttachedServers) else 0.0
        began = said = time.monotonic()
        while not fleet.is_open(wait_for=wait_for, patient=time.monotonic() - began < patience):
            time.sleep(_LOOK_SECONDS)
            if time.monotonic() - said > _SAY_SECONDS:
                said = time.monotonic()
                states = Counter(one.state for one in fleet.states())
                logger.info("%s: waiting for servers (and their GPUs): %s", label, dict(states))
        logger.info("%s: %d of %d server(s) ready", label, len(fleet.urls), len(keepers))
        yield fleet
    finally:
        if fleet is not None:
            fleet.close()
        _end(list(keepers.values()))
        ray.kill(directory)


def _sources(
    config: Servers, target: Path, options: EngineOptions, logs: Path, label: str
) -> dict[str, StartPlan | str]:
    match config:
        case AttachedServers():
            return {f"{label}-{index}": url.rstrip("/") for index, url in enumerate(config.urls)}
        case EmbeddedServers() | LaunchedServers():
            names = [f"{label}-{index}" for index in range(config.count)]
            return {name: StartPlan(name, config, target, options, logs) for name in names}


def _keeper(name: str, source: StartPlan | str, config: Servers, directory: str) -> Any:
    import ray

    match config:
        case AttachedServers():
            gpus, restarts = 0, -1
            place = _here(hard=False)
        case EmbeddedServers():
            gpus, restarts = int(config.device == "cuda"), config.restarts_per_hour
            place = _here(hard=True)
        case LaunchedServers():
            # An actor's GPUs are all of one node: nothing more is needed to keep a group together.
            gpus = config.tensor_parallel_size if config.device == "cuda" else 0
            restarts = config.restarts_per_hour
            place = _here(hard=True) if config.listen == "loopback" else {}
    options = {
        "num_cpus": _ACTOR_CPUS,
        "num_gpus": gpus,
        "max_restarts": restarts,
        "max_concurrency": 2,  # `close` must not keep `admit` waiting
        **place,
    }
    network = isinstance(config, LaunchedServers) and config.listen == "network"
    gateway = isinstance(config, AttachedServers) and config.gateway
    return (
        ray.remote(Keeper)
        .options(**options)
        .remote(name, source, directory, network=network, gateway=gateway)
    )


def _here(*, hard: bool) -> dict[str, Any]:
    """On the driver's node: what listens on loopback lives where its users are."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=not hard)}


def _check_gpus(config: Servers) -> None:
    """Raise `ServerFailed` for a server that no node of this cluster could ever hold."""
    import ray

    if isinstance(config, AttachedServers) or config.device != "cuda":
        return
    here = ray.get_runtime_context().get_node_id()
    anywhere = isinstance(config, LaunchedServers) and config.listen == "network"
    gpus = [
        int(node["Resources"]["GPU"]) if "GPU" in node["Resources"] else 0
        for node in ray.nodes()
        if node["Alive"] and (anywhere or node["NodeID"] == here)
    ]
    each = config.tensor_parallel_size if isinstance(config, LaunchedServers) else 1
    room = sum(one // each for one in gpus)
    if room == 0 or (not anywhere and room < config.count):
        where = "the cluster's nodes have" if anywhere else "this node has"
        raise ServerFailed(
            f"{config.count} server(s) with {each} GPU(s) each were asked for; {where} {gpus} "
            "GPU(s). One server needs all its GPUs on one node: lower count or "
            "tensor_parallel_size"
            + ("" if anywhere else ", or set listen to network to use other nodes")
        )


def _end(keepers: Sequence[Any]) -> None:
    """Close all at once, then kill the actors: the second also ends what the first could not."""
    import ray

    closing = [one.close.remote() for one in keepers]
    if closing:
        _, unfinished = ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS)
        if unfinished:
            logger.warning("%d server(s) did not close in time; killed", len(unfinished))
    for one in keepers:
        ray.kill(one)


def _checked_event(checked: CheckedServer) -> tuple[str, dict[str, Any]]:
    facts = {"url": checked.url, "not_checked": list(checked.not_checked)}
    if checked.model is None or checked.server is None:
        return "gateway_checked", facts
    return "server_checked", {**facts, **record_of(checked.model, checked.server)}
