"""A run folder on disk: where each artefact lies, atomic writes, the manifest, the lock."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from pipelines.errors import BadRecipe, PreflightFailed
from pipelines.lease import hold_lease
from pipelines.stages import STAGES
from pipelines.storage import Location, RemotePath, atomic_file, location_of, storage_faults
from pipelines.storage import sha256_of as sha256_of
from pipelines.storage import write_atomically as write_atomically


@dataclass(frozen=True)
class RunFolder:
    """The layout of one run. Holds no handle and no state: every process may make its own."""

    root: Path
    store: str | None = None  # where responses are kept, if not here: a folder or a URI

    @property
    def recipe(self) -> Path:
        """The resolved recipe, secrets redacted."""
        return self.root / "recipe.yaml"

    @property
    def manifest(self) -> Path:
        """What each finished stage made, with counts and checksums."""
        return self.root / "manifest.json"

    @property
    def events(self) -> Path:
        """Facts for machines, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def prompts(self) -> Path:
        """`prompts/<set>/*.parquet`, and `_rejected/<set>.parquet` beside them."""
        return self.root / "prompts"

    @property
    def responses(self) -> Location:
        """`responses/<set>/*.parquet`, only rows with status ok."""
        return self.root / "responses" if self.store is None else location_of(self.store)

    @property
    def rejected_responses(self) -> Location:
        """`responses/_rejected/<set>/*.parquet`: rejected and failed rows with their reason."""
        return self.responses / "_rejected"

    @property
    def segments(self) -> Location:
        """`responses/_segments/<set>/*.arrow`: rows made durable as they arrived."""
        return self.responses / "_segments"

    @property
    def origin(self) -> Location:
        """Which prompts, sampling and gates the responses in a store were made with."""
        return self.responses / "_origin.json"

    @property
    def lease(self) -> Location:
        """Who writes to the store."""
        return self.responses / "_lease.json"

    @property
    def lease_mark(self) -> Path:
        """What this folder's last lease was called: the next run here may follow it at once."""
        return self.root / ".lease"

    @property
    def features(self) -> Path:
        """Hidden-state shards and their index."""
        return self.root / "features"

    @property
    def draft_vocab(self) -> Path:
        """`d2t`, `t2d`, and the counts they came from."""
        return self.root / "draft_vocab.safetensors"

    @property
    def checkpoints(self) -> Path:
        """Training checkpoints, each with its place in the data."""
        return self.root / "checkpoints"

    @property
    def training(self) -> Path:
        """What training learned about itself: `metrics.jsonl`, `summary.json`."""
        return self.root / "training"

    @property
    def draft(self) -> Path:
        """The exported draft, as SGLang loads it."""
        return self.root / "draft"

    @property
    def evaluation(self) -> Path:
        """Acceptance lengths, by domain, against the baselines."""
        return self.root / "evaluation.json"

    @property
    def evaluation_samples(self) -> Path:
        """A few answers, and which of their tokens the draft had right."""
        return self.root / "evaluation_samples.json"

    @property
    def evaluation_phases(self) -> Path:
        """What each finished phase of an evaluation measured, until all are there."""
        return self.root / "evaluation"

    @property
    def report(self) -> Path:
        """One self-contained page."""
        return self.root / "report.html"

    @property
    def logs(self) -> Path:
        """Server and worker logs."""
        return self.root / "logs"

    def create(self) -> None:
        """Make the folder. Raises `PreflightFailed` where that is not allowed."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".writable-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise PreflightFailed(
                f"the run folder {self.root} cannot be written: {error.strerror}",
                expected="a folder that this user may create files in",
                change="set run_folder in the recipe to such a folder, or mend its permissions",
            ) from error

    def name_of(self, location: Location) -> str:
        """What the manifest calls a file of this run, wherever responses are kept."""
        where = self.responses
        if isinstance(where, RemotePath) and isinstance(location, RemotePath):
            return f"responses/{location.key.removeprefix(where.key).lstrip('/')}"
        assert isinstance(location, Path)
        if isinstance(where, Path) and where in location.parents:
            return str(Path("responses") / location.relative_to(where))
        return str(location.relative_to(self.root))

    def locate(self, name: str) -> Location:
        """Where the file is that the manifest calls `name`."""
        kind, _, rest = name.partition("/")
        return self.responses / rest if kind == "responses" else self.root / name

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the folder, and the store, for one writer. A second one is refused.

        A dead writer does not hold the folder. A store that it held from another folder is free
        when its lease runs out, see `pipelines/lease.py`.
        """
        with self._lock_folder():
            if self.store is None:
                yield
            else:
                with hold_lease(self.lease, self.lease_mark):
                    yield

    @contextmanager
    def _lock_folder(self) -> Iterator[None]:
        with (self.root / ".lock").open("a+b", buffering=0) as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                handle.seek(0)
                holder = handle.read().decode()
                raise PreflightFailed(
                    f"the run folder {self.root} is held by another run ({holder})",
                    expected="one writer for a run folder",
                    change="wait for that run, stop it, or set another run_folder",
                ) from error
            with storage_faults(self.root):
                handle.truncate(0)
                handle.write(f"pid {os.getpid()}".encode())
            yield


