"""The fault-injecting server: right where it is right, wrong where it says, and repeatable."""

import asyncio
import json
import random
import signal
import urllib.request
from collections import Counter

import pytest
from transformers import AutoTokenizer

from actors.client import Client
from actors.errors import RequestFault
from actors.protocol import GenerateRequest
from tests.support.fake_server import FakeServer, Reply
from tests.support.fault_process import FaultProcess
from tests.support.faults import HUGE_MEBIBYTES, Fault, FaultPlan, spoiled
from tests.support.scripted_answers import ScriptedTarget
from tests.support.tiny_target import EOS_ID

IDS = tuple(range(40, 60))
HARMLESS = {Fault.SLOW}  # late, and right
# Right by all that a single reply can say; the pool knows which version it checked.
FOR_THE_POOL = {Fault.WEIGHT_VERSION}


def asking(ids=IDS, rid="r" * 32, most=32, seed=7):
    return GenerateRequest(rid, tuple(ids), {"max_new_tokens": most, "sampling_seed": seed})


def ask(url, request=None, *, deadline=5.0, vocab_size=259):
    async def once():
        async with Client(url, vocab_size=vocab_size) as client:
            return await client.generate(request or asking(), deadline_seconds=deadline)

    return asyncio.run(once())


def get(url):
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.loads(reply.read())


@pytest.fixture(scope="module")
def answers(tiny_target):
    return ScriptedTarget.of(tiny_target, "")


def test_the_table_decodes_as_the_tokenizer_does(tiny_target, answers):
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    dice = random.Random(3)
    for _ in range(300):
        ids = [dice.randrange(len(answers.pieces)) for _ in range(dice.randint(0, 24))]
        said = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert answers.decode(ids) == said


def test_an_answer_depends_on_prompt_seed_and_model_alone(tiny_target, answers):
    assert answers.answer(IDS, 100, 1) == answers.answer(IDS, 100, 1)
    assert answers.answer(IDS, 100, 1) != answers.answer(IDS, 100, 2)
    assert answers.answer(IDS, 100, 1) != answers.answer(IDS[1:], 100, 1)
    assert answers.answer(IDS, 100, 1) != ScriptedTarget.of(tiny_target, "b").answer(IDS, 100, 1)
    assert answers.answer(IDS, 100, 1)[-1] == EOS_ID
    assert answers.answer(IDS, 100, 1)[:4] == answers.answer(IDS, 4, 1)


def test_the_share_of_faults_is_kept_and_every_kind_comes():
    plan = FaultPlan(seed=5, share=0.1)
    met = Counter(plan.fault_of((n, n + 1), 0) for n in range(20_000))
    assert 0.09 < 1 - met[None] / 20_000 < 0.11
    assert met.keys() == {None, *Fault}
    assert plan.fault_of((1, 2), plan.most_per_prompt) is None


@pytest.mark.parametrize("fault", Fault)
def test_each_fault_is_seen_by_the_client(fault, answers):
    script = lambda http, _: spoiled(fault, http, answers.reply(http))  # noqa: E731
    with FakeServer(script) as server:
        if fault in HARMLESS | FOR_THE_POOL:
            assert list(ask(server.url).output_ids) == answers.answer(IDS, 32, 7)
        else:
            deadline = 0.3 if fault is Fault.HANG else 20.0
            with pytest.raises(RequestFault):
                ask(server.url, deadline=deadline)
            assert server.most_mebibytes < HUGE_MEBIBYTES // 2, "the client took what it is given"


def test_a_good_reply_keeps_the_contract_also_when_cut_by_length(answers):
    with FakeServer(lambda http, _: Reply(answers.reply(http))) as server:
        whole, cut = ask(server.url, asking(most=100)), ask(server.url, asking(most=3))
    assert (whole.finish.kind, cut.finish.kind) == ("stop", "length")
    assert whole.text == answers.decode(whole.output_ids)


def test_it_breaks_again_in_the_same_way_and_goes_on_counting_after_a_death(tmp_path, tiny_target):
    prompts = [(40 + n, 50) for n in range(30)]

    def lives(name, die_after):
        place = FaultProcess(
            tiny_target,
            tmp_path / name,
            ("--seed", "4", "--fault-share", "0.5", "--faults", "reset,half_json,nan"),
        )
        url = place.start(*(("--die-after", str(die_after)) if die_after else ()))
        if die_after:
            for prompt in prompts[:die_after]:
                ask_quietly(url, prompt)
            ask_quietly(url, prompts[die_after])
            assert place.wait() == -signal.SIGKILL
            assert place.start() == url, "another port"
        for prompt in prompts[die_after or 0 :] + prompts:
            ask_quietly(url, prompt)
        place.close()
        return place.met()

    undisturbed = lives("one", None)
    assert undisturbed == lives("two", 10)
    assert set(undisturbed) == {"reset", "half_json", "nan", "good"}


def ask_quietly(url, ids):
    try:
        ask(url, asking(ids))
    except RequestFault:
        return


def test_another_model_on_the_same_port_says_so_and_says_something_else(tmp_path, tiny_target):
    place = FaultProcess(tiny_target, tmp_path / "state")
    url = place.start()
    said, model, seed = ask(url), get(f"{url}/model_info"), get(f"{url}/server_info")["random_seed"]
    assert model["model_path"] == str(tiny_target)
    place.kill()
    assert place.start("--model", "impostor") == url
    assert ask(url).output_ids != said.output_ids
    assert get(f"{url}/model_info")["model_path"] == "/models/impostor"
    assert get(f"{url}/server_info")["random_seed"] != seed
    assert get(f"{url}/v1/models")["data"][0]["max_model_len"] == 512
    place.close()


def test_a_hanging_request_is_in_nobodys_books_and_an_abort_ends_it(answers):
    def script(http, _):
        slow = http["input_ids"][0] == 1
        return spoiled(Fault.SLOW if slow else Fault.HANG, http, answers.reply(http))

    async def story(server):
        async with Client(server.url, vocab_size=259) as client:
            hung = asyncio.create_task(client.generate(asking(rid="h" * 32), deadline_seconds=30.0))
            await asyncio.to_thread(server.hanging.wait)
            idle = await client.loads()
            slow = asyncio.create_task(
                client.generate(asking((1, 5), rid="s" * 32), deadline_seconds=30.0)
            )
            while len(server.requests) < 2:
                await asyncio.sleep(0.005)
            busy = await client.loads()
            await client.abort("h" * 32)
            with pytest.raises(RequestFault, match="abort"):
                await hung
            return idle.running, busy.running, (await slow).completion_tokens

    with FakeServer(script, ranks=None) as server:
        idle, busy, tokens = asyncio.run(story(server))
    assert (idle, busy) == (0, 1)
    assert tokens > 0


def test_sigterm_ends_it_though_its_stdin_is_open(tmp_path, tiny_target):
    place = FaultProcess(tiny_target, tmp_path / "state")
    place.start()
    place.terminate()
