"""The draw is by key alone; quotas add up, keep to the caps and follow the weights."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.selection.draw import Draw, draw_key, quotas

KEYS = st.lists(st.integers(0, 2**64 - 1), unique=True, max_size=40)


def sha(i):
    return f"{i:064x}"


def test_a_key_is_the_same_for_good():
    assert draw_key(1, "chat", sha(0)) == 13806743063481123529


def test_keys_depend_on_the_seed_the_set_and_the_content():
    keys = {draw_key(*one) for one in [(1, "a", sha(0)), (2, "a", sha(0)), (1, "b", sha(0))]}
    assert len(keys | {draw_key(1, "a", sha(1))}) == 4


@pytest.mark.parametrize("shift", [0, 28, 56])
def test_keys_are_uniform(shift):
    """Chi-square over 256 bins at the lowest, a middle and the highest byte."""
    rows = 50_000
    keys = np.array([draw_key(5, "chat", sha(i)) for i in range(rows)], np.uint64)
    counts = np.bincount(((keys >> np.uint64(shift)) & np.uint64(255)).astype(int), minlength=256)
    statistic = ((counts - rows / 256) ** 2 / (rows / 256)).sum()
    assert 173 < statistic < 354  # 255 degrees of freedom: all but one of 10,000 on each side


@given(KEYS, st.integers(0, 45), st.randoms())
def test_the_least_keys_are_drawn_whatever_the_order(keys, cap, rng):
    rng.shuffle(keys)
    draw = Draw(cap)
    for key in keys:
        draw.offer(key)
    drawn = keys if draw.below is None else [key for key in keys if key < draw.below]
    assert sorted(drawn) == sorted(keys)[:cap]


@given(KEYS, st.integers(0, 20))
def test_a_key_that_is_out_stays_out(keys, cap):
    draw, out = Draw(cap), set()
    for key in keys:
        draw.offer(key)
        if draw.below is not None:
            out |= {one for one in keys if one >= draw.below}
            assert out.isdisjoint(one for one in keys if one < draw.below)


def test_a_draw_of_more_rows_holds_every_row_of_a_draw_of_fewer():
    keys = [draw_key(1, "a", sha(i)) for i in range(500)]
    bounds = []
    for cap in (10, 100, 400):
        draw = Draw(cap)
        for key in keys:
            draw.offer(key)
        bounds.append(draw.below)
    assert bounds == sorted(bounds)


SETS = st.dictionaries(
    st.sampled_from("abcdef"),
    st.tuples(st.floats(1e-6, 1e6), st.none() | st.integers(0, 50)),
    min_size=1,
)


@given(SETS, st.integers(0, 200))
def test_quotas_add_up_and_keep_to_the_caps(sets, rows):
    weights = {name: weight for name, (weight, _) in sets.items()}
    caps = {name: cap for name, (_, cap) in sets.items()}
    given = quotas(rows, weights, caps)
    assert list(given) == list(sets)
    limit = rows if None in caps.values() else min(rows, sum(caps.values()))
    assert sum(given.values()) == limit
    for name, cap in caps.items():
        assert 0 <= given[name] <= (rows if cap is None else cap)


@given(SETS, st.integers(0, 200))
def test_more_weight_and_no_lower_cap_is_no_fewer_rows(sets, rows):
    weights = {name: weight for name, (weight, _) in sets.items()}
    caps = {name: cap for name, (_, cap) in sets.items()}
    given = quotas(rows, weights, caps)
    for one in sets:
        for other in sets:
            roomier = caps[one] is None or (caps[other] is not None and caps[one] >= caps[other])
            if weights[one] > weights[other] and roomier:
                assert given[one] >= given[other]


@given(SETS, st.integers(0, 200))
def test_sets_below_their_caps_are_within_a_row_of_their_share(sets, rows):
    weights = {name: weight for name, (weight, _) in sets.items()}
    caps = {name: cap for name, (_, cap) in sets.items()}
    given = quotas(rows, weights, caps)
    free = [name for name in sets if caps[name] is None or given[name] < caps[name]]
    left, total = sum(given[name] for name in free), sum(weights[name] for name in free)
    for name in free:
        # A set that rounding filled to its cap took a row at most from the others.
        assert abs(given[name] - left * weights[name] / total) < 1 + len(sets)


@pytest.mark.parametrize(
    ("rows", "weights", "caps", "expected"),
    [
        (10, {"a": 1, "b": 1, "c": 1}, {}, [4, 3, 3]),
        (10, {"a": 2, "b": 1, "c": 1}, {}, [5, 3, 2]),
        (100, {"a": 0.5, "b": 0.3, "c": 0.2}, {}, [50, 30, 20]),
        (100, {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 20}, [20, 48, 32]),
        (100, {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 20, "b": 40}, [20, 40, 40]),
        (100, {"a": 1, "b": 1}, {"a": 20, "b": 40}, [20, 40]),
        (0, {"a": 1, "b": 1}, {"a": 20}, [0, 0]),
        (None, {"a": 1, "b": 1}, {"a": 20}, [20, None]),
    ],
)
def test_what_a_full_set_leaves_goes_to_the_others_by_weight(rows, weights, caps, expected):
    capped = {name: caps.get(name) for name in weights}
    assert list(quotas(rows, weights, capped).values()) == expected


@pytest.mark.parametrize(
    ("weights", "caps"),
    [({"a": 0.0}, {"a": None}), ({"a": -1.0}, {"a": None}), ({"a": 1.0}, {"b": None})],
)
def test_a_weight_or_a_set_that_is_not_there_is_refused(weights, caps):
    with pytest.raises(ValueError, match="a cap and a weight above zero"):
        quotas(10, weights, caps)
