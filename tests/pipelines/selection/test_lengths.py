"""Length profiles are exact, and their sparklines fit a table."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.selection.lengths import LengthProfile


def profile_of(lengths, context=100):
    profile = LengthProfile(context)
    profile.add(np.array(lengths, np.int64))
    return profile


@given(st.lists(st.integers(0, 100), min_size=1), st.integers(0, 5))
def test_figures_are_those_of_the_sorted_lengths(lengths, cut):
    profile = profile_of(lengths[:cut])
    profile.add(np.array(lengths[cut:], np.int32))
    ordered = sorted(lengths)
    assert (profile.count, profile.total) == (len(lengths), sum(lengths))
    assert (profile.min, profile.max) == (ordered[0], ordered[-1])
    for share in (0.5, 0.9, 0.99):
        assert profile.quantile(share) == ordered[int(len(ordered) * share)]


@pytest.mark.parametrize("tokens", [-1, 101])
def test_a_length_outside_of_the_context_is_refused(tokens):
    profile = profile_of([5])
    with pytest.raises(ValueError, match="expected 0 to 100"):
        profile.add(np.array([7, tokens]))
    assert profile.count == 1


def test_no_prompt_has_no_length():
    profile = profile_of([])
    assert (profile.count, profile.total) == (0, 0)
    for ask in (lambda: profile.min, lambda: profile.max, lambda: profile.quantile(0.5)):
        with pytest.raises(ValueError, match="of 0 prompts"):
            ask()


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], "    "),
        ([7], "█   "),
        ([1, 10, 10, 100], "▄ █▄"),
        ([1] * 16 + [100], "█  ▁"),
        ([0, 1], "█   "),
        ([1, 2, 4, 8, 16, 32, 64, 80], "▆▆▃█"),
    ],
)
def test_a_sparkline_shows_where_the_prompts_are(lengths, expected):
    assert profile_of(lengths).sparkline(4) == expected
    assert len(profile_of(lengths).sparkline()) == 16
