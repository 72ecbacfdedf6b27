"""Which tokens of a few answers the draft had right: replayed here, and proved by the server.

A server counts accepted drafts and does not say where they were. Greedy verification changes no
token, so its rounds follow from the answer: the target's states are computed once more, the draft
is asked at the start of each round, and the counts must be those that the server gave.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from training.acceptance import Counters

MAX_TOKENS = 1024  # of prompt and answer: what is replayed in a second or two
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # half a character, until its other tokens come


@torch.inference_mode()
def replay(
    draft: Any,  # actors.reference_draft.Draft
    ids: torch.Tensor,  # [T] prompt, answer, and what the target says after it
    aux: torch.Tensor,  # [T, A*H] the target's aux states
    *,
    prompt_tokens: int,
    emitted: int,  # tokens of the answer
    steps: int,
) -> tuple[int, ...]:
    """How many drafts each verification accepted, in order.

    Row i holds (state i, token i + 1) and speaks of token i + 2, as in `draft_logits`.
    """
    fused = draft.fuse(aux[None])  # [1, T, D]
    first = _layer(draft, fused[:, :-1], ids[1:])  # [1, T-1, D]: every round's first draft at once
    guesses = draft.best(first[0])  # [T-1]
    accepted: list[int] = []
    known = prompt_tokens + 1
    while known < prompt_tokens + emitted:
        right, guess, state = 0, guesses[known - 2], first[:, known - 2 : known - 1]
        hidden = fused[:, : known - 1]
        while known + right < len(ids) and guess == ids[known + right]:
            right += 1
            if right == steps:
                break
            hidden = torch.cat([hidden, state], dim=1)
            state = _layer(draft, hidden, ids[1 : known + right])[:, -1:]
            guess = draft.best(state[0, 0])
        accepted.append(right)
        known += right + 1
    return tuple(accepted)


def _layer(draft: Any, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(hidden.shape[1])[None]
    state: torch.Tensor = draft.layer(hidden, ids[None], positions, None, None)
    return state


def agrees(accepted: Sequence[int], counters: Counters) -> bool:
    """Whether the rounds are those that the server counted."""
    seen = Counter(accepted)
    return tuple(seen[k] for k in range(counters.steps + 1)) == counters.histogram


def pieces_of(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> tuple[str, ...]:
    """The text of each token; of a character in several tokens, the last one has it."""
    pieces, said = [], ""
    for end in range(1, len(ids) + 1):
        text = decode(ids[:end])
        if end < len(ids) and text.endswith(_UNFINISHED):
            pieces.append("")
            continue
        pieces.append(text[len(said) :])
        said = text
    return tuple(pieces)
