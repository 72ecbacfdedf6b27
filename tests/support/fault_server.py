"""A server that breaks in every way, as a program: `python -m tests.support.fault_server --help`.

It prints its URL in a line of its own, and ends when its stdin ends or on SIGTERM. `--state-file`
says in a line each what every request met; a server that starts again with it goes on counting.
"""

import argparse
import asyncio
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any, TextIO

from tests.support.fake_server import Answer, Die, Reply, ScriptedServer, Slow
from tests.support.faults import Fault, FaultPlan, spoiled
from tests.support.scripted_answers import ScriptedTarget, digest_of

BURST = 12  # how many requests a burst of 503 refuses


class FaultScript:
    """Answers as a target would, but for the requests that the plan spoils."""

    def __init__(
        self, target: ScriptedTarget, plan: FaultPlan, latency: float, journal: "Journal"
    ) -> None:
        self._target, self._plan, self._latency = target, plan, latency
        self._journal = journal
        self._burst_left = 0
        self.die_after: int | None = None  # requests

    def __call__(self, request: dict[str, Any], nth: int) -> Answer:
        """One request's answer. How often its prompt was asked is the journal's to say."""
        del nth
        if request["rid"].startswith("probe-"):  # before any row: not what the faults are for
            return Reply(self._target.reply(request))
        ids = request["input_ids"]
        key = f"{digest_of(ids, request['sampling_params'].get('sampling_seed')):016x}"
        if self.die_after is not None and self._journal.lines >= self.die_after:
            return Die()
        fault = self._plan.fault_of(ids, self._journal.asked[key])
        if self._burst_left > 0:
            fault, self._burst_left = Fault.BURST_503, self._burst_left - 1
        elif fault is Fault.BURST_503:
            self._burst_left = BURST - 1
        refused = fault is None and self._target.refuses(ids)
        self._journal.write(key, fault.value if fault else "refused" if refused else "good")
        if refused:
            return Reply({"error": {"message": "this prompt is refused"}}, 400)
        good = self._target.reply(request)
        # Between half and three halves of the mean, by the prompt alone.
        seconds = self._latency * (0.5 + (digest_of("latency", *ids) % 1000) / 1000)
        if fault is None:
            return Slow(seconds, Reply(good))
        return spoiled(fault, request, good)


class Journal:
    """What every request met, in a file that outlives the process."""

    def __init__(self, path: Path | None) -> None:
        self.asked: Counter[str] = Counter()
        self.lines = 0
        self._file: TextIO | None = None
        if path is None:
            return
        if path.exists():
            for line in path.read_text().splitlines():
                self.asked[line.split()[0]] += 1
                self.lines += 1
        self._file = path.open("a", buffering=1)  # each line at once: SIGKILL loses none

    def write(self, key: str, met: str) -> None:
        """One request of the prompt with this key, and what it met."""
        self.asked[key] += 1
        self.lines += 1
        if self._file is not None:
            self._file.write(f"{key} {met}\n")


async def serve(options: argparse.Namespace) -> None:
    """Serve until stdin ends or SIGTERM comes."""
    script = FaultScript(
        ScriptedTarget.of(options.target, options.model),
        FaultPlan(options.seed, options.fault_share, tuple(options.faults)),
        options.latency_ms / 1000,
        Journal(options.state_file),
    )
    script.die_after = options.die_after
    server = ScriptedServer(
        script=script,
        # The folder's name is what a served path is compared by.
        model_path=str(options.target if options.model == "" else Path("/models") / options.model),
        server_info={
            "context_length": options.context_tokens,
            "max_total_num_tokens": options.max_total_num_tokens,
            "max_running_requests": 512,
        },
        ranks=None,
    )
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, ended.set)
    loop.add_signal_handler(signal.SIGINT, ended.set)
    # A daemon: it may still wait for stdin when SIGTERM ends the program.
    threading.Thread(target=_tell_end_of_stdin, args=(loop, ended), daemon=True).start()
    url = await server.start(options.port)
    sys.stdout.write(url + "\n")
    sys.stdout.flush()
    await ended.wait()
    await server.stop()


def _tell_end_of_stdin(loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
    os.read(sys.stdin.fileno(), 1)
    loop.call_soon_threadsafe(ended.set)


def parse_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The program's options."""
    parser = argparse.ArgumentParser(prog="fault_server", description=__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder with the byte-level tokenizer")
    add("--model", default="", help="serve another model of this name, with other answers")
    add("--port", type=int, default=0)
    add("--seed", type=int, default=0)
    add("--fault-share", type=float, default=0.0)
    add("--faults", type=_faults, default=tuple(Fault), help="names with commas; default all")
    add("--latency-ms", type=float, default=0.0, help="mean, of good answers")
    add("--context-tokens", type=int, default=512)
    add("--max-total-num-tokens", type=int, default=100_000)
    add("--die-after", type=int, default=None, help="requests; then SIGKILL itself")
    add("--state-file", type=Path, default=None)
    return parser.parse_args(arguments)


def _faults(names: str) -> tuple[Fault, ...]:
    return tuple(Fault(name) for name in names.split(",") if name)


if __name__ == "__main__":
    asyncio.run(serve(parse_options()))
