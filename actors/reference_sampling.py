"""The next token of each row, from logits: SGLang's order of filters, draws that are the row's own.

A row's draws come from its own generator, so they do not depend on which rows run beside it.
"""

import secrets
from collections.abc import Sequence

import torch

from actors.protocol_server import ServedSampling

# Sorting a vocabulary of 150,000 for every token costs more than the token. The likeliest few
# nearly always hold all that top_p leaves; where they do not, everything is sorted.
_CANDIDATES = 1024


class Sampler:
    """One request's draws: its plan, its generator, and its output so far where that counts."""

    def __init__(self, plan: ServedSampling) -> None:
        self._plan = plan
        # Without a seed the draws differ from run to run, as they do in SGLang.
        seed = secrets.randbits(63) if plan.seed is None else plan.seed
        self._generator = torch.Generator().manual_seed(seed)
        self._counts: torch.Tensor | None = None

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the best score of the model's own is the answer."""
        return self._plan.temperature is None and not self._plan.penalises

    def choose(
        self,
        scores: torch.Tensor,  # [V] fp32
    ) -> int:
        """Draw the next token, and remember it."""
        plan = self._plan
        if plan.penalises:
            scores = self._penalised(scores)
        if plan.temperature is None:
            token = int(scores.argmax())
        else:
            probabilities = (scores / plan.temperature).softmax(-1)
            uniform = float(torch.rand((), generator=self._generator, dtype=torch.float64))
            token = _draw(probabilities, plan, uniform)
        if self._counts is not None:
            self._counts[token] += 1
        return token

    def _penalised(self, scores: torch.Tensor) -> torch.Tensor:
        """SGLang's penalties, over the output only, not the prompt."""
        plan = self._plan
        if self._counts is None:
            self._counts = torch.zeros_like(scores)
        counts = self._counts
        scores = scores - plan.frequency_penalty * counts - plan.presence_penalty * (counts > 0)
        scaled = torch.where(
            scores < 0, scores * plan.repetition_penalty, scores / plan.repetition_penalty
        )
        return torch.where(counts > 0, scaled, scores)


def next_tokens(
    logits: torch.Tensor,  # [n, V] fp32
    samplers: Sequence[Sampler],
) -> list[int | None]:
    """One token for each row; None where the row met a NaN."""
    ids, broken = greedy(logits)
    chosen: list[int | None] = list(ids.tolist())
    for row, (sampler, is_broken) in enumerate(zip(samplers, broken.tolist(), strict=True)):
        if is_broken:
            chosen[row] = None
        elif not sampler.is_plain_greedy:
            chosen[row] = sampler.choose(logits[row])
    return chosen


def greedy(
    logits: torch.Tensor,  # [..., V]
) -> tuple[torch.Tensor, torch.Tensor]:  # [...] ids, [...] bool
    """The best id of each row (the lowest of equals), and whether the row met a NaN."""
    ids = logits.argmax(-1)  # a NaN counts as the largest
    return ids, logits.gather(-1, ids[..., None])[..., 0].isnan()


def _draw(
    probabilities: torch.Tensor,  # [V]
    plan: ServedSampling,
    uniform: float,  # in [0, 1)
) -> int:
    """Invert the cumulative distribution at `uniform`, over what the filters leave."""
    if plan.top_k is None and plan.top_p == 1.0 and plan.min_p == 0.0:
        return _invert(probabilities, uniform)
    weights, ids = _likeliest(probabilities, plan)
    # As SGLang's sampler: top_k, then top_p over the unfiltered mass, then min_p of the best.
    before = weights.cumsum(-1) - weights
    kept = (before <= plan.top_p) & (weights >= weights[0] * plan.min_p)
    return int(ids[_invert(weights * kept, uniform)])


def _likeliest(
    probabilities: torch.Tensor, plan: ServedSampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens, best first: all that the filters can leave, at least."""
    size = len(probabilities)
    if plan.top_k is not None:
        return probabilities.topk(min(plan.top_k, size))
    weights, ids = probabilities.topk(min(_CANDIDATES, size))
    reaches_top_p = float(weights.sum()) > plan.top_p
    reaches_min_p = float(weights[-1]) < float(weights[0]) * plan.min_p
    if reaches_top_p or reaches_min_p:
        return weights, ids
    weights, ids = probabilities.sort(descending=True)
    return weights, ids


def _invert(weights: torch.Tensor, uniform: float) -> int:
    cumulative = weights.double().cumsum(-1)
    place = int(torch.searchsorted(cumulative, cumulative[-1] * uniform, right=True))
    # Rounding may point past the end, or at a weight of nothing behind the last one that counts.
    last = int(weights.nonzero()[-1])
    return min(place, last)
