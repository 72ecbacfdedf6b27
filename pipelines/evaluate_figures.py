"""What an evaluation asked and measured, and the figures that follow from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipelines.recipe import Recipe, fingerprint
from pipelines.store import RunFolder, sha256_of
from training.acceptance import Counters, bootstrap_interval, ngram_acceptance, pooled
from training.export import WEIGHTS_FILE

EVALUATION_VERSION = "1"
OVERALL_DOMAINS = ("chat", "math", "code")
Phase = Literal["plain", "trained", "untrained"]
DRAFTED: tuple[Phase, ...] = ("trained", "untrained")
PHASES: tuple[Phase, ...] = ("plain", *DRAFTED)
_BOOTSTRAP_SEED = 1
# Of each set's prompts. An untrained draft is hardly ever right, so a few say it, and each token
# costs a whole verification.
_UNTRAINED_SHARE = 0.25


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt, rendered through the chat template by the prepare stage."""

    sample_id: str
    dataset: str
    domain: str
    input_ids: tuple[int, ...]
    max_new_tokens: int


@dataclass(frozen=True)
class Answer:
    """What a server made of one prompt. `counters` is None without a draft."""

    output_ids: tuple[int, ...]
    counters: Counters | None


@dataclass(frozen=True)
class Measured:
    """One phase: the answers by sample id."""

    answers: Mapping[str, Answer]
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over wall time: says something of this machine only."""
        return sum(len(one.output_ids) for one in self.answers.values()) / self.seconds


def prompts_of(phase: Phase, prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts that a phase asks: all, or for the untrained draft the first of each set."""
    if phase != "untrained":
        return list(prompts)
    chosen: list[Prompt] = []
    for dataset in dict.fromkeys(prompt.dataset for prompt in prompts):
        of_set = [prompt for prompt in prompts if prompt.dataset == dataset]
        chosen += of_set[: math.ceil(_UNTRAINED_SHARE * len(of_set))]
    return chosen


def first_difference(expected: Sequence[int], seen: Sequence[int]) -> int | None:
    """The first position where two outputs differ, an end that comes early included."""
    for position, (one, other) in enumerate(zip(expected, seen, strict=False)):
        if one != other:
            return position
    return None if len(expected) == len(seen) else min(len(expected), len(seen))


def summarise(
    recipe: Recipe,
    run: RunFolder,
    prompts: Sequence[Prompt],
    measured: Mapping[Phase, Measured],
    differences: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of `evaluation.json`."""
    steps = recipe.evaluate.draft_steps
    plain = measured["plain"].answers
    kinds: dict[str, list[tuple[Prompt, Counters]]] = {
        phase: [
            (prompt, counters_of_draft(measured[phase].answers[prompt.sample_id]))
            for prompt in prompts_of(phase, prompts)
        ]
        for phase in DRAFTED
    }
    kinds["ngram"] = [
        (
            prompt,
            ngram_acceptance(
                prompt.input_ids,
                plain[prompt.sample_id].output_ids,
                steps=steps,
                emitted=prompt.max_new_tokens,
            ),
        )
        for prompt in prompts
    ]
    domains = sorted({prompt.domain for prompt in prompts})
    phases = [(phase, measured[phase]) for phase in PHASES]
    groups = {"overall": OVERALL_DOMAINS, "all_domains": tuple(domains)}
    groups |= {domain: (domain,) for domain in domains}
    return {
        "version": EVALUATION_VERSION,
        "recipe": fingerprint(recipe, "evaluate"),
        "draft_sha256": sha256_of(run.draft / WEIGHTS_FILE),
        "method": {
            "decoding": "greedy",
            "speculation": "chain",
            "dtype": recipe.evaluate.servers.dtype,  # type: ignore[union-attr]
            "draft_steps": steps,
            "max_new_tokens": recipe.evaluate.max_new_tokens,
            "acceptance_length": "1 + correct_drafts / verifications, from summed counters",
            "overall": list(OVERALL_DOMAINS),
            "untrained": f"on the first {_UNTRAINED_SHARE:.0%} of each set's prompts",
            "interval": "95%, percentile bootstrap over prompts",
            "ngram": "longest suffix of 4 to 1 tokens, its latest occurrence before",
        },
        "prompts": len(prompts),
        "prompts_per_set": recipe.evaluate.prompts_per_set,
        "sets": [one.name for one in recipe.prompts.evaluation],
        "lossless": all(one["is_tie"] for one in differences),
        "tokens_compared": sum(
            len(one.output_ids) for phase in DRAFTED for one in measured[phase].answers.values()
        ),
        "numeric_ties": list(differences),
        "acceptance": {
            kind: {
                name: _acceptance(
                    [one for prompt, one in counted if prompt.domain in members], steps
                )
                for name, members in groups.items()
            }
            for kind, counted in kinds.items()
        },
        # Wall time of this machine, small batches, no CUDA graphs: for information only.
        "tokens_per_second": {name: round(one.tokens_per_second, 2) for name, one in phases},
        "seconds": {name: round(one.seconds, 2) for name, one in phases},
    }


def _acceptance(counted: Sequence[Counters], steps: int) -> dict[str, Any]:
    total = pooled(counted, steps=steps)
    return {
        "prompts": len(counted),
        "acceptance_length": total.acceptance_length,
        "interval": bootstrap_interval(counted, seed=_BOOTSTRAP_SEED),
        "acceptance_rates": total.acceptance_rates,
        "verifications": total.verifications,
        "correct_drafts": total.correct_drafts,
        "histogram": total.histogram,
    }


def counters_of_draft(answer: Answer) -> Counters:
    """The counters of an answer that was given with a draft."""
    assert answer.counters is not None, "a phase with a draft has counters"
    return answer.counters
