"""Proofs about rows: prompts and responses, read from their files and nothing else."""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.conversation import expected_ids
from pipelines.proof import Breaks, Broken, Evidence, NotThere, SampleMark, digest_of, parquet_rows
from pipelines.schema import PROMPT_SCHEMA, REJECTED_PROMPT_SCHEMA, RESPONSE_SCHEMA
from pipelines.storage import Location, contents, listed, readable
from pipelines.store import RunFolder

_SAMPLES = 48  # rows that are rendered and decoded again, spread over a set

RESPONSE_CHECKS = {
    "responses: status": "committed rows are ok, rows kept aside say why they are not",
    "responses: usage": "counts are those of the stored ids",
    "responses: finish": "the end agrees with the last id, or with the cap that was sent",
    "responses: vocabulary": "ids lie within the target's vocabulary",
    "responses: segments": "spans tile output_ids exactly",
    "responses: prompts": "prompt ids and messages are those of prompts/",
}


def schemas(evidence: Evidence) -> str:
    """Every file of rows has exactly the pinned schema, nullability included."""
    run = evidence.run
    expected = [
        (_files(run.prompts, "_rejected"), PROMPT_SCHEMA),
        (listed(run.prompts / "_rejected", "*.parquet"), REJECTED_PROMPT_SCHEMA),
        (_files(run.responses, "_"), RESPONSE_SCHEMA),
        (listed(run.rejected_responses, "*/*.parquet"), RESPONSE_SCHEMA),
    ]
    files = 0
    for paths, schema in expected:
        for path in paths:
            files += 1
            _compare_schema(run, path, schema)
    if not files:
        raise NotThere("not there yet: no prompts, no responses")
    return f"{files:,} files"


def prompt_ids_are_unique(evidence: Evidence) -> str:
    """No sample id comes twice in a run, and each row lies in its own set's folder."""
    breaks, seen = Breaks(), set()
    files = _files(evidence.run.prompts, "_rejected")
    if not files:
        evidence.refuse_nothing("prepare", "prompts")
    for path, row in parquet_rows(files, ["sample_id", "dataset"]):
        if row["sample_id"] in seen:
            breaks.add(f"{path.parent.name}/{path.name}", f"{row['sample_id']} comes twice")
        if row["dataset"] != path.parent.name:
            breaks.add(row["sample_id"], f"dataset {row['dataset']} in folder {path.parent.name}")
        seen.add(row["sample_id"])
    breaks.raise_if_any()
    return f"{len(seen):,} prompts"


def prompts_conserved(evidence: Evidence) -> str:
    """Source rows = prompts + rejected, for each set, as counted when they were prepared."""
    evidence.need("prepare")
    run, breaks, says = evidence.run, Breaks(), []
    recorded = evidence.stages["prepare"]["counts"]["sets"]
    for name in (*evidence.train_sets, *evidence.evaluation_sets):
        prompts = _count_rows(_set_files(run.prompts / name))
        aside = run.prompts / "_rejected" / f"{name}.parquet"
        rejected = _count_rows([aside] if aside.exists() else [])
        if name not in recorded:
            breaks.add(name, "the manifest does not count this set")
        elif prompts + rejected != recorded[name]["rows"]:
            rows = recorded[name]["rows"]
            breaks.add(name, f"{rows} source rows, {prompts} prompts and {rejected} rejected")
        says.append(f"{name} {prompts + rejected:,} = {prompts:,} + {rejected:,} rejected")
    breaks.raise_if_any()
    return "; ".join(says)


def conservation(evidence: Evidence) -> str:
    """Prompts = ok + rejected + failed (+ not yet done); nothing twice, nothing from nowhere."""
    run, breaks, says = evidence.run, Breaks(), []
    if not run.responses.exists():
        evidence.refuse_nothing("generate", "responses")
    for name in evidence.train_sets:
        wanted = _wanted(evidence, name, breaks)
        ok = set(_ids(_set_files(run.responses / name), breaks, "responses"))
        aside = set(_ids(_set_files(run.rejected_responses / name), breaks, "_rejected"))
        durable = set(_segment_ids(run.segments / name))
        waiting = durable - ok - aside
        # A commit that was killed half way may hold a row twice, and its segments still.
        for sample_id in sorted((ok & aside) - durable):
            breaks.add(name, f"{sample_id} is both committed and kept aside")
        for sample_id in sorted((ok | aside | waiting) - wanted):
            breaks.add(name, f"{sample_id} answers no prompt of this set")
        left = wanted - ok - aside - waiting
        if evidence.is_done("generate"):
            for sample_id in sorted(left | (waiting & wanted)):
                breaks.add(name, f"{sample_id} was asked and is in no committed file")
        rest = f", {len(left):,} not yet done" if left else ""
        done = f"{len(ok):,} ok + {len(aside):,} aside + {len(waiting):,} in segments"
        says.append(f"{name} {len(wanted):,} = {done}{rest}")
    breaks.raise_if_any()
    return "; ".join(says)


