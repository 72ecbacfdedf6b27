"""The server half: SGLang's defaults, SGLang's refusals, and nothing accepted that is not done."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.errors import Refused
from actors.protocol import (
    GenerateRequest,
    SpeculationCounters,
    fault_of,
    parse_completion,
    parse_loads,
)
from actors.protocol_server import (
    RequestRefused,
    ServedFinish,
    ServedSampling,
    ServerLimits,
    generate_reply,
    loads_body,
    parse_abort,
    parse_generate,
    waiting_abort_reply,
)

LIMITS = ServerLimits(vocab_size=100, context_length=32, greedy_only=False, allows_rid=str.isalnum)


def read(params=None, *, limits=LIMITS, **body):
    body = {"rid": "r1", "input_ids": [1, 2, 3], "sampling_params": params or {}, **body}
    return parse_generate(json.dumps(body).encode(), limits)


def refusal(params=None, *, limits=LIMITS, **body):
    with pytest.raises(RequestRefused) as caught:
        read(params, limits=limits, **body)
    # Our own client half understands every refusal as one that asking again will not change.
    fault = fault_of(caught.value.status, json.dumps(caught.value.body).encode())
    assert isinstance(fault, Refused)
    return caught.value.body


def test_absent_fields_have_sglangs_defaults():
    request = read(limits=ServerLimits(100, 4096, False, str.isalnum))
    assert request.max_new_tokens == 128
    assert request.sampling == ServedSampling(1.0, 1.0, None, 0.0, 1.0, 0.0, 0.0, None)
    assert (request.ignore_eos, request.skip_special_tokens, request.no_stop_trim) == (
        False,
        True,
        False,
    )
    assert not request.echoes_prompt


def test_null_is_absent_and_null_for_the_length_goes_as_far_as_the_context():
    request = read({"temperature": None, "max_new_tokens": None, "top_k": None})
    assert request.sampling.temperature == 1.0
    assert request.max_new_tokens == 32 - 3 - 1


def test_every_field_that_is_sent_arrives():
    request = read(
        {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.2,
            "frequency_penalty": 0.3,
            "sampling_seed": 7,
            "max_new_tokens": 5,
            "stop_token_ids": [4, 5],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "no_stop_trim": True,
        },
        return_prompt_token_ids=True,
    )
    assert request.sampling == ServedSampling(0.5, 0.9, 40, 0.1, 1.1, 0.2, 0.3, 7)
    assert request.stop_token_ids == {4, 5}
    assert request.max_new_tokens == 5
    assert request.ignore_eos
    assert request.no_stop_trim
    assert request.echoes_prompt
    assert not request.skip_special_tokens
    assert not request.spaces_between_special_tokens


@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 9e-7}, {"top_k": 1}])
def test_a_temperature_of_nothing_is_greedy(params):
    assert read(params).sampling.temperature is None


def test_no_rid_gives_one_of_its_own():
    assert read(rid=None).rid != read(rid=None).rid


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [[1, 2]]}, "batches are not served"),
        ({"input_ids": "1 2"}, "input_ids: invalid type"),
        ({"input_ids": [1, True]}, "expected an integer"),
        ({"rid": ["a"]}, "batches are not served"),
        ({"sampling_params": [{}]}, "batches are not served"),
        ({"text": "hello"}, "text is not served"),
        ({"stream": True}, "stream is not served"),
        ({"return_logprob": True}, "return_logprob is not served"),
        ({"return_hidden_states": True}, "return_hidden_states is not served"),
        ({"return_prompt_token_ids": 1}, "expected a boolean"),
    ],
)
def test_a_body_of_another_kind_is_refused_with_a_string(change, message):
    assert message in refusal(**change)["error"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 4}, "unknown field `max_tokens`, expected one of `"),
        ({"stop": ["\n"]}, "stop is not served"),
        ({"n": 2}, "n is not served"),
        ({"json_schema": "{}"}, "json_schema is not served"),
        ({"temperature": "0"}, "temperature: invalid type"),
        ({"temperature": True}, "temperature: invalid type"),
        ({"max_new_tokens": 4.0}, "max_new_tokens: invalid type"),
        ({"stop_token_ids": 2}, "stop_token_ids: invalid type"),
        ({"ignore_eos": 1}, "ignore_eos: invalid type"),
    ],
)
def test_a_sampling_field_of_another_kind_is_refused_with_a_string(params, message):
    assert message in refusal(params)["error"]


@pytest.mark.parametrize("neutral", [{"stop": None}, {"stop": []}, {"n": 1}, {"min_new_tokens": 0}])
def test_a_field_that_asks_for_nothing_is_accepted(neutral):
    assert read(neutral).rid == "r1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "input_ids cannot be empty."),
        ({"input_ids": None}, "input_ids must be given."),
        ({"input_ids": [1, 100]}, "valid range is [0, 100)"),
        ({"input_ids": [-1]}, "valid range is [0, 100)"),
        (
            {"input_ids": [1] * 32},
            "The input (32 tokens) is longer than the model's context",
        ),
        ({"rid": "../x"}, "cannot name a capture file"),
    ],
)
def test_an_impossible_prompt_is_refused_with_a_message(change, message):
    assert message in refusal(**change)["error"]["message"]


@pytest.mark.parametrize(
    "params",
    [
        {"max_new_tokens": 30},
        {"max_new_tokens": -1},
        {"temperature": -0.1},
        {"top_p": 0.0},
        {"top_k": 0},
        {"min_p": 1.5},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"frequency_penalty": -3.0},
        {"sampling_seed": 2**63},
    ],
)
def test_a_value_out_of_range_is_refused_and_named(params):
    (key,) = params
    message = refusal(params)["error"]["message"]
    assert key in message or "maximum context length of 32 tokens" in message


def test_a_length_to_the_contexts_very_end_is_served():
    assert read({"max_new_tokens": 29}).max_new_tokens == 29
    assert read({"max_new_tokens": 0}).max_new_tokens == 0


def test_a_greedy_server_refuses_draws_and_penalties():
    greedy = ServerLimits(100, 32, True, str.isalnum)
    for params in ({"temperature": 0.7}, {"temperature": 0, "presence_penalty": 0.1}):
        message = refusal({"max_new_tokens": 4, **params}, limits=greedy)["error"]["message"]
        assert "verifies drafts greedily" in message
    assert read({"max_new_tokens": 4, "temperature": 0}, limits=greedy).sampling.temperature is None


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"3", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(body):
    with pytest.raises(RequestRefused) as caught:
        parse_generate(body, LIMITS)
    assert caught.value.status == 400


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["rid", "input_ids", "sampling_params", "temperature", "stop", "n"])
                | st.text(max_size=5),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_read_or_refused_never_a_crash(value):
    outcome: object
    try:
        outcome = parse_generate(json.dumps(value).encode(), LIMITS)
    except RequestRefused as refused:
        outcome = refused.status
    assert outcome == 400 or 0 < len(outcome.input_ids) < 32


COUNTERS = SpeculationCounters(4, 5, (1, 1, 2))


@pytest.mark.parametrize(
    ("output", "finish"),
    [
        ([7, 8, 9], ServedFinish.stop(9)),
        ([7, 8, 9, 10], ServedFinish.length(4)),
    ],
)
def test_a_reply_is_what_the_client_half_reads(output, finish):
    served = read({"max_new_tokens": 4}, return_prompt_token_ids=True)
    body = generate_reply(
        served, output, "text", finish, seconds=0.5, speculation=COUNTERS, draft_steps=3
    )
    asked = GenerateRequest("r1", (1, 2, 3), {"max_new_tokens": 4})
    completion = parse_completion(asked, 200, json.dumps(body).encode(), vocab_size=100)
    assert list(completion.output_ids) == output
    assert completion.speculation == COUNTERS
    assert completion.prompt_tokens == 3
    assert body["meta_info"]["spec_accept_length"] == len(output) / 4
    assert body["meta_info"]["spec_accept_rate"] == 5 / 12


@pytest.mark.parametrize("counters", [None, SpeculationCounters(0, 0, ())])
def test_counters_are_absent_not_zero_where_nothing_was_verified(counters):
    served = read({"max_new_tokens": 1})
    body = generate_reply(
        served, [7], "t", ServedFinish.length(1), seconds=0.1, speculation=counters, draft_steps=3
    )
    assert not any(key.startswith("spec_") for key in body["meta_info"])


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (
            generate_reply(
                read({"max_new_tokens": 4}),
                [2],
                "",
                ServedFinish.nan(),
                seconds=0.1,
                speculation=None,
                draft_steps=0,
            ),
            "nan",
        ),
        (waiting_abort_reply(read(), ServedFinish.abort("Abort in waiting queue")), "abort"),
    ],
)
def test_a_nan_and_an_abort_inside_a_200_are_faults_to_the_client_half(body, fault):
    asked = GenerateRequest("r1", (1, 2, 3), {"max_new_tokens": 4})
    with pytest.raises(Exception, match=fault) as caught:
        parse_completion(asked, 200, json.dumps(body).encode(), vocab_size=100)
    assert caught.value.fault == fault


def test_loads_are_read_by_the_client_half():
    body = loads_body(
        now="2030-01-01T00:00:00+00:00",
        version="v",
        running=2,
        waiting=3,
        used_tokens=64,
        total_tokens=128,
        max_running=4,
        tokens_per_second=10.0,
    )
    load = parse_loads(200, json.dumps(body).encode())
    assert (load.running, load.waiting, load.used_tokens) == (2, 3, 64)


def test_an_abort_names_a_request_or_everything():
    assert parse_abort(b'{"rid": "s1"}') == ("s1", False)
    assert parse_abort(b'{"abort_all": true}') == ("", True)
    for body in (b"{}", b'{"rid": ""}', b'{"rid": 3}', b"nonsense"):
        with pytest.raises(RequestRefused):
            parse_abort(body)
