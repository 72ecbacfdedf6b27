"""The training loop of one worker, and its launch as a Ray Train job.

Our own checkpoints folder is the truth about how far training got; Ray Train's storage holds
nothing that a restart needs.
"""

import json
import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch
import torch.distributed as dist
from pydantic import BaseModel
from safetensors.torch import save_file

from training import checkpoint, draft_vocab
from training.checkpoint import Snapshot
from training.config import DraftConfig, TrainConfig
from training.engine import DTYPES, Engine, TrainingFault, learning_rate
from training.features import FeatureRows, FeatureStore, TokenRows, failed_samples
from training.model import DraftModel, initial_weights, target_weights
from training.packing import PackedBatch
from training.reader import PlannedRows, ReadAhead, RowPlan, Turn
from training.stream import TOKENS_FILE, SlicedRows, StreamedRows, TokenStore
from training.tally import Tally
from training.ttt import TTTLoss

logger = logging.getLogger(__name__)

_ATTEMPTS = 3  # launches of the worker group before a failing run is given up
MAX_SET_ASIDE_SHARE = 0.01  # of all samples, as in a capture to disk
STOP_FILE = "stop"  # in the output folder: workers write a checkpoint and end


class TrainJob(BaseModel, frozen=True, extra="forbid", strict=True):
    """All that a worker must know. Paths are absolute: a worker's folder is not the driver's."""

    draft: DraftConfig
    train: TrainConfig
    features: str
    # Where the states are: all in `features`; in a stream; or in `features` up to `until_step`.
    # Of the last two, `features` holds the tokens of all rows.
    states: Literal["offline", "streaming", "chunked"]
    until_step: int | None = None  # training pauses there, held-out rows included
    target: str
    draft_vocab: str
    checkpoints: str
    output: str
    fingerprint: str  # of the data, the draft vocabulary, and everything that changes weights


# Given the steps that are made already, each rank's rows from there on, as Ray datasets.
Streams = Callable[[int], Sequence[Any]]


def launch(job: TrainJob, streams: Streams | None = None) -> None:
    """Train to the end on the Ray cluster this process is connected to. Blocks.

    Call it outside the main thread, where Ray Train would put its own handler on SIGINT.

    A worker group that dies is started again and goes on from the newest checkpoint, with streams
    that begin there. Raises `TrainingFault` at once where another try would end the same way.
    """
    from ray.data import ExecutionOptions
    from ray.train import DataConfig, RunConfig, ScalingConfig, WorkerGroupError
    from ray.train.torch import TorchConfig, TorchTrainer

    config, gpus = job.train, job.train.gpus_per_worker
    # One logical CPU, whatever the threads: on a small machine the rest must stay free for Ray's
    # own actors, or the group is never scheduled.
    resources = {"CPU": 1, "GPU": gpus} if gpus else {"CPU": 1}
    storage = Path(job.checkpoints) / "_ray"  # Ray Train wants one; what it writes is not needed
    assert (job.states == "streaming") == (streams is not None)
    for attempt in range(1, _ATTEMPTS + 1):
        datasets = streams(checkpoint.newest_step(Path(job.checkpoints))) if streams else ()
        trainer = TorchTrainer(
            _worker,
            train_loop_config=job.model_dump(mode="json"),
            scaling_config=ScalingConfig(
                num_workers=config.workers, use_gpu=gpus > 0, resources_per_worker=resources
            ),
            torch_config=TorchConfig(backend="nccl" if gpus else "gloo"),
            datasets={_stream_of(rank): one for rank, one in enumerate(datasets)},
            dataset_config=DataConfig(
                datasets_to_split=[], execution_options=ExecutionOptions(preserve_order=True)
            ),
            run_config=RunConfig(  # type: ignore[call-arg]  # the stub names the older class
                name=f"train-{uuid.uuid4().hex[:8]}",  # a name used before would resume by itself
                storage_path=str(storage),
                worker_runtime_env={"env_vars": _openmp(config)},
            ),
        )
        try:
            trainer.fit()
        except WorkerGroupError as error:
            fault = _fault_in(error.worker_failures.values())
            if fault is not None:
                raise TrainingFault(fault) from error
            if attempt == _ATTEMPTS:
                raise
            logger.warning("the worker group died and is started again: %s", error)
        else:
            return
        finally:
            shutil.rmtree(storage, ignore_errors=True)


def _stream_of(rank: int) -> str:
    return f"rows-{rank}"


def _openmp(config: TrainConfig) -> dict[str, str]:
    """How many threads, and how they wait. Read once, when torch is imported.

    Ray sets one thread otherwise. Threads that sleep at once lose a third of a step in waking up;
    threads that spin for long lose more as soon as another process wants a core. A short spin,
    then sleep, was measured as good as spinning on idle cores.
    """
    return {
        "OMP_NUM_THREADS": str(config.threads_per_worker),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "20000",
    }