def open_run(root: Path) -> RunFolder:
    """The run in a folder, with the store that its recipe names. What is no recipe names none."""
    try:
        recipe = yaml.safe_load((root / "recipe.yaml").read_text())
        store = recipe["generate"]["store"]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        store = None
    return RunFolder(root, store if isinstance(store, str) else None)


def write_json(path: Location, value: Any) -> None:
    """Write JSON that a person can read, atomically. NaN and Infinity are refused."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, text.encode() + b"\n")


def write_parquet(path: Location, table: pa.Table) -> None:
    """Write a table atomically; the same table gives the same bytes."""
    with atomic_file(path) as handle:
        pq.write_table(table, handle, compression="zstd", row_group_size=4096)


def read_manifest(run: RunFolder) -> dict[str, Any]:
    """The manifest, or an empty one for a new run."""
    if not run.manifest.exists():
        return {"stages": {}}
    try:
        manifest: dict[str, Any] = json.loads(run.manifest.read_bytes())
    except ValueError as error:
        raise BadRecipe(
            f"{run.manifest} is not JSON: {error}",
            expected="the manifest as Eyas wrote it",
            change="restore it from a copy, or start in another run_folder",
        ) from error
    return manifest


def record_stage(
    run: RunFolder, stage: str, *, fingerprint: str, counts: Mapping[str, Any], seconds: float
) -> None:
    """Say in the manifest that a stage is done, with the checksum of every file it made.

    `counts` are the stage's own; `counts["headline"]` is the one line that people see of it.
    """
    assert stage in STAGES
    manifest = read_manifest(run)
    for later in STAGES[STAGES.index(stage) :]:  # what was made from the earlier artefact is stale
        manifest["stages"].pop(later, None)
    manifest["stages"][stage] = {
        "fingerprint": fingerprint,
        "seconds": round(seconds, 1),
        "counts": dict(counts),
        "files": {
            run.name_of(path): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in stage_files(run, stage)
        },
    }
    write_json(run.manifest, manifest)


def forget_stages(run: RunFolder, stages: Sequence[str]) -> None:
    """Take the done marks of the given stages out of the manifest."""
    manifest = read_manifest(run)
    kept = {name: entry for name, entry in manifest["stages"].items() if name not in stages}
    if kept != manifest["stages"]:
        write_json(run.manifest, {**manifest, "stages": kept})


def stage_files(run: RunFolder, stage: str) -> list[Location]:
    """The committed files of a stage, sorted: what its manifest entry covers."""
    match stage:
        case "prepare":
            roots = [run.prompts]
        case "generate":
            return _response_files(run)
        case "capture":
            roots = [run.features]
        case "train":
            roots = [run.draft_vocab, run.training]
        case "export":
            roots = [run.draft]
        case "evaluate":
            roots = [run.evaluation, run.evaluation_samples]
        case _:
            raise AssertionError(stage)
    return [
        path
        for root in roots
        for path in ([root] if root.is_file() else sorted(root.rglob("*")))
        if path.is_file() and not path.name.startswith(".")
    ]


def _response_files(run: RunFolder) -> list[Location]:
    """Without segments, which are rows on their way to a commit, and notes beside the sets."""
    found: list[Location] = [*run.responses.rglob("*")]
    return [
        path
        for path in sorted(found, key=str)
        if not path.name.startswith(".")
        and not run.name_of(path).startswith("responses/_segments/")
        and not (path.parent == run.responses and path.name.startswith("_"))
        and (isinstance(path, RemotePath) or path.is_file())
    ]
