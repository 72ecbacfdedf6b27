"""The engine's loop: requests in, tokens out, batched continuously in a thread of its own.

A new request is read (prefill) between two steps of those that run. A step adds one token to each
running request, or, with a draft, verifies a chain of drafted tokens for each.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError

from actors.capture_file import publish
from actors.protocol import SpeculationCounters
from actors.protocol_server import ServedFinish, ServedRequest
from actors.reference_draft import Draft
from actors.reference_model import States, Target
from actors.reference_sampling import Sampler, greedy, next_tokens
from actors.reference_speculation import Drafted, Speculation

logger = logging.getLogger(__name__)

# Prompts read in one pass, padding included: enough to fill the cores, few enough that the
# running requests wait a moment only and the activations stay near the caches.
_PREFILL_TOKENS = 2048
# How much longer than the oldest waiting prompt a companion may be, and how much shorter.
_SIMILAR_TOKENS = 32
_SIMILAR_SHARE = 0.25


@dataclass(frozen=True)
class Outcome:
    """How one request ended. `output_ids` include the stop token."""

    request: ServedRequest
    output_ids: tuple[int, ...]
    finish: ServedFinish
    speculation: SpeculationCounters | None
    ran: bool  # False: taken back while it waited


@dataclass(frozen=True)
class Broken:
    """The engine failed, or stopped, with the request unfinished."""

    message: str
    is_shutdown: bool


@dataclass(frozen=True)
class LoadFigures:
    """What runs and waits now."""

    running: int
    waiting: int
    used_tokens: int
    tokens_per_second: float


@dataclass(eq=False)
class _Running:
    """One request with a slot; its place in the engine's list is its slot."""

    request: ServedRequest
    done: Callable[[Outcome | Broken], object]
    sampler: Sampler
    output: list[int] = field(default_factory=list)
    cached: int = 0  # tokens in the slot; the newest token is not among them
    drafted: Drafted | None = None
    histogram: list[int] = field(default_factory=list)


