"""One prompt row and what the pool made of it become one response row. Pure but for the clock's
value, which is an argument."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from actors.pool import Completed, Failed
from actors.protocol import Completion
from pipelines.quality import Accepted, Rejected, judge
from pipelines.recipe import Gates, TargetProfile
from pipelines.split import Markers, Split, is_open_at_start, split

Decode = Callable[[Sequence[int]], str]  # ids to text, special tokens shown


@dataclass(frozen=True)
class RowMaker:
    """What all rows of a run share."""

    profile: TargetProfile
    gates: Gates
    decode: Decode

    def response_row(
        self,
        prompt: Mapping[str, Any],
        params: Mapping[str, Any],
        outcome: Completed[Any] | Failed,
        *,
        finished_at: datetime,
    ) -> dict[str, Any]:
        """A row of `RESPONSE_SCHEMA`."""
        shared = {
            **{name: prompt[name] for name in ("sample_id", "dataset", "domain")},
            "prompt_id": prompt["sample_id"],
            "turn": 1,
            "sample": 1,
            **{name: encodable(prompt[name]) for name in ("messages", "tools")},
            "prompt_ids": prompt["prompt_ids"],
            "params": json.dumps(dict(params), sort_keys=True),
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
                return {**shared, **self._reply(prompt["prompt_ids"], completion)}

    def _reply(self, prompt_ids: Sequence[int], reply: Completion) -> dict[str, Any]:
        cut = self._split(prompt_ids, reply)
        verdict = judge(
            reply.output_ids,
            cut,
            reply.finish,
            gates=self.gates,
            reserved_ids=frozenset(self.profile.reserved_ids),
        )
        match verdict:
            case Accepted():
                status, detail = "ok", ""
            case Rejected(gate=gate, detail=detail):
                status = f"rejected:{gate}"
        text = encodable(reply.text)
        flags = list(verdict.flags)
        if self.decode(reply.output_ids) != text:
            flags.append("text_differs")
        return {
            "reasoning": self.decode(cut.ids("reasoning", reply.output_ids)),
            "content": self.decode(cut.ids("content", reply.output_ids)),
            "tool_calls": "[]",
            "finish_reason": reply.finish.kind,
            "finish_matched": json.dumps(reply.finish.matched),
            "usage": {
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": reply.completion_tokens,
                "reasoning_tokens": cut.tokens("reasoning"),
                "cached_tokens": reply.cached_tokens,
                "total_tokens": reply.prompt_tokens + reply.completion_tokens,
            },
            "output_ids": list(reply.output_ids),
            "segments": [vars(one) for one in cut.segments],
            "text": text,
            "status": status,
            "detail": detail,
            "flags": json.dumps(flags),
            "weight_version": encodable(reply.weight_version),
        }

    def _split(self, prompt_ids: Sequence[int], reply: Completion) -> Split:
        markers = self._markers()
        matched = reply.finish.matched
        return split(
            reply.output_ids,
            stop_id=matched if isinstance(matched, int) else None,
            markers=markers,
            open_at_start=is_open_at_start(prompt_ids, markers),
            is_whitespace=lambda token: not self.decode([token]).strip(),
        )

    def _markers(self) -> Markers | None:
        opening, closing = self.profile.think_open_id, self.profile.think_close_id
        if opening is None or closing is None:  # the profile has both or neither
            return None
        return Markers(opening, closing)


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
        "output_ids": [],
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
