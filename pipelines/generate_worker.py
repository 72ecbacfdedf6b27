"""The worker of generate: one event loop, one pool, one ledger. Never raises for a row."""

import asyncio
import functools
import hashlib
import json
import logging
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from actors.config import AttachedServers, PoolConfig, Sampling
from actors.dispatch import ServerReport
from actors.fit import Expectation, check_fit
from actors.pool import Completed, Failed, Pool
from actors.preflight import model_context_tokens
from actors.protocol import GenerateRequest, sampling_params
from pipelines.calls import PromptReader
from pipelines.collector import rare_collections
from pipelines.conversation import (
    NO_ROOM,
    Answer,
    HistoryRule,
    NotAsked,
    messages_before,
    next_prompt_ids,
    turns_of,
)
from pipelines.durable_rows import DurableRows
from pipelines.ledger import Answered, Ledger, Row
from pipelines.loop_thread import LoopThread
from pipelines.publish import Publisher
from pipelines.readings import pool_readings
from pipelines.recipe import Gates, Recipe, Target
from pipelines.response_row import RowMaker, decoder_of
from pipelines.row_report import RowReport
from pipelines.schema import response_id
from pipelines.segments import SegmentWriter
from pipelines.store import RunFolder
from pipelines.template import ChatTemplate, load_tokenizer
from pipelines.turns import history_rule

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 1.0
_RESERVED_TOKENS = 1  # the scheduler keeps the last place of the context
_NEVER = 2**31  # rows; the ledger says when a segment is written


class Report(Protocol):
    """The workers' end of a mailbox."""

    def put(self, items: Sequence[RowReport]) -> bool:
        """Hand over reports of durable rows; return whether to go on."""
        ...


