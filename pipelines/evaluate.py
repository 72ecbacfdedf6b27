"""Measure the draft on held-out prompts: greedy chain speculation on a real server, fp32, lossless.

Three phases, each on a server of its own: no draft, the trained draft, and the same draft before
training. The n-gram baseline needs no server: its rounds follow from the greedy output. A finished
phase is kept in the run folder, so that a killed evaluation goes on with the next one.
"""

import asyncio
import hashlib
import json
import logging
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from actors.config import EmbeddedServers, Sampling
from actors.errors import BadReply, ServerFailed
from actors.fleet import running_servers
from actors.launch import EngineOptions
from actors.pool import Failed, Pool
from actors.protocol import Completion, GenerateRequest, sampling_params
from actors.reference_draft import read_draft
from pipelines.errors import PreflightFailed, VerificationFailed
from pipelines.evaluate_figures import (
    DRAFTED,
    PHASES,
    Answer,
    Measured,
    Phase,
    Prompt,
    counters_of_draft,
    first_difference,
    prompts_of,
    summarise,
)
from pipelines.evaluate_replay import MAX_TOKENS, agrees, pieces_of, replay
from pipelines.evaluate_samples import SAMPLES, AnswerSample, write_samples
from pipelines.export import read_draft_config, write_untrained_draft
from pipelines.recipe import Recipe
from pipelines.response_row import decoder_of
from pipelines.store import RunFolder, sha256_of, write_json
from pipelines.telemetry import EventLog, Progress
from pipelines.template import load_tokenizer
from pipelines.witness import Witness, can_witness
from training.acceptance import Counters
from training.export import WEIGHTS_FILE

logger = logging.getLogger(__name__)

# Two tokens whose fp32 logits are nearer than this may swap with the order of a sum; a draft
# changes how many rows a forward has, and with it that order.
TIE_LOGIT_GAP = 1e-3


def evaluate(recipe: Recipe, run: RunFolder, events: EventLog) -> dict[str, Any]:
    """Write `evaluation.json`; return its main numbers. Ray is running.

    Raises `VerificationFailed` where speculation changed a token: then no figure is written.
    """
    servers = recipe.evaluate.servers
    if not isinstance(servers, EmbeddedServers):
        raise PreflightFailed(
            f"evaluate.servers.kind is {servers.kind}",
            expected="embedded: three servers are started in turn, each with another draft",
            change="set evaluate.servers.kind to embedded",
        )
    prompts = read_prompts(recipe, run)
    measured = {
        phase: _phase(recipe, run, phase, prompts_of(phase, prompts), servers, events)
        for phase in PHASES
    }
    differences = compare(recipe, prompts, measured)
    refuse_lossy(differences)
    result = summarise(recipe, run, prompts, measured, differences)
    result["samples"] = write_samples(run, *replayed(recipe, run, prompts, measured))
    write_json(run.evaluation, result)
    shutil.rmtree(run.evaluation_phases)
    return _counts(result)


def read_prompts(recipe: Recipe, run: RunFolder) -> list[Prompt]:
    """The first `prompts_per_set` prompts of each evaluation set by sample id."""
    config = recipe.evaluate
    prompts: list[Prompt] = []
    for one in recipe.prompts.evaluation:
        files = sorted((run.prompts / one.name).glob("*.parquet"))
        if not files:
            raise PreflightFailed(
                f"{run.prompts / one.name} holds no prompts",
                expected="the evaluation set as the prepare stage wrote it",
                change="run the prepare stage",
            )
        columns = ["sample_id", "dataset", "domain", "prompt_ids"]
        table = pa.concat_tables([pq.read_table(file, columns=columns) for file in files])
        for row in table.sort_by("sample_id").slice(0, config.prompts_per_set).to_pylist():
            # The draft's tokens need room as well, and the plain phase asks for that many more.
            room = recipe.prompts.context_tokens - len(row["prompt_ids"]) - config.draft_steps
            prompts.append(
                Prompt(
                    sample_id=row["sample_id"],
                    dataset=row["dataset"],
                    domain=row["domain"],
                    input_ids=tuple(row["prompt_ids"]),
                    max_new_tokens=min(config.max_new_tokens, max(room, 1)),
                )
            )
    return prompts


