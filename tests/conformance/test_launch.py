"""The stock server, launched, judged, killed, restarted and ended as a recipe has it."""

import asyncio
import time

import psutil
import pytest

from actors.client import Client
from actors.config import LaunchedServers
from actors.fit import Expectation
from actors.fleet import running_servers
from actors.launch import EngineOptions
from actors.preflight import Admission, ProbePrompt
from tests.conformance.sglang_cpu.set_up import STOCK_VARIABLES, stock_python
from tests.support.conformance_requests import CONTEXT, STOP_ID, VOCABULARY, request_of
from tests.support.fake_sglang import gone
from tests.support.sglang_rig import STOCK_ON_A_CPU

pytestmark = [pytest.mark.conformance, pytest.mark.usefixtures("local_ray")]
SECONDS = 600.0


@pytest.fixture(scope="module")
def config() -> LaunchedServers:
    if not stock_python().exists():
        pytest.skip("the stock server is not set up here; EYAS_SGLANG_PYTHON may name its python")
    arguments = {name: value for name, value in STOCK_ON_A_CPU.items() if name != "device"}
    return LaunchedServers(
        kind="launch",
        count=1,
        python=str(stock_python()),
        tensor_parallel_size=1,
        device="cpu",
        arguments=arguments,
        environment=STOCK_VARIABLES,
        ready_seconds=SECONDS,
        restart_seconds=1.0,
    )


async def answer(url, prompt):
    async with Client(url, vocab_size=VOCABULARY) as client:
        request = request_of("greedy", prompt, 8)
        return (await client.generate(request, deadline_seconds=SECONDS)).output_ids


def family_of(log_header_word):
    """The processes whose command line has this word, and all their children."""
    found = [
        one
        for one in psutil.process_iter(["cmdline"])
        if log_header_word in (one.info["cmdline"] or [])
    ]
    return {one.pid for root in found for one in (root, *root.children(recursive=True))}


def test_a_launched_stock_server_is_judged_restarted_on_its_port_and_ended_whole(
    config, target, tokenizer, prompts, tmp_path
):
    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)

    admission = Admission(
        Expectation(target, CONTEXT - 2, CONTEXT),
        vocab_size=VOCABULARY,
        probes=tuple(ProbePrompt(ids, (STOP_ID,)) for ids in prompts[:2]),
        decode=decode,
        markers={"<|im_end|>": STOP_ID},
    )
    events = []
    with running_servers(
        config,
        target=target,
        options=EngineOptions(),
        logs=tmp_path,
        label="stock",
        wait_for="first",
        admission=admission,
        on_event=lambda name, fields: events.append((name, fields)),
    ) as fleet:
        (url,) = fleet.urls
        (checked,) = fleet.checked()
        assert checked.not_checked == ()
        first = asyncio.run(answer(url, prompts[0]))
        port = url.rpartition(":")[2]
        family = family_of(port)
        assert len(family) >= 5  # two of the guard, the server, its scheduler, its detokenizer
        server = next(
            one
            for one in map(psutil.Process, family)
            if one.cmdline()[1:3] == ["-m", "sglang.launch_server"]
        )
        server.kill()
        deadline = time.monotonic() + SECONDS
        while [name for name, _ in events].count("server_ready") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert gone(family)
        assert fleet.urls == (url,)
        assert asyncio.run(answer(url, prompts[0])) == first
        family = family_of(port)
    assert gone(family)
    died = next(fields for name, fields in events if name == "server_died")
    assert "code 137" in died["error"]
