"""Proofs about rows: which there are, and what is derived of them. See also `response_proofs`."""

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b, sha256
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.conversation import expected_ids
from pipelines.proof import Breaks, Broken, Evidence, NotThere, parquet_rows
from pipelines.schema import PROMPT_SCHEMA, REJECTED_PROMPT_SCHEMA, RESPONSE_SCHEMA
from pipelines.storage import Location, contents, listed, readable
from pipelines.store import RunFolder

_SAMPLES = 48  # rows that are rendered and decoded again, spread over a set


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
        prompts = _count_rows(set_files(run.prompts / name))
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
        ok = set(_ids(set_files(run.responses / name), breaks, "responses"))
        aside = set(_ids(set_files(run.rejected_responses / name), breaks, "_rejected"))
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
    files = set_files(evidence.run.prompts / name)
    list(_ids(files, breaks, "prompts"))
    samples = evidence.recipe.generate.samples_per_prompt
    rows = parquet_rows(files, ["sample_id", "continuations"])
    return {one for _, row in rows for one in expected_ids(row, samples)}


def evaluation_is_disjoint(evidence: Evidence) -> str:
    """No held-out prompt says, but for case and spacing, what a training prompt says."""
    run, columns = evidence.run, ["sample_id", "messages"]
    trained: dict[bytes, str] = {}
    for name in evidence.train_sets:
        for _, row in parquet_rows(set_files(run.prompts / name), columns):
            trained[_said(row["messages"])] = row["sample_id"]
    breaks, count = Breaks(), 0
    for name in evidence.evaluation_sets:
        for _, row in parquet_rows(set_files(run.prompts / name), columns):
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
        for row in some_rows(set_files(evidence.run.prompts / name)):
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
        for row in some_rows(set_files(evidence.run.responses / name)):
            count += 1
            for part, derived in derive(row).items():
                if derived != row[part]:
                    breaks.add(row["sample_id"], f"{part} is not what its ids say")
    if not count:
        raise NotThere("not there yet: no committed responses")
    breaks.raise_if_any()
    return f"{count:,} responses read again"


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


def _said(messages: str) -> bytes:
    words = " ".join(f"{one['role']} {one['content']}" for one in json.loads(messages))
    return blake2b(" ".join(words.casefold().split()).encode(), digest_size=16).digest()


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


def some_rows(files: list[Location]) -> Iterable[dict[str, Any]]:
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


def set_files(folder: Location) -> list[Location]:
    return [path for path in listed(folder, "*.parquet") if not path.name.startswith(".")]