def _wanted(evidence: Evidence, name: str, breaks: Breaks) -> set[str]:
    """The sample ids of all responses that a set's prompts want."""
    files = _set_files(evidence.run.prompts / name)
    list(_ids(files, breaks, "prompts"))
    samples = evidence.recipe.generate.samples_per_prompt
    rows = parquet_rows(files, ["sample_id", "continuations"])
    return {one for _, row in rows for one in expected_ids(row, samples)}


def evaluation_is_disjoint(evidence: Evidence) -> str:
    """No held-out prompt says, but for case and spacing, what a training prompt says."""
    run, columns = evidence.run, ["sample_id", "messages"]
    trained: dict[bytes, str] = {}
    for name in evidence.train_sets:
        for _, row in parquet_rows(_set_files(run.prompts / name), columns):
            trained[_said(row["messages"])] = row["sample_id"]
    breaks, count = Breaks(), 0
    for name in evidence.evaluation_sets:
        for _, row in parquet_rows(_set_files(run.prompts / name), columns):
            count += 1
            same = trained.get(_said(row["messages"]))
            if same is not None:
                breaks.add(row["sample_id"], f"held out, yet trained on as {same}")
    if not trained or not count:
        evidence.refuse_nothing("prepare", "prompts")
    breaks.raise_if_any()
    return f"{count:,} held-out prompts against {len(trained):,}"


def rendering(evidence: Evidence, render: Callable[[Mapping[str, Any]], list[int]]) -> str:
    """The template, applied once more to a sample of prompts, gives the stored ids."""
    breaks, count = Breaks(), 0
    for name in (*evidence.train_sets, *evidence.evaluation_sets):
        for row in _some(_set_files(evidence.run.prompts / name)):
            count += 1
            ids = render(row)
            if ids != row["prompt_ids"]:
                at = _first_difference(ids, row["prompt_ids"])
                breaks.add(row["sample_id"], f"rendered again, ids differ from token {at} on")
    if not count:
        evidence.refuse_nothing("prepare", "prompts")
    breaks.raise_if_any()
    return f"{count:,} prompts rendered again"


