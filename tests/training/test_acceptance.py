"""The counters of acceptance, and the n-gram baseline worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.acceptance import Counters, bootstrap_interval, ngram_acceptance, pooled


def test_acceptance_length_and_rates_come_from_the_histogram():
    counters = Counters((4, 3, 2, 1))
    assert (counters.verifications, counters.correct_drafts) == (10, 10)
    assert counters.acceptance_length == 2.0
    assert counters.acceptance_rates == (6 / 10, 3 / 6, 1 / 3)


def test_what_was_never_verified_has_no_acceptance_length_and_not_a_length_of_zero_or_one():
    nothing = Counters.none(3)
    assert nothing.acceptance_length is None
    assert nothing.acceptance_rates == (None, None, None)
    assert bootstrap_interval([nothing], seed=1) is None


def test_a_pooled_acceptance_length_weighs_verifications_and_not_requests():
    total = pooled([Counters((0, 1)), Counters((9, 0))], steps=1)
    assert total.acceptance_length == 1.1


def test_counters_of_different_draft_lengths_do_not_add_up():
    with pytest.raises(ValueError, match="do not add up"):
        Counters((1, 2)) + Counters((1, 2, 3))


def test_the_bootstrap_is_seeded_and_holds_the_pooled_length():
    requests = [Counters((3, n % 4, 1)) for n in range(40)]
    low, high = bootstrap_interval(requests, seed=7)
    assert (low, high) == bootstrap_interval(requests, seed=7)
    assert low < pooled(requests, steps=2).acceptance_length < high


def test_equal_requests_leave_no_uncertainty():
    assert bootstrap_interval([Counters((1, 1))] * 5, seed=1) == (1.5, 1.5)


def test_ngram_rounds_worked_out_by_hand():
    # Text 7 8 9 5 7 8, then the output 9 5 1 8 9.
    # Prefill gives 9. Round 1: suffix 8 9 was seen, then came 5 7; 5 is right, 7 is not: 1
    # accepted, out are 9 5 1. Round 2: 1 is new: no draft, 0 accepted, out is 8. Round 3: 8 came
    # before, followed by 9 5; 9 is right and the output ends: 1 accepted.
    assert ngram_acceptance([7, 8, 9, 5, 7, 8], [9, 5, 1, 8, 9], steps=2).histogram == (1, 2, 0)


def test_the_longest_suffix_wins_over_the_latest_occurrence():
    # The text ends in 1 2. Its 2 came last before 9, but 1 2 was followed by 3.
    prompt = [1, 2, 3, 2, 9, 1]
    assert ngram_acceptance(prompt, [2, 3], steps=1).histogram == (0, 1)
    assert ngram_acceptance(prompt, [2, 3], steps=1, longest=1).histogram == (1, 0)


def test_a_copy_goes_on_into_what_it_drafted():
    assert ngram_acceptance([5, 4], [4, 4, 4, 4, 4], steps=3).histogram == (0, 0, 0, 1)


def test_tokens_past_the_cut_judge_the_last_round_only():
    prompt, output = [1, 2, 3, 4, 1], [2, 3, 4]
    assert ngram_acceptance(prompt, output[:2], steps=2).histogram == (0, 1, 0)
    assert ngram_acceptance(prompt, output, steps=2, emitted=2).histogram == (0, 0, 1)


def test_an_output_of_one_token_needs_no_verification():
    assert ngram_acceptance([1, 1], [1], steps=2).verifications == 0


@given(
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=20),
    output=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    steps=st.integers(1, 4),
)
def test_every_output_token_comes_from_the_prefill_a_draft_or_a_verification(prompt, output, steps):
    counters = ngram_acceptance(prompt, output, steps=steps)
    emitted = 1 + counters.verifications + counters.correct_drafts
    # The last round may accept up to the end, which leaves no room for its own token.
    assert emitted in (len(output), len(output) + 1)