@dataclass(frozen=True)
class WorkerPlan:
    """All that a worker needs to know, and nothing that changes."""

    run: RunFolder
    sets: tuple[str, ...]
    target: Target
    vocab_size: int
    context_tokens: int
    sampling: Sampling
    samples_per_prompt: int
    gates: Gates
    pool: PoolConfig  # this worker's share of it
    share: float  # of each server, in (0, 1]
    expectation: Expectation
    gateway: bool
    servers: Callable[[], tuple[ServerReport, ...]]
    report: Report
    # Segments that were there when the driver looked: what it wants asked is not in them, except
    # for the rows named here, which are the earlier turns of what it wants.
    seen_segments: frozenset[str] = frozenset()
    earlier_turns: frozenset[str] = frozenset()

    @staticmethod
    def of(
        recipe: Recipe,
        run: RunFolder,
        *,
        servers: Callable[[], tuple[ServerReport, ...]],
        report: Report,
        seen_segments: frozenset[str] = frozenset(),
        earlier_turns: frozenset[str] = frozenset(),
    ) -> "WorkerPlan":
        """The plan of each of the recipe's workers: they share the permits."""
        whole, workers = recipe.generate.pool, recipe.generate.workers
        servers_config = recipe.generate.servers
        permits = max(1, permits_per_server(recipe) // workers)
        return WorkerPlan(
            run=run,
            sets=tuple(one.name for one in recipe.prompts.train),
            target=recipe.target,
            vocab_size=target_vocab_size(Path(recipe.target.path)),
            context_tokens=recipe.prompts.context_tokens,
            sampling=recipe.generate.sampling,
            samples_per_prompt=recipe.generate.samples_per_prompt,
            gates=recipe.generate.gates,
            pool=whole.model_copy(update={"max_in_flight_per_server": permits}),
            share=1.0 / workers,
            expectation=expectation_of(recipe),
            gateway=isinstance(servers_config, AttachedServers) and servers_config.gateway,
            servers=servers,
            report=report,
            seen_segments=seen_segments,
            earlier_turns=earlier_turns,
        )


def permits_per_server(recipe: Recipe) -> int:
    """How many requests all workers together may have at one server."""
    permits = recipe.generate.pool.max_in_flight_per_server
    servers = recipe.generate.servers
    if isinstance(servers, AttachedServers) or servers.kind == "launch":
        return permits
    # What waits inside a server only makes its answers, and so the verdicts, late.
    running = servers.max_running_requests
    return min(permits, running + running // 4 + 1)


def target_vocab_size(target: Path) -> int:
    """The vocabulary size in the target's config.json."""
    config = json.loads((target / "config.json").read_bytes())
    text = config.get("text_config", config)
    size: int = text["vocab_size"]
    return size


def expectation_of(recipe: Recipe) -> Expectation:
    """What the recipe needs of a server that describes itself."""
    target = Path(recipe.target.path)
    return Expectation(target, recipe.prompts.context_tokens, model_context_tokens(target))


class GenerateWorker:
    """Asks for rows and makes them durable. One event loop in its own thread, one pool.

    Ray restarts a worker that died and gives it the same rows again: it looks up at its start what
    is durable already, so that a row is not asked twice.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._tokenizer = load_tokenizer(plan.target)
        self._decode = decoder_of(self._tokenizer)
        self._maker = RowMaker(plan.target.profile, plan.gates, self._decode)
        self._durable = DurableRows(
            plan.run, plan.sets, skip=plan.seen_segments, also=plan.earlier_turns
        )
        self._reader = PromptReader()
        self._conversations: set[asyncio.Task[int]] = set()
        self._is_open = True
        self._loop = LoopThread()
        self._loop.run(self._enter())

    def __call__(self, calls: pa.Table) -> pa.Table:
        """Read and answer the prompts of some calls. Returns how many rows became durable."""
        return pa.table({"rows": [self.answer(self._reader.prompts(calls))]})

    def answer(self, prompts: pa.Table) -> int:
        """Answer prompts; return how many rows became durable."""
        return self._loop.run(self._answer_all(prompt_rows(prompts)))

    def close(self) -> None:
        """End the loop and what lives in it. Ray ends the process instead."""
        self._loop.run(self._leave())
        self._loop.stop()

    async def _enter(self) -> None:
        plan = self._plan
        self._stack = AsyncExitStack()
        self._stack.enter_context(rare_collections())
        self._pool = await self._stack.enter_async_context(
            Pool(
                (),
                plan.pool,
                vocab_size=plan.vocab_size,
                fit=functools.partial(check_fit, expectation=plan.expectation),
                share=plan.share,
                gateway=plan.gateway,
            )
        )
        writers = {name: SegmentWriter(plan.run, name, flush_rows=_NEVER) for name in plan.sets}
        self._ledger = await self._stack.enter_async_context(
            Ledger(self._row, writers, confirm=self._pool.confirm, report=self._tell)
        )
        self._pool.apply(await asyncio.to_thread(plan.servers))
        self._watching = asyncio.create_task(self._watch())

    async def _leave(self) -> None:
        self._watching.cancel()
        await self._stack.aclose()

    async def _watch(self) -> None:
        """Follow the servers as they come and go, and stop asking when the tap is closed."""
        publisher, before = Publisher(self._plan.run.root.name), self._pool.snapshot()
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                self._pool.apply(await asyncio.to_thread(self._plan.servers))
                self._go_on(await asyncio.to_thread(self._plan.report.put, []))
                publisher.publish(pool_readings(before, now := self._pool.snapshot()))
                before = now
            except Exception:
                logger.exception("the driver cannot be reached; going on as before")

    def _tell(self, reports: Sequence[RowReport]) -> None:
        go_on = self._plan.report.put(reports)
        self._loop.call(self._go_on, go_on)

    def _go_on(self, is_open: bool) -> None:
        if self._is_open and not is_open:
            self._is_open = False
            for one in self._conversations:
                one.cancel()  # the pool tells the servers to stop

    async def _answer_all(self, prompts: Sequence[Mapping[str, Any]]) -> int:
        samples = range(1, self._plan.samples_per_prompt + 1)
        if not self._is_open:
            return 0
        tasks = [
            asyncio.create_task(self._converse(prompt, sample))
            for prompt in prompts
            for sample in samples
        ]
        self._conversations |= set(tasks)
        try:
            kept = await asyncio.gather(*tasks)
        except asyncio.CancelledError:  # the tap was closed; what has arrived is kept
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._ledger.flush()
            return sum(one.result() for one in tasks if not one.cancelled())
        finally:
            for one in tasks:
                one.cancel()
            self._conversations -= set(tasks)
        return sum(kept)

    async def _converse(self, prompt: Mapping[str, Any], sample: int) -> int:
        """Have every turn of one sample answered, each with the answers before it."""
        answers: list[Answer] = []
        asked = 0
        for turn in range(1, turns_of(prompt) + 1):
            name = response_id(prompt["sample_id"], turn, sample)
            row: Row | None = None
            if name in self._durable:
                if turn == turns_of(prompt):
                    break
                row = await asyncio.to_thread(self._durable.row, name)
            while row is None:  # a row whose server was exchanged under it is asked again
                row = await self._ask(prompt, answers, turn, sample)
                asked += row is not None
            if turn < turns_of(prompt):
                answers.append(Answer.of(row))
        return asked

    async def _ask(
        self, prompt: Mapping[str, Any], answers: Sequence[Answer], turn: int, sample: int
    ) -> Row | None:
        """The durable row of one response; None if it has to be asked again."""
        name = response_id(prompt["sample_id"], turn, sample)
        asked, not_asked = self._asked(prompt, answers, turn)
        params = self._params(name, asked["prompt_ids"])
        if not_asked is None and params["max_new_tokens"] < 1:
            room = f"{len(asked['prompt_ids'])} of {self._plan.context_tokens} tokens are prompt"
            not_asked = _not_asked(NO_ROOM, room)
        several = self._plan.samples_per_prompt * turns_of(prompt) > 1
        outcome: Completed[Any] | Failed = not_asked or await self._pool.generate(
            GenerateRequest(name, tuple(asked["prompt_ids"]), params),
            affinity=prompt["sample_id"] if several else None,
        )
        answered = Answered(asked, turn, sample, params, outcome, time.monotonic())
        return await self._ledger.keep(answered)

    def _asked(
        self, prompt: Mapping[str, Any], answers: Sequence[Answer], turn: int
    ) -> tuple[Mapping[str, Any], Failed | None]:
        """The prompt as this turn sees it, and why it is not asked, if so."""
        if turns_of(prompt) == 1:
            return prompt, None
        messages = messages_before(prompt, answers, turn, self._history_rule)
        ids = next_prompt_ids(prompt, answers, self._history_rule, self._decode)
        if isinstance(ids, NotAsked):
            return {**prompt, "messages": messages}, _not_asked(ids.fault, ids.detail)
        return {**prompt, "messages": messages, "prompt_ids": array("i", ids)}, None

    def _params(self, name: str, prompt_ids: Sequence[int]) -> dict[str, Any]:
        sampling = self._plan.sampling
        room = self._plan.context_tokens - len(prompt_ids) - _RESERVED_TOKENS
        return sampling_params(
            sampling,
            max_new_tokens=max(0, min(sampling.max_new_tokens, room)),
            seed=row_seed(sampling.seed, name),
            stop_token_ids=self._plan.target.profile.stop_token_ids,
        )

    @functools.cached_property
    def _history_rule(self) -> HistoryRule:
        template = ChatTemplate(self._tokenizer, self._plan.target.profile)
        return history_rule(template, self._plan.target.profile)

    def _row(self, answered: Answered) -> Row:
        return self._maker.response_row(
            answered.prompt,
            answered.params,
            answered.outcome,
            finished_at=datetime.now(timezone.utc),
            turn=answered.turn,
            sample=answered.sample,
        )


def _not_asked(fault: str, detail: str) -> Failed:
    return Failed(fault, detail, "", 0, 0, 0)


def prompt_rows(batch: pa.Table) -> list[dict[str, Any]]:
    """The rows of a batch; prompt ids as arrays of int32, by slices of one buffer."""
    ids = batch["prompt_ids"].combine_chunks()
    values, offsets = ids.values.to_numpy(), ids.offsets.to_pylist()
    rows = batch.drop_columns(["prompt_ids"]).to_pylist()
    for row, start, end in zip(rows, offsets[:-1], offsets[1:], strict=True):
        row["prompt_ids"] = array("i", values[start:end].tobytes())
    return rows


def row_seed(seed: int, sample_id: str) -> int:
    """The sampling seed of one response: 31 bits, of the recipe's seed and its sample id alone."""
    digest = hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