def decoding(evidence: Evidence, derive: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> str:
    """What is derived from ids is what the stored ids say, for a sample of rows."""
    breaks, count = Breaks(), 0
    for name in evidence.train_sets:
        for row in _some(_set_files(evidence.run.responses / name)):
            count += 1
            for part, derived in derive(row).items():
                if derived != row[part]:
                    breaks.add(row["sample_id"], f"{part} is not what its ids say")
    if not count:
        raise NotThere("not there yet: no committed responses")
    breaks.raise_if_any()
    return f"{count:,} responses read again"


def response_rows(evidence: Evidence) -> dict[str, Breaks]:
    """Walk every response once; return what broke, by check. Remembers ok rows as evidence."""
    breaks: dict[str, Breaks] = {name: Breaks() for name in RESPONSE_CHECKS}
    vocab_size = _vocab_size(evidence)
    for name in evidence.train_sets:
        asked = _asked(evidence, name)
        for is_aside, row in _responses(evidence.run, name):
            evidence.rows_walked += 1
            for check, fault in row_faults(row, is_aside=is_aside, vocab_size=vocab_size):
                breaks[check].add(row["sample_id"], fault)
            prompt = asked.get(row["prompt_id"])
            if prompt is not None and not prompt.fits(row):
                breaks["responses: prompts"].add(
                    row["sample_id"], "its prompt ids or messages are not those of prompts/"
                )
            if not is_aside:
                evidence.responses[row["sample_id"]] = SampleMark(
                    digest_of(row["prompt_ids"], row["output_ids"]),
                    len(row["prompt_ids"]),
                    len(row["output_ids"]),
                )
    return breaks


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


def _compare_schema(run: RunFolder, path: Location, expected: pa.Schema) -> None:
    name = run.name_of(path)
    try:
        seen = pq.read_schema(readable(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise Broken(f"{name} cannot be read: {error}") from error
    if seen.equals(expected, check_metadata=True):
        return
    for field in expected:
        at = seen.get_field_index(field.name)
        if at < 0:
            raise Broken(f"{name} has no column {field.name}")
        if not seen.field(at).equals(field):
            raise Broken(f"{name}: {_say(seen.field(at))}, expected {_say(field)}")
    extra = [one for one in seen.names if one not in expected.names]
    if extra:
        raise Broken(f"{name} has an unknown column {extra[0]}")
    raise Broken(f"{name}: the order of columns or the schema version differs")


def _say(field: pa.Field) -> str:
    return f"{field.name} {field.type} {'null' if field.nullable else 'not null'}"


def _vocab_size(evidence: Evidence) -> int | None:
    try:
        return int(evidence.target_config["vocab_size"])
    except NotThere:
        return None


@dataclass(frozen=True)
class _Prompt:
    """What a response's prompt must be, without its ids."""

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
        return _Prompt(digest_of(row["prompt_ids"]), messages, start, ends)

    def fits(self, row: Mapping[str, Any]) -> bool:
        """Whether a response row was asked with this. What lies between the start and the end of a
        later turn are the target's own answers."""
        ids, turn = row["prompt_ids"], row["turn"]
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
    files = _set_files(evidence.run.prompts / name)
    columns = ["sample_id", "prompt_ids", "messages", "history", "continuations"]
    return {row["sample_id"]: _Prompt.of(row) for _, row in parquet_rows(files, columns)}


def _said(messages: str) -> bytes:
    words = " ".join(f"{one['role']} {one['content']}" for one in json.loads(messages))
    return blake2b(" ".join(words.casefold().split()).encode(), digest_size=16).digest()


def _text_digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()


def _responses(run: RunFolder, name: str) -> Iterator[tuple[bool, dict[str, Any]]]:
    for is_aside, folder in ((False, run.responses / name), (True, run.rejected_responses / name)):
        for _, row in parquet_rows(_set_files(folder)):
            yield is_aside, row


def _ids(files: list[Location], breaks: Breaks, what: str) -> Iterator[str]:
    seen: set[str] = set()
    for path, row in parquet_rows(files, ["sample_id"]):
        if row["sample_id"] in seen:
            breaks.add(f"{what}/{path.parent.name}", f"{row['sample_id']} comes twice")
        seen.add(row["sample_id"])
        yield row["sample_id"]


def _segment_ids(folder: Location) -> Iterator[str]:
    for path in listed(folder, "*.arrow"):
        try:
            content = contents(path)
            if sha256(content).hexdigest()[:16] != path.stem.rpartition("-")[2]:
                raise Broken(f"segment {path.name} does not have the checksum in its name")
            file = pa.ipc.open_file(content)
            for at in range(file.num_record_batches):
                yield from file.get_batch(at).column("sample_id").to_pylist()
        except (pa.ArrowInvalid, OSError, KeyError) as error:
            raise Broken(f"segment {path.name} cannot be read: {error}") from error


def _some(files: list[Location]) -> Iterable[dict[str, Any]]:
    """A few whole rows of a set, the same ones each time: first, last, and random ones."""
    counts = {path: _count_rows([path]) for path in files}
    total = sum(counts.values())
    wanted = set(random.Random(total).sample(range(total), min(total, _SAMPLES)))
    wanted |= {0, total - 1} if total else set()
    places: dict[Location, set[int]] = defaultdict(set)
    start = 0
    for path, count in counts.items():
        places[path] |= {at - start for at in wanted if start <= at < start + count}
        start += count
    for path, chosen in places.items():
        if chosen:
            for at, (_, row) in enumerate(parquet_rows([path])):
                if at in chosen:
                    yield row


def _count_rows(files: Iterable[Location]) -> int:
    total = 0
    for path in files:
        try:
            total += pq.read_metadata(readable(path)).num_rows
        except (pa.ArrowInvalid, OSError) as error:
            raise Broken(f"{path.name} cannot be read: {error}") from error
    return total


def _first_difference(a: list[int], b: list[int]) -> int:
    for at, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return at
    return min(len(a), len(b))


def _files(root: Location, not_starting: str) -> list[Location]:
    return [
        path
        for path in listed(root, "*/*.parquet")
        if not path.parent.name.startswith(not_starting) and not path.name.startswith(".")
    ]


def _set_files(folder: Location) -> list[Location]:
    return [path for path in listed(folder, "*.parquet") if not path.name.startswith(".")]
