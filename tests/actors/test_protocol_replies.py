"""The client half of the contract: a table of broken replies, and a fuzz of good ones."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.errors import BadReply, Overloaded, Refused, RequestFault, Unreachable
from actors.protocol import (
    GenerateRequest,
    fault_of,
    parse_completion,
    parse_loads,
    parse_model_info,
    parse_server_info,
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
        (("prompt_token_ids",), [5, 6, 8], "foreign_prompt"),
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


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000])
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
