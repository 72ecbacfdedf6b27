"""What a recipe names: is it there, whole, and can it be reached? Each check ends as a finding.

Reads, and asks servers with GET only. A probe file is written where a run will write, and removed.
"""

import asyncio
import json
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from actors.config import AttachedServers
from actors.errors import RequestFault
from actors.fit import Expectation
from actors.preflight import Admission, check_server, model_context_tokens
from pipelines.doctor_checks import clocks_agree, disk_suffices
from pipelines.doctor_finding import Finding, failed, passed, proved, size, warned
from pipelines.doctor_machine import Space
from pipelines.doctor_plan import Sizes, disk_needed, stage_servers
from pipelines.errors import PreflightFailed, RunError
from pipelines.recipe import PromptSet, Recipe, Target
from pipelines.sources.files import SourceFile, find_files
from pipelines.storage import Location, location_of, write_atomically

_HEADER_LIMIT = 100 << 20  # bytes; no safetensors header is larger
_COUNTED_BYTES = 1 << 30  # lines of larger files are not counted: it takes too long


@dataclass(frozen=True)
class Weights:
    """What the headers of a target's weight files say."""

    files: int
    numbers: int
    bytes: int


# --- the target


def check_target(recipe: Recipe) -> tuple[list[Finding], Weights | None]:
    """The target folder is whole and is what the profile says; and what its weights take."""
    from pipelines.template import load_tokenizer, read_target_config, text_config

    target, found = recipe.target, list[Finding]()
    folder, kept = Path(target.path), dict[str, Any]()

    def keep(name: str, look: Callable[[], Any], say: Callable[[Any], str]) -> bool:
        def looked() -> str:
            kept[name] = look()
            return say(kept[name])

        found.append(proved(name, looked))
        return name in kept

    if not keep("target", lambda: read_target_config(folder), lambda _: str(folder)):
        return found, None
    keep("target weights", lambda: read_weights(folder), _weights_in_words)
    if keep("tokenizer", lambda: load_tokenizer(target), lambda one: f"{len(one):,} tokens"):
        found.append(proved("profile", lambda: _profile(kept["tokenizer"], recipe)))
    if keep("language model", lambda: text_config(kept["target"]), lambda _: "its config is whole"):
        found.append(proved("draft", lambda: _draft(recipe)))
    if target.trust_remote_code:
        found.append(_trusted(target))
    return found, kept.get("target weights")


