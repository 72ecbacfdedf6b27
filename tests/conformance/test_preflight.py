"""What both engines say of themselves, and what preflight makes of it."""

import email.utils
import time

import pytest

from actors.errors import ServerUnfit
from actors.server import check_servers
from tests.support.conformance_requests import CONTEXT, get, with_client
from tests.support.sglang_rig import SLOTS

pytestmark = pytest.mark.conformance


def test_preflight_accepts_the_server_of_the_recipes_target(server, target):
    (one,) = check_servers([server.url], target=target, need_context_tokens=CONTEXT)
    assert one.model.weight_version == "default"
    assert one.model.reasoning_parser is None
    assert one.server.version.startswith("0.5.23")
    assert one.server.max_running_requests == SLOTS


def test_preflight_refuses_another_target(server, tmp_path):
    with pytest.raises(ServerUnfit, match="serves"):
        check_servers([server.url], target=tmp_path / "another", need_context_tokens=16)


def test_preflight_refuses_a_context_that_is_too_short(server, target):
    with pytest.raises(ServerUnfit, match="at least"):
        check_servers([server.url], target=target, need_context_tokens=1_000_000)


def test_the_context_length_is_told_somewhere(server):
    """The stock server's `/server_info` has null unless it was started with one."""
    info = with_client(server.url, lambda client: client.server_info())
    assert info.context_length in (None, CONTEXT)
    _, models, _ = get(server.url, "/v1/models")
    assert models["data"][0]["max_model_len"] == CONTEXT


def test_both_say_where_model_and_tokenizer_come_from(server, target):
    info = with_client(server.url, lambda client: client.model_info())
    assert info.model_path == info.tokenizer_path == str(target)
    assert info.preferred_sampling_params is None


def test_the_clock_of_a_server_can_be_read(server):
    _, _, headers = get(server.url, "/health")
    told = email.utils.parsedate_to_datetime(headers["date"]).timestamp()
    assert abs(told - time.time()) < 5.0


def test_what_a_run_writes_down_of_the_stock_server_is_there(engines):
    info = with_client(engines["stock"].url, lambda client: client.server_info())
    assert type(info.raw["random_seed"]) is int  # drawn anew at each start
    assert info.raw["enable_deterministic_inference"] is False
    assert info.raw["disable_radix_cache"] is False
    assert info.allow_auto_truncate is False
    assert info.speculative_algorithm is None
    assert info.max_total_num_tokens == 16384