def compare(
    recipe: Recipe, prompts: Sequence[Prompt], measured: Mapping[Phase, Measured]
) -> list[dict[str, Any]]:
    """Every prompt whose output changed with a draft: where, what, and whether it was a tie."""
    differences: list[dict[str, Any]] = []
    for phase in DRAFTED:
        for prompt in prompts_of(phase, prompts):
            plain, drafted = (measured[one].answers[prompt.sample_id] for one in ("plain", phase))
            at = first_difference(plain.output_ids[: prompt.max_new_tokens], drafted.output_ids)
            if at is not None:
                differences.append(
                    {
                        "phase": phase,
                        "sample_id": prompt.sample_id,
                        "position": at,
                        "plain": plain.output_ids[at : at + 1],
                        "drafted": drafted.output_ids[at : at + 1],
                        "context": [*prompt.input_ids, *plain.output_ids[:at]],
                    }
                )
    if differences and can_witness(recipe.target):
        witness = Witness(recipe.target, torch.float32)
        for one in differences:
            top = witness.next_logits(one["context"]).topk(2)
            one["logit_gap"] = float(top.values[0] - top.values[1])
            one["is_tie"] = one["logit_gap"] < TIE_LOGIT_GAP and (
                {*one["plain"], *one["drafted"]} == set(top.indices.tolist())
            )
    return [{key: one[key] for key in one if key != "context"} for one in differences]


