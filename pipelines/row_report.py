"""What the driver learns of one durable response row: figures, never its text. Pure."""

import hashlib
import itertools
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa

# The columns of a response row that `report_of` reads.
REPORT_COLUMNS = (
    "sample_id",
    "prompt_id",
    "dataset",
    "status",
    "usage",
    "segments",
    "output_ids",
    "server",
    "finish_reason",
    "latency_ms",
    "finished_at",
)


# The names that `actors` gives to refusals of a prompt (not of a client, as 401 is).
_REFUSALS = frozenset(
    f"failed:{name}" for name in ("http_400", "http_413", "http_422", "prompt_id_out_of_vocabulary")
)


def has_reply(status: str) -> bool:
    """Whether a server answered at all."""
    return not status.startswith("failed:")


def is_settled(status: str) -> bool:
    """Whether asking again would change nothing: there is a reply, or a server said no."""
    return has_reply(status) or status in _REFUSALS


@dataclass(frozen=True)
class RowReport:
    """One durable row. Counts of a failed row are zero: it has no reply, see `has_reply`."""

    sample_id: str
    prompt_id: str
    dataset: str
    status: str  # ok | rejected:<gate> | failed:<fault>
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int
    finished_us: int  # microseconds since the epoch
    server: str  # "" where none was asked
    finish_reason: str  # stop | length; "" on a failed row
    closed: bool  # an end of the reasoning was seen: its marker, or a tool call after it
    output_hash: int  # 64 bits of the output ids; 0 on a failed row
    latency_ms: int

    @property
    def is_ok(self) -> bool:
        """Whether the row may be trained on."""
        return self.status == "ok"

    @property
    def is_settled(self) -> bool:
        """Whether asking again would change nothing: there is a reply, or a server said no."""
        return is_settled(self.status)

    @property
    def has_reply(self) -> bool:
        """Whether a server answered at all."""
        return has_reply(self.status)


REPORT_SCHEMA = pa.schema(
    [
        pa.field(
            one.name,
            {str: pa.string(), bool: pa.bool_(), int: pa.int64()}[one.type],  # type: ignore[index]
            nullable=False,
        )
        for one in fields(RowReport)
    ]
)


def reports_in(table: pa.Table) -> Iterator[RowReport]:
    """The reports in a table of `REPORT_SCHEMA`, one at a time."""
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            yield RowReport(**row)


def report_of(row: Mapping[str, Any]) -> RowReport:
    """The report of a response row; `row` needs `REPORT_COLUMNS` only."""
    usage = row["usage"]
    return RowReport(
        sample_id=row["sample_id"],
        prompt_id=row["prompt_id"],
        dataset=row["dataset"],
        status=row["status"],
        prompt_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        reasoning_tokens=usage["reasoning_tokens"],
        finished_us=int(row["finished_at"].timestamp() * 1e6),
        server=row["server"],
        finish_reason=row["finish_reason"],
        closed=_is_closed([one["kind"] for one in row["segments"]]),
        output_hash=output_hash(row["output_ids"]),
        latency_ms=row["latency_ms"],
    )


def output_hash(output_ids: Sequence[int]) -> int:
    """A signed 64-bit hash of the ids, the same in every process; 0 of none."""
    if not output_ids:
        return 0
    content = array("i", output_ids).tobytes()
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little", signed=True)


def _is_closed(kinds: list[str]) -> bool:
    """Whether the last reasoning ends at a marker or a tool call; where there is none, whether an
    answer follows a marker, which then closed empty thinking."""
    if "reasoning" in kinds:
        last = len(kinds) - 1 - kinds[::-1].index("reasoning")
        return kinds[last + 1 : last + 2] in (["marker"], ["tool_call"])
    pairs = itertools.pairwise(kinds)
    return any(pair in (("marker", "content"), ("marker", "tool_call")) for pair in pairs)
