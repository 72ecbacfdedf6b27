"""What both engines say of themselves, and what preflight makes of it."""

import asyncio
import time

import pytest

from actors.errors import ServerUnfit
from actors.fit import Expectation
from actors.preflight import Admission, ProbePrompt, check_server, check_servers
from tests.support.conformance_requests import CONTEXT, STOP_ID, VOCABULARY, get, with_client
from tests.support.sglang_rig import SLOTS

pytestmark = pytest.mark.conformance


# The stock server keeps two of the context's tokens to itself: more is cut in silence.
ROOM = CONTEXT - 2


def admission_of(target, tokenizer, prompts, **markers):
    def decode(ids):
        return tokenizer.decode(ids, skip_special_tokens=False, spaces_between_special_tokens=False)

    return Admission(
        Expectation(target, ROOM, CONTEXT),
        vocab_size=VOCABULARY,
        probes=tuple(ProbePrompt(ids, (STOP_ID,)) for ids in prompts[:2]),
        decode=decode,
        markers=markers,
    )


def test_preflight_accepts_the_server_of_the_recipes_target(server, target, tokenizer, prompts):
    admission = admission_of(target, tokenizer, prompts, **{"<|im_end|>": STOP_ID})
    one = asyncio.run(check_server(server.url, admission))
    assert one.model.weight_version == "default"
    assert one.model.reasoning_parser is None
    assert one.server.version.startswith("0.5.23")
    assert one.server.max_running_requests == SLOTS
    assert one.not_checked == (() if server.name == "stock" else ("markers",))


def test_preflight_refuses_a_server_that_knows_a_marker_by_another_text(
    engines, target, tokenizer, prompts
):
    admission = admission_of(target, tokenizer, prompts, **{"</think>": STOP_ID})
    with pytest.raises(ServerUnfit, match="writes token 2 as"):
        asyncio.run(check_server(engines["stock"].url, admission))


def test_preflight_refuses_another_target(server, tmp_path):
    with pytest.raises(ServerUnfit, match="serves"):
        check_servers([server.url], target=tmp_path / "another", need_context_tokens=16)


def test_preflight_refuses_what_the_stock_server_would_cut(engines, target):
    url = engines["stock"].url
    check_servers([url], target=target, need_context_tokens=ROOM)
    with pytest.raises(ServerUnfit, match="at least"):
        check_servers([url], target=target, need_context_tokens=ROOM + 1)


def test_the_context_length_is_told_somewhere(server):
    """The stock server's `/server_info` has null unless it was started with one."""
    info = with_client(server.url, lambda client: client.server_info())
    assert info.context_length in (None, CONTEXT)
    _, models = get(server.url, "/v1/models")
    assert models["data"][0]["max_model_len"] == CONTEXT


def test_both_say_where_model_and_tokenizer_come_from(server, target):
    info = with_client(server.url, lambda client: client.model_info())
    assert info.model_path == info.tokenizer_path == str(target)
    assert info.preferred_sampling_params is None


def test_the_clock_of_a_server_can_be_read(server):
    told = with_client(server.url, lambda client: client.server_time())
    assert abs(told - time.time()) < 5.0


def test_what_a_run_writes_down_of_the_stock_server_is_there(engines):
    info = with_client(engines["stock"].url, lambda client: client.server_info())
    assert type(info.raw["random_seed"]) is int  # drawn anew at each start
    assert info.raw["enable_deterministic_inference"] is False
    assert info.raw["disable_radix_cache"] is False
    assert info.allow_auto_truncate is False
    assert info.speculative_algorithm is None
    assert info.max_total_num_tokens == 16384