def replayed(
    recipe: Recipe, run: RunFolder, prompts: Sequence[Prompt], measured: Mapping[Phase, Measured]
) -> tuple[list[AnswerSample], dict[str, int]]:
    """The trained draft's rounds in the first answers of each set, and why answers are left out."""
    sets = list(dict.fromkeys(prompt.dataset for prompt in prompts))
    each = max(1, SAMPLES // len(sets))
    chosen = [
        one for name in sets for one in [p for p in prompts if p.dataset == name][:each]
    ][:SAMPLES]  # fmt: skip
    if not can_witness(recipe.target):
        return [], {"target_too_large": len(chosen)}
    witness, draft = Witness(recipe.target, torch.float32), read_draft(run.draft)
    decode = decoder_of(load_tokenizer(recipe.target))
    samples: list[AnswerSample] = []
    left_out = Counter[str]()
    for prompt in chosen:
        plain, drafted = (measured[one].answers[prompt.sample_id] for one in ("plain", "trained"))
        ids = (*prompt.input_ids, *plain.output_ids)
        if len(ids) > MAX_TOKENS:
            left_out["too_long"] += 1
            continue
        states = witness.states(ids)
        accepted = replay(
            draft,
            torch.tensor(ids),
            torch.cat([states[layer + 1] for layer in recipe.target.profile.aux_layer_ids], dim=1),
            prompt_tokens=len(prompt.input_ids),
            emitted=len(drafted.output_ids),
            steps=recipe.evaluate.draft_steps,
        )
        if not agrees(accepted, counters_of_draft(drafted)):
            left_out["server_counted_otherwise"] += 1
            continue
        pieces = pieces_of(drafted.output_ids, decode)
        samples.append(
            AnswerSample(prompt.sample_id, prompt.dataset, prompt.domain, pieces, accepted)
        )
    return samples, dict(left_out)


def refuse_lossy(differences: Sequence[Mapping[str, Any]]) -> None:
    """Raise `VerificationFailed` unless every difference is a numeric tie."""
    lossy = [one for one in differences if "is_tie" not in one or not one["is_tie"]]
    if not lossy:
        return
    first = lossy[0]
    gap = f", logits {first['logit_gap']:.3g} apart" if "logit_gap" in first else ""
    raise VerificationFailed(
        f"speculation changed {len(lossy)} outputs; the first is {first['sample_id']} at token "
        f"{first['position']} with the {first['phase']} draft: {list(first['plain'])} became "
        f"{list(first['drafted'])}{gap}",
        expected="greedy outputs equal token for token, or a numeric tie "
        f"(top two fp32 logits nearer than {TIE_LOGIT_GAP})",
        change="the server verifies drafts wrongly, or does not run in float32; compare dtype and "
        "versions, and look at its log in the run's logs folder",
    )


def _phase(
    recipe: Recipe,
    run: RunFolder,
    phase: Phase,
    prompts: Sequence[Prompt],
    servers: EmbeddedServers,
    events: EventLog,
) -> Measured:
    """Measure one phase, or read what an earlier call measured of the very same."""
    path = run.evaluation_phases / f"{phase}.json"
    mark = _mark(recipe, run, phase, prompts)
    stored = json.loads(path.read_bytes()) if path.exists() else None
    if stored is not None and stored["mark"] == mark:
        logger.info("evaluate: %s was measured before", phase)
        return _measured_from(stored)
    scratch = run.evaluation_phases / ".untrained"
    shutil.rmtree(scratch, ignore_errors=True)
    if phase == "untrained":
        write_untrained_draft(recipe, run, scratch)
    draft = {"plain": None, "trained": run.draft, "untrained": scratch}[phase]
    options = EngineOptions(
        draft=draft, draft_steps=None if draft is None else recipe.evaluate.draft_steps
    )
    try:
        with running_servers(
            servers,
            target=Path(recipe.target.path),
            options=options,
            logs=run.logs,
            label=f"evaluate-{phase}",
        ) as fleet:
            events.figures.servers = fleet.states
            measured = asyncio.run(_ask(recipe, run, phase, prompts, fleet.urls))
    except ServerFailed as error:
        raise PreflightFailed(
            f"the evaluation server failed with the {phase} draft: {error}",
            expected="a server that loads the target and the draft, and stays up",
            change="the log above says why; the same command goes on from here",
        ) from error
    shutil.rmtree(scratch, ignore_errors=True)
    write_json(
        path,
        {
            "mark": mark,
            "seconds": measured.seconds,
            "answers": {
                sample_id: {
                    "output_ids": answer.output_ids,
                    "histogram": answer.counters and answer.counters.histogram,
                }
                for sample_id, answer in measured.answers.items()
            },
        },
    )
    events.append("evaluation_phase", phase=phase, seconds=round(measured.seconds, 1))
    return measured


def _measured_from(stored: Mapping[str, Any]) -> Measured:
    answers = {
        sample_id: Answer(
            tuple(one["output_ids"]),
            None if one["histogram"] is None else Counters(tuple(one["histogram"])),
        )
        for sample_id, one in stored["answers"].items()
    }
    return Measured(answers, stored["seconds"])


def _mark(recipe: Recipe, run: RunFolder, phase: Phase, prompts: Sequence[Prompt]) -> str:
    """A hash of what a phase's result depends on."""
    draft = {
        "plain": lambda: "",
        "trained": lambda: sha256_of(run.draft / WEIGHTS_FILE),
        "untrained": lambda: read_draft_config(run).model_dump_json() + str(recipe.train.seed),
    }[phase]()
    depends_on = [
        recipe.evaluate.model_dump_json(include={"draft_steps", "max_new_tokens"}),
        recipe.evaluate.servers.model_dump_json(include={"dtype", "device"}),
        recipe.target.model_dump_json(),
        draft,
        [(prompt.sample_id, prompt.input_ids, prompt.max_new_tokens) for prompt in prompts],
    ]
    return hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()


async def _ask(
    recipe: Recipe, run: RunFolder, phase: Phase, prompts: Sequence[Prompt], urls: Sequence[str]
) -> Measured:
    config = recipe.evaluate
    progress = Progress(f"evaluate {phase}", total=len(prompts), unit="prompts")
    steps = None if phase == "plain" else config.draft_steps

    async def one(prompt: Prompt) -> Answer:
        # Past the cut the plain tokens judge the n-gram baseline's last round, as a server would.
        more = config.draft_steps if phase == "plain" else 0
        request = _request(recipe, prompt, prompt.max_new_tokens + more)
        outcome = await pool.generate(request, lambda reply, _: counters_of(reply, steps))
        if isinstance(outcome, Failed):
            raise PreflightFailed(
                f"{prompt.sample_id} was not answered after {outcome.attempt} attempts: "
                f"{outcome.fault}: {outcome.detail}",
                expected="an answer to every evaluation prompt",
                change=f"see the server's log in {run.logs}; the same command goes on from here",
            )
        progress.advance(1)
        return Answer(outcome.completion.output_ids, outcome.value)

    async with Pool(urls, config.pool, vocab_size=read_draft_config(run).vocab_size) as pool:
        started = time.monotonic()
        # Long prompts first, so that no long one is alone at the end.
        order = sorted(prompts, key=lambda prompt: -len(prompt.input_ids))
        answers = await asyncio.gather(*map(one, order))
        seconds = time.monotonic() - started
    return Measured(
        {prompt.sample_id: answer for prompt, answer in zip(order, answers, strict=True)}, seconds
    )


def _request(recipe: Recipe, prompt: Prompt, max_new_tokens: int) -> GenerateRequest:
    greedy = Sampling.greedy(max_new_tokens)
    return GenerateRequest(
        rid=prompt.sample_id,
        input_ids=prompt.input_ids,
        sampling_params=sampling_params(
            greedy,
            max_new_tokens=max_new_tokens,
            seed=0,
            stop_token_ids=recipe.target.profile.stop_token_ids,
        ),
    )


def counters_of(reply: Completion, steps: int | None) -> Counters | None:
    """The reply's counters, which must agree with themselves and with the tokens that came."""
    seen = reply.speculation
    if steps is None:
        if seen is not None:
            raise BadReply("spec_counters", "a server without a draft counted verifications")
        return None
    if seen is None:
        raise BadReply("spec_counters", "a server with a draft counted no verification")
    histogram = seen.correct_drafts_histogram
    if len(histogram) > steps + 1:
        raise BadReply("spec_counters", f"{histogram} counts more than {steps} drafts a round")
    counters = Counters(histogram + (0,) * (steps + 1 - len(histogram)))
    sums = (counters.verifications, counters.correct_drafts)
    if sums != (seen.verifications, seen.correct_drafts):
        raise BadReply(
            "spec_counters",
            f"{histogram} sums to {sums}, the server says "
            f"{(seen.verifications, seen.correct_drafts)}",
        )
    # One token comes from the prefill, and the last round may be cut by the answer's end.
    cut = 1 + sum(sums) - reply.completion_tokens
    if not 0 <= cut <= steps:
        raise BadReply("spec_counters", f"{sums} explain {cut:+d} tokens more than came")
    return counters


def _counts(result: Mapping[str, Any]) -> dict[str, Any]:
    lengths = {
        kind: groups["overall" if groups["overall"]["prompts"] else "all_domains"][
            "acceptance_length"
        ]
        for kind, groups in result["acceptance"].items()
    }
    return {
        "headline": f"acceptance length {_shown(lengths['trained'])} on {result['prompts']} "
        f"held-out prompts (untrained {_shown(lengths['untrained'])}, n-gram "
        f"{_shown(lengths['ngram'])}), outputs unchanged",
        "prompts": result["prompts"],
        "tokens_compared": result["tokens_compared"],
        "numeric_ties": len(result["numeric_ties"]),
        "acceptance_length": lengths,
    }


def _shown(length: float | None) -> str:
    return "unknown" if length is None else f"{length:.2f}"
