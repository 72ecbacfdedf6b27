"""What the driver learns of a row."""

from datetime import datetime, timezone

import pyarrow as pa
import pytest

from pipelines.row_report import REPORT_COLUMNS, REPORT_SCHEMA, output_hash, report_of
from pipelines.schema import RESPONSE_SCHEMA

AT = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=timezone.utc)


def row(*kinds, status="ok", output_ids=(5, 6)):
    return {
        "sample_id": "chat-1.t1.s2",
        "prompt_id": "chat-1",
        "dataset": "chat",
        "status": status,
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": len(output_ids),
            "reasoning_tokens": 1,
            "cached_tokens": 0,
            "total_tokens": 5,
        },
        "segments": [{"kind": kind, "start": 0, "end": 1} for kind in kinds],
        "output_ids": list(output_ids),
        "server": "http://s",
        "finish_reason": "stop",
        "latency_ms": 70,
        "finished_at": AT,
    }


def test_a_report_needs_only_its_columns():
    one = row("content")
    assert set(one) == set(REPORT_COLUMNS) <= set(RESPONSE_SCHEMA.names)
    report = report_of(one)
    assert (report.prompt_id, report.output_tokens, report.latency_ms) == ("chat-1", 2, 70)
    assert report.finished_us == round(AT.timestamp() * 1e6)
    assert report.is_ok
    assert report.has_reply


def test_a_table_of_reports_gives_them_back():
    report = report_of(row("reasoning", "marker", "content"))
    table = pa.Table.from_pylist([vars(report)], schema=REPORT_SCHEMA)
    assert type(report)(**table.to_pylist()[0]) == report


@pytest.mark.parametrize(
    ("kinds", "closed"),
    [
        (("reasoning", "marker", "content", "stop"), True),
        (("marker", "reasoning", "marker", "content"), True),
        (("reasoning", "tool_call", "stop"), True),
        (("reasoning", "marker", "stop"), True),
        (("marker", "content"), True),
        (("reasoning", "stop"), False),
        (("marker", "reasoning"), False),
        (("reasoning", "marker", "reasoning"), False),
        (("content", "stop"), False),
        ((), False),
    ],
)
def test_the_segments_say_whether_the_reasoning_ended(kinds, closed):
    assert report_of(row(*kinds)).closed is closed


def test_a_hash_is_of_the_ids_alone_and_fits_64_bits():
    assert output_hash([5, 6]) == output_hash((5, 6)) != output_hash([6, 5])
    assert output_hash([]) == 0
    assert all(-(2**63) <= output_hash([one]) < 2**63 for one in range(50))


def test_a_failed_row_has_no_reply():
    assert not report_of(row(status="failed:nan", output_ids=())).has_reply
