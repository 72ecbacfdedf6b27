"""Rounds are replayed as a server speculates, and must be those that it counted."""

from dataclasses import dataclass

import torch

from pipelines.evaluate_replay import agrees, pieces_of, replay
from training.acceptance import Counters


@dataclass
class CountingDraft:
    """Says that each token is followed by the next number; its states are the tokens it was given.

    `layer` sees how far it was asked, so that a replay that shifts by one says something else.
    """

    def fuse(self, aux):
        return aux[..., :1]

    def layer(self, hidden, ids, positions, *_):
        assert hidden.shape[1] == ids.shape[1] == positions.shape[1]
        return ids[..., None].float()

    def best(self, states):
        return (states[..., 0] + 1).long()


def rounds(prompt: list[int], output: list[int], *, emitted: int, steps: int = 3) -> tuple:
    ids = torch.tensor(prompt + output)
    aux = torch.zeros(len(ids), 6)
    given = {"prompt_tokens": len(prompt), "emitted": emitted, "steps": steps}
    return replay(CountingDraft(), ids, aux, **given)


def test_a_round_ends_at_the_first_wrong_draft_and_gives_one_token_more():
    # 5 is the prefill's; 6 7 8 are drafted right and 9 comes with them; after 9, 10 was wrong.
    assert rounds([1, 2], [5, 6, 7, 8, 9, 20, 21, 30, 40], emitted=9) == (3, 0, 1, 0)


def test_a_draft_that_is_never_right_has_a_round_for_each_token():
    assert rounds([1], [9, 7, 5, 3], emitted=4) == (0, 0, 0)


def test_tokens_past_the_answer_judge_the_last_round_only():
    assert rounds([1], [5, 6, 7, 8, 9, 10], emitted=2) == (3,)
    assert rounds([1], [5, 6], emitted=2) == (1,)
    assert rounds([1], [5], emitted=1) == ()


def test_rounds_agree_with_the_counts_of_the_server_or_do_not():
    assert agrees((3, 0, 1, 0), Counters((2, 1, 0, 1)))
    assert not agrees((3, 0, 1, 1), Counters((2, 1, 0, 1)))
    assert not agrees((4, 0, 1, 0), Counters((2, 1, 0, 1)))


def test_a_character_of_several_tokens_is_the_last_ones():
    letters = "h\u00e9!".encode()
    decode = lambda ids: bytes(ids).decode(errors="replace")  # noqa: E731
    assert pieces_of(list(letters), decode) == ("h", "", "\u00e9", "!")
    assert pieces_of(list(letters[:2]), decode) == ("h", "\N{REPLACEMENT CHARACTER}")
