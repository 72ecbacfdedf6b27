"""Proofs about each response by itself, from one walk over all of them."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from actors.pool import Completed
from actors.protocol import Completion, Finish, sampling_params
from pipelines.generate_worker import row_seed
from pipelines.proof import Breaks, Evidence, NotThere, SampleMark, digest_of, parquet_rows
from pipelines.recipe import Recipe
from pipelines.response_row import RowMaker
from pipelines.row_proofs import set_files, some_rows
from pipelines.schema import response_id
from pipelines.storage import Location
from pipelines.store import RunFolder

RESPONSE_CHECKS = {
    "responses: status": "committed rows are ok, rows kept aside say why they are not",
    "responses: usage": "counts are those of the stored ids",
    "responses: finish": "the end agrees with the last id, or with the cap that was sent",
    "responses: vocabulary": "ids lie within the target's vocabulary",
    "responses: segments": "spans tile output_ids exactly",
    "responses: prompts": "prompt ids, messages and tools are those of prompts/",
    "responses: identity": "each id follows from prompt, turn and sample; rows lie in their set",
    "responses: order": "rows of a set are in the order of their ids",
    "responses: sampling": "what was sent is the recipe's, each row with its own seed",
    "responses: counts": "the manifest counts the rows and tokens that are there",
}


@dataclass
class _SetTally:
    """What a walk over one set has seen, to be compared with what generate counted."""

    statuses: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0  # of ok rows, as is the next
    output_tokens: int = 0
    last_id: dict[bool, str] = field(default_factory=dict)  # of committed rows, of those aside

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row."""
        self.statuses[row["status"]] += 1
        if row["status"] == "ok":
            self.prompt_tokens += len(row["prompt_ids"])
            self.output_tokens += len(row["output_ids"])

    def is_in_order(self, row: Mapping[str, Any], *, is_aside: bool) -> bool:
        """Whether a row comes after the one before it; remembers it."""
        before, self.last_id[is_aside] = self.last_id.get(is_aside), row["sample_id"]
        return before is None or before < row["sample_id"]

    def counts(self) -> dict[str, Any]:
        """The same, as the manifest says it."""
        reasons = {
            kind: {
                status.partition(":")[2]: count
                for status, count in self.statuses.items()
                if status.startswith(f"{kind}:")
            }
            for kind in ("rejected", "failed")
        }
        return {
            "prompts": self.statuses.total(),
            "ok": self.statuses["ok"],
            **reasons,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
        }


def response_rows(evidence: Evidence) -> dict[str, Breaks]:
    """Walk every response once; return what broke, by check. Remembers ok rows as evidence."""
    breaks: dict[str, Breaks] = {name: Breaks() for name in RESPONSE_CHECKS}
    vocab_size = evidence.target_number("vocab_size")
    for name in evidence.train_sets:
        asked, tally = _asked(evidence, name), _SetTally()
        for is_aside, row in _responses(evidence.run, name):
            evidence.rows_walked += 1
            tally.add(row)
            prompt = asked.get(row["prompt_id"])
            faults = [
                *row_faults(row, is_aside=is_aside, vocab_size=vocab_size),
                *_place_faults(row, name),
                *(("responses: sampling", one) for one in _sampling_faults(row, evidence.recipe)),
            ]
            if not tally.is_in_order(row, is_aside=is_aside):
                faults.append(("responses: order", "it comes after a row with a larger id"))
            if prompt is not None and not prompt.fits(row):
                said = "its prompt ids, messages or tools are not those of prompts/"
                faults.append(("responses: prompts", said))
            for check, fault in faults:
                breaks[check].add(row["sample_id"], fault)
            if not is_aside:
                evidence.responses[row["sample_id"]] = SampleMark(
                    digest_of(row["prompt_ids"], row["output_ids"]),
                    len(row["prompt_ids"]),
                    len(row["output_ids"]),
                )
        if evidence.is_done("generate"):
            recorded = evidence.stages["generate"]["counts"]["sets"][name]
            for key, count in tally.counts().items():
                if recorded[key] != count:
                    said = f"the manifest counts {key} {recorded[key]}, the rows say {count}"
                    breaks["responses: counts"].add(name, said)
    return breaks


