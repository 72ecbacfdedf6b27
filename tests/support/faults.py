"""Every way in which one request to a server can go wrong, and which request meets which.

Decided by a hash of seed, prompt and how often the prompt was asked: the same in every process.
"""

import enum
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.fake_server import (
    Answer,
    Cut,
    Hang,
    Huge,
    Raw,
    Reply,
    Reset,
    Slow,
    aborted_while_waiting,
)
from tests.support.scripted_answers import digest_of

HUGE_MEBIBYTES = 80
_PAGE = b"<html><body><h1>Bad Gateway</h1></body></html>"


class Fault(enum.Enum):
    """What is wrong with one answer."""

    RESET = "reset"  # before any byte
    CUT_AFTER_HEADERS = "cut_after_headers"
    CUT_BODY = "cut_body"
    BURST_503 = "burst_503"  # this request and some that come after it
    BUSY_429 = "busy_429"
    PAGE_500 = "page_500"
    PAGE_502 = "page_502"
    PAGE_504 = "page_504"
    PAGE_200 = "page_200"
    REDIRECT = "redirect"
    EMPTY_BODY = "empty_body"
    SLOW = "slow"
    HANG = "hang"
    HALF_JSON = "half_json"
    WRONG_TYPES = "wrong_types"
    HUGE_BODY = "huge_body"
    NAN = "nan"
    ABORT_RUNNING = "abort_running"
    ABORT_WAITING = "abort_waiting"
    ERROR_IN_200 = "error_in_200"
    FOREIGN_RID = "foreign_rid"
    REPLY_OF_ANOTHER = "reply_of_another"
    CLIPPED = "clipped"
    COMPLETION_COUNT = "completion_count"
    PROMPT_COUNT = "prompt_count"
    OUT_OF_VOCABULARY = "out_of_vocabulary"
    NO_COMPLETION_TOKENS = "no_completion_tokens"
    WEIGHT_VERSION = "weight_version"


@dataclass(frozen=True)
class FaultPlan:
    """How often which faults come. One prompt meets at most `most_per_prompt` on one server."""

    seed: int
    share: float
    kinds: tuple[Fault, ...] = tuple(Fault)
    most_per_prompt: int = 2

    def fault_of(self, prompt_ids: Sequence[int], nth: int) -> Fault | None:
        """What the nth request (0 first) for this prompt meets."""
        if nth >= self.most_per_prompt or not self.kinds:
            return None
        dice = random.Random(digest_of(self.seed, *prompt_ids, nth))
        return dice.choice(self.kinds) if dice.random() < self.share else None


def spoiled(fault: Fault, request: Mapping[str, Any], good: Mapping[str, Any]) -> Answer:  # noqa: C901
    """The answer to `request` with this fault in it, where `good` was the right reply."""
    body = json.dumps(good).encode()
    match fault:
        case Fault.RESET:
            return Reset()
        case Fault.CUT_AFTER_HEADERS:
            return Cut(b"")
        case Fault.CUT_BODY:
            return Cut(body[: len(body) // 2])
        case Fault.BURST_503:
            return Reply({"object": "error", "message": "The request queue is full."}, 503)
        case Fault.BUSY_429:
            return Reply({"error": "too many requests"}, 429, {"Retry-After": "1"})
        case Fault.PAGE_500 | Fault.PAGE_502 | Fault.PAGE_504:
            return Raw(_PAGE, int(fault.value.removeprefix("page_")))
        case Fault.PAGE_200:
            return Raw(_PAGE)
        case Fault.REDIRECT:
            return Raw(b"", 302, headers={"Location": "http://127.0.0.1:9/generate"})
        case Fault.EMPTY_BODY:
            return Raw(b"", content_type="application/json")
        case Fault.SLOW:
            return Slow(1.0, Reply(dict(good)))
        case Fault.HANG:
            return Hang()
        case Fault.HALF_JSON:
            return Raw(body[: len(body) // 2], content_type="application/json")
        case Fault.HUGE_BODY:
            return Huge(HUGE_MEBIBYTES)
        case Fault.ABORT_WAITING:
            return Reply(aborted_while_waiting(dict(request)))
        case Fault.ERROR_IN_200:
            return Reply({"error": {"message": "something happened"}})
        case _:
            return Reply(_bad_reply(fault, good))


def _bad_reply(fault: Fault, good: Mapping[str, Any]) -> dict[str, Any]:
    """A whole reply with one wrong fact."""
    ids, meta = list(good["output_ids"]), dict(good["meta_info"])
    reply = {**good, "meta_info": meta}
    match fault:
        case Fault.WRONG_TYPES:
            reply["output_ids"] = [float(token) for token in ids]
            meta["completion_tokens"] = str(len(ids))
        case Fault.NAN:
            meta["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
        case Fault.ABORT_RUNNING:
            kept = ids[: len(ids) // 2]
            reply["output_ids"], meta["completion_tokens"] = kept, len(kept)
            meta["finish_reason"] = {"type": "abort", "message": "Abort for a weight update"}
        case Fault.FOREIGN_RID:
            meta["id"] = "0" * 32
        case Fault.REPLY_OF_ANOTHER:
            reply["prompt_token_ids"] = [*good["prompt_token_ids"][:-1], 0]
        case Fault.CLIPPED:
            kept = ids[: max(1, len(ids) // 2)]
            reply["output_ids"], meta["completion_tokens"] = kept, len(kept)
            meta["finish_reason"] = {"type": "length", "length": len(kept)}
        case Fault.COMPLETION_COUNT:
            meta["completion_tokens"] = len(ids) + 1
        case Fault.PROMPT_COUNT:
            meta["prompt_tokens"] += 1
        case Fault.OUT_OF_VOCABULARY:
            reply["output_ids"] = [*ids[:-1], 2**31]
        case Fault.NO_COMPLETION_TOKENS:
            del meta["completion_tokens"]
        case Fault.WEIGHT_VERSION:
            meta["weight_version"] = "another"
        case _:
            raise AssertionError(fault)
    return reply
