"""Charts say their numbers in words, keep inside their box, and take any finite values."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.charts import (
    Bar,
    Line,
    Mark,
    bar_chart,
    histogram,
    line_chart,
    nice_ticks,
    number,
    thin,
)

_NUMBERS = st.floats(-1e9, 1e9).map(lambda value: round(value, 6))


@given(_NUMBERS, _NUMBERS)
def test_ticks_are_few_ascending_and_cover_the_values(one, other):
    low, high = sorted((one, other))
    ticks = nice_ticks(low, high)
    margin = 1e-6 * max(1.0, abs(low), abs(high))
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))
    assert ticks[0] <= low + margin
    assert ticks[-1] >= high - margin


@settings(deadline=None)
@given(st.lists(st.tuples(_NUMBERS, _NUMBERS), min_size=1, max_size=30))
def test_a_line_stays_inside_its_box(points):
    svg = line_chart([Line("loss", tuple(sorted(points)))], title="Loss", x="step", y="loss")
    for pair in re.findall(r'points="([^"]*)"', svg):
        for place in pair.split():
            x, y = (float(part) for part in place.split(","))
            assert 0 <= x <= 400
            assert 0 <= y <= 220


def test_thinning_keeps_first_and_last_and_bounds_the_number():
    points = [(float(at), float(at % 7)) for at in range(100_000)]
    kept = thin(points)
    assert len(kept) <= 242
    assert (kept[0], kept[-1]) == (points[0], points[-1])


def test_an_unknown_value_is_said_and_never_drawn_as_zero():
    bars = [("math", [Bar("trained", 2.5, (2.25, 2.75)), Bar("n-gram", None, None)])]
    svg = bar_chart(bars, title="AL", floor=1.0, unknown="unknown")
    assert "trained 2.50 (95% 2.25 to 2.75), n-gram unknown" in svg
    assert svg.count("<rect") == 1


def test_a_histogram_counts_every_value():
    svg = histogram([700, 701, 701, 900], title="lengths", at=0)
    assert "4 values from 700 to 900 tokens" in svg
    assert re.findall(r'height="([0-9.]*)"', svg) == ["62.0", "20.7"]
    assert "log scale" not in svg


def test_where_a_few_values_are_far_longer_than_most_bins_grow():
    svg = histogram([1, 2, 2, 900], title="lengths", at=0)
    assert re.findall(r'height="([0-9.]*)"', svg) == ["31.0", "62.0", "31.0"]
    assert "900 tokens (log scale)" in svg


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50))
def test_a_histogram_takes_any_lengths_and_stays_inside_its_box(values):
    svg = histogram(values, title="lengths", at=0)
    bars = re.findall(r'x="([0-9.]+)" y="([0-9.]+)" width="([0-9.]+)" height="([0-9.]+)"', svg)
    assert 1 <= len(bars) <= 24
    for x, y, width, height in (map(float, bar) for bar in bars):
        assert x >= 10
        assert x + width <= 391
        assert y >= 0
        assert y + height <= 66.1


def test_marks_are_drawn_with_labels_that_do_not_collide():
    points = tuple((float(at), 1.0) for at in range(101))
    marks = [Mark(10.0, "1", "stop"), Mark(11.0, "2", "alarm"), Mark(90.0, "3", "restart")]
    svg = line_chart([Line("speed", points)], title="t", x="x", y="y", marks=marks)
    assert [kind for kind in ("stop", "alarm", "restart") if f"mark {kind}" in svg] == [
        "stop",
        "alarm",
        "restart",
    ]
    assert ">1-2<" in svg
    assert ">3<" in svg


def test_an_axis_says_large_numbers_shortly():
    said = [number(one) for one in (0.0, 0.25, 9999.0, 12_000.0, 3.4e6, 2e9)]
    assert said == ["0", "0.25", "9,999", "12k", "3.4M", "2G"]


def test_names_are_escaped():
    svg = line_chart([Line("<b>", ((0.0, 1.0), (1.0, 2.0)))], title='"<x>', x="s", y="v")
    assert "<b>" not in svg
    assert "<x>" not in svg


def test_nothing_to_draw_is_nothing():
    assert line_chart([Line("a", ())], title="t", x="x", y="y") == ""
    assert histogram([], title="t", at=0) == ""
