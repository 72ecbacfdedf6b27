"""Ten thousand damaged replies: each is a typed fault, or a completion that is true in every point.

The oracle reads the raw bytes with the standard library and knows the contract by itself.
"""

import asyncio
import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from actors.client import Client
from actors.errors import RequestFault
from actors.protocol import Completion, Finish, GenerateRequest, parse_completion
from tests.support.fake_server import FakeServer, Raw, good_reply
from tests.support.mutations import damaged

VOCAB = 500
COUNT, COUNT_OVER_HTTP = 10_000, 400


def request_and_reply(number: int) -> tuple[GenerateRequest, bytes]:
    """A request and a good reply to it: stops, lengths, stop strings, with and without counters."""
    prompt = tuple(range(3, 5 + number % 7))
    request = GenerateRequest(f"{number:032x}", prompt, {"max_new_tokens": 6})
    asked = json.loads(request.body())
    counters = {
        "spec_verify_ct": 2,
        "spec_num_correct_drafts": 1,
        "spec_correct_drafts_histogram": [1, 1],
    }
    match number % 4:
        case 0:
            reply = good_reply(asked, [9, 8, 2], text="hi")
        case 1:
            reply = good_reply(asked, [9, 8, 7, 6, 5, 4], text="hello there")
        case 2:
            stop = {"type": "stop", "matched": "END"}
            reply = good_reply(asked, [9, 8], text="é END", finish=stop, num_retractions=1)
        case _:
            reply = good_reply(asked, [9, 8, 2], text="hi", e2e_latency=0.5, **counters)
    return request, json.dumps(reply).encode()


def check(request: GenerateRequest, body: bytes, completion: Completion) -> None:
    """What must be true of a completion that was made of this body for this request."""
    reply = json.loads(body)
    assert type(reply) is dict
    assert "error" not in reply
    meta = reply["meta_info"]
    assert completion.rid == meta["id"] == request.rid
    ids = reply["output_ids"]
    assert type(ids) is list
    assert all(type(token) is int and 0 <= token < VOCAB for token in ids)
    assert list(completion.output_ids) == ids
    assert_same(completion.completion_tokens, meta["completion_tokens"], len(ids))
    assert_same(completion.prompt_tokens, meta["prompt_tokens"], len(request.input_ids))
    if "prompt_token_ids" in reply:
        echoed = reply["prompt_token_ids"]
        assert all(type(token) is int for token in echoed)
        assert echoed == list(request.input_ids)
    assert_same(completion.cached_tokens, meta["cached_tokens"])
    assert completion.cached_tokens >= 0
    assert_same(completion.weight_version, meta["weight_version"])
    assert_same(completion.text, reply["text"])
    assert type(completion.text) is str
    if "num_retractions" in meta:
        assert_same(completion.retractions, meta["num_retractions"])
    else:
        assert completion.retractions is None
    check_finish(request, meta["finish_reason"], completion)
    check_counters(meta, completion)


def check_finish(request: GenerateRequest, reason: dict, completion: Completion) -> None:
    ids, finish = completion.output_ids, completion.finish
    assert len(ids) <= request.max_new_tokens
    assert finish.kind == reason["type"]
    if finish.kind == "length":
        assert_same(finish.length, reason["length"], request.max_new_tokens, len(ids))
        return
    assert finish.kind == "stop"
    assert ids, "a stop without a token"
    assert_same(finish.matched, reason["matched"])
    assert type(finish.matched) in (int, str)
    assert finish.matched != "NaN happened"
    if type(finish.matched) is int:
        assert ids[-1] == finish.matched


def check_counters(meta: dict, completion: Completion) -> None:
    if completion.speculation is None:
        assert "spec_verify_ct" not in meta
        return
    assert_same(completion.speculation.verifications, meta["spec_verify_ct"])
    assert_same(completion.speculation.correct_drafts, meta["spec_num_correct_drafts"])
    histogram = meta["spec_correct_drafts_histogram"]
    assert list(completion.speculation.correct_drafts_histogram) == histogram
    assert all(type(count) is int for count in histogram)


def assert_same(first, *others) -> None:
    """Equal, and of one type: True is not 1, and 3.0 is not 3."""
    for other in others:
        assert type(first) is type(other)
        assert first == other


def test_ten_thousand_damaged_replies_never_crash_and_never_pass_with_a_wrong_fact():
    dice = random.Random(20_260)
    faults: Counter[str] = Counter()
    passed = 0
    for number in range(COUNT):
        request, good = request_and_reply(number)
        body = damaged(good, dice)
        try:
            completion = parse_completion(request, 200, body, vocab_size=VOCAB)
        except RequestFault as fault:
            faults[fault.fault] += 1
        else:
            check(request, body, completion)
            passed += body != good
    # The damage must reach every check, and must not be so heavy that nothing is left to pass.
    assert len(faults) >= 30, faults
    assert COUNT * 0.02 < passed < COUNT * 0.6


@pytest.mark.parametrize("number", range(4))
def test_the_undamaged_replies_pass(number):
    request, good = request_and_reply(number)
    check(request, good, parse_completion(request, 200, good, vocab_size=VOCAB))


@pytest.mark.parametrize(
    "wrong",
    [
        {"rid": "other"},
        {"output_ids": (9, 8, 3)},
        {"output_ids": (9, 8)},
        {"finish": Finish("stop", 3, None)},
        {"finish": Finish("stop", "2", None)},
        {"finish": Finish("length", None, 3)},
        {"prompt_tokens": 9},
        {"completion_tokens": 2},
        {"completion_tokens": 3.0},
        {"cached_tokens": 1},
        {"weight_version": ""},
        {"text": "ho"},
        {"retractions": 1},
    ],
)
def test_the_oracle_sees_a_wrong_fact(wrong):
    request, good = request_and_reply(0)
    completion = parse_completion(request, 200, good, vocab_size=VOCAB)
    with pytest.raises(AssertionError):
        check(request, good, replace(completion, **wrong))


def test_damaged_replies_over_http_are_faults_or_true():
    dice = random.Random(20_261)
    stories = [request_and_reply(number) for number in range(COUNT_OVER_HTTP)]
    bodies = {request.rid: damaged(good, dice) for request, good in stories}
    kinds = ("application/json", "application/json", "text/html", "application/octet-stream")
    answers = {
        rid: Raw(body, dice.choice((200,) * 12 + (201, 204, 400, 500, 503)), dice.choice(kinds))
        for rid, body in bodies.items()
    }

    async def ask(client, request):
        try:
            return await client.generate(request, deadline_seconds=20.0)
        except RequestFault as fault:
            return fault

    async def story(url):
        async with Client(url, vocab_size=VOCAB) as client:
            return await asyncio.gather(*(ask(client, request) for request, _ in stories))

    with FakeServer(lambda http, _: answers[http["rid"]]) as server:
        outcomes = asyncio.run(story(server.url))
    completed = 0
    for (request, _), outcome in zip(stories, outcomes, strict=True):
        if isinstance(outcome, Completion):
            completed += 1
            assert answers[request.rid].status == 200
            check(request, bodies[request.rid], outcome)
    assert 0 < completed < COUNT_OVER_HTTP