class Engine:
    """Owns the target, the draft and the thread that runs them."""

    def __init__(
        self,
        target: Target,
        *,
        slots: int,
        threads: int,
        draft: Draft | None = None,
        draft_steps: int = 0,
        capture_folder: Path | None = None,
    ) -> None:
        assert draft is None or draft_steps > 0
        assert draft is None or draft.header.aux_layer_ids == target.aux_layer_ids
        assert capture_folder is None or target.aux_layer_ids
        self._target = target
        self._slots = slots
        self._threads = threads
        self._speculation = (
            None if draft is None else Speculation(target, draft, draft_steps, slots)
        )
        self._capture_folder = capture_folder
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._aborted: list[Callable[[ServedRequest], bool]] = []
        self._work = threading.Condition()
        self._stopping = False
        self._failure: str | None = None
        self._rate = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: ServedRequest, done: Callable[[Outcome | Broken], object]) -> None:
        """Queue a request; `done` is called once, from the engine's thread or from here."""
        entry = _Running(request, done, Sampler(request.sampling))
        with self._work:
            broken = self._refusal()
            if broken is None:
                self._waiting.append(entry)
                self._work.notify()
        if broken is not None:
            done(broken)

    def abort(self, means: Callable[[ServedRequest], bool]) -> None:
        """Take back every request that `means` names."""
        with self._work:
            self._aborted.append(means)
            self._work.notify()

    def stop(self) -> None:
        """End the thread; what is unfinished ends as `Broken`."""
        with self._work:
            self._stopping = True
            self._work.notify()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def failure(self) -> str | None:
        """Why the engine is dead, or None."""
        return self._failure

    def load(self) -> LoadFigures:
        """A snapshot for `/v1/loads`."""
        running, waiting = list(self._running), len(self._waiting)
        used = sum(entry.cached for entry in running)
        return LoadFigures(len(running), waiting, used, self._rate if running else 0.0)

    def _refusal(self) -> Broken | None:
        if self._failure is not None:
            return Broken(f"the engine failed: {self._failure}", is_shutdown=False)
        if self._stopping:
            return Broken("the server is shutting down", is_shutdown=True)
        return None

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a setting of the thread that computes
        try:
            with torch.inference_mode():
                while self._wait_for_work():
                    self._take_back()
                    if not self._admit() and self._running:
                        self._step()
        except Exception as error:
            # The thread's edge: recorded, and every request is told.
            logger.exception("the engine failed")
            self._failure = f"{type(error).__name__}: {error}"
        with self._work:
            self._stopping = True
            left = [*self._running, *self._waiting]
            self._running, self._waiting = [], deque()
        broken = self._refusal()
        assert broken is not None
        for entry in left:
            entry.done(broken)

    def _wait_for_work(self) -> bool:
        with self._work:
            while not (self._stopping or self._waiting or self._running or self._aborted):
                self._work.wait()
            return not self._stopping

    def _take_back(self) -> None:
        with self._work:
            if not self._aborted:
                return
            claims, self._aborted = self._aborted, []
            waiting = [one for one in self._waiting if any(means(one.request) for means in claims)]
            for entry in waiting:
                self._waiting.remove(entry)
        for entry in waiting:
            finish = ServedFinish.abort("Abort in waiting queue")
            entry.done(Outcome(entry.request, (), finish, None, ran=False))
        self._retire(
            {
                slot: ServedFinish.abort("Aborted")
                for slot, entry in enumerate(self._running)
                if any(means(entry.request) for means in claims)
            }
        )

    def _admit(self) -> bool:
        """Read one group of waiting prompts; whether there was one."""
        with self._work:
            group = _similar_prompts(self._waiting, self._slots - len(self._running))
            for entry in group:
                self._waiting.remove(entry)
        if not group:
            return False
        # Those that decode come first, so that their slots follow the running ones.
        group.sort(key=lambda entry: entry.request.max_new_tokens == 0)
        decoding = sum(entry.request.max_new_tokens > 0 for entry in group)
        first = len(self._running)
        self._running += group
        for entry in group:
            entry.cached = len(entry.request.input_ids)
        states = self._target.prefill(
            [entry.request.input_ids for entry in group], first_slot=first if decoding else None
        )
        finishes: dict[int, ServedFinish | Broken] = {}
        if decoding:
            finishes |= self._first_tokens(first, decoding, states)
        for row in range(decoding, len(group)):
            finishes[first + row] = ServedFinish.length(0)
        if self._capture_folder is not None:
            for row, entry in enumerate(group):
                broken = self._capture(self._capture_folder, entry, states, row)
                if broken is not None:
                    finishes[first + row] = broken
        self._retire(finishes)
        return True

    def _first_tokens(self, first: int, count: int, states: States) -> dict[int, ServedFinish]:
        entries = self._running[first : first + count]
        ends = torch.tensor([entry.cached - 1 for entry in entries], device=states.last.device)
        rows = torch.arange(count, device=ends.device)
        logits = self._target.logits(states.last[rows, ends])
        tokens = next_tokens(logits, [entry.sampler for entry in entries])
        finishes: dict[int, ServedFinish] = {}
        for row, (entry, token) in enumerate(zip(entries, tokens, strict=True)):
            finish = self._append(entry, token)
            if finish is not None:
                finishes[first + row] = finish
        if self._speculation is not None:
            assert states.aux is not None
            prompts = [(*entry.request.input_ids[1:], entry.output[-1]) for entry in entries]
            drafted = self._speculation.prefill(prompts, states.aux[:count], first_slot=first)
            for entry, one in zip(entries, drafted, strict=True):
                entry.drafted = one
        return finishes

    def _step(self) -> None:
        started, before = time.monotonic(), sum(len(entry.output) for entry in self._running)
        finishes = self._decode() if self._speculation is None else self._verify(self._speculation)
        tokens = sum(len(entry.output) for entry in self._running) - before
        self._rate = tokens / (time.monotonic() - started)
        self._retire(finishes)

    def _decode(self) -> dict[int, ServedFinish]:
        running = self._running
        newest = torch.tensor([[entry.output[-1]] for entry in running])
        states = self._target.extend(newest, [entry.cached for entry in running])
        logits = self._target.logits(states.last[:, 0])
        finishes: dict[int, ServedFinish] = {}
        tokens = next_tokens(logits, [entry.sampler for entry in running])
        for slot, (entry, token) in enumerate(zip(running, tokens, strict=True)):
            entry.cached += 1
            finish = self._append(entry, token)
            if finish is not None:
                finishes[slot] = finish
        return finishes

    def _verify(self, speculation: Speculation) -> dict[int, ServedFinish]:
        """One round: draft a chain for each, read it in one pass, keep what the target says too."""
        running = self._running
        starts = [entry.cached for entry in running]
        newest = [entry.output[-1] for entry in running]
        drafted = [entry.drafted for entry in running if entry.drafted is not None]
        assert len(drafted) == len(running)
        chains = speculation.chains(drafted, starts)  # [n, S]
        ids = torch.cat([torch.tensor(newest)[:, None], chains.cpu()], dim=1)
        states = self._target.extend(ids, starts)
        best, broken = greedy(self._target.logits(states.last))  # [n, S+1]
        agreed = (chains == best[:, :-1]).cumprod(dim=1).sum(dim=1)  # [n]
        finishes: dict[int, ServedFinish] = {}
        rounds = zip(running, best.tolist(), broken.tolist(), agreed.tolist(), strict=True)
        for slot, (entry, tokens, is_broken, accepted) in enumerate(rounds):
            entry.cached += accepted + 1
            _count(entry.histogram, accepted)
            for token, nan in zip(tokens[: accepted + 1], is_broken, strict=False):
                finish = self._append(entry, None if nan else token)
                if finish is not None:
                    # The round counts whole though the answer is cut here, as in SGLang.
                    finishes[slot] = finish
                    break
        assert states.aux is not None
        # The drafted states give way to the target's own, for the accepted tokens.
        for entry, one in zip(
            running, speculation.extend(best, states.aux, starts, agreed), strict=True
        ):
            entry.drafted = one
        return finishes

    def _append(self, entry: _Running, token: int | None) -> ServedFinish | None:
        """Add a token; the reason if it was the last. None as a token is a NaN."""
        request = entry.request
        stops = frozenset() if request.ignore_eos else request.stop_token_ids | self._target.eos_ids
        if token is None:
            # SGLang writes a stop token over the id.
            entry.output.append(min(self._target.eos_ids | request.stop_token_ids, default=0))
            return ServedFinish.nan()
        entry.output.append(token)
        if token in stops:
            return ServedFinish.stop(token)
        if len(entry.output) >= request.max_new_tokens:
            return ServedFinish.length(request.max_new_tokens)
        return None

    def _capture(self, folder: Path, entry: _Running, states: States, row: int) -> Broken | None:
        """Publish a prompt's states. A full disk fails this request, not the engine."""
        assert states.aux is not None
        request, tokens = entry.request, len(entry.request.input_ids)
        aux, last = states.aux[row, :tokens], states.last[row, :tokens]
        try:
            publish(folder, request.rid, request.input_ids, aux, last, self._target.aux_layer_ids)
        except (OSError, SafetensorError) as error:
            logger.error("the states of %s were not written: %s", request.rid, error)
            return Broken(f"the captured states were not written: {error}", is_shutdown=False)
        return None

    def _retire(self, finishes: Mapping[int, ServedFinish | Broken]) -> None:
        """Tell the finished ones, and close the gaps: the last slot moves into each."""
        ended = []
        for slot in sorted(finishes, reverse=True):
            entry, last = self._running[slot], len(self._running) - 1
            if slot != last:
                kept = self._running[last]
                self._target.cache.move(last, slot, kept.cached)
                if self._speculation is not None:
                    self._speculation.cache.move(last, slot, kept.cached)
                self._running[slot] = kept
            self._running.pop()
            ended.append((entry, finishes[slot]))
        if ended and not self._running:
            self._target.cache.clear()
            if self._speculation is not None:
                self._speculation.cache.clear()
        for entry, finish in reversed(ended):
            entry.done(finish if isinstance(finish, Broken) else self._outcome(entry, finish))

    def _outcome(self, entry: _Running, finish: ServedFinish) -> Outcome:
        counters = None if self._speculation is None else _counters(entry.histogram)
        return Outcome(entry.request, tuple(entry.output), finish, counters, ran=True)


def _similar_prompts(waiting: Sequence[_Running], free_slots: int) -> list[_Running]:
    """The oldest waiting prompt, and others of about its length that fit into one pass."""
    if not waiting or free_slots < 1:
        return []
    group = [waiting[0]]
    base = longest = len(waiting[0].request.input_ids)
    allowed = max(_SIMILAR_TOKENS, int(base * _SIMILAR_SHARE))
    for entry in list(waiting)[1:]:
        tokens = len(entry.request.input_ids)
        longest_then = max(longest, tokens)
        if len(group) == free_slots or longest_then * (len(group) + 1) > _PREFILL_TOKENS:
            break
        if abs(tokens - base) <= allowed:
            group.append(entry)
            longest = longest_then
    return group


def _count(histogram: list[int], accepted: int) -> None:
    histogram.extend([0] * (accepted + 1 - len(histogram)))
    histogram[accepted] += 1


def _counters(histogram: Sequence[int]) -> SpeculationCounters:
    return SpeculationCounters(
        verifications=sum(histogram),
        correct_drafts=sum(accepted * rounds for accepted, rounds in enumerate(histogram)),
        correct_drafts_histogram=tuple(histogram),
    )
