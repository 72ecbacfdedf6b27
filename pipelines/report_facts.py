"""The page's head and foot: what was run on what, when, how it ended; versions and checksums."""

from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipelines.last_seen import read_last_seen
from pipelines.report_look import Look, cut
from pipelines.report_timeline import moments, said_time
from pipelines.report_training import DRAFTS, overall, two
from pipelines.stages import STAGES
from pipelines.status import StatusReport, status
from pipelines.telemetry import duration

_VERSIONED = ("eyas", "torch", "transformers", "ray", "deepspeed", "pyarrow")
_CHECKSUMS = 400
_RECIPE_CHARACTERS = 60_000


def header(look: Look, evaluation: Mapping[str, Any] | None) -> dict[str, Any]:
    """Name, state, alarms, what was run on what, and the main numbers."""
    seen = look.tried("status", lambda: status(look.run)) if look.recipe else None
    return {
        "name": look.recipe.name if look.recipe else look.run.root.name,
        "state": _state(look, seen),
        "alarms": list(seen.alarms) if seen else [],
        "history": list(seen.history) if seen else [],
        "what": [
            *_what(look),
            ("machine", look.tried("machine", lambda: _machine(look)) or "not recorded"),
            *(look.tried("events", lambda: _when(look)) or []),
        ],
        "big": look.tried("numbers", lambda: _big(look, evaluation)) or [],
    }


def _state(look: Look, seen: StatusReport | None) -> str:
    done = [stage for stage in STAGES if stage in look.stages]
    stages = "all stages done" if len(done) == len(STAGES) else f"done: {', '.join(done) or 'none'}"
    return f"{seen.state}; {stages}" if seen else stages


def _what(look: Look) -> list[tuple[str, str]]:
    if look.recipe is None:
        return []
    target, shape = look.recipe.target, look.recipe.draft
    uses = {
        use: ", ".join(f"{one.name} ({one.domain})" for one in look.sets if one.use == use)
        for use in ("training", "evaluation")
    }
    return [
        ("target", f"{Path(target.path).name} ({target.path})"),
        (
            "draft",
            f"EAGLE-3, hidden size {shape.hidden_size:,}, {shape.draft_vocab_size:,} tokens of "
            "draft vocabulary",
        ),
        ("training sets", uses["training"] or "none"),
        ("held-out sets", uses["evaluation"] or "none"),
    ]


def _machine(look: Look) -> str | None:
    seen = read_last_seen(look.run)
    if seen is None:
        return None
    gpus = Counter(one.name for one in seen.gpus)
    named = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    cpus = f", {seen.ray.total['CPU']:g} logical CPUs" if "CPU" in seen.ray.total else ""
    return f"{seen.host}: {named}; Ray with {seen.ray.nodes} nodes{cpus}"


def _when(look: Look) -> list[tuple[str, str]]:
    if not look.events:
        return []
    times = [float(one["at"]) for one in look.events]
    first, last = min(times), max(times)
    kinds = Counter(one.kind for one in moments(look.events))
    worked = sum(float(entry["seconds"]) for entry in look.stages.values())
    return [
        ("when", f"{said_time(first)} to {said_time(last)} UTC, {duration(last - first)}"),
        ("work", f"{duration(worked)} in the last session of each finished stage"),
        (
            "on the way",
            f"restarts {kinds['restart']}, stops {kinds['stop']}, server alarms {kinds['alarm']}",
        ),
    ]


def _big(look: Look, evaluation: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    big = []
    if evaluation is not None:
        for kind in ("trained", "untrained"):
            group = overall(evaluation["acceptance"][kind])
            big.append((f"acceptance length, {DRAFTS[kind]}", two(group["acceptance_length"])))
    if "generate" in look.stages:
        sets = look.stages["generate"]["counts"]["sets"].values()
        big.append(("responses that are ok", f"{sum(one['ok'] for one in sets):,}"))
        big.append(("output tokens in them", f"{sum(one['output_tokens'] for one in sets):,}"))
    if "train" in look.stages:
        big.append(("optimiser steps", f"{look.stages['train']['counts']['steps']:,}"))
    return big


def provenance(look: Look) -> dict[str, Any]:
    """The stages with their fingerprints, and facts of the servers and the measured draft."""
    done = [name for name in STAGES if name in look.stages]
    stages = [look.tried("stages", lambda name=name: _stage(look, name)) for name in done]  # type: ignore[misc]
    return {
        "stages": [one for one in stages if one],
        "facts": look.tried("facts", lambda: _facts(look)) or [],
    }


def _stage(look: Look, name: str) -> dict[str, str]:
    entry = look.stages[name]
    return {
        "name": name,
        "time": duration(entry["seconds"]),
        "files": f"{len(entry['files']):,}",
        "bytes": f"{sum(one['bytes'] for one in entry['files'].values()):,}",
        "fingerprint": entry["fingerprint"],
        "headline": str(entry["counts"].get("headline", "")),
    }


def _facts(look: Look) -> list[tuple[str, str]]:
    facts = []
    for event in look.events:
        if event["event"] == "server_checked":
            said = [f"version {event.get('version')}", f"weights {event.get('weight_version')}"]
            said += [f"{key} {event[key]}" for key in ("dtype", "context_length") if key in event]
            facts.append(("server", ", ".join(said)))
    for name in ("export", "evaluate"):
        files = look.stages[name]["files"] if name in look.stages else {}
        for path, file in files.items():
            if path.endswith((".safetensors", "evaluation.json")):
                facts.append((f"{path}, sha256", file["sha256"]))
    installed = ", ".join(f"{name} {_version(name)}" for name in _VERSIONED)
    return [*dict.fromkeys(facts), ("this page was written with", installed)]


def checksums(look: Look) -> dict[str, Any]:
    """Files with their checksums, as many as fit on a page."""
    rows = [
        (name, file["sha256"])
        for entry in look.stages.values()
        for name, file in entry["files"].items()
    ]
    return {"rows": rows[:_CHECKSUMS], "total": len(rows)}


def recipe_text(look: Look) -> str:
    """The recipe as it was resolved; secrets were redacted when it was written."""
    return cut(look.run.recipe.read_text(errors="replace"), _RECIPE_CHARACTERS)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "not installed"
