"""Thirty response rows of one set: ok, rejected and failed ones."""

from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from pipelines.segments import SegmentWriter, committed_files
from pipelines.store import RunFolder


def row(number: int, status: str = "ok", *, attempt: int = 1, text: str = "") -> dict[str, Any]:
    """The response to prompt `number` of the set `set`."""
    ids = [number + 10, 2] if not status.startswith("failed") else []
    return {
        "sample_id": f"set-{number:04d}",
        "messages": "[]",
        "reasoning": "",
        "content": text or f"answer {number}",
        "finish_reason": "stop",
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": len(ids),
            "reasoning_tokens": 0,
            "cached_tokens": 0,
            "total_tokens": 2 + len(ids),
        },
        "prompt_id": f"set-{number:04d}",
        "turn": 1,
        "sample": 1,
        "dataset": "set",
        "domain": "chat",
        "tools": "[]",
        "tool_calls": "[]",
        "prompt_ids": [1, number],
        "output_ids": ids,
        "segments": [{"kind": "content", "start": 0, "end": len(ids)}],
        "finish_matched": "2",
        "text": text,
        "status": status,
        "detail": "",
        "flags": "[]",
        "params": "{}",
        "server": "http://127.0.0.1:1",
        "weight_version": "default",
        "attempt": attempt,
        "queued_ms": 1,
        "latency_ms": 2,
        "finished_at": datetime(2026, 1, 1, 0, 0, number % 60, tzinfo=timezone.utc),
    }


def _status_of(number: int) -> str:
    return {0: "rejected:empty_content", 1: "failed:refused"}.get(number % 5, "ok")


ROWS = [row(number, _status_of(number)) for number in range(30)]
IDS = [one["sample_id"] for one in ROWS]


def write(run: RunFolder, rows: Iterable[dict[str, Any]], per_segment: int = 7) -> None:
    """Make rows durable, some in each segment."""
    writer = SegmentWriter(run, "set", flush_rows=per_segment)
    for one in rows:
        writer.add(one)
    writer.flush()


def fingerprint(run: RunFolder) -> dict[str, bytes]:
    """Every committed file, by the name that the manifest gives it."""
    return {run.name_of(path): path.read_bytes() for path in committed_files(run, "set")}
