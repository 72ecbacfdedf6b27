"""Where the CPU of a running generate worker and its driver goes, seen by py-spy."""

import collections
import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

_ROLES = {"worker": "GenerateWorker", "driver": "pipelines.cli generate"}
_SETTLE_SECONDS = 2.0


@contextmanager
def profiling(output: Path, seconds: int, url: str, in_flight: int) -> Iterator[None]:
    """While a stage runs in here, record its worker and driver; write `output` when both ended.

    It begins when the server at `url` holds most of `in_flight` requests. Only threads on the CPU
    are counted. Needs py-spy in this environment (`pip install py-spy`).
    """
    spy = Path(sys.executable).with_name("py-spy")
    if not spy.exists():
        raise FileNotFoundError(f"{spy}: install py-spy into this environment to profile")
    ended = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        watch = threads.submit(_record, spy, output, seconds, url, in_flight, ended)
        try:
            yield
        finally:
            ended.set()
        watch.result()


def _record(
    spy: Path, output: Path, seconds: int, url: str, in_flight: int, ended: threading.Event
) -> None:
    _wait_for_flow(url, in_flight, ended)
    found = _find()
    recordings = {}
    for role, pid in found.items():
        raw = output.with_suffix(f".{role}.raw")
        command = [str(spy), "record", "--pid", str(pid), "--duration", str(seconds)]
        command += ["--rate", "200", "--format", "raw", "--nonblocking", "--output", str(raw)]
        recordings[role, raw] = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    report = []
    for (role, raw), recording in recordings.items():
        recording.wait()
        report.append(summary(role, raw.read_text().splitlines() if raw.exists() else []))
    output.write_text("\n\n".join(report) + "\n")


def _wait_for_flow(url: str, in_flight: int, ended: threading.Event) -> None:
    while not ended.wait(0.2):
        with urllib.request.urlopen(f"{url}/v1/loads") as reply:
            rank = json.loads(reply.read())["loads"][0]
        if rank["num_running_reqs"] + rank["num_waiting_reqs"] >= 0.75 * in_flight:
            time.sleep(_SETTLE_SECONDS)
            return
    raise TimeoutError(f"the stage ended before the server held {in_flight} requests at once")


def _find() -> dict[str, int]:
    """The pids below this process whose command line names a role."""
    found: dict[str, int] = {}
    for one in psutil.Process().children(recursive=True):
        try:
            line = " ".join(one.cmdline())
        except psutil.Error:
            continue  # it ended in this moment
        for role, mark in _ROLES.items():
            if mark in line:
                found.setdefault(role, one.pid)
    return found


def summary(role: str, lines: Sequence[str], *, top: int = 30) -> str:
    """Shares of samples by function, alone and with what it called, from collapsed stacks."""
    alone: collections.Counter[str] = collections.Counter()
    whole: collections.Counter[str] = collections.Counter()
    total = 0
    for line in lines:
        stack, _, count = line.rpartition(" ")
        frames = [_without_line(frame) for frame in stack.split(";")]
        total += int(count)
        alone[frames[-1]] += int(count)
        for frame in set(frames):
            whole[frame] += int(count)
    if not total:
        return f"{role}: no samples"
    shown = [f"{role}: {total} samples"]
    for title, counter in (("alone", alone), ("with callees", whole)):
        shown.append(f"  {title}")
        shown += [f"    {100 * n / total:5.1f}%  {one}" for one, n in counter.most_common(top)]
    return "\n".join(shown)


def _without_line(frame: str) -> str:
    """`name (file.py:12)` without the line number."""
    head, colon, tail = frame.rpartition(":")
    return f"{head})" if colon and tail.rstrip(")").isdigit() else frame
