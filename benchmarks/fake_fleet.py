"""Cheap servers that keep SGLang's contract, as one program: `python -m benchmarks.fake_fleet`.

It prints the URLs as one JSON list, serves until its stdin ends, and costs little per request: no
HTTP library, replies put together from ready parts. Answers and latencies are pure functions of the
prompt, and every 1,024 prompts in a row hold the same latencies, so that two clients meet the same.
"""

import argparse
import asyncio
import contextlib
import json
import math
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from benchmarks.harness import ROOT

CLASSES = 1024  # of prompts: each has its answer and its latency
STOP_ID = 2
# The tokens that are asked and answered, for `make_tiny_target`: as in a vocabulary of 150,000, an
# id is six digits long, and a token about four characters. Both are what JSON costs.
_FIRST_ID = 150_000
WORDS = {_FIRST_ID + n: f" h{letter}k" for n, letter in enumerate("abcdefghijklmnopqrstuvwxyz")}
_IDS = tuple(WORDS)
_STOP_TEXT = "<|im_end|>"
_DIGITS = 4  # ids 1 to 4 of a prompt are its number in words, base 26
_RUNNING, _TOKENS = 256, 1_000_000  # what a server says it holds at once
_TOKENS_EACH = 1000


@dataclass(frozen=True)
class Work:
    """What is asked and answered: mean counts of ids, and seconds of a lognormal latency."""

    prompt_tokens: int = 500
    answer_tokens: int = 500
    latency_seconds: float = 0.5
    latency_sigma: float = 0.5

    def prompt_ids(self, number: int) -> list[int]:
        """The prompt with this number, of 0.8 to 1.2 times the mean length."""
        assert 0 <= number < 26**_DIGITS
        digits = [_IDS[number // 26**place % 26] for place in reversed(range(_DIGITS))]
        rest = _length(self.prompt_tokens, number) - 1 - _DIGITS
        return [1, *digits, *_words(rest, number)]

    def answer_ids(self, number: int) -> list[int]:
        """The answer to a prompt, stop id last."""
        kind = number % CLASSES
        return [*_words(_length(self.answer_tokens, 7 * kind) - 1, 31 * kind), STOP_ID]

    def latencies(self) -> list[float]:
        """Seconds for each class of prompts: the quantiles of the lognormal, shuffled."""
        mu = math.log(self.latency_seconds) - self.latency_sigma**2 / 2
        normal = statistics.NormalDist(mu, self.latency_sigma)
        seconds = [math.exp(normal.inv_cdf((kind + 0.5) / CLASSES)) for kind in range(CLASSES)]
        random.Random(0).shuffle(seconds)
        return seconds


@dataclass(frozen=True)
class FakeServer:
    """One server of a fleet."""

    slowness: float = 1.0  # its latencies are this many times the work's
    opens_after_requests: int = 0  # of the whole fleet; until then its port refuses


def text_of(ids: Sequence[int]) -> str:
    """What the tiny target's tokenizer decodes, for ids of words and the stop id."""
    return "".join(_STOP_TEXT if one == STOP_ID else WORDS[one] for one in ids)


_MANY = random.Random(1).choices(_IDS, k=8192)


def _words(count: int, place: int) -> list[int]:
    start = place * 7 % (len(_MANY) - count)
    return _MANY[start : start + count]


def _length(mean: int, number: int) -> int:
    """From 0.8 to 1.2 times the mean, the mean over many numbers."""
    return round(mean * (0.8 + 0.4 * (number * 37 % 101) / 100))


@dataclass(frozen=True)
class ServerLog:
    """What a server saw. Times are seconds since the epoch."""

    opened: float
    answers: tuple[tuple[float, float], ...]  # (arrived, answered), in the order of answering


def read_log(url: str) -> ServerLog:
    """Ask a fake server for its log so far."""
    with urllib.request.urlopen(f"{url}/log") as reply:
        log = json.loads(reply.read())
    return ServerLog(log["opened"], tuple((arrived, done) for arrived, done in log["answers"]))


@contextlib.contextmanager
def serving(
    work: Work, servers: Sequence[FakeServer], *, model_path: str
) -> Iterator[tuple[str, ...]]:
    """Run the program beside this one; yield the servers' URLs."""
    setting = {
        "work": asdict(work),
        "servers": [asdict(one) for one in servers],
        "model_path": model_path,
    }
    command = [sys.executable, "-m", "benchmarks.fake_fleet", json.dumps(setting)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield tuple(json.loads(process.stdout.readline()))
    finally:
        process.stdin.close()
        process.wait()


@dataclass
class _Fleet:
    """What its servers share."""

    requests: int = 0


class _Server:
    """State of one server: ready parts of replies, and the log of what it answered."""

    def __init__(self, work: Work, server: FakeServer, model_path: str, fleet: "_Fleet") -> None:
        self.fleet = fleet
        self.model_path = model_path
        self.latencies = [one * server.slowness for one in work.latencies()]
        self.answers_to = [work.answer_ids(kind) for kind in range(CLASSES)]
        self.replies = [_reply_parts(answer) for answer in self.answers_to]
        self.in_flight = 0
        self.opened = 0.0
        self.answers: list[tuple[float, float]] = []

    def look_up(self, path: bytes) -> bytes:
        """The body of a GET."""
        replies = {
            b"/health": {},
            b"/log": {"opened": self.opened, "answers": self.answers},
            b"/model_info": {
                "model_path": self.model_path,
                "tokenizer_path": self.model_path,
                "weight_version": "default",
                "reasoning_parser": None,
                "preferred_sampling_params": None,
            },
            b"/server_info": {
                "version": "0.5.23",
                "context_length": 2048,
                "max_total_num_tokens": _TOKENS,
                "max_running_requests": _RUNNING,
                "allow_auto_truncate": False,
                "speculative_algorithm": None,
                "random_seed": id(self) % 2**31,
                "skip_tokenizer_init": False,
                "enable_deterministic_inference": False,
            },
            b"/v1/models": {
                "object": "list",
                "data": [{"id": self.model_path, "object": "model", "max_model_len": 2048}],
            },
            b"/v1/loads": {
                "loads": [
                    {
                        "num_running_reqs": min(self.in_flight, _RUNNING),
                        "num_waiting_reqs": max(0, self.in_flight - _RUNNING),
                        "num_used_tokens": self.in_flight * _TOKENS_EACH,
                        "token_usage": self.in_flight * _TOKENS_EACH / _TOKENS,
                        "max_total_num_tokens": _TOKENS,
                        "max_running_requests": _RUNNING,
                    }
                ]
            },
        }
        return json.dumps(replies[path]).encode() if path in replies else b""


def _reply_parts(answer: Sequence[int]) -> tuple[bytes, bytes]:
    """The reply before the prompt's echo, and after what depends on the request."""
    stopped = {"type": "stop", "matched": STOP_ID}
    before = {"text": text_of(answer), "output_ids": answer}
    after = {
        "finish_reason": stopped
        if answer[-1] == STOP_ID
        else {"type": "length", "length": len(answer)},
        "completion_tokens": len(answer),
        "cached_tokens": 0,
        "weight_version": "default",
    }
    compact = (",", ":")
    return (
        json.dumps(before, separators=compact)[:-1].encode() + b',"prompt_token_ids":[',
        json.dumps(after, separators=compact)[1:].encode() + b"}",
    )


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with Content-Length, requests one after the other, no more than the clients need."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer = self._buffer + data if self._buffer else data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end]
            lowered = head.lower()
            place = lowered.find(b"\r\ncontent-length:")
            length = int(lowered[place + 17 :].split(b"\r\n", 1)[0]) if place >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            self._answer(head.split(b" ", 2)[1].split(b"?", 1)[0], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if path == b"/generate":
            self._generate(body)
        elif path == b"/abort_request":
            self._send(b"{}")
        elif reply := self._server.look_up(path):
            self._send(reply)
        else:
            self._send(b'{"detail":"Not Found"}', b"404 Not Found")

    def _generate(self, body: bytes) -> None:
        server = self._server
        ids = _between(body, b'"input_ids"', b"[", b"]")
        number = 0
        for digit in ids.split(b",", _DIGITS + 1)[1 : 1 + _DIGITS]:
            number = number * 26 + int(digit) - _FIRST_ID
        kind = number % CLASSES
        before, after = server.replies[kind]
        most = int(_between(body, b'"max_new_tokens"', b":", b","))
        if most < len(server.answers_to[kind]):  # a probe
            before, after = _reply_parts(server.answers_to[kind][:most])
        reply = b"".join(
            (
                before,
                ids,
                b'],"meta_info":{"id":"',
                _between(body, b'"rid"', b'"', b'"'),
                b'","prompt_tokens":',
                str(ids.count(b",") + 1).encode(),
                b",",
                after,
            )
        )
        server.fleet.requests += 1
        server.in_flight += 1
        loop = asyncio.get_running_loop()
        loop.call_later(server.latencies[kind], self._finish, reply, time.time())

    def _finish(self, reply: bytes, arrived: float) -> None:
        self._server.in_flight -= 1
        self._server.answers.append((arrived, time.time()))
        self._send(reply)

    def _send(self, body: bytes, status: bytes = b"200 OK") -> None:
        if self._transport.is_closing():
            return
        date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime()).encode()
        self._transport.write(
            b"HTTP/1.1 %b\r\nDate: %b\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (status, date, len(body), body)
        )


def _between(body: bytes, key: bytes, opening: bytes, closing: bytes) -> bytes:
    """What stands between the first `opening` after a key and the next `closing`."""
    start = body.index(opening, body.index(key) + len(key)) + len(opening)
    return body[start : body.index(closing, start)]


async def _serve(setting: dict[str, object]) -> None:
    work = Work(**setting["work"])  # type: ignore[arg-type]
    servers = [FakeServer(**one) for one in setting["servers"]]  # type: ignore[attr-defined]
    loop = asyncio.get_running_loop()
    fleet, urls, openings = _Fleet(), [], []
    for one in servers:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))  # bound, not listening: connecting is refused
        urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
        state = _Server(work, one, str(setting["model_path"]), fleet)
        openings.append(loop.create_task(_open(listener, state, one.opens_after_requests)))
        if not one.opens_after_requests:
            await openings[-1]
    sys.stdout.write(json.dumps(urls) + "\n")
    sys.stdout.flush()
    await loop.run_in_executor(None, sys.stdin.read)
    for opening in openings:
        opening.cancel()


async def _open(listener: socket.socket, state: _Server, after_requests: int) -> None:
    while state.fleet.requests < after_requests:
        await asyncio.sleep(0.05)
    state.opened = time.time()
    loop = asyncio.get_running_loop()
    await loop.create_server(lambda: _Connection(state), sock=listener, backlog=1024)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fake_fleet")
    parser.add_argument("setting", help="JSON: work, servers, model_path")
    asyncio.run(_serve(json.loads(parser.parse_args().setting)))
