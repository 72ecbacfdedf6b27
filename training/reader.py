"""The planned rows of one worker, read from memory maps in plan order, a thread reading ahead."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from training.config import DraftConfig, TrainConfig
from training.features import FeatureRow, FeatureStore
from training.packing import (
    PackedBatch,
    StepPlan,
    counted_rows,
    deal,
    pack,
    plan_epoch,
    split_rows,
    steps_per_epoch,
)

_STEPS_AHEAD = 2  # optimiser steps whose rows are read while another one runs


class PlannedRows:
    """What each optimiser step of one rank reads: a pure function of the store and the config."""

    def __init__(
        self, store: FeatureStore, draft: DraftConfig, config: TrainConfig, *, rank: int, world: int
    ) -> None:
        self.store, self.split = store, split_rows(store.sample_ids, config.heldout_share)
        self._draft, self._config, self._rank, self._world = draft, config, rank, world
        self._lengths = [min(length, config.max_tokens_per_sample) for length in store.lengths]
        # A step of a row that may teach costs about five times the keys and values of a token.
        self._costs = [
            length + 5 * config.ttt_steps * loss_tokens
            for length, loss_tokens in zip(self._lengths, store.loss_tokens, strict=True)
        ]
        self.steps_per_epoch = steps_per_epoch(len(self.split.train), config.batch_samples)
        self.total_steps = self.steps_per_epoch * config.epochs
        self._epoch: tuple[int, list[StepPlan]] | None = None

    def step(self, step: int) -> list[PackedBatch]:
        """The micro-batches of one optimiser step, counted from 0 over the whole run."""
        epoch, at = divmod(step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._plan(epoch))
        rows = self.split.train
        return [self._pack([rows[i] for i in batch]) for batch in self._epoch[1][at][self._rank]]

    def heldout(self) -> Iterable[PackedBatch]:
        """This rank's share of the held-out rows, the same number of micro-batches on each rank."""
        plan = deal(
            self.split.heldout,
            self._lengths,
            self._costs,
            self._config.micro_batch_tokens,
            self._world,
        )
        return (self._pack(rows) for rows in plan[self._rank])

    def volume(self) -> dict[str, int]:
        """Samples, tokens and teaching rows of one epoch, and what was cut. Reads every mask."""
        limit, steps = self._config.max_tokens_per_sample, self._config.ttt_steps
        cut = [length - limit for length in self.store.lengths if length > limit]
        masks = (self.store.tokens(row)[1][:limit] for row in self.split.train)
        return {
            "samples": len(self.split.train),
            "heldout_samples": len(self.split.heldout),
            "tokens": sum(self._lengths[row] for row in self.split.train),
            "rows": sum(int(counted_rows(mask, steps).any(-1).sum()) for mask in masks),
            "cut_samples": len(cut),
            "cut_tokens": sum(cut),
        }

    def _plan(self, epoch: int) -> list[StepPlan]:
        return plan_epoch(
            [self.store.sample_ids[row] for row in self.split.train],
            [self._lengths[row] for row in self.split.train],
            [self._costs[row] for row in self.split.train],
            seed=self._config.seed,
            epoch=epoch,
            batch_samples=self._config.batch_samples,
            micro_batch_tokens=self._config.micro_batch_tokens,
            workers=self._world,
        )

    def _pack(self, rows: Sequence[int]) -> PackedBatch:
        size = self._draft.target_hidden_size
        return pack(
            [self._cut(self.store.row(row)) for row in rows],
            steps=self._config.ttt_steps,
            aux_size=len(self._draft.aux_layer_ids) * size,
            last_size=size,
        )

    def _cut(self, row: FeatureRow) -> FeatureRow:
        end = self._config.max_tokens_per_sample
        return replace(
            row,
            input_ids=row.input_ids[:end],
            loss_mask=row.loss_mask[:end],
            aux=row.aux[:end],
            last=row.last[:end],
        )


class ReadAhead:
    """Iterate over steps and their batches while a thread reads the next ones.

    A fault in the reading thread is raised in the iterating one. `close` ends the thread.
    """

    def __init__(self, read: Callable[[int], list[PackedBatch]], steps: Iterable[int]) -> None:
        self._read, self._steps = read, steps
        self._ready: queue.Queue[tuple[int, list[PackedBatch]] | BaseException | None]
        self._ready = queue.Queue(maxsize=_STEPS_AHEAD)
        self._closed = threading.Event()
        self.waited_seconds = 0.0  # for the batches handed out last
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, list[PackedBatch]]]:
        while True:
            started = time.monotonic()
            item = self._ready.get()
            self.waited_seconds = time.monotonic() - started
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            yield item

    def close(self) -> None:
        """Stop reading and wait for the thread. What was read ahead is dropped."""
        self._closed.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue

    def _run(self) -> None:
        # A second thread with an OpenMP team of its own makes more threads than cores: libgomp then
        # stops spinning everywhere, and the training thread loses a third of its speed waking up.
        torch.set_num_threads(1)
        try:
            for step in self._steps:
                item = (step, self._read(step))
                if self._closed.is_set():
                    return
                self._ready.put(item)
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the iterating thread, which raises
            self._ready.put(error)
