"""Publishes a run's figures through Ray once a second, and keeps `RUN/servers.json` fresh.

Where Ray collects no metrics this costs some microseconds a second and reaches nobody.
"""

import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from actors.supervision import ServerStatus
from pipelines.errors import StorageFailed
from pipelines.last_seen import (
    GpuSeen,
    LastSeen,
    RaySeen,
    ServerSeen,
    gpus_of,
    place_of,
    write_last_seen,
)
from pipelines.metrics import METRICS, RUN_LABEL, Metric, Reading
from pipelines.readings import kv_usage, server_readings
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog, Figures

logger = logging.getLogger(__name__)

_PUBLISH_SECONDS = 1.0
_SEEN_SECONDS = 5.0
_SUMMARY_SECONDS = 60.0
_PAUSE_SECONDS = 60.0  # after a failure: nothing that a run needs depends on this
_CLOSE_SECONDS = 10.0
_GPU_SECONDS = 5.0
_ERROR_LETTERS = 300
_GPU_QUERY = "--query-gpu=index,name,memory.used,memory.total,utilization.gpu"


class Publisher:
    """One process's series in Ray. Ray's instruments are made at their first use."""

    def __init__(self, run_name: str) -> None:
        self._run_name = run_name
        self._instruments: dict[str, Any] = {}

    def publish(self, readings: Iterable[Reading]) -> None:
        """Hand readings to Ray, which exports them some seconds later. Never blocks."""
        for one in readings:
            metric = METRICS[one.name]
            if one.name not in self._instruments:
                self._instruments[one.name] = _instrument(metric)
            instrument, tags = (
                self._instruments[one.name],
                {**one.labels, RUN_LABEL: self._run_name},
            )
            match metric.kind:
                case "counter":
                    if one.value > 0:  # Ray refuses a growth of nothing
                        instrument.inc(float(one.value), tags=tags)
                case "gauge":
                    instrument.set(float(one.value), tags=tags)
                case "histogram":
                    instrument.observe(float(one.value), tags=tags)


@contextmanager
def publishing(run: RunFolder, events: EventLog, stage: str) -> Iterator[None]:
    """Publish what comes into `events.figures` until the block ends, from a thread of its own.

    Ray is running. A failure is logged and tried again later, and never ends the stage.
    """
    events.figures = Figures()  # what gauges of an earlier stage showed is over
    ended = threading.Event()
    thread = threading.Thread(
        target=_Desk(run, events, stage).keep, args=(ended,), name="publish", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_CLOSE_SECONDS)
        place_of(run).unlink(missing_ok=True)  # no server is left to be seen


class _Desk:
    """The thread's own: what is due, and when."""

    def __init__(self, run: RunFolder, events: EventLog, stage: str) -> None:
        self._run, self._events, self._stage = run, events, stage
        self._publisher = Publisher(run.root.name)
        self._seen_at = float("-inf")
        self._said_at = time.monotonic()

    def keep(self, ended: threading.Event) -> None:
        """Publish every second until `ended`, and once more then."""
        pause = 0.0
        while not ended.wait(pause):
            pause = self._tried(self._turn, time.monotonic())
        self._tried(self._last_turn, time.monotonic())

    def _tried(self, turn: Any, now: float) -> float:
        """Seconds until the next turn."""
        try:
            turn(now)
        except Exception:
            logger.exception("figures were not published; trying again in a minute")
            return _PAUSE_SECONDS
        return _PUBLISH_SECONDS

    def _turn(self, now: float) -> None:
        servers = self._events.figures.servers()
        self._publisher.publish(self._events.figures.drain())
        self._publisher.publish(server_readings(servers))
        if now - self._seen_at >= _SEEN_SECONDS:
            self._seen_at = now
            self._see(servers)
        if now - self._said_at >= _SUMMARY_SECONDS:
            self._said_at = now
            self._say()

    def _last_turn(self, _now: float) -> None:
        self._publisher.publish(self._events.figures.drain())
        self._say()

    def _see(self, servers: Iterable[ServerStatus]) -> None:
        seen = LastSeen(
            at=round(time.time(), 3),
            host=socket.gethostname(),
            pid=os.getpid(),
            stage=self._stage,
            servers=tuple(_server_seen(one) for one in servers),
            gpus=_gpus(),
            ray=_ray_seen(),
        )
        try:
            write_last_seen(self._run, seen)
        except OSError as error:  # rows that find no room say it louder
            logger.warning("%s is not written: %s", place_of(self._run), error)

    def _say(self) -> None:
        summary = self._events.figures.summary()
        if not summary:
            return
        try:
            self._events.append("figures", stage=self._stage, **summary)
        except StorageFailed as error:
            logger.warning("figures are not written down: %s", error)


def _instrument(metric: Metric) -> Any:
    from ray.util.metrics import Counter, Gauge, Histogram

    about, tags = f"{metric.meaning} [{metric.unit}]", (*metric.labels, RUN_LABEL)
    match metric.kind:
        case "counter":
            return Counter(metric.name, about, tag_keys=tags)
        case "gauge":
            return Gauge(metric.name, about, tag_keys=tags)
        case "histogram":
            return Histogram(metric.name, about, list(metric.boundaries), tag_keys=tags)


def _server_seen(server: ServerStatus) -> ServerSeen:
    load = server.load
    return ServerSeen(
        name=server.name,
        url=server.url,
        state=server.state,
        running=None if load is None else load.running,
        queue=None if load is None else load.waiting,
        kv_usage=kv_usage(server),
        tokens_per_second=None if load is None else load.gen_throughput,
        restarts=server.restarts,
        error=server.error[:_ERROR_LETTERS],
    )


def _ray_seen() -> RaySeen:
    import ray

    alive = [bool(node["Alive"]) for node in ray.nodes()]
    shown = ("CPU", "GPU", "memory", "object_store_memory")
    total, free = ray.cluster_resources(), ray.available_resources()
    return RaySeen(
        nodes=sum(alive),
        dead_nodes=len(alive) - sum(alive),
        total={name: total[name] for name in shown if name in total},
        # Ray leaves out what is used up.
        free={name: free.get(name, 0.0) for name in shown if name in total},
    )


def _gpus() -> tuple[GpuSeen, ...]:
    """The GPUs of this machine; none where NVIDIA's tool is absent or cannot say."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    try:
        answer = subprocess.run(
            [tool, _GPU_QUERY, "--format=csv,noheader,nounits"],
            check=True,
            capture_output=True,
            text=True,
            timeout=_GPU_SECONDS,
        )
        return gpus_of(answer.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        logger.info("nvidia-smi does not say what the GPUs do: %s", error)
        return ()
