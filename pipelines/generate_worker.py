"""The worker of generate: one event loop, one pool, its own segments. Never raises for a row."""

import asyncio
import hashlib
import json
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa

from actors.config import AttachedServers, EmbeddedServers, PoolConfig, Sampling
from actors.errors import BadReply
from actors.pool import Completed, Failed, Pool
from actors.protocol import Completion, GenerateRequest, sampling_params
from pipelines.recipe import Gates, Recipe, Target
from pipelines.response_row import RowMaker
from pipelines.row_report import REPORT_SCHEMA, RowReport, report_of
from pipelines.segments import SegmentWriter, durable_reports
from pipelines.store import RunFolder

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 2.0
_ROWS_PER_CALL = (8, 512)  # each call takes half the worker's permits, within these bounds
_RESERVED_TOKENS = 1  # the scheduler keeps the last place of the context


@dataclass(frozen=True)
class WorkerPlan:
    """All that a worker needs to know, and nothing that changes."""

    run: RunFolder
    sets: tuple[str, ...]
    urls: tuple[str, ...]
    target: Target
    vocab_size: int
    context_tokens: int
    sampling: Sampling
    gates: Gates
    pool: PoolConfig  # this worker's share of it

    @staticmethod
    def of(recipe: Recipe, run: RunFolder, urls: tuple[str, ...]) -> "WorkerPlan":
        """The plan of each of the recipe's workers: they share the permits."""
        whole = recipe.generate.pool
        permits = whole.max_in_flight_per_server
        match recipe.generate.servers:
            case EmbeddedServers(max_running_requests=running):
                # What waits inside a server only makes its answers, and so the verdicts, late.
                permits = min(permits, running + running // 4 + 1)
            case AttachedServers():
                pass
        share = max(1, permits // recipe.generate.workers)
        return WorkerPlan(
            run=run,
            sets=tuple(one.name for one in recipe.prompts.train),
            urls=urls,
            target=recipe.target,
            vocab_size=target_vocab_size(Path(recipe.target.path)),
            context_tokens=recipe.prompts.context_tokens,
            sampling=recipe.generate.sampling,
            gates=recipe.generate.gates,
            pool=whole.model_copy(update={"max_in_flight_per_server": share}),
        )

    @property
    def rows_per_call(self) -> int:
        """How many rows one call of the worker takes."""
        least, most = _ROWS_PER_CALL
        permits = self.pool.max_in_flight_per_server * len(self.urls)
        return min(most, max(least, permits // 2))


def target_vocab_size(target: Path) -> int:
    """The vocabulary size in the target's config.json."""
    config = json.loads((target / "config.json").read_bytes())
    text = config.get("text_config", config)
    size: int = text["vocab_size"]
    return size


class GenerateWorker:
    """Asks for rows and makes them durable. One event loop in its own thread, one pool.

    Ray restarts a worker that died and gives it the same rows again: it looks up at its start what
    is durable already, so that a row is not asked twice.
    """

    def __init__(self, plan: WorkerPlan) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(
            plan.target.path, trust_remote_code=plan.target.trust_remote_code
        )
        self._plan = plan
        self._maker = RowMaker(
            plan.target.profile,
            plan.gates,
            lambda ids: str(
                tokenizer.decode(
                    list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
                )
            ),
        )
        self._known = {
            report.sample_id: report
            for name in plan.sets
            for report in durable_reports(plan.run, name)
            if report.has_reply
        }
        self._writers = {name: SegmentWriter(plan.run, name) for name in plan.sets}
        self._pool = Pool(plan.urls, plan.pool, vocab_size=plan.vocab_size)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._pool.__aenter__(), self._loop).result()
        self._flushing = asyncio.run_coroutine_threadsafe(self._flush_often(), self._loop)

    def __call__(self, batch: pa.Table) -> pa.Table:
        """Answer the rows of a batch. They are durable when this returns their reports."""
        answers = self._answer_all(batch.to_pylist())
        reports = asyncio.run_coroutine_threadsafe(answers, self._loop).result()
        return pa.Table.from_pylist([asdict(one) for one in reports], schema=REPORT_SCHEMA)

    async def _answer_all(self, prompts: Sequence[Mapping[str, Any]]) -> list[RowReport]:
        reports = await asyncio.gather(*(self._answer(prompt) for prompt in prompts))
        await self._flush({prompt["dataset"] for prompt in prompts})
        return list(reports)

    async def _answer(self, prompt: Mapping[str, Any]) -> RowReport:
        sample_id = prompt["sample_id"]
        if sample_id in self._known:
            return self._known[sample_id]
        params = self._params(prompt)
        outcome: Completed[Any] | Failed
        if params["max_new_tokens"] < 1:
            room = f"{len(prompt['prompt_ids'])} of {self._plan.context_tokens} tokens are prompt"
            outcome = Failed("no_room", room, "", 0, 0, 0)
        else:
            ids = tuple(prompt["prompt_ids"])
            outcome = await self._pool.generate(
                GenerateRequest(sample_id, ids, params), check_counts
            )
        # In a thread: splitting and decoding a long answer would hold up the other replies.
        return await asyncio.to_thread(self._store, prompt, params, outcome)

    def _params(self, prompt: Mapping[str, Any]) -> dict[str, Any]:
        sampling = self._plan.sampling
        room = self._plan.context_tokens - len(prompt["prompt_ids"]) - _RESERVED_TOKENS
        return sampling_params(
            sampling,
            max_new_tokens=max(0, min(sampling.max_new_tokens, room)),
            seed=row_seed(sampling.seed, prompt["sample_id"]),
            stop_token_ids=self._plan.target.profile.stop_token_ids,
        )

    def _store(
        self,
        prompt: Mapping[str, Any],
        params: Mapping[str, Any],
        outcome: Completed[Any] | Failed,
    ) -> RowReport:
        row = self._maker.response_row(
            prompt, params, outcome, finished_at=datetime.now(timezone.utc)
        )
        self._writers[row["dataset"]].add(row)
        return report_of(row)

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_SECONDS)
            try:
                await self._flush(self._writers)
            except OSError as error:
                # The rows stay with the writer; the flush at the batch's end raises what persists.
                logger.warning("rows are not durable yet: %s", error)

    async def _flush(self, sets: Iterable[str]) -> None:
        for name in sets:
            await asyncio.to_thread(self._writers[name].flush)


def check_counts(completion: Completion, request: GenerateRequest) -> None:
    """Counts that the row's int32 columns cannot hold are no counts. Raises `BadReply`."""
    del request
    if completion.cached_tokens >= 2**31:
        raise BadReply("cached_tokens", f"{completion.cached_tokens} tokens from a cache")


def row_seed(seed: int, sample_id: str) -> int:
    """The sampling seed of one row: 31 bits, a function of the recipe's seed and the row alone."""
    digest = hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
