"""One prompt row and what the pool made of it become one response row. Pure but for the clock's
value, which is an argument."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

from actors.pool import Completed, Failed
from actors.protocol import Completion
from pipelines.quality import Accepted, Rejected, judge, last_question
from pipelines.recipe import Gates, TargetProfile
from pipelines.schema import SegmentKind, response_id
from pipelines.split import Decode, Split, Splitter
from pipelines.token_bytes import token_bytes
from pipelines.tool_calls import NO_CALLS, ToolCalls, read_calls

_params_json = json.JSONEncoder(sort_keys=True).encode


@dataclass(frozen=True)
class Reading:
    """What the ids of one reply say."""

    cut: Split
    texts: tuple[str, ...]  # of each segment
    calls: ToolCalls

    def text(self, kind: SegmentKind) -> str:
        """The text of the segments of this kind."""
        pairs = zip(self.cut.segments, self.texts, strict=True)
        return "".join(text for one, text in pairs if one.kind == kind)


class Reader:
    """Reads the replies of one target. The same ids give the same reading, always."""

    def __init__(self, profile: TargetProfile, decode: Decode) -> None:
        self._profile, self._decode = profile, decode
        self._splitter = Splitter(profile, decode)
        self._markers: dict[tuple[int, ...], str] = {}

    def read(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        *,
        stop_id: int | None,
        declared: Sequence[str],
    ) -> Reading:
        """Split, decode and parse a reply; `declared` are the names of the prompt's tools."""
        cut = self._splitter.split(prompt_ids, output_ids, stop_id)
        texts = tuple(self._text(one.kind, output_ids[one.start : one.end]) for one in cut.segments)
        calls = NO_CALLS
        if any(one.kind == "tool_call" for one in cut.segments):
            calls = read_calls(output_ids, cut, self._profile, self._decode, declared)
        return Reading(cut, texts, calls)

    def _text(self, kind: SegmentKind, ids: Sequence[int]) -> str:
        if kind not in ("marker", "stop"):
            return self._decode(ids)
        key = tuple(ids)  # these come again with every row
        if key not in self._markers:
            self._markers[key] = self._decode(ids)
        return self._markers[key]


