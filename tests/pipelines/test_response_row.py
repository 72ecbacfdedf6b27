"""From a reply to a row: nothing invented, nothing lost."""

import json
from datetime import datetime, timezone

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from actors.pool import Completed, Failed
from actors.protocol import Completion, Finish
from pipelines.recipe import ChannelMarkers, ToolMarkers
from pipelines.response_row import Reader, RowMaker, decoder_of, derived_columns, encodable
from pipelines.schema import RESPONSE_SCHEMA
from tests.support.generate_run import prompt_row
from tests.support.profiles import (
    CALL,
    CALL_END,
    CLOSE,
    HERMES,
    OPEN,
    PLAIN,
    QWEN,
    STOP,
    THINKS,
    gates,
    profile,
)

NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


def decode(ids):
    return "".join(f"<{one}>" for one in ids)


def reply(ids, *, text=None, version="default"):
    stopped = ids[-1] == STOP
    finish = Finish("stop", STOP, None) if stopped else Finish("length", None, len(ids))
    shown = decode(ids) if text is None else text
    completion = Completion("r", tuple(ids), shown, finish, 3, len(ids), 1, version, None)
    return Completed(completion, None, "http://s", 2, 11, 22)


def row_of(outcome, *, prompt_ids=(1, 2, OPEN), of=THINKS, tools="[]", **place):
    prompt = {**prompt_row(1), "prompt_ids": list(prompt_ids), "tools": tools}
    maker = RowMaker(of, gates(), decode)
    row = maker.response_row(prompt, {"b": 1, "a": 2}, outcome, finished_at=NOW, **place)
    table = pa.Table.from_pylist([row], schema=RESPONSE_SCHEMA)
    assert all(column.null_count == 0 for column in table.columns)
    assert set(row) == set(RESPONSE_SCHEMA.names)
    return row


def test_a_thinking_answer_is_split_and_counted():
    row = row_of(reply([5, 6, CLOSE, 7, STOP]))
    assert (row["reasoning"], row["content"], row["status"]) == ("<5><6>", "<7>", "ok")
    assert row["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "reasoning_tokens": 2,
        "cached_tokens": 1,
        "total_tokens": 8,
    }
    assert list(row["output_ids"]) == [5, 6, CLOSE, 7, STOP]
    assert row["finish_matched"] == "2"
    assert json.loads(row["params"]) == {"a": 2, "b": 1}
    assert (row["server"], row["attempt"], row["queued_ms"]) == ("http://s", 2, 11)
    assert row["flags"] == "[]"


def test_the_parts_decode_to_the_whole():
    row = row_of(reply([5, 6, CLOSE, 7, STOP]))
    parts = [decode(row["output_ids"][one["start"] : one["end"]]) for one in row["segments"]]
    assert "".join(parts) == row["text"]


def test_a_text_that_the_ids_do_not_give_is_flagged_and_not_used():
    row = row_of(reply([5, CLOSE, 7, STOP], text="something else"))
    assert row["flags"] == '["text_differs"]'
    assert row["content"] == "<7>"
    assert row["status"] == "ok"


def test_a_rejected_row_keeps_all_its_ids():
    row = row_of(reply([5, 6, STOP]))
    assert row["status"] == "rejected:missing_think_close"
    assert row["detail"]
    assert list(row["output_ids"]) == [5, 6, STOP]


def test_a_plain_target_has_content_only():
    row = row_of(reply([5, 6, STOP]), of=PLAIN)
    assert (row["reasoning"], row["content"]) == ("", "<5><6>")
    assert row["usage"]["reasoning_tokens"] == 0


def test_a_failed_row_says_that_its_zeros_are_no_counts():
    row = row_of(Failed("http_400", "too \ud83d long", "", 1, 3, 4))
    assert row["status"] == "failed:http_400"
    assert row["flags"] == '["no_reply"]'
    assert row["detail"] == "too ? long"
    assert set(row["usage"].values()) == {0}
    assert list(row["output_ids"]) == row["segments"] == []
    assert row["prompt_ids"] == [1, 2, OPEN]


@pytest.mark.parametrize("text", ["\ud83d", "a\udfffb", "fine \U0001f600"])
def test_any_text_can_be_stored(text):
    assert encodable(text).encode("utf-8")
    row = row_of(reply([5, CLOSE, 7, STOP], text=text, version=text))
    assert "text_differs" in row["flags"]


