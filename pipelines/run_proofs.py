"""Proofs about the run folder itself: recipe, manifest, events, and what may not lie in it."""

import json
import os
from pathlib import Path

from pipelines.errors import BadRecipe
from pipelines.proof import Breaks, Broken, Evidence, NotThere, read_stages
from pipelines.recipe import fingerprint, load_recipe
from pipelines.store import sha256_of, stage_files

# Formats whose readers run what the file says.
_CODE = frozenset({".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib"})
_TEXTS = frozenset({".yaml", ".json", ".jsonl", ".html", ".md", ".log", ".txt"})
_KEYS = (
    *("EYAS_API_KEY", "RAY_AUTH_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "MLFLOW_TRACKING_PASSWORD"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"),
)
_SHORTEST_KEY = 8  # characters; a shorter value is found everywhere
_TEXT_LIMIT = 256 << 20  # bytes of one file that are searched


def recipe_is_the_runs(evidence: Evidence) -> str:
    """The recipe is readable, and is the one that every finished stage was made with."""
    if not evidence.run.recipe.exists():
        if evidence.stages:
            raise Broken("recipe.yaml is missing, though stages are recorded as done")
        raise NotThere("not there yet: no stage was started")
    try:
        recipe = load_recipe(evidence.run.recipe)
    except BadRecipe as error:
        raise Broken(error.seen) from error
    for stage, entry in evidence.stages.items():
        if entry["fingerprint"] != fingerprint(recipe, stage):
            raise Broken(f"{stage} was made with another recipe than recipe.yaml")
    return f"{recipe.name}, {len(evidence.stages)} stages made with it"


def manifest_files(evidence: Evidence) -> str:
    """Every listed file is there, with its checksum."""
    stages = read_stages(evidence.run)
    if not stages:
        raise NotThere("not there yet: no stage is recorded as done")
    breaks, count = Breaks(), 0
    for entry in stages.values():
        for name, promised in entry["files"].items():
            count += 1
            path = evidence.run.locate(name)
            if not path.is_file():
                breaks.add(name, "it is listed, and is missing")
            elif path.stat().st_size != promised["bytes"]:
                breaks.add(name, f"{path.stat().st_size} bytes, {promised['bytes']} were listed")
            elif sha256_of(path) != promised["sha256"]:
                breaks.add(name, "its sha256 is not the one listed")
    breaks.raise_if_any()
    return f"{count:,} files"


def manifest_complete(evidence: Evidence) -> str:
    """No file lies among the committed ones that no stage has listed."""
    stages = read_stages(evidence.run)
    if not stages:
        raise NotThere("not there yet: no stage is recorded as done")
    breaks, count = Breaks(), 0
    for stage, entry in stages.items():
        for path in stage_files(evidence.run, stage):
            count += 1
            name = evidence.run.name_of(path)
            if name not in entry["files"]:
                breaks.add(name, f"it lies among the files of {stage}, which did not list it")
    breaks.raise_if_any()
    return f"{count:,} files"


def events(evidence: Evidence) -> str:
    """Each line is an event with its time. The last may be on its way while a driver writes."""
    path = evidence.run.events
    if not path.exists():
        if evidence.stages:
            raise Broken(f"{path.name} is missing, though stages are recorded as done")
        raise NotThere("not there yet: nothing has happened")
    with path.open("rb") as lines:
        count = 0
        for count, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            _check_event(f"{path.name}, line {count}", line)
    return f"{count:,} events"


def _check_event(place: str, line: bytes) -> None:
    try:
        event = json.loads(line)
    except ValueError as error:
        raise Broken(f"{place} is not JSON") from error
    match event:
        case {"at": float() | int(), "event": str()}:
            return
        case _:
            raise Broken(f"{place} has no time or no name")


def nothing_dangerous(evidence: Evidence) -> str:
    """No file that runs code when it is read, and no key of this environment in any text."""
    root = evidence.run.root
    keys = {
        name: os.environ[name].encode()
        for name in _KEYS
        if name in os.environ and len(os.environ[name]) >= _SHORTEST_KEY
    }
    breaks, count = Breaks(), 0
    for path in sorted(root.rglob("*")):
        if not path.is_file():
            continue
        count += 1
        name = str(path.relative_to(root))
        if path.suffix in _CODE:
            breaks.add(name, "a format that may run code when it is read")
        for key in _keys_in(path, keys):
            breaks.add(name, f"it holds the value of {key}")
    if not count:
        raise NotThere("not there yet: no file")
    breaks.raise_if_any()
    return f"{count:,} files, {len(keys)} keys of this environment looked for"


def _keys_in(path: Path, keys: dict[str, bytes]) -> list[str]:
    if not keys or path.suffix not in _TEXTS or path.stat().st_size > _TEXT_LIMIT:
        return []
    content = path.read_bytes()
    return [name for name, value in keys.items() if value in content]
