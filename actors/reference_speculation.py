"""Chains of drafted tokens for a batch of running requests (EAGLE-3, topk 1).

Row i of a draft's slot holds (target state i, token i+1) at position i. Once the target has read L
tokens of a request and named the next one, rows 0..L-1 are there, and row L-1 speaks of x_{L+1}.
Alignment as in sglang 0.5.23, `speculative/eagle_worker_v2.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from actors.reference_cache import SlotCache, causal_mask
from actors.reference_draft import Draft
from actors.reference_model import Target


@dataclass(frozen=True, eq=False)
class Drafted:
    """Where a chain starts: the draft's first token, and the state to go on from."""

    token: torch.Tensor  # [] int64, target id
    recycled: torch.Tensor  # [D]


class Speculation:
    """The draft and its slots, beside the target's."""

    def __init__(self, target: Target, draft: Draft, steps: int, slots: int) -> None:
        self.steps = steps
        self.cache = SlotCache(1, slots)
        self._draft = draft
        self._device = target.device
        header = draft.header
        self._groups = header.num_attention_heads // header.num_key_value_heads
        self._dtype = target.dtype

    def prefill(
        self,
        next_ids: Sequence[Sequence[int]],  # of each prompt, without its first, with the new token
        aux: torch.Tensor,  # [n, q, A*H]
        *,
        first_slot: int,
    ) -> list[Drafted]:
        """Read whole prompts into slots from `first_slot` on."""
        rows, queries, _ = aux.shape
        ids = torch.zeros(rows, queries, dtype=torch.int64)
        for row, one in enumerate(next_ids):
            ids[row, : len(one)] = torch.tensor(one)
        positions = torch.arange(queries, device=self._device).expand(rows, -1)
        self.cache.plan_prefill(first_slot, rows, queries)
        fused = self._draft.fuse(aux)
        out = self._draft.layer(fused, ids.to(self._device), positions, self.cache, None)
        return self._starts(out, torch.tensor([len(one) - 1 for one in next_ids]))

    def chains(self, drafted: Sequence[Drafted], starts: Sequence[int]) -> torch.Tensor:
        """Draft `steps` tokens for each of slots 0..n-1 [n, steps]; `starts` = tokens read, L.

        Rows from L on are provisional: `extend` replaces them.
        """
        token = torch.stack([one.token for one in drafted])
        hidden = torch.stack([one.recycled for one in drafted])[:, None]  # [n, 1, D]
        tokens = [token]
        for step in range(self.steps - 1):
            hidden = self._add(hidden, token[:, None], [start + step for start in starts])
            token = self._draft.best(hidden[:, 0])
            tokens.append(token)
        return torch.stack(tokens, dim=1)

    def extend(
        self,
        next_ids: torch.Tensor,  # [n, q] the target's own token after each verified position
        aux: torch.Tensor,  # [n, q, A*H]
        starts: Sequence[int],
        agreed: torch.Tensor,  # [n] accepted tokens; rows past this one mean nothing
    ) -> list[Drafted]:
        """Add what the target verified, with its own states; return where the next chains start."""
        out = self._add(self._draft.fuse(aux), next_ids, starts)
        return self._starts(out, agreed)

    def _add(
        self,
        hidden: torch.Tensor,  # [n, q, D]
        ids: torch.Tensor,  # [n, q]
        starts: Sequence[int],
    ) -> torch.Tensor:  # [n, q, D]
        first, queries = torch.tensor(starts, device=self._device), ids.shape[1]
        used = self.cache.plan_extend(first, queries)
        mask = causal_mask(first, queries, used, self._groups, self._dtype)
        positions = first[:, None] + torch.arange(queries, device=self._device)
        return self._draft.layer(hidden, ids, positions, self.cache, mask)

    def _starts(
        self,
        out: torch.Tensor,  # [n, q, D]
        rows: torch.Tensor,  # [n]
    ) -> list[Drafted]:
        picked = out[torch.arange(len(out), device=out.device), rows.to(out.device)]  # [n, D]
        tokens = self._draft.best(picked)
        return [Drafted(*one) for one in zip(tokens, picked, strict=True)]