def test_a_later_turn_or_sample_has_an_id_of_its_own():
    row = row_of(reply([5, CLOSE, 7, STOP]), turn=2, sample=3)
    first = prompt_row(1)["sample_id"]
    assert (row["sample_id"], row["prompt_id"]) == (f"{first}.t2.s3", first)
    assert (row["turn"], row["sample"]) == (2, 3)


def hermes_row(call):
    ids = [6, CALL, *(1000 + ord(letter) for letter in call), CALL_END, STOP]
    prompt = {**prompt_row(1), "tools": '[{"function": {"name": "look"}}]'}
    shown = RowMaker(QWEN, gates(), letters)
    return shown.response_row(prompt, {}, reply(ids, text=letters(ids)), finished_at=NOW)


def letters(ids):
    return "".join(chr(one - 1000) if one >= 1000 else f"<{one}>" for one in ids)


def test_a_tool_call_is_stored_as_the_target_wrote_it():
    row = hermes_row('{"name": "look", "arguments": {"bird":"kite"}}')
    assert (row["status"], row["flags"], row["content"]) == ("ok", "[]", "<6>")
    assert json.loads(row["tool_calls"]) == [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "look", "arguments": '{"bird":"kite"}'},
        }
    ]


@pytest.mark.parametrize(
    ("call", "status", "flags"),
    [
        ('{"name": "look", "arguments": {', "rejected:invalid_tool_json", []),
        ('{"name": "see", "arguments": {}}', "ok", ["undeclared_tool"]),
        ('{"name": "\\ud83d", "arguments": {}}', "ok", ["undeclared_tool"]),
    ],
)
def test_what_is_wrong_with_a_tool_call_is_named(call, status, flags):
    row = hermes_row(call)
    assert (row["status"], json.loads(row["flags"])) == (status, flags)
    assert row["tool_calls"].encode()


# With a real tokenizer

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")


@pytest.fixture(scope="module")
def tokenizer(tiny_target):
    loaded = AutoTokenizer.from_pretrained(tiny_target)
    loaded.add_special_tokens({"additional_special_tokens": [*MARKERS, *HARMONY]})
    return loaded


def targets_of(tokenizer):
    """A profile for each way of marking parts, with the ids that this tokenizer gives them."""
    ids = tokenizer.convert_tokens_to_ids
    plain = {"think_open_id": None, "think_close_id": None}
    hermes = {**vars(HERMES), "call_open_id": ids("<tool_call>"), "call_close_id": ids(MARKERS[3])}
    names = ("start_id", "channel_id", "constrain_id", "message_id", "end_id")
    channels = dict(zip(names, map(ids, HARMONY), strict=True))
    return [
        profile(**plain),
        profile(
            think_open_id=ids("<think>"),
            think_close_id=ids("</think>"),
            tool_markers=ToolMarkers(**hermes),
        ),
        profile(**plain, channels=ChannelMarkers(**channels)),
    ]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_parts_decode_to_the_whole_and_are_derived_again(tokenizer, data):
    of = data.draw(st.sampled_from(targets_of(tokenizer)))
    controls = tokenizer.convert_tokens_to_ids([*MARKERS, *HARMONY])
    token = st.sampled_from(controls) | st.integers(3, len(tokenizer) - 1)
    ids = data.draw(st.lists(token, min_size=1, max_size=40))
    prompt_ids = data.draw(st.lists(st.sampled_from(controls), max_size=2))
    ids = [*ids, STOP] if data.draw(st.booleans()) else ids
    decode_ids = decoder_of(tokenizer)
    whole = decode_ids(ids)
    assert whole == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    maker = RowMaker(of, gates(), decode_ids)
    prompt = {**prompt_row(1), "prompt_ids": prompt_ids}
    row = maker.response_row(prompt, {}, reply(ids, text=whole), finished_at=NOW)
    parts = [ids[one["start"] : one["end"]] for one in row["segments"]]
    assert [one for part in parts for one in part] == ids
    assert "text_differs" not in row["flags"]
    if "\ufffd" not in whole:  # half a character is shown as such, wherever it is cut
        assert "".join(map(decode_ids, parts)) == whole
    again = derived_columns(Reader(of, decode_ids), row)
    assert again == {name: row[name] for name in again}
