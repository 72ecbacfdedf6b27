"""The client half of the contract: a table of broken replies, and a fuzz of good ones."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import BadReply, Overloaded, Refused, RequestFault, Unreachable, Unserved
from actors.protocol import (
    GenerateRequest,
    fault_of,
    http_date_seconds,
    identity_of,
    parse_completion,
    parse_loads,
    parse_model_info,
    parse_server_info,
    retry_after_seconds,
)
from tests.support.fake_server import good_reply

VOCAB = 100
REQUEST = GenerateRequest("r", (5, 6, 7), {"max_new_tokens": 4})
GOOD = good_reply(json.loads(REQUEST.body()), [9, 8, 2], text="hi")
_MISSING = object()


def parse(reply, request=REQUEST):
    body = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
    return parse_completion(request, 200, body, vocab_size=VOCAB)


def with_change(path, value):
    reply = copy.deepcopy(GOOD)
    *parents, leaf = path
    holder = reply
    for one in parents:
        holder = holder[one]
    if value is _MISSING:
        del holder[leaf]
    else:
        holder[leaf] = value
    return reply


STOP_AT_3 = {"type": "stop", "matched": 3}


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        (("meta_info",), _MISSING, "missing_meta_info"),
        (("meta_info",), None, "type_meta_info"),
        (("output_ids",), _MISSING, "missing_output_ids"),
        (("output_ids",), [9, True, 2], "type_output_ids"),
        (("output_ids",), [9, 8.0, 2], "type_output_ids"),
        (("output_ids",), [9, -1, 2], "id_out_of_vocabulary"),
        (("output_ids",), [9, VOCAB, 2], "id_out_of_vocabulary"),
        (("output_ids",), [9, 2], "completion_tokens"),
        (("output_ids",), [[9, 8, 2]], "type_output_ids"),
        (("output_ids",), [9, 2**64, 2], "type_output_ids"),
        (("output_ids",), [9, 2**63, 2], "id_out_of_vocabulary"),
        (("prompt_token_ids",), [5, 6, 8], "foreign_prompt"),
        (("prompt_token_ids",), [5, 6], "foreign_prompt"),
        (("prompt_token_ids",), [5.0, 6, 7], "foreign_prompt"),
        (("prompt_token_ids",), None, "type_prompt_token_ids"),
        (("meta_info", "num_retractions"), -1, "type_num_retractions"),
        (("meta_info", "num_retractions"), None, "type_num_retractions"),
        (("text",), _MISSING, "missing_text"),
        (("text",), None, "type_text"),
        (("meta_info", "id"), "q", "foreign_rid"),
        (("meta_info", "id"), _MISSING, "missing_id"),
        (("meta_info", "prompt_tokens"), _MISSING, "missing_prompt_tokens"),
        (("meta_info", "prompt_tokens"), 4, "prompt_tokens"),
        (("meta_info", "completion_tokens"), _MISSING, "missing_completion_tokens"),
        (("meta_info", "completion_tokens"), None, "type_completion_tokens"),
        (("meta_info", "completion_tokens"), 0, "completion_tokens"),
        (("meta_info", "completion_tokens"), -3, "type_completion_tokens"),
        (("meta_info", "completion_tokens"), "3", "type_completion_tokens"),
        (("meta_info", "cached_tokens"), _MISSING, "missing_cached_tokens"),
        (("meta_info", "cached_tokens"), 4, "cached_tokens"),
        (("meta_info", "weight_version"), _MISSING, "missing_weight_version"),
        (("meta_info", "finish_reason"), None, "type_finish_reason"),
        (("meta_info", "finish_reason"), {"type": "eos"}, "finish_reason"),
        (("meta_info", "finish_reason"), {"type": "stop"}, "missing_matched"),
        (("meta_info", "finish_reason"), {"type": "stop", "matched": None}, "finish_reason"),
        (("meta_info", "finish_reason"), STOP_AT_3, "stop_mismatch"),
        (("meta_info", "finish_reason"), {"type": "length", "length": 3}, "clipped"),
        (("meta_info", "finish_reason"), {"type": "length", "length": 4}, "clipped"),
        (("meta_info", "finish_reason"), {"type": "abort"}, "abort"),
    ],
)
def test_each_broken_reply_has_its_name(path, value, fault):
    with pytest.raises(RequestFault) as caught:
        parse(with_change(path, value))
    assert caught.value.fault == fault


def test_an_abort_in_the_waiting_queue_is_an_abort_though_its_counts_are_missing():
    reply = with_change(("meta_info", "finish_reason"), {"type": "abort", "message": "queue"})
    for count in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        del reply["meta_info"][count]
    with pytest.raises(Overloaded, match="queue"):
        parse(reply)


def test_more_tokens_than_asked_are_refused():
    short = GenerateRequest("r", (5, 6, 7), {"max_new_tokens": 2})
    with pytest.raises(BadReply, match="too_many_tokens"):
        parse(GOOD, short)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000),
        *(b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": "\\ud83d"}', b'{"a": "\\udc00x"}'),
    ],
)
def test_what_is_no_json_object_is_a_bad_reply(body):
    with pytest.raises(BadReply):
        parse(body)


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (400, b'{"error": "plain"}', Refused, "plain"),
        (400, b'{"error": {"message": "nested"}}', Refused, "nested"),
        (400, b'{"object": "error", "message": "flat", "code": 400}', Refused, "flat"),
        (503, b"<html>busy</html>", Overloaded, "busy"),
        (500, b"", Unreachable, "500"),
        (502, b'{"error": null}', Unreachable, "error"),
        (301, b"", BadReply, "301"),
        (401, b"{}", Unserved, "EYAS_API_KEY"),
        (404, b'{"detail": "Not Found"}', Unserved, "Not Found"),
    ],
)
def test_the_servers_own_words_are_kept(status, body, kind, words):
    fault = fault_of(status, body)
    assert type(fault) is kind
    assert words in fault.detail


@pytest.mark.parametrize("parse_it", [parse_model_info, parse_server_info, parse_loads])
def test_an_empty_answer_of_a_server_about_itself_is_a_bad_reply(parse_it):
    with pytest.raises(BadReply):
        parse_it(200, b"{}")
    with pytest.raises(Overloaded):
        parse_it(503, b"{}")


CORE = {"num_running_reqs": 3, "num_waiting_reqs": 1, "num_used_tokens": 50}
FULL_CORE = CORE | {
    "max_total_num_tokens": 100,
    "max_running_requests": 8,
    "token_usage": 0.5,
    "gen_throughput": 12.5,
}


def loads(*ranks):
    return parse_loads(200, json.dumps({"loads": ranks}).encode())


def test_the_load_of_all_ranks_is_one_load():
    load = loads(FULL_CORE, FULL_CORE | {"token_usage": 0.75, "gen_throughput": 0})
    assert (load.running, load.waiting, load.used_tokens) == (6, 2, 100)
    assert (load.max_total_num_tokens, load.max_running_requests) == (200, 16)
    assert (load.token_usage, load.gen_throughput) == (0.75, 12.5)


def test_what_a_rank_does_not_say_is_not_zero():
    load = loads(FULL_CORE, CORE)
    assert load.max_total_num_tokens is None
    assert load.max_running_requests is None
    assert load.token_usage is None
    assert load.gen_throughput is None
    with pytest.raises(BadReply, match="missing_num_running_reqs"):
        loads({"num_waiting_reqs": 1, "num_used_tokens": 50})


@pytest.mark.parametrize("usage", [None, "0.5", True, -0.1])
def test_a_load_that_is_no_number_is_a_bad_reply(usage):
    with pytest.raises(BadReply, match="type_token_usage"):
        loads(FULL_CORE | {"token_usage": usage})


def test_retractions_are_counted_where_the_server_counts_them():
    assert parse(GOOD).retractions is None
    assert parse(with_change(("meta_info", "num_retractions"), 2)).retractions == 2


MODEL = {
    "model_path": "m",
    "tokenizer_path": "m",
    "weight_version": "default",
    "reasoning_parser": None,
    "preferred_sampling_params": None,
}
SERVER = {
    "version": "0.5.23",
    "context_length": 512,
    "max_total_num_tokens": 100,
    "max_running_requests": 8,
    "allow_auto_truncate": False,
    "speculative_algorithm": None,
    "random_seed": 1,
}


def identity(**changes):
    model = {key: changes.get(key, value) for key, value in MODEL.items()}
    server = {key: changes.get(key, value) for key, value in SERVER.items()}
    return identity_of(
        parse_model_info(200, json.dumps(model).encode()),
        parse_server_info(200, json.dumps(server).encode()),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model_path": "other"},
        {"tokenizer_path": "other"},
        {"weight_version": "2"},
        {"version": "0.6"},
        {"random_seed": 2},
    ],
)
def test_another_process_or_model_has_another_identity(change):
    assert identity(**change) != identity()


def test_what_a_process_may_change_while_it_runs_is_no_part_of_its_identity():
    assert identity(max_total_num_tokens=99) == identity()


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("0", 0.0),
        (" 12 ", 12.0),
        ("999999999999999999999", 600.0),
        ("Wed, 21 Oct 2015 07:28:30 GMT", 30.0),
        ("Wed, 21 Oct 2015 07:28:30 -0000", 30.0),
        ("Wed, 21 Oct 2015 06:00:00 GMT", 0.0),
        ("Wed, 21 Oct 2099 06:00:00 GMT", 600.0),
        *((odd, None) for odd in ("", "soon", "1.5", "-1", "Wed, 99 Oct 2015", "٣")),
    ],
)
def test_when_to_come_back_is_seconds_or_a_date_and_bounded(header, seconds):
    now = http_date_seconds("Wed, 21 Oct 2015 07:28:00 GMT")
    assert retry_after_seconds(header, now) == seconds


def test_a_reply_may_weigh_what_its_request_allows():
    small = GenerateRequest("r", (1,) * 500, {"max_new_tokens": 500})
    assert 1_000_000 < small.max_reply_bytes < 1_500_000
    long = GenerateRequest("r", (1,) * 100_000, {"max_new_tokens": 32_768})
    assert long.max_reply_bytes < 20 * 2**20


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 120) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
PATHS = [
    *((key,) for key in GOOD),
    *(("meta_info", key) for key in GOOD["meta_info"]),
    ("meta_info", "finish_reason", "type"),
    ("meta_info", "finish_reason", "matched"),
    ("output_ids", 0),
    ("output_ids", 2),
    ("meta_info", "spec_verify_ct"),
    ("error",),
]


def _has(holder, key) -> bool:
    if isinstance(key, int):
        return isinstance(holder, list) and key < len(holder)
    return isinstance(holder, dict) and key in holder


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(PATHS), JSON), min_size=1, max_size=3))
def test_a_changed_reply_never_crashes_and_never_passes_with_a_wrong_fact(changes):
    reply = copy.deepcopy(GOOD)
    for path, value in changes:
        *parents, leaf = path
        holder = reply
        for one in parents:
            holder = holder[one] if _has(holder, one) else None
        if isinstance(holder, dict) or _has(holder, leaf):
            holder[leaf] = value
    try:
        completion = parse(reply)
    except RequestFault:
        return
    meta = reply["meta_info"]
    assert completion.rid == "r" == meta["id"]
    assert list(completion.output_ids) == reply["output_ids"]
    assert completion.completion_tokens == len(reply["output_ids"]) == meta["completion_tokens"]
    assert completion.prompt_tokens == len(REQUEST.input_ids)
    assert all(type(one) is int and 0 <= one < VOCAB for one in completion.output_ids)
    assert meta["finish_reason"]["type"] == completion.finish.kind == "stop"
    assert completion.finish.matched == meta["finish_reason"]["matched"]
    if isinstance(completion.finish.matched, int):
        assert completion.output_ids[-1] == completion.finish.matched


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, len(json.dumps(GOOD)) - 1), flip=st.integers(0, 255))
def test_damaged_bytes_never_crash(cut, flip):
    body = bytearray(json.dumps(GOOD).encode())
    body[cut] = flip
    for damaged in (bytes(body), bytes(body[:cut])):
        try:
            completion = parse(damaged)
        except RequestFault:
            continue
        assert completion.completion_tokens == len(completion.output_ids)