def judging(evidence: Evidence, maker: RowMaker) -> str:
    """A sample of replies, those kept aside too, made into rows again: same status, same flags."""
    breaks, count = Breaks(), 0
    for name in evidence.train_sets:
        for is_aside, folder in _folders(evidence.run, name):
            for row in some_rows(set_files(folder)):
                # No reply, or one that breaks the contract, which another check names.
                faults = row_faults(row, is_aside=is_aside, vocab_size=None)
                if row["status"].startswith("failed:") or any(True for _ in faults):
                    continue
                count += 1
                again = maker.response_row(
                    {**row, "sample_id": row["prompt_id"]},
                    json.loads(row["params"]),
                    Completed(_reply(row), None, "", 1, 0, 0),
                    finished_at=row["finished_at"],
                    turn=row["turn"],
                    sample=row["sample"],
                )
                for part in ("status", "flags"):
                    if again[part] != row[part]:
                        said = f"{part} is {row[part]!r}, judged again {again[part]!r}"
                        breaks.add(row["sample_id"], said[:200])
    if not count:
        raise NotThere("not there yet: no committed responses")
    breaks.raise_if_any()
    return f"{count:,} replies judged again"


def _reply(row: Mapping[str, Any]) -> Completion:
    """What the server must have said for a stored row."""
    usage, ids, kind = row["usage"], tuple(row["output_ids"]), row["finish_reason"]
    length = len(ids) if kind == "length" else None
    return Completion(
        rid=row["sample_id"],
        output_ids=ids,
        text=row["text"],
        finish=Finish(kind, json.loads(row["finish_matched"]), length),
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=usage["cached_tokens"],
        weight_version=row["weight_version"],
        speculation=None,
    )


def _place_faults(row: Mapping[str, Any], name: str) -> Iterator[tuple[str, str]]:
    """What of a row does not follow from its prompt, turn and sample, or from its folder."""
    if min(row["turn"], row["sample"]) < 1:
        yield "responses: identity", f"it is turn {row['turn']} of sample {row['sample']}"
    elif row["sample_id"] != response_id(row["prompt_id"], row["turn"], row["sample"]):
        said = f"turn {row['turn']}, sample {row['sample']} of {row['prompt_id']}"
        yield "responses: identity", f"its id is not that of {said}"
    if row["dataset"] != name:
        yield "responses: identity", f"dataset {row['dataset']} in folder {name}"


def _sampling_faults(row: Mapping[str, Any], recipe: Recipe) -> Iterator[str]:
    try:
        sent = json.loads(row["params"])
        cap = sent["max_new_tokens"]
    except (ValueError, KeyError, TypeError) as error:
        yield f"params is not what was promised: {error!r}"
        return
    sampling = recipe.generate.sampling
    room = recipe.prompts.context_tokens - len(row["prompt_ids"])
    most = min(sampling.max_new_tokens, max(0, room))
    if not isinstance(cap, int) or not 0 <= cap <= most:
        yield f"max_new_tokens {cap} was sent, at most {most} fit"
        return
    wanted = sampling_params(
        sampling,
        max_new_tokens=cap,
        seed=row_seed(sampling.seed, row["sample_id"]),
        stop_token_ids=recipe.target.profile.stop_token_ids,
    )
    for key in sorted(wanted.keys() | sent.keys()):
        if key not in sent:
            yield f"{key} was not sent"
        elif key not in wanted or sent[key] != wanted[key]:
            said = wanted.get(key, "nothing of it")
            yield f"{key} {sent[key]} was sent, the recipe says {said}"


def row_faults(
    row: Mapping[str, Any], *, is_aside: bool, vocab_size: int | None
) -> Iterator[tuple[str, str]]:
    """What one response row breaks, as (check, what)."""
    status: str = row["status"]
    if is_aside == (status == "ok") or not _is_status(status):
        where = "a row kept aside" if is_aside else "a committed row"
        yield "responses: status", f"{where} has status {status!r}"
    yield from (("responses: usage", one) for one in _usage_faults(row))
    if status.startswith("failed:"):  # it has no reply to judge
        return
    yield from (("responses: finish", one) for one in _finish_faults(row))
    yield from (("responses: segments", one) for one in _segment_faults(row))
    if vocab_size is not None:
        for column in ("prompt_ids", "output_ids"):
            ids = row[column]
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                bad = max(ids) if min(ids) >= 0 else min(ids)
                yield "responses: vocabulary", f"{column} holds {bad}, vocabulary {vocab_size:,}"


def _usage_faults(row: Mapping[str, Any]) -> Iterator[str]:
    usage = row["usage"]
    if row["status"].startswith("failed:"):
        if any(usage.values()) or row["output_ids"]:
            yield "a failed row counts tokens, yet it has no reply"
        return
    reasoning = sum(
        one["end"] - one["start"] for one in row["segments"] if one["kind"] == "reasoning"
    )
    expected = {
        "completion_tokens": len(row["output_ids"]),
        "prompt_tokens": len(row["prompt_ids"]),
        "reasoning_tokens": reasoning,
        "total_tokens": len(row["prompt_ids"]) + len(row["output_ids"]),
    }
    for name, count in expected.items():
        if usage[name] != count:
            yield f"usage.{name} is {usage[name]}, the ids say {count}"
    if not 0 <= usage["cached_tokens"] <= usage["prompt_tokens"]:
        yield f"usage.cached_tokens is {usage['cached_tokens']} of {usage['prompt_tokens']}"


