"""From a reply to a row: nothing invented, nothing lost."""

import json
from datetime import datetime, timezone

import pyarrow as pa
import pytest

from actors.pool import Completed, Failed
from actors.protocol import Completion, Finish
from pipelines.response_row import RowMaker, encodable
from pipelines.schema import RESPONSE_SCHEMA
from tests.support.generate_run import prompt_row
from tests.support.profiles import CLOSE, OPEN, PLAIN, STOP, THINKS, gates

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
    assert row["output_ids"] == [5, 6, CLOSE, 7, STOP]
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
    assert row["output_ids"] == [5, 6, STOP]


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
    assert row["output_ids"] == row["segments"] == []
    assert row["prompt_ids"] == [1, 2, OPEN]


@pytest.mark.parametrize("text", ["\ud83d", "a\udfffb", "fine \U0001f600"])
def test_any_text_can_be_stored(text):
    assert encodable(text).encode("utf-8")
    row = row_of(reply([5, CLOSE, 7, STOP], text=text, version=text))
    assert "text_differs" in row["flags"]
