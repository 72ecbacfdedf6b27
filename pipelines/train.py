"""Train: features in, a trained draft's weights out. Splits, draft vocabulary, launch, progress."""

import contextlib
import hashlib
import json
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipelines.capture_slices import captured_slices
from pipelines.errors import PreflightFailed, QualityStop, RunError
from pipelines.feature_stream import streaming
from pipelines.readings import step_readings, tally_readings
from pipelines.recipe import Recipe
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog, Progress
from training import draft_vocab
from training.checkpoint import CheckpointFault
from training.config import DraftConfig
from training.draft_vocab import DraftVocab, DraftVocabFault
from training.engine import TrainingFault
from training.features import FeatureFault, FeatureStore, TokenRows
from training.loop import STOP_FILE, Streams, TrainJob, launch
from training.model import TargetFault, draft_config
from training.packing import split_rows, steps_per_epoch
from training.stream import TOKENS_FILE, StreamFault, TokenStore

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_STOP_SECONDS = 120.0  # how long a stop may take: the step under way and one checkpoint
_FAULTS = (
    FeatureFault,
    TargetFault,
    CheckpointFault,
    DraftVocabFault,
    TrainingFault,
    StreamFault,
)
# What changes how the arithmetic is carried out, not what is computed.
_COMFORT = (
    "micro_batch_tokens",
    "zero_stage",
    "workers",
    "threads_per_worker",
    "gpus_per_worker",
    "checkpoint_every_steps",
    "checkpoints_kept",
    "log_every_steps",
)


def train(recipe: Recipe, run: RunFolder, events: EventLog) -> dict[str, Any]:
    """Train to the end, going on from the newest checkpoint, and return the summary.

    Ray must be connected already. Raises `PreflightFailed` where the data, the target or a
    checkpoint cannot be used, and `QualityStop` where the loss stops being a number.
    """
    try:
        config, store = _open(recipe, run)
        vocab = _draft_vocab(recipe, run, store, config)
        job = _job(recipe, run, config, vocab, store)
        split = split_rows(store.sample_ids, recipe.train.heldout_share)
        total = steps_per_epoch(len(split.train), recipe.train.batch_samples) * recipe.train.epochs
        events.append(
            "train_started",
            samples=len(split.train),
            heldout_samples=len(split.heldout),
            steps=total,
            draft_vocab_coverage=round(vocab.coverage, 4),
        )
        _train_on(recipe, run, events, job, store, total)
    except (
        FeatureFault,
        TargetFault,
        CheckpointFault,
        DraftVocabFault,
        TrainingFault,
        StreamFault,
    ) as fault:
        raise _for_people(fault) from fault
    summary: dict[str, Any] = json.loads((run.training / "summary.json").read_text())
    events.append("train_finished", steps=summary["steps"], seconds=summary["seconds"])
    return {"headline": _headline(summary), **summary}


def _train_on(
    recipe: Recipe, run: RunFolder, events: EventLog, job: TrainJob, rows: TokenRows, total: int
) -> None:
    """Launch training on states that are on disk, that come by, or that are made slice by slice."""
    match recipe.capture.mode:
        case "offline":
            _launch_and_watch(job, total, run, events)
        case "streaming":
            with streaming(recipe, run, events, job.draft) as streams:
                _launch_and_watch(job, total, run, events, streams)
        case "chunked":
            for until in captured_slices(recipe, run, events, job.draft, rows):
                part = job.model_copy(update={"until_step": until})
                _launch_and_watch(part, total, run, events)


def _headline(summary: Mapping[str, Any]) -> str:
    length = summary["heldout"]["overall"]["acceptance_length"]
    seen = "no held-out response" if length is None else f"simulated acceptance length {length:.2f}"
    return f"{summary['steps']:,} steps, {summary['rows_trained']:,} rows; {seen}"


def _open(recipe: Recipe, run: RunFolder) -> tuple[DraftConfig, TokenRows]:
    layers = recipe.target.profile.aux_layer_ids
    config = draft_config(Path(recipe.target.path), recipe.draft, layers)
    if recipe.capture.mode == "offline":
        return config, FeatureStore(run.features, aux_layer_ids=layers)
    return config, TokenStore(run.features / TOKENS_FILE)


def _draft_vocab(
    recipe: Recipe, run: RunFolder, store: TokenRows, config: DraftConfig
) -> DraftVocab:
    """The stored draft vocabulary if it was made from these very data, otherwise a new one."""
    split = split_rows(store.sample_ids, recipe.train.heldout_share)
    fingerprint = draft_vocab.fingerprint_of(
        [f"{store.sample_ids[row]}:{store.lengths[row]}" for row in split.train],
        size=config.draft_vocab_size,
        vocab_size=config.vocab_size,
        max_tokens=recipe.train.max_tokens_per_sample,
    )
    if run.draft_vocab.exists():
        stored = draft_vocab.load(run.draft_vocab)
        if stored.fingerprint == fingerprint:
            return stored
        logger.info("the draft vocabulary was made from other data and is made again")
    counts = draft_vocab.count_tokens(
        store,
        split.train,
        max_tokens=recipe.train.max_tokens_per_sample,
        vocab_size=config.vocab_size,
    )
    vocab = draft_vocab.choose(counts, config.draft_vocab_size, fingerprint=fingerprint)
    draft_vocab.save(vocab, run.draft_vocab)
    logger.info(
        "draft vocabulary: %d of %d tokens, covering %.1f%% of what may teach",
        config.draft_vocab_size,
        config.vocab_size,
        100 * vocab.coverage,
    )
    return vocab


