"""Requests for the embedded engine, without HTTP: many at once, answers in order."""

import json
import threading
from concurrent.futures import Future

from actors.protocol_server import ServedRequest, ServerLimits, parse_generate


def limits(vocab_size=259, context_length=512, greedy_only=False) -> ServerLimits:
    return ServerLimits(vocab_size, context_length, greedy_only, lambda _: True)


def served(rid, input_ids, *, within=None, **params) -> ServedRequest:
    """A request as the server reads it from its body; greedy unless said otherwise."""
    body = {
        "rid": rid,
        "input_ids": list(input_ids),
        "sampling_params": {"temperature": 0.0, **params},
    }
    return parse_generate(json.dumps(body).encode(), within or limits())


def answers(engine, requests, *, arrive_after=0):
    """Submit all; with `arrive_after`, each waits until that many tokens' worth of steps ran."""
    futures = []
    for request in requests:
        future: Future = Future()
        engine.submit(request, future.set_result)
        futures.append(future)
        if arrive_after:
            wait_for_steps(engine, arrive_after)
    return [future.result(timeout=120) for future in futures]


def wait_for_steps(engine, steps):
    """Return once the engine has run that many more steps, or has nothing left to run."""
    done = threading.Event()
    remaining = [steps]
    step = engine._step

    def counted():
        step()
        remaining[0] -= 1
        if remaining[0] <= 0:
            done.set()

    engine._step = counted
    while not done.wait(0.005):
        load = engine.load()
        if load.running == load.waiting == 0:
            break
    engine._step = step
