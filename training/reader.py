"""The planned rows of one worker, read in plan order, a thread reading ahead."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from training.config import DraftConfig, TrainConfig
from training.features import FeatureRow, FeatureRows, TokenRows
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

_TURNS_AHEAD = 2  # turns whose rows are read while another one runs


@dataclass(frozen=True)
class Turn:
    """What is read at once: an optimiser step, or a part of the held-out rows between two steps."""

    step: int  # of the steps, counted from 0 over the whole run; for a part: of those made by then
    part: int | None = None  # None: an optimiser step
    parts: int = 0

    @property
    def is_last_part(self) -> bool:
        """Whether all held-out rows have come by with this turn."""
        return self.part == self.parts - 1


class RowPlan:
    """Which rows each turn of one rank reads: a pure function of the rows' ids and the config."""

    def __init__(self, rows: TokenRows, config: TrainConfig, *, rank: int, world: int) -> None:
        self.rows, self.split = rows, split_rows(rows.sample_ids, config.heldout_share)
        self._config, self._rank, self._world = config, rank, world
        self._lengths = [min(length, config.max_tokens_per_sample) for length in rows.lengths]
        # A step of a row that may teach costs about five times the keys and values of a token.
        self._costs = [
            length + 5 * config.ttt_steps * loss_tokens
            for length, loss_tokens in zip(self._lengths, rows.loss_tokens, strict=True)
        ]
        self.steps_per_epoch = steps_per_epoch(len(self.split.train), config.batch_samples)
        self.total_steps = self.steps_per_epoch * config.epochs
        self._epoch: tuple[int, list[StepPlan]] | None = None
        # The same number of parts on every rank, and one of no rows where none are held out.
        heldout = deal(
            self.split.heldout, self._lengths, self._costs, config.micro_batch_tokens, world
        )
        self._heldout = heldout[rank] or ((),)

    def turns(self, step: int, until: int) -> Iterator[Turn]:
        """From so many finished steps to so many: steps, and the held-out rows after each epoch."""
        if step and step % self.steps_per_epoch == 0:
            yield from self._parts(step)
        for at in range(step, until):
            yield Turn(at)
            if (at + 1) % self.steps_per_epoch == 0:
                yield from self._parts(at + 1)

    def micro_batches(self, turn: Turn) -> list[tuple[int, ...]]:
        """The rows of each forward of one turn, in the order in which they are read."""
        if turn.part is not None:
            return [self._heldout[turn.part]]
        epoch, at = divmod(turn.step, self.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._plan(epoch))
        rows = self.split.train
        return [tuple(rows[i] for i in batch) for batch in self._epoch[1][at][self._rank]]

    def volume(self) -> dict[str, int]:
        """Samples, tokens and teaching rows of one epoch, and what was cut. Reads every mask."""
        limit, steps = self._config.max_tokens_per_sample, self._config.ttt_steps
        cut = [length - limit for length in self.rows.lengths if length > limit]
        masks = (self.rows.tokens(row)[1][:limit] for row in self.split.train)
        return {
            "samples": len(self.split.train),
            "heldout_samples": len(self.split.heldout),
            "tokens": sum(self._lengths[row] for row in self.split.train),
            "rows": sum(int(counted_rows(mask, steps).any(-1).sum()) for mask in masks),
            "cut_samples": len(cut),
            "cut_tokens": sum(cut),
        }

    def _parts(self, step: int) -> Iterator[Turn]:
        return (Turn(step, part, len(self._heldout)) for part in range(len(self._heldout)))

    def _plan(self, epoch: int) -> list[StepPlan]:
        return plan_epoch(
            [self.rows.sample_ids[row] for row in self.split.train],
            [self._lengths[row] for row in self.split.train],
            [self._costs[row] for row in self.split.train],
            seed=self._config.seed,
            epoch=epoch,
            batch_samples=self._config.batch_samples,
            micro_batch_tokens=self._config.micro_batch_tokens,
            workers=self._world,
        )


class PlannedRows:
    """The packed batches of each turn of a plan. Rows are asked for in the plan's order."""

    def __init__(
        self, plan: RowPlan, rows: FeatureRows, draft: DraftConfig, config: TrainConfig
    ) -> None:
        self._plan, self._rows, self._config = plan, rows, config
        self._last_size = draft.target_hidden_size
        self._aux_size = len(draft.aux_layer_ids) * draft.target_hidden_size

    def batches(self, turn: Turn) -> list[PackedBatch]:
        """The micro-batches of one turn."""
        return [self._pack(rows) for rows in self._plan.micro_batches(turn)]

    def _pack(self, numbers: Sequence[int]) -> PackedBatch:
        return pack(
            [self._cut(self._rows.row(number)) for number in numbers],
            steps=self._config.ttt_steps,
            aux_size=self._aux_size,
            last_size=self._last_size,
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
    """Iterate over turns and their batches while a thread reads the next ones.

    A fault in the reading thread is raised in the iterating one. `close` ends the thread.
    """

    def __init__(self, read: Callable[[Turn], list[PackedBatch]], turns: Iterable[Turn]) -> None:
        self._read, self._turns = read, turns
        self._ready: queue.Queue[tuple[Turn, list[PackedBatch]] | BaseException | None]
        self._ready = queue.Queue(maxsize=_TURNS_AHEAD)
        self._closed = threading.Event()
        self.waited_seconds = 0.0  # for the batches handed out last
        self._thread = threading.Thread(target=self._run, name="read-ahead", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[Turn, list[PackedBatch]]]:
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
            for turn in self._turns:
                item = (turn, self._read(turn))
                if self._closed.is_set():
                    return
                self._ready.put(item)
            self._ready.put(None)
        except BaseException as error:  # noqa: BLE001 - handed to the iterating thread, which raises
            self._ready.put(error)