def _finish_faults(row: Mapping[str, Any]) -> Iterator[str]:
    ids, kind = row["output_ids"], row["finish_reason"]
    try:
        matched = json.loads(row["finish_matched"])
        cap = json.loads(row["params"])["max_new_tokens"]
    except (ValueError, KeyError, TypeError) as error:
        yield f"finish_matched or params is not what was promised: {error!r}"
        return
    match kind:
        case "length":
            if len(ids) != cap:
                yield f"finished by length with {len(ids)} tokens, the cap was {cap}"
        case "stop":
            if isinstance(matched, int) and (not ids or ids[-1] != matched):
                yield f"stopped at {matched}, the last id is {ids[-1] if ids else 'none'}"
            elif matched is None or matched == "NaN happened":
                yield f"stopped with matched {matched!r}"
            if len(ids) > cap:
                yield f"{len(ids)} tokens, the cap was {cap}"
        case _:
            yield f"finish_reason is {kind!r}"


def _segment_faults(row: Mapping[str, Any]) -> Iterator[str]:
    at, total = 0, len(row["output_ids"])
    for one in row["segments"]:
        if one["start"] != at or one["end"] <= one["start"]:
            yield f"a segment covers {one['start']} to {one['end']}, expected it to start at {at}"
            return
        at = one["end"]
    if at != total:
        yield f"segments end at {at} of {total} ids"


def _is_status(status: str) -> bool:
    kind, colon, name = status.partition(":")
    return status == "ok" or (kind in ("rejected", "failed") and bool(colon and name))


@dataclass(frozen=True)
class _Prompt:
    """What a response's prompt must be, without its ids."""

    about: bytes  # tools and domain, which all turns share
    first: bytes  # of turn 1
    messages: bytes | None  # None where each turn has its own
    history: tuple[int, bytes] | None  # length and digest of what a later turn starts with
    continuations: tuple[tuple[int, bytes], ...]  # and of what each later turn ends with

    @staticmethod
    def of(row: Mapping[str, Any]) -> "_Prompt":
        """Of a row of `PROMPT_SCHEMA`."""
        ends = tuple((len(ids), digest_of(ids)) for ids in row["continuations"])
        start = (len(row["history"][0]), digest_of(row["history"][0])) if ends else None
        messages = None if ends else _text_digest(row["messages"])
        return _Prompt(_about(row), digest_of(row["prompt_ids"]), messages, start, ends)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a response row was asked with this. What lies between the start and the end of a
        later turn are the target's own answers."""
        ids, turn = row["prompt_ids"], row["turn"]
        if _about(row) != self.about:
            return False
        if self.messages is not None and _text_digest(row["messages"]) != self.messages:
            return False
        # A turn that was not asked keeps the ids of the first.
        if turn == 1 or row["status"] == "failed:earlier_turn":
            return digest_of(ids) == self.first
        if self.history is None or turn > 1 + len(self.continuations):
            return False
        start, end = self.history, self.continuations[turn - 2]
        return (
            start[0] + end[0] <= len(ids)
            and digest_of(ids[: start[0]]) == start[1]
            and digest_of(ids[len(ids) - end[0] :]) == end[1]
        )


def _asked(evidence: Evidence, name: str) -> dict[str, _Prompt]:
    files = set_files(evidence.run.prompts / name)
    columns = ["sample_id", "domain", "tools", "prompt_ids", "messages"]
    columns += ["history", "continuations"]
    return {row["sample_id"]: _Prompt.of(row) for _, row in parquet_rows(files, columns)}


def _about(row: Mapping[str, Any]) -> bytes:
    return _text_digest(json.dumps([row["domain"], row["tools"]]))


def _text_digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _folders(run: RunFolder, name: str) -> tuple[tuple[bool, Location], ...]:
    """Where a set's rows lie, and whether they are kept aside there."""
    return (False, run.responses / name), (True, run.rejected_responses / name)


def _responses(run: RunFolder, name: str) -> Iterator[tuple[bool, dict[str, Any]]]:
    for is_aside, folder in _folders(run, name):
        for _, row in parquet_rows(set_files(folder)):
            yield is_aside, row
