"""The engine gives what a plain loop gives, greedy, drafted or captured, in any company."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.capture_file import take
from actors.protocol_server import ServedFinish
from actors.reference_draft import TargetFacts, read_draft
from actors.reference_engine import Broken, Engine
from actors.reference_model import Target
from tests.support.draft_folder import bigram_target, knowing_draft, random_draft
from tests.support.engine_requests import answers, served
from tests.support.tiny_target import AUX_LAYER_IDS, EOS_ID

STEPS = 3


def prompts(count, longest=40, seed=0):
    chance = random.Random(seed)
    return [
        [chance.randrange(3, 259) for _ in range(chance.randrange(1, longest))]
        for _ in range(count)
    ]


def started(folder, *, slots=4, draft=None, aux=(), capture_folder=None):
    aux = AUX_LAYER_IDS if draft is not None else aux
    target = Target(folder, dtype="float32", device="cpu", slots=slots, aux_layer_ids=aux)
    if draft is not None:
        facts = TargetFacts(target.layers, target.hidden_size, target.vocab_size, target.embedding)
        draft = read_draft(draft, target=facts)
    engine = Engine(
        target,
        slots=slots,
        threads=1,
        draft=draft,
        draft_steps=STEPS if draft else 0,
        capture_folder=capture_folder,
    )
    engine.start()
    return engine


@pytest.fixture(scope="module")
def engine(tiny_target):
    engine = started(tiny_target)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def plain(tiny_target):
    return AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()


def generated(plain, ids, tokens, **kinds):
    out = plain.generate(
        torch.tensor([ids]), do_sample=False, max_new_tokens=tokens, pad_token_id=0, **kinds
    )
    return tuple(out[0, len(ids) :].tolist())


def test_greedy_equals_transformers_for_prompts_that_arrive_at_different_moments(engine, plain):
    rows = prompts(11)
    lengths = [5 + 3 * number % 17 for number in range(len(rows))]
    requests = [
        served(f"r{number}", row, max_new_tokens=tokens)
        for number, (row, tokens) in enumerate(zip(rows, lengths, strict=True))
    ]
    outcomes = answers(engine, requests, arrive_after=2)
    for row, tokens, outcome in zip(rows, lengths, outcomes, strict=True):
        expected = generated(plain, row, tokens)
        assert outcome.output_ids == expected
        stopped = expected[-1] == EOS_ID
        assert outcome.finish == (
            ServedFinish.stop(EOS_ID) if stopped else ServedFinish.length(tokens)
        )
    load = engine.load()
    assert (load.running, load.waiting, load.used_tokens) == (0, 0, 0)


@pytest.mark.smollm
def test_greedy_equals_transformers_on_a_real_target():
    from pipelines.target import prepare_quickstart_target

    folder = prepare_quickstart_target()
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = started(folder)
    texts = (
        "The capital of France is",
        "def is_prime(n):\n",
        "Once upon a time, in a small",
        "2+2=",
    )
    rows = [engine._target.tokenizer(text)["input_ids"] for text in texts]
    try:
        outcomes = answers(
            engine,
            [
                served(text, row, max_new_tokens=24, within=real_limits(engine))
                for text, row in zip(texts, rows, strict=True)
            ],
        )
    finally:
        engine.stop()
    for row, outcome in zip(rows, outcomes, strict=True):
        assert outcome.output_ids == generated(plain, row, 24)


def real_limits(engine):
    from tests.support.engine_requests import limits

    return limits(engine._target.vocab_size, engine._target.context_length)


def test_a_stop_token_of_the_request_ends_it_and_is_part_of_the_output(engine, plain):
    row = prompts(1, seed=3)[0]
    free = generated(plain, row, 12)
    stop = free[5]
    end = free.index(stop) + 1
    (outcome,) = answers(engine, [served("r", row, max_new_tokens=12, stop_token_ids=[stop])])
    assert outcome.output_ids == free[:end]
    assert outcome.finish == ServedFinish.stop(stop)
    (outcome,) = answers(
        engine, [served("r", row, max_new_tokens=12, stop_token_ids=[stop], ignore_eos=True)]
    )
    assert len(outcome.output_ids) == 12
    assert outcome.finish == ServedFinish.length(12)


def test_a_seed_gives_the_same_draws_in_any_company(engine):
    row = prompts(1, seed=4)[0]
    draws = {"temperature": 1.0, "top_p": 0.95, "max_new_tokens": 16, "ignore_eos": True}
    mine = served("mine", row, sampling_seed=7, **draws)
    (alone,) = answers(engine, [mine])
    others = [
        served(f"o{n}", one, sampling_seed=n, **draws) for n, one in enumerate(prompts(5, seed=5))
    ]
    crowd = answers(engine, [*others[:3], mine, *others[3:]], arrive_after=1)
    assert crowd[3].output_ids == alone.output_ids
    (other_seed,) = answers(engine, [served("mine", row, sampling_seed=8, **draws)])
    assert other_seed.output_ids != alone.output_ids


def test_nothing_to_generate_needs_no_slot_and_gives_nothing(engine):
    outcomes = answers(
        engine, [served(f"r{n}", row, max_new_tokens=0) for n, row in enumerate(prompts(9))]
    )
    assert {outcome.output_ids for outcome in outcomes} == {()}
    assert {outcome.finish.reason["type"] for outcome in outcomes} == {"length"}
    assert {outcome.finish.reason["length"] for outcome in outcomes} == {0}


def test_a_nan_ends_its_request_under_its_own_name(tiny_target):
    engine = started(tiny_target)
    engine._target.logits = lambda last: torch.full((len(last), 259), float("nan"))
    try:
        (outcome,) = answers(engine, [served("r", [5, 6], max_new_tokens=4, ignore_eos=True)])
    finally:
        engine.stop()
    assert outcome.finish == ServedFinish.nan()
    assert outcome.output_ids == (EOS_ID,)


def test_a_failure_in_the_loop_fails_every_request_and_is_remembered(tiny_target):
    engine = started(tiny_target, slots=1)

    def broken(*_):
        raise RuntimeError("out of memory, say")

    engine._target.extend = broken
    outcomes = answers(
        engine, [served(f"r{n}", [5, 6], max_new_tokens=9, ignore_eos=True) for n in range(3)]
    )
    assert all(isinstance(one, Broken) and not one.is_shutdown for one in outcomes)
    assert engine.failure == "RuntimeError: out of memory, say"
    (later,) = answers(engine, [served("late", [5])])
    assert "out of memory" in later.message
    engine.stop()


def test_requests_are_taken_back_while_they_wait_and_while_they_run(tiny_target):
    engine = started(tiny_target, slots=1)
    outcomes, taken_back = {}, []
    step = engine._step

    def abort_first():
        step()
        if not taken_back:
            taken_back.append(True)
            engine.abort(lambda one: one.rid in ("running", "waiting"))

    engine._step = abort_first
    requests = [
        served(rid, [5, 6], max_new_tokens=400, ignore_eos=True) for rid in ("running", "waiting")
    ]
    requests.append(served("kept", [5, 6], max_new_tokens=3, ignore_eos=True))
    outcomes = dict(zip(("running", "waiting", "kept"), answers(engine, requests), strict=True))
    engine.stop()
    assert outcomes["running"].ran
    assert outcomes["running"].finish.reason["type"] == "abort"
    assert 0 < len(outcomes["running"].output_ids) < 400
    assert not outcomes["waiting"].ran
    assert len(outcomes["kept"].output_ids) == 3


def test_stopping_answers_what_is_unfinished(tiny_target):
    engine = started(tiny_target, slots=1)
    step, told = engine._step, []

    def stop_soon():
        step()
        if not told:
            told.append(True)
            engine._stopping = True

    engine._step = stop_soon
    outcomes = answers(
        engine, [served(f"r{n}", [5, 6], max_new_tokens=400, ignore_eos=True) for n in range(2)]
    )
    engine.stop()
    assert all(isinstance(one, Broken) and one.is_shutdown for one in outcomes)
    assert engine.failure is None


def test_captured_states_are_the_models_own(tiny_target, plain, tmp_path):
    engine = started(tiny_target, aux=AUX_LAYER_IDS, capture_folder=tmp_path)
    rows = prompts(7, seed=9)
    requests = [
        served(f"row-{n}", row, max_new_tokens=0 if n % 2 else 3) for n, row in enumerate(rows)
    ]
    try:
        outcomes = answers(engine, requests)
    finally:
        engine.stop()
    for n, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
        states = take(
            tmp_path,
            f"row-{n}",
            expected_ids=row,
            aux_width=192,
            width=64,
            aux_layer_ids=AUX_LAYER_IDS,
        )
        with torch.inference_mode():
            hidden = plain(torch.tensor([row]), output_hidden_states=True).hidden_states
        expected = torch.cat([hidden[layer + 1][0] for layer in AUX_LAYER_IDS], dim=-1)
        # Both are rounded to bf16 (8 bits): one step apart at most, where fp32 sums differ.
        torch.testing.assert_close(states.aux, expected.bfloat16(), rtol=2**-7, atol=1e-4)
        torch.testing.assert_close(states.last, hidden[-1][0].bfloat16(), rtol=2**-7, atol=1e-4)
        if n % 2 == 0:
            assert outcome.output_ids == generated(plain, row, 3)
    assert list(tmp_path.iterdir()) == []


def test_states_that_cannot_be_written_fail_their_request_not_the_engine(tiny_target, tmp_path):
    folder = tmp_path / "captures"
    folder.mkdir()
    engine = started(tiny_target, aux=AUX_LAYER_IDS, capture_folder=folder)
    try:
        folder.rmdir()
        (outcome,) = answers(engine, [served("a", [5, 6], max_new_tokens=0)])
        assert "not written" in outcome.message
        folder.mkdir()
        (outcome,) = answers(engine, [served("b", [5, 6], max_new_tokens=0)])
    finally:
        engine.stop()
    assert outcome.finish == ServedFinish.length(0)
    assert engine.failure is None


class PlainSpeculation:
    """One request at a time, everything computed anew each round: no cache, no batch."""

    def __init__(self, folder, draft):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.draft = read_draft(draft)
        self.embedding = self.model.get_input_embeddings().weight

    @torch.inference_mode()
    def run(self, prompt, tokens, stop):
        x = [*prompt, self.best(prompt)[0][-1]]
        histogram = [0] * (STEPS + 1)
        while not self.ended(x, prompt, tokens, stop):
            chain = self.chain(x)
            best, _ = self.best([*x, *chain])
            answer = best[len(x) - 1 :]
            accepted = 0
            while accepted < STEPS and chain[accepted] == answer[accepted]:
                accepted += 1
            histogram[accepted] += 1
            x += answer[: accepted + 1]
        output = x[len(prompt) :][:tokens]
        if stop in output:
            output = output[: output.index(stop) + 1]
        return tuple(output), tuple(histogram)

    def ended(self, x, prompt, tokens, stop):
        output = x[len(prompt) :]
        return len(output) >= tokens or stop in output

    def best(self, ids):
        out = self.model(torch.tensor([ids]), output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer + 1][0] for layer in AUX_LAYER_IDS], dim=-1)
        return out.logits[0].argmax(-1).tolist(), aux

    def chain(self, x):
        _, aux = self.best(x[:-1])
        hidden, ids = self.draft.fuse(aux[None]), x[1:]
        chain = []
        for _ in range(STEPS):
            rows = torch.arange(len(ids))[None]
            out = self.draft.layer(hidden, torch.tensor([ids]), rows, None, None)
            chain.append(int(self.draft.best(out[0, -1])))
            # The next step reads what this one gave, behind the true rows.
            hidden = torch.cat([hidden, out[:, -1:]], dim=1)
            ids = [*ids, chain[-1]]
        return chain


def trimmed(histogram):
    """SGLang's histogram grows as it must; trailing zeros were never written."""
    histogram = list(histogram)
    while histogram and histogram[-1] == 0:
        histogram.pop()
    return tuple(histogram)


