"""The peer with no comfort: a closed aiohttp loop. `python -m benchmarks.bare_loop URL ROWS ...`

It sends the same requests as `eyas generate`, keeps as many in flight, parses the replies, and
checks, keeps and retries nothing. Prints one JSON object.
"""

import argparse
import asyncio
import json
import resource
import sys
import time
from typing import Any

import aiohttp

from benchmarks.fake_fleet import STOP_ID, Work
from benchmarks.harness import steady_rate


async def ask_all(url: str, work: Work, rows: int, in_flight: int) -> list[float]:
    """Ask for all prompts; return the moments when answers came, seconds."""
    finished: list[float] = []
    numbers = iter(range(rows))

    async def ask(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            body = request_body(f"{number:032x}", work.prompt_ids(number))
            async with session.post(url + "/generate", json=body) as reply:
                await reply.json()
            finished.append(time.monotonic())

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(ask(session) for _ in range(in_flight)))
    return finished


def request_body(rid: str, input_ids: list[int]) -> dict[str, Any]:
    """What a plain client sends for one prompt."""
    return {
        "rid": rid,
        "input_ids": input_ids,
        "sampling_params": {
            "max_new_tokens": 1000,
            "temperature": 1.0,
            "top_p": 0.95,
            "sampling_seed": 1,
            "stop_token_ids": [STOP_ID],
            "skip_special_tokens": False,
            "no_stop_trim": True,
        },
        "stream": False,
        "return_prompt_token_ids": True,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bare_loop")
    parser.add_argument("url")
    parser.add_argument("rows", type=int)
    parser.add_argument("in_flight", type=int)
    parser.add_argument("work", type=json.loads)
    given = parser.parse_args()
    moments = asyncio.run(ask_all(given.url, Work(**given.work), given.rows, given.in_flight))
    usage = resource.getrusage(resource.RUSAGE_SELF)
    result = {"rate": steady_rate(moments), "cpu_seconds": usage.ru_utime + usage.ru_stime}
    sys.stdout.write(json.dumps(result) + "\n")