def _fault_in(failures: Iterable[BaseException]) -> str | None:
    """The message of a failure that another try would repeat, if there is one."""
    for failure in failures:
        cause: BaseException | None = failure
        while cause is not None:
            if isinstance(cause, (TrainingFault, ValueError)):  # our faults of data are ValueErrors
                return str(cause)
            cause = cause.__cause__
    return None


def _worker(config: dict[str, Any]) -> None:
    """What Ray Train runs on each worker."""
    import ray.train
    import ray.train.torch

    job = TrainJob.model_validate_json(json.dumps(config))
    torch.set_num_threads(job.train.threads_per_worker)
    assert torch.get_num_threads() == job.train.threads_per_worker
    context = ray.train.get_context()
    rank = context.get_world_rank()
    stream: Iterable[pa.Table] | None = None
    if job.states == "streaming":
        rows = ray.train.get_dataset_shard(_stream_of(rank))
        stream = rows.iter_batches(batch_size=None, batch_format="pyarrow")
    train_rows(
        job,
        rank=rank,
        world=context.get_world_size(),
        device=torch.device(ray.train.torch.get_device()),
        stream=stream,
    )


def train_rows(
    job: TrainJob,
    *,
    rank: int,
    world: int,
    device: torch.device,
    stream: Iterable[pa.Table] | None = None,
    on_step: Callable[[int], None] | None = None,
) -> None:
    """Train from the newest checkpoint to the last step, and write what was learned.

    The process group must exist. `stream` has this rank's rows from that checkpoint on, where the
    job is streamed. `on_step` is called with the number of finished steps.
    """
    run = _Run(job, rank, world, device, stream)
    reader = ReadAhead(run.planned.batches, run.plan.turns(run.step, run.until_step))
    try:
        finished = run.train(reader, on_step)
    finally:
        reader.close()
    if finished and run.step == run.plan.total_steps:
        run.finish()


@dataclass
class _Window:
    """Sums over the steps since the last line of metrics."""

    tally: Tally
    steps: int = 0
    loss: float = 0.0
    rows: int = 0
    tokens: int = 0
    waited: float = 0.0
    set_aside: int = 0  # samples without states, since the worker started
    started: float = field(default_factory=time.monotonic)


def _open_rows(job: TrainJob, stream: Iterable[pa.Table] | None) -> tuple[TokenRows, FeatureRows]:
    """What is known of all rows, and where their states come from."""
    folder = Path(job.features)
    layers, size = job.draft.aux_layer_ids, job.draft.target_hidden_size
    if job.states == "offline":
        store = FeatureStore(folder, aux_layer_ids=layers)
        return store, store
    tokens = TokenStore(folder / TOKENS_FILE)
    sizes = {"aux_size": len(layers) * size, "last_size": size}
    if job.states == "chunked":
        store = FeatureStore(folder, aux_layer_ids=layers)
        return tokens, SlicedRows(tokens, store, failed_samples(folder), **sizes)
    assert stream is not None, "a streamed job comes with its stream"
    longest = job.train.max_tokens_per_sample
    return tokens, StreamedRows(tokens, stream, max_tokens=longest, **sizes)