@pytest.fixture(scope="module")
def bigram(tmp_path_factory):
    return bigram_target(tmp_path_factory.mktemp("bigram"))


@pytest.fixture(scope="module", params=["random", "knowing", "noisy"])
def speculating(request, bigram, tiny_target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("draft")
    if request.param == "random":
        target, draft = tiny_target, random_draft(folder, vocab_size=259)
    else:
        model = AutoModelForCausalLM.from_pretrained(bigram, dtype=torch.float32).eval()
        with torch.inference_mode():
            follows = model(torch.arange(259)[:, None]).logits[:, 0].argmax(-1)
        noise = {"knowing": 0.0, "noisy": 0.012}[request.param]
        target = bigram
        draft = knowing_draft(folder, follows, draft_vocab_size=230, noise=noise)
    engine = started(target, draft=draft)
    yield request.param, engine, PlainSpeculation(target, draft)
    engine.stop()


def test_speculation_gives_the_greedy_output_and_the_plain_rounds(speculating):
    kind, engine, oracle = speculating
    rows = prompts(9, longest=30, seed=11)
    outcomes = answers(
        engine,
        [served(f"r{n}", row, max_new_tokens=13 + n) for n, row in enumerate(rows)],
        arrive_after=2,
    )
    total = [0] * (STEPS + 1)
    for n, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
        output, histogram = oracle.run(row, 13 + n, EOS_ID)
        assert outcome.output_ids == output == generated(oracle.model, row, 13 + n)
        counters = outcome.speculation
        assert counters.correct_drafts_histogram == trimmed(histogram)
        assert counters.verifications == sum(histogram)
        assert counters.correct_drafts == sum(k * rounds for k, rounds in enumerate(histogram))
        total = [sum(pair) for pair in zip(total, histogram, strict=True)]
    match kind:
        case "knowing":
            assert min(total) > 0  # every length of chain occurs
            assert sum(total[1:]) > sum(total) / 3
        case "noisy":
            assert total[0] > 0
            assert sum(total[1:]) > 5  # some, and it hangs on the target's states


def test_a_chain_may_look_past_the_contexts_end(speculating):
    _, engine, oracle = speculating
    row = [3 + n % 250 for n in range(490)]
    (outcome,) = answers(engine, [served("r", row, max_new_tokens=22, ignore_eos=True)])
    assert outcome.output_ids == generated(oracle.model, row, 22, eos_token_id=None)


def test_a_single_token_needs_no_verification(speculating):
    _, engine, _ = speculating
    (outcome,) = answers(engine, [served("r", [5, 6, 7], max_new_tokens=1)])
    assert len(outcome.output_ids) == 1
    assert outcome.speculation.verifications == 0