def decoder_of(tokenizer: Any) -> Decode:
    """How a tokenizer's ids become text here: every special token shown, nothing cleaned up."""
    if not tokenizer.is_fast:
        return lambda ids: str(
            tokenizer.decode(
                list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )
    # Straight to it: the wrapper walks over all ids once more.
    backend = tokenizer.backend_tokenizer

    def whole(ids: Sequence[int]) -> str:
        return str(backend.decode(list(ids), skip_special_tokens=False))

    known = token_bytes(backend)
    if known is None:
        return whole

    def joined(ids: Sequence[int]) -> str:
        try:
            return known.decode(ids)
        except IndexError:  # a target's vocabulary may be padded beyond the tokenizer's
            return whole(ids)

    return joined


def tool_names(tools: str) -> list[str]:
    """The names that a row's `tools` (JSON) declares."""
    return [] if tools == "[]" else [one["function"]["name"] for one in json.loads(tools)]


def stop_id_of(matched: int | str | None) -> int | None:
    """The token that ended a reply; None where none did (out of tokens, or a stop string)."""
    return matched if isinstance(matched, int) else None


def derived_columns(reader: Reader, row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a stored row that follow from its ids, derived once more."""
    stop_id = stop_id_of(json.loads(row["finish_matched"]))
    reading = reader.read(
        row["prompt_ids"],
        row["output_ids"],
        # A stored end that is another id than the last is a fault of its own; it cuts nothing off.
        stop_id=stop_id if list(row["output_ids"][-1:]) == [stop_id] else None,
        declared=tool_names(row["tools"]),
    )
    return _columns(reading)


def _columns(reading: Reading) -> dict[str, Any]:
    return {
        "segments": [vars(one) for one in reading.cut.segments],
        "reasoning": reading.text("reasoning"),
        "content": reading.text("content"),
        "tool_calls": encodable(reading.calls.as_json()),
    }


@dataclass(frozen=True)
class RowMaker:
    """What all rows of a run share."""

    profile: TargetProfile
    gates: Gates
    decode: Decode

    @cached_property
    def _reader(self) -> Reader:
        return Reader(self.profile, self.decode)

    @cached_property
    def _reserved(self) -> frozenset[int]:
        return self.profile.reserved

    def response_row(
        self,
        prompt: Mapping[str, Any],
        params: Mapping[str, Any],
        outcome: Completed[Any] | Failed,
        *,
        finished_at: datetime,
        turn: int = 1,
        sample: int = 1,
    ) -> dict[str, Any]:
        """A row of `RESPONSE_SCHEMA`.

        `prompt` is the prompt's row; for a later turn, with the `messages` and `prompt_ids` that
        this turn was asked with. Output ids come as an array of int32, as they are stored.
        """
        shared = {
            "sample_id": response_id(prompt["sample_id"], turn, sample),
            **{name: prompt[name] for name in ("dataset", "domain")},
            "prompt_id": prompt["sample_id"],
            "turn": turn,
            "sample": sample,
            **{name: encodable(prompt[name]) for name in ("messages", "tools")},
            "prompt_ids": prompt["prompt_ids"],
            "params": _params_json(dict(params)),
            "server": outcome.server,
            "attempt": outcome.attempt,
            "queued_ms": outcome.queued_ms,
            "latency_ms": outcome.latency_ms,
            "finished_at": finished_at,
        }
        match outcome:
            case Failed():
                return {**shared, **_no_reply(outcome)}
            case Completed(completion=completion):
                return {**shared, **self._reply(prompt, completion)}

    def _reply(self, prompt: Mapping[str, Any], reply: Completion) -> dict[str, Any]:
        declared = tool_names(prompt["tools"])
        output_ids = array("i", reply.output_ids)
        reading = self._reader.read(
            prompt["prompt_ids"],
            reply.output_ids,
            stop_id=stop_id_of(reply.finish.matched),
            declared=declared,
        )
        columns = _columns(reading)
        verdict = judge(
            output_ids,
            reading.cut,
            reply.finish,
            content=columns["content"],
            gates=self.gates,
            reserved=self._reserved,
            calls=reading.calls,
            declared=declared,
            question=last_question(prompt["messages"]) if self.gates.languages else "",
        )
        match verdict:
            case Accepted():
                status, detail = "ok", ""
            case Rejected(gate=gate, detail=detail):
                status = f"rejected:{gate}"
        text = encodable(reply.text)
        flags = list(verdict.flags)
        # The parts nearly always join to the whole, which then need not be decoded once more.
        if "".join(reading.texts) != text and self.decode(reply.output_ids) != text:
            flags.append("text_differs")
        return {
            **columns,
            "finish_reason": reply.finish.kind,
            "finish_matched": json.dumps(reply.finish.matched),
            "usage": {
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": reply.completion_tokens,
                "reasoning_tokens": reading.cut.tokens("reasoning"),
                "cached_tokens": reply.cached_tokens,
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
            "output_ids": output_ids,
            "text": text,
            "status": status,
            "detail": encodable(detail),
            "flags": json.dumps(flags) if flags else "[]",
            "weight_version": encodable(reply.weight_version),
        }


def _no_reply(outcome: Failed) -> dict[str, Any]:
    return {
        "reasoning": "",
        "content": "",
        "tool_calls": "[]",
        "finish_reason": "",
        "finish_matched": "null",
        # A flag says what these zeros are: the schema allows no null, and there was no reply.
        "usage": dict.fromkeys(
            (
                "prompt_tokens",
                "completion_tokens",
                "reasoning_tokens",
                "cached_tokens",
                "total_tokens",
            ),
            0,
        ),
        "output_ids": array("i"),
        "segments": [],
        "text": "",
        "status": f"failed:{outcome.fault}",
        "detail": encodable(outcome.detail),
        "flags": '["no_reply"]',
        "weight_version": "",
    }


def encodable(text: str) -> str:
    """The text with lone surrogates, which JSON may hold and UTF-8 may not, replaced by "?"."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
