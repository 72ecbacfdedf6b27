"""Which servers are refused, by what they say of themselves and by what they answer."""

from pathlib import Path

import pytest

from actors.errors import ServerUnfit
from actors.fit import (
    Expectation,
    check_clock,
    check_fit,
    check_markers,
    check_not_stuck,
    check_text,
    record_of,
)
from actors.protocol import Completion, Finish, ModelInfo, ServerInfo

EXPECTED = Expectation(Path("/models/tiny"), context_tokens=512)
URL = "http://a"


def model(**changes):
    fields = {
        "model_path": "/models/tiny",
        "tokenizer_path": "/models/tiny",
        "weight_version": "default",
        "reasoning_parser": None,
        "preferred_sampling_params": None,
    }
    return ModelInfo(**{**fields, **changes})


def server(raw=None, **changes):
    fields = {
        "version": "0.5.23",
        "context_length": 512,
        "max_total_num_tokens": 10_000,
        "max_running_requests": 8,
        "allow_auto_truncate": False,
        "speculative_algorithm": None,
    }
    return ServerInfo(**{**fields, **changes}, raw=raw or {})


def completion(ids, text=""):
    finish = Finish("length", None, len(ids))
    return Completion("r", tuple(ids), text, finish, 3, len(ids), 0, "default", None)


@pytest.mark.parametrize(
    ("said", "running"),
    [
        (model(), server()),
        (model(model_path="/elsewhere/tiny", tokenizer_path="org/tiny"), server()),
        (model(), server(version="0.6.0.dev3+gabc")),
        (model(), server(version="main")),
        (model(), server(context_length=None)),
        (model(), server({"max_req_input_len": 508})),
        (model(), server({"skip_tokenizer_init": False})),
        (model(), server(max_total_num_tokens=None)),
    ],
)
def test_a_server_with_the_target_and_room_fits(said, running):
    check_fit(URL, said, running, EXPECTED)


@pytest.mark.parametrize(
    ("said", "running", "words"),
    [
        (model(model_path="/models/other"), server(), "serves /models/other"),
        (model(tokenizer_path="/models/other"), server(), "tokenizer /models/other"),
        (model(preferred_sampling_params='{"top_p": 0.9}'), server(), "top_p"),
        (model(), server(allow_auto_truncate=True), "auto-truncate"),
        (model(), server({"skip_tokenizer_init": True}), "skip-tokenizer-init"),
        (model(), server(context_length=511), "context_length 511"),
        (model(), server(max_total_num_tokens=511), "max_total_num_tokens 511"),
        (model(), server(version="0.5.9"), "version 0.5.9"),
        # A context of 512 leaves an input of 506, and 510 for prompt and response.
        (model(), server({"max_req_input_len": 506}), r"max_req_input_len \+ 4 510"),
    ],
)
def test_a_server_that_would_change_the_data_is_unfit(said, running, words):
    with pytest.raises(ServerUnfit, match=words):
        check_fit(URL, said, running, EXPECTED)


def test_without_a_length_of_its_own_the_server_has_the_models():
    expected = Expectation(EXPECTED.target, 512, model_context_tokens=511)
    with pytest.raises(ServerUnfit, match="context_length 511"):
        check_fit(URL, model(), server(context_length=None), expected)
    # What the server itself says counts more.
    check_fit(URL, model(), server({"max_req_input_len": 600}, context_length=None), expected)


def test_clocks_may_differ_by_two_minutes():
    check_clock(URL, 1_000.0, 1_119.0)
    with pytest.raises(ServerUnfit, match=r"-121 s"):
        check_clock(URL, 1_000.0, 1_121.0)
    with pytest.raises(ServerUnfit, match=r"\+121 s"):
        check_clock(URL, 1_121.0, 1_000.0)


@pytest.mark.parametrize("text", ["ab c", " ab c", "ab c\ufffd"])
def test_a_leading_blank_and_a_cut_character_are_no_difference(text):
    check_text(URL, completion([1, 2], text), lambda _: "ab c")


def test_another_tokenizer_is_found_by_its_text():
    with pytest.raises(ServerUnfit, match=r"\[1, 2\] as 'xy'"):
        check_text(URL, completion([1, 2], "xy"), lambda _: "ab")


def test_one_and_the_same_token_to_every_prompt_is_unfit():
    with pytest.raises(ServerUnfit, match="token 0 only"):
        check_not_stuck(URL, [completion([0] * 16), completion([0] * 16)])
    check_not_stuck(URL, [completion([0] * 16), completion([5] * 16)])
    check_not_stuck(URL, [completion([2])])  # stopped at once
    check_not_stuck(URL, [])


def test_a_marker_with_another_text_is_unfit():
    check_markers(URL, {"<think>": 7}, {"<think>": "<think>"})
    with pytest.raises(ServerUnfit, match="token 7 as '<tool>'"):
        check_markers(URL, {"<think>": 7}, {"<think>": "<tool>"})


def test_a_record_has_what_the_server_said_and_no_more():
    raw = {"enable_deterministic_inference": True, "random_seed": 5, "api_key": "secret"}
    record = record_of(model(), server(raw, speculative_algorithm="EAGLE3"))
    assert record["enable_deterministic_inference"] is True
    assert record["speculative_algorithm"] == "EAGLE3"
    assert "quantization" not in record
    assert "secret" not in str(record)