def read_weights(folder: Path) -> Weights:
    """Every shard that the index names is there, each as long as its own header says.

    Raises `PreflightFailed` with the first that is not: a copy that was cut short.
    """
    index = folder / "model.safetensors.index.json"
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except FileNotFoundError:
        names = {path.name for path in folder.glob("*.safetensors")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _cut_short(f"{index} is no index: {error!r}") from error
    numbers = total = 0
    for name in sorted(names):
        path = folder / name
        if not path.is_file():
            raise _cut_short(f"{folder} has no {name}, which its index names")
        held, end = _read_header(path)
        if path.stat().st_size != end:
            seen = f"{path.stat().st_size:,} bytes, its header promises {end:,}"
            raise _cut_short(f"{path} has {seen}")
        numbers, total = numbers + held, total + end
    return Weights(len(names), numbers, total)


def _read_header(path: Path) -> tuple[int, int]:
    """The numbers that a safetensors file holds, and its length in bytes."""
    with path.open("rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if length > _HEADER_LIMIT:
            raise _cut_short(f"{path} is no safetensors file")
        text = handle.read(length)
    try:
        tensors = [one for name, one in json.loads(text).items() if name != "__metadata__"]
        numbers = sum(_product(one["shape"]) for one in tensors)
        end = max((one["data_offsets"][1] for one in tensors), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise _cut_short(f"{path} has no safetensors header") from error
    return numbers, 8 + length + end


def _product(shape: list[int]) -> int:
    product = 1
    for one in shape:
        product *= one
    return product


def _cut_short(seen: str) -> PreflightFailed:
    return PreflightFailed(
        seen,
        expected="every weight file of the target, whole",
        change="copy the target folder again",
    )


def _weights_in_words(weights: Weights) -> str:
    return f"{weights.files} file(s), {weights.numbers:,} numbers, {size(weights.bytes)}"


def _profile(tokenizer: Any, recipe: Recipe) -> str:
    from pipelines.profile_checks import check_profile
    from pipelines.template import read_target_config

    profile = recipe.target.profile
    check_profile(tokenizer, profile, read_target_config(Path(recipe.target.path)))
    return f"{len(profile.marker_ids)} markers, stop ids and template agree with the tokenizer"


def _draft(recipe: Recipe) -> str:
    _draft_numbers(recipe)
    return "a draft of this shape fits the target"


def _draft_numbers(recipe: Recipe) -> tuple[int, int, int]:
    """Numbers that the draft trains, those of its frozen embedding, the target's hidden size."""
    from pydantic import ValidationError

    from training.export import draft_shapes
    from training.model import TargetFault, draft_config

    target = recipe.target
    try:
        config = draft_config(Path(target.path), recipe.draft, target.profile.aux_layer_ids)
    except (TargetFault, ValidationError) as error:
        raise PreflightFailed(
            f"no draft can be built for {target.path}: {error}",
            expected="a target whose config.json fits target.profile and the draft's shape",
            change="set target.path, target.profile.aux_layer_ids or draft as the message says",
        ) from error
    shapes = {name: _product([*shape]) for name, shape in draft_shapes(config).items()}
    frozen = shapes.pop("embed_tokens.weight")
    return sum(shapes.values()), frozen, config.target_hidden_size


def _trusted(target: Target) -> Finding:
    return warned(
        "remote code",
        f"Python files of {target.path} run with your rights, as target.trust_remote_code says",
        expected="false, unless the tokenizer brings its own code",
        change="read these files; set target.trust_remote_code to false if it works without",
    )


def sizes_of(recipe: Recipe, weights: Weights | None, prompts: int | None) -> Sizes | None:
    """What the estimates rest on; None where the target is not there to be looked at."""
    if weights is None:
        return None
    try:
        trained, frozen, hidden_size = _draft_numbers(recipe)
    except RunError:
        return None  # a finding of its own says why
    return Sizes(weights.numbers, weights.bytes, hidden_size, trained, frozen, prompts)


# --- prompts


def check_prompts(recipe: Recipe) -> tuple[list[Finding], int | None]:
    """Every set's files are there; and how many training prompts there may be, if that is known."""
    findings, rows = list[Finding](), Counter[str]()
    known = True
    for one in (*recipe.prompts.train, *recipe.prompts.evaluation):
        name = f"prompts: {one.name}"
        try:
            files = find_files(one.path)
            counts = [_rows(file) for file in files] if one in recipe.prompts.train else []
        except (RunError, OSError, pa.ArrowException) as error:
            findings.append(_unreadable(name, one, error))
            known = False
            continue
        findings.append(passed(name, f"{len(files)} file(s), {size(_bytes(files))}"))
        if None in counts:
            known = known and one.cap is not None
        total = sum(count for count in counts if count is not None)
        rows[one.name] = total if one.cap is None or None not in counts else one.cap
        if one.cap is not None:
            rows[one.name] = min(rows[one.name], one.cap)
    return findings, rows.total() if known else None


def _unreadable(name: str, one: PromptSet, error: Exception) -> Finding:
    if isinstance(error, RunError):
        return failed(name, error.seen, expected=error.expected, change=error.change)
    return failed(
        name,
        f"{one.path}: {error}",
        expected="files that this user may read",
        change="correct the path, the permission, or the way there",
    )


def _bytes(files: tuple[SourceFile, ...]) -> int:
    return sum(file.size for file in files)


def _rows(file: SourceFile) -> int | None:
    """Rows of a file, where that is soon said; None elsewhere."""
    is_plain = file.name.lower().endswith((".jsonl", ".ndjson"))
    if file.suffix == ".parquet" and not is_plain:
        with file.open() as handle:
            rows: int = pq.ParquetFile(handle).metadata.num_rows
            return rows
    if not is_plain or file.size > _COUNTED_BYTES:
        return None
    with file.open() as handle:
        count = 0
        while piece := handle.read(1 << 20):
            count += piece.count(b"\n")
        return count


# --- storage


def check_run_folder(recipe: Recipe, sizes: Sizes | None) -> Iterator[Finding]:
    """The run folder can be written, and its disk has room for the run."""
    folder = Path(recipe.run_folder)
    there = next(one for one in (folder, *folder.parents) if one.exists())
    yield from check_storage("run folder", there)
    if sizes is not None:
        usage = shutil.disk_usage(there)
        written = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        disk = disk_needed(recipe, sizes)
        space = Space(usage.total, usage.free)
        yield disk_suffices(disk, space, written=written, where=str(there))


def check_store(recipe: Recipe) -> Iterator[Finding]:
    """The store of the responses, where the recipe names one, takes and gives back a file."""
    if recipe.generate.store is not None:
        yield from check_storage("store", location_of(recipe.generate.store))


def check_storage(name: str, place: Location) -> Iterator[Finding]:
    """A probe is written, read again and removed; its time is compared with ours."""
    probe = place / f".eyas-doctor-{uuid.uuid4().hex}"
    content = uuid.uuid4().bytes
    written = [time.time()]
    try:
        write_atomically(probe, content)
        try:
            skew = probe.stat().st_mtime - written[0]
            back = probe.read_bytes()
        finally:
            probe.unlink(missing_ok=True)
    except RunError as error:
        yield failed(name, error.seen, expected=error.expected, change=error.change)
        return
    except OSError as error:
        yield failed(
            name,
            f"{place} cannot be used: {error}",
            expected="a place that answers, where this user may write, read and delete",
            change="mend the permission, the keys in the environment, or the way there",
        )
        return
    if back != content:
        yield failed(
            name,
            f"{place} gave back other bytes than it was given",
            expected="a store that keeps what it is given",
            change="use another store",
        )
        return
    yield passed(name, f"{place}: a probe was written, read and removed")
    late = clocks_agree(f"{name} clock", skew)
    if late is not None:
        yield late


# --- servers that somebody else runs


def check_attached(recipe: Recipe) -> Iterator[Finding]:
    """Every attached server answers and is what the recipe needs. It is asked with GET only."""
    folder = Path(recipe.target.path)
    try:
        own_length = model_context_tokens(folder)
    except (OSError, ValueError, AttributeError):
        own_length = None  # the target's own check names the broken file
    expectation = Expectation(folder, recipe.prompts.context_tokens, own_length)
    seen = set[str]()
    for servers, _ in stage_servers(recipe).values():
        if not isinstance(servers, AttachedServers):
            continue
        admission = Admission(expectation, vocab_size=0, gateway=servers.gateway)
        for url in servers.urls:
            if url not in seen:
                seen.add(url)
                yield _attached(url, admission)


def _attached(url: str, admission: Admission) -> Finding:
    name = f"server {url}"

    def look() -> str:
        checked = asyncio.run(check_server(url, admission))
        version = "" if checked.server is None else f"version {checked.server.version}"
        left = f"not checked: {', '.join(checked.not_checked)}" if checked.not_checked else ""
        return ", ".join(filter(None, (version, left))) or "it answers"

    try:
        return proved(name, look)
    except RequestFault as fault:
        return failed(
            name,
            f"it does not answer: {fault}",
            expected="a server that is up",
            change="start it, or correct its URL in the recipe",
        )


def check_kinds(recipe: Recipe) -> Iterator[Finding]:
    """Capture hands over in this machine's memory; evaluation takes the engine's counters."""
    stages = {"capture": ("embedded", "launch"), "evaluate": ("embedded",)}
    for stage, kinds in stages.items():
        servers, _ = stage_servers(recipe)[stage]
        if servers.kind not in kinds:
            yield failed(
                f"{stage} servers",
                f"{stage}.servers.kind is {servers.kind}",
                expected=" or ".join(kinds),
                change=f"set {stage}.servers.kind to {kinds[-1]}",
            )
