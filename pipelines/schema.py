"""Prompt and response rows: pinned, versioned Arrow schemas. The contract between the stages.

Nested values of free shape are JSON strings, so that no file infers a type of its own.
"""

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

PROMPT_SCHEMA_VERSION = "3"
RESPONSE_SCHEMA_VERSION = "2"

Domain = Literal["chat", "math", "code", "tools", "multilingual", "other"]
SegmentKind = Literal["reasoning", "marker", "content", "tool_call", "stop"]

# Parquet calls the values of a list "element"; another name would come back changed.
_IDS = pa.list_(pa.field("element", pa.int32(), nullable=False))


def _field(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


PROMPT_SCHEMA = pa.schema(
    [
        _field("sample_id", pa.string()),  # <set>-<12 hex of the content>, unique in a run
        _field("dataset", pa.string()),
        _field("domain", pa.string()),
        _field("messages", pa.string()),  # JSON list of {role, content, ...}
        _field("tools", pa.string()),  # JSON list; "[]" where there are none
        _field("tools_given", pa.string()),  # JSON: as the set declares them; "null" where none
        _field("repairs", pa.string()),  # JSON list: the rules that mended the conversation
        _field("format", pa.string()),  # how the source writes its rows
        _field("prompt_ids", _IDS),  # the template rendered and tokenised once, up to turn 1
        # For further user turns that are to be answered, one list each, empty lists where there are
        # none. Turn k + 1 is asked with history[0] + answer 1 + history[1] + ... + answer k +
        # continuations[k - 1], where an answer is without its stop id, and without its reasoning if
        # the target's template drops that from history.
        _field("history", pa.list_(pa.field("element", _IDS, nullable=False))),
        _field("continuations", pa.list_(pa.field("element", _IDS, nullable=False))),
        _field("source", pa.string()),
        _field("license", pa.string()),
    ],
    metadata={"eyas.schema": "prompt", "eyas.schema_version": PROMPT_SCHEMA_VERSION},
)

REJECTED_PROMPT_SCHEMA = pa.schema(
    [
        _field("file", pa.string()),
        _field("line", pa.int64()),  # 1-based line (JSONL) or row (Parquet)
        _field("dataset", pa.string()),
        _field("status", pa.string()),  # rejected:<reason>
        _field("detail", pa.string()),
    ],
    metadata={"eyas.schema": "rejected_prompt", "eyas.schema_version": PROMPT_SCHEMA_VERSION},
)

_USAGE = pa.struct(
    [
        _field("prompt_tokens", pa.int32()),
        _field("completion_tokens", pa.int32()),
        _field("reasoning_tokens", pa.int32()),
        _field("cached_tokens", pa.int32()),
        _field("total_tokens", pa.int32()),
    ]
)
_SEGMENT = pa.struct(
    [_field("kind", pa.string()), _field("start", pa.int32()), _field("end", pa.int32())]
)

RESPONSE_SCHEMA = pa.schema(
    [
        _field("sample_id", pa.string()),  # `response_id` of the next three
        _field("messages", pa.string()),  # JSON: the messages before this answer
        _field("reasoning", pa.string()),  # derived from output_ids, as are content and tool_calls
        _field("content", pa.string()),
        _field("finish_reason", pa.string()),  # stop | length; "" on a failed row
        _field("usage", _USAGE),  # all zero on a failed row, which has no reply
        _field("prompt_id", pa.string()),  # the prompt's own sample id
        _field("turn", pa.int32()),  # of the conversation, 1 is the first answer
        _field("sample", pa.int32()),  # of samples_per_prompt, 1 is the first
        _field("dataset", pa.string()),
        _field("domain", pa.string()),
        _field("tools", pa.string()),
        _field("tool_calls", pa.string()),  # JSON list
        _field("prompt_ids", _IDS),
        _field("output_ids", _IDS),  # as the server gave them, stop token included
        _field("segments", pa.list_(pa.field("element", _SEGMENT, nullable=False))),
        _field("finish_matched", pa.string()),  # JSON: a stop id, a stop string, or null
        _field("text", pa.string()),  # the server's own decoding, a review copy
        _field("status", pa.string()),  # ok | rejected:<gate> | failed:<fault>
        _field("detail", pa.string()),  # what the gate or fault saw; "" when ok
        _field("flags", pa.string()),  # JSON list of names
        _field("params", pa.string()),  # JSON: every sampling field that was sent
        _field("server", pa.string()),
        _field("weight_version", pa.string()),
        _field("attempt", pa.int32()),  # 1 is the first
        _field("queued_ms", pa.int64()),
        _field("latency_ms", pa.int64()),
        _field("finished_at", pa.timestamp("us", tz="UTC")),
    ],
    metadata={"eyas.schema": "response", "eyas.schema_version": RESPONSE_SCHEMA_VERSION},
)


@dataclass(frozen=True)
class Segment:
    """A span `[start, end)` of a response's output ids."""

    kind: SegmentKind
    start: int
    end: int


def response_id(prompt_id: str, turn: int, sample: int) -> str:
    """The sample id of one response: the prompt's own for the first turn of the first sample."""
    assert turn >= 1
    assert sample >= 1
    return prompt_id if turn == sample == 1 else f"{prompt_id}.t{turn}.s{sample}"


def response_loss_mask(prompt_tokens: int, output_tokens: int) -> list[bool]:
    """Which tokens of prompt + response may teach: every token the target itself produced.

    The spans are recorded lengths; they are never found again by searching text.
    """
    return [False] * prompt_tokens + [True] * output_tokens