def _job(
    recipe: Recipe, run: RunFolder, config: DraftConfig, vocab: DraftVocab, store: TokenRows
) -> TrainJob:
    decides = {
        key: value
        for key, value in recipe.train.model_dump(mode="json").items()
        if key not in _COMFORT
    }
    data = [store.sample_ids, store.lengths, store.loss_tokens]
    parts = [config.model_dump(mode="json"), decides, vocab.fingerprint, data]
    return TrainJob(
        draft=config,
        train=recipe.train,
        features=str(run.features.resolve()),
        states=recipe.capture.mode,
        target=str(Path(recipe.target.path).resolve()),
        draft_vocab=str(run.draft_vocab.resolve()),
        checkpoints=str(run.checkpoints.resolve()),
        output=str(run.training.resolve()),
        fingerprint=hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16],
    )


def _launch_and_watch(
    job: TrainJob, total: int, run: RunFolder, events: EventLog, streams: Streams | None = None
) -> None:
    """Run the Ray Train job in a thread, and turn its metrics into progress and events here."""
    run.training.mkdir(parents=True, exist_ok=True)
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    stop = run.training / STOP_FILE
    stop.unlink(missing_ok=True)  # of an earlier process
    failure: list[BaseException] = []
    done = threading.Event()  # an interrupted Thread.join takes a live thread for a finished one

    def work() -> None:
        try:
            launch(job, streams)
        except BaseException as error:  # noqa: BLE001 - raised below, in the thread that waits
            failure.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=work, name="ray-train", daemon=True)
    watch = _Watch(run.training / "metrics.jsonl", total, events)
    try:
        thread.start()
        while not done.wait(_POLL_SECONDS):
            watch.look()
        watch.look()
    except KeyboardInterrupt:
        logger.info("stopping: the step under way ends and a checkpoint is written")
        stop.touch()
        done.wait(_STOP_SECONDS)
        raise
    finally:
        stop.unlink(missing_ok=True)
    if failure:
        raise failure[0]


class _Watch:
    """Follows `metrics.jsonl`. Lines of steps that a restart cuts are not shown twice."""

    def __init__(self, path: Path, total: int, events: EventLog) -> None:
        self._path, self._total, self._events = path, total, events
        self._step, self._seen_heldout = (self._last(path, kind) for kind in ("train", "heldout"))
        self._progress = Progress(
            "train", total=total, done=self._step, unit="steps", figures=events.figures
        )

    @staticmethod
    def _last(path: Path, kind: str) -> int:
        """Where an earlier process stopped writing such lines; they have been shown."""
        return max((line["step"] for line in _lines(path) if line["kind"] == kind), default=0)

    def look(self) -> None:
        """Show and record what is new."""
        for line in _lines(self._path):
            if line["kind"] == "train" and line["step"] > self._step:
                length = line["acceptance_length"]
                notes = {"loss": f"{line['loss']:.3f}", "rows/s": f"{line['rows_per_second']:.0f}"}
                notes |= {"AL": f"{length:.2f}"} if length is not None else {}
                self._progress.advance(line["step"] - self._step, notes)
                self._events.figures.take(step_readings(line, line["step"] - self._step))
                self._step = line["step"]
            elif line["kind"] == "heldout" and line["step"] > self._seen_heldout:
                self._seen_heldout = line["step"]
                length = line["overall"]["acceptance_length"]
                self._events.append("heldout_measured", step=line["step"], acceptance_length=length)
                self._events.figures.take(tally_readings(line["overall"], "heldout"))
                if length is not None:
                    logger.info("train  step %d: held-out AL %.3f", line["step"], length)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a growing JSONL file; none where it does not exist yet."""
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def _for_people(fault: Exception) -> RunError:
    """The same fault with the exit code that fits it."""
    if isinstance(fault, TrainingFault):
        return QualityStop(
            str(fault),
            expected="a finite loss at every step",
            change="see the message; training goes on from the last checkpoint",
        )
    if isinstance(fault, StreamFault):
        return PreflightFailed(
            str(fault),
            expected="servers that answer, and hand over the states of what they were sent",
            change="see their logs in the run's folder; the same command goes on from here",
        )
    return PreflightFailed(
        str(fault),
        expected="features, target and checkpoints that belong together",
        change="do what the message says, then run the stage again",
    )