class _Run:
    """One worker's rows, engine and clock while the loop runs."""

    def __init__(
        self,
        job: TrainJob,
        rank: int,
        world: int,
        device: torch.device,
        stream: Iterable[pa.Table] | None,
    ) -> None:
        self.job, self.config, self.rank, self.device = job, job.train, rank, device
        self.output = Path(job.output)
        tokens, self.rows = _open_rows(job, stream)
        self.plan = RowPlan(tokens, job.train, rank=rank, world=world)
        self.planned = PlannedRows(self.plan, self.rows, job.draft, job.train)
        self.vocab = draft_vocab.load(Path(job.draft_vocab))
        snapshot = checkpoint.load_newest(Path(job.checkpoints), fingerprint=job.fingerprint)
        self.step = snapshot.step if snapshot else 0
        self.until_step = self.plan.total_steps if job.until_step is None else job.until_step
        self.seconds_before = snapshot.seconds if snapshot else 0.0
        self.started = time.monotonic()
        self.embedding, head = target_weights(Path(job.target))
        self.engine = self._engine(head, snapshot)
        self.heldout: dict[str, Any] | None = None
        self._evaluation: _Evaluation | None = None
        if rank == 0:
            _cut_metrics(self.metrics, self.step)

    @property
    def metrics(self) -> Path:
        """One JSON object a line; rank 0 alone writes it."""
        return self.output / "metrics.jsonl"

    def _engine(self, head: torch.Tensor, snapshot: Snapshot | None) -> Engine:
        draft = DraftModel(self.job.draft)
        draft.load_state_dict({"embed_tokens.weight": self.embedding}, strict=False)
        steps, decay = self.config.ttt_steps, self.config.step_decay
        head = head.to(DTYPES[self.config.dtype])
        loss = TTTLoss(draft, head, self.vocab.used, steps=steps, step_decay=decay)
        if snapshot is None:
            first = initial_weights(self.job.draft, head, self.vocab.used, seed=self.config.seed)
            return Engine(loss, self.config, first, device=self.device)
        return Engine(
            loss,
            self.config,
            snapshot.weights,
            device=self.device,
            moments={"exp_avg": snapshot.exp_avg, "exp_avg_sq": snapshot.exp_avg_sq},
            ema=snapshot.ema,
            step=snapshot.step,
        )

    def train(self, reader: ReadAhead, on_step: Callable[[int], None] | None) -> bool:
        """Take the turns that are left. False where a stop was asked for before the last step."""
        self._window = _Window(Tally.empty(self.config.ttt_steps))
        for turn, batches in reader:
            if turn.part is not None:
                self._evaluate(turn, batches)
                continue
            self._window.waited += reader.waited_seconds
            stop = self._step(turn.step, batches)
            if on_step:
                on_step(self.step)
            if stop and self.step < self.until_step:
                return False
        return True

    def _step(self, step: int, batches: list[PackedBatch]) -> bool:
        """One optimiser step. Returns whether a stop was asked for."""
        window = self._window
        rows, tokens, stop = self._agree(batches)
        rate = learning_rate(step, self.plan.total_steps, self.config)
        result = self.engine.step(batches, max(1, rows), rate)
        loss = float(self._sum(torch.tensor(result.loss, dtype=torch.float64)))
        if not (math.isfinite(loss) and math.isfinite(result.grad_norm)):
            raise _not_finite(step, batches, loss, result.grad_norm)
        self.step = step + 1
        window.tally += result.tally
        window.steps += 1
        window.loss += loss
        window.rows, window.tokens = window.rows + rows, window.tokens + tokens
        last = self.step == self.until_step
        if last or self.step % self.config.log_every_steps == 0:
            self._log(window, rate, result.grad_norm)
            self._window = _Window(Tally.empty(self.config.ttt_steps))
        if last or stop or self.step % self.config.checkpoint_every_steps == 0:
            self._save()
        return stop

    def finish(self) -> None:
        """Write the weights to export and the summary. They appear only when training is done."""
        averaged = self.engine.averaged_weights()
        weights = averaged or self.engine.weights()
        if self.rank != 0:
            return
        # One key: safetensors writes several in an order that differs from process to process.
        about = {"made": json.dumps({"step": self.step, "averaged": bool(averaged)})}
        temporary = self.output / f".weights.{os.getpid()}.tmp"
        save_file(weights, temporary, metadata=about)
        temporary.replace(self.output / "weights.safetensors")
        _write_json(self.output / "draft_config.json", self.job.draft.model_dump(mode="json"))
        volume = self.plan.volume()
        summary = {
            "steps": self.step,
            "epochs": self.config.epochs,
            **volume,
            "rows_trained": volume["rows"] * self.config.epochs,
            "tokens_trained": volume["tokens"] * self.config.epochs,
            "seconds": round(self._seconds(), 1),
            "averaged": bool(averaged),
            "draft_vocab_coverage": self.vocab.coverage,
            "heldout": self.heldout,
        }
        _write_json(self.output / "summary.json", summary)

    def _agree(self, batches: list[PackedBatch]) -> tuple[int, int, bool]:
        """Teaching rows and tokens of the step over all ranks, and whether to stop after it."""
        asked = self.rank == 0 and (self.output / STOP_FILE).exists()
        rows = sum(len(batch.rows) for batch in batches)
        tokens = sum(len(batch.input_ids) for batch in batches)
        mine = [rows, tokens, int(asked), len(self.rows.set_aside)]
        rows, tokens, stops, set_aside = self._sum(torch.tensor(mine)).tolist()
        samples = len(self.plan.rows.sample_ids)
        if set_aside > MAX_SET_ASIDE_SHARE * samples:
            raise TrainingFault(
                f"{set_aside} of {samples} samples came without states; this rank's last: "
                f"{list(self.rows.set_aside.items())[-1:]}. At most {MAX_SET_ASIDE_SHARE:.0%} "
                "may; a target that computes NaN in this dtype needs another one"
            )
        self._window.set_aside = set_aside
        return rows, tokens, bool(stops)

    def _sum(self, values: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, on the CPU."""
        values = values.to(self.device)
        dist.all_reduce(values)
        return values.cpu()

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _log(self, window: _Window, rate: float, grad_norm: float) -> None:
        tally = Tally.from_vector(self._sum(window.tally.vector()))
        elapsed = time.monotonic() - window.started
        if self.rank == 0:
            self._append(
                "train",
                epoch=(self.step - 1) // self.plan.steps_per_epoch,
                total_steps=self.plan.total_steps,
                loss=window.loss / window.steps,
                learning_rate=rate,
                grad_norm=grad_norm,
                rows=window.rows,
                tokens=window.tokens,
                seconds=round(elapsed, 3),
                rows_per_second=window.rows / elapsed,
                tokens_per_second=window.tokens / elapsed,
                data_wait_share=window.waited / elapsed,
                set_aside=window.set_aside,
                **tally.summary(),
            )

    def _evaluate(self, turn: Turn, batches: list[PackedBatch]) -> None:
        """Count what the averaged weights get right of held-out rows; add up after the last."""
        if self._evaluation is None:
            weights = self.engine.averaged_weights() or self.engine.weights()
            evaluator = self.engine.evaluator(weights, self.embedding, self.vocab.used)
            self._evaluation = _Evaluation(evaluator, self.plan, self.device)
        for batch in batches:
            self._evaluation.add(batch)
        if turn.is_last_part:
            self.heldout = self._evaluation.summary(self._sum)
            self._evaluation = None
            if self.rank == 0:
                self._append("heldout", **self.heldout)

    def _save(self) -> None:
        weights, moments = self.engine.weights(), self.engine.moments()
        averaged = self.engine.averaged_weights()
        if self.rank == 0:
            snapshot = Snapshot(
                step=self.step,
                fingerprint=self.job.fingerprint,
                seconds=self._seconds(),
                weights=weights,
                ema=averaged,
                **moments,
            )
            checkpoint.save(Path(self.job.checkpoints), snapshot, kept=self.config.checkpoints_kept)
        self._sum(torch.zeros(1))  # nobody goes on before the checkpoint is there

    def _append(self, kind: str, **facts: Any) -> None:
        line = json.dumps({"kind": kind, "step": self.step, **facts}, allow_nan=False)
        with self.metrics.open("a") as file:
            file.write(line + "\n")


class _Evaluation:
    """Held-out acceptance from globally summed counts, overall and by domain."""

    def __init__(self, evaluator: TTTLoss, plan: RowPlan, device: torch.device) -> None:
        self._evaluator, self._device = evaluator, device
        rows, held = plan.rows, plan.split.heldout
        self._domain_of = {rows.sample_ids[row]: rows.domains[row] for row in held}
        self._domains = sorted(set(self._domain_of.values()))
        shape = Tally.empty(evaluator.steps).vector().shape
        self._sums = torch.zeros(len(self._domains), *shape, dtype=torch.int64)

    @torch.no_grad()
    def add(self, batch: PackedBatch) -> None:
        """Count what the draft gets right of these rows."""
        _, speakable, correct = (flags.cpu() for flags in self._evaluator(batch.to(self._device)))
        for number, sample_id in enumerate(batch.sample_ids):
            of = batch.documents == number
            tally = Tally.of(batch.counted[of], speakable[of], correct[of])
            self._sums[self._domains.index(self._domain_of[sample_id])] += tally.vector()

    def summary(self, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """The counts of all ranks. Every rank must call this together."""
        sums = sum_over_ranks(self._sums)
        return {
            "overall": Tally.from_vector(sums.sum(0)).summary(),
            "domains": {
                name: Tally.from_vector(part).summary()
                for name, part in zip(self._domains, sums, strict=True)
            },
        }


def _not_finite(
    step: int, batches: list[PackedBatch], loss: float, grad_norm: float
) -> TrainingFault:
    names = sorted(name for batch in batches for name in batch.sample_ids)
    return TrainingFault(
        f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; finite numbers were expected. "
        f"This rank's samples: {', '.join(names)}. Look at them with eyas glance; if their states "
        "are sound, lower train.learning_rate. The last checkpoint is from before this step"
    )


def _cut_metrics(path: Path, step: int) -> None:
    """Drop what will be made again, held-out rows at the step itself included, and a last line
    that a kill cut short."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith("\n"):
            break
        fields = json.loads(line)
        if fields["step"] > step or (fields["kind"] == "heldout" and fields["step"] == step):
            break
        kept.append(line)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text("".join(kept))
    temporary.replace(path)


def _write_json(path: Path, value: Any) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n")
    temporary.replace(path)
