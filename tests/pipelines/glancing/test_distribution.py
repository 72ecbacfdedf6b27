"""Quantiles and histograms agree with NumPy's, also when parts are put together."""

import random

import numpy as np
import pytest

from pipelines.glancing.distribution import Distribution

_SHARES = [0.0, 0.1, 0.5, 0.9, 0.99, 1.0]


def of(numbers):
    distribution = Distribution()
    for number in numbers:
        distribution.add(number)
    return distribution


@pytest.mark.parametrize("count", [1, 2, 7, 1_000])
def test_quantiles_are_values_that_were_seen(count):
    numbers = [random.Random(n).randrange(500) for n in range(count)]
    expected = np.quantile(numbers, _SHARES, method="nearest")
    assert list(of(numbers).quantiles().values()) == pytest.approx(expected, abs=1)


def test_parts_together_are_the_whole():
    numbers = [random.Random(n).randrange(500) for n in range(300)]
    parts = of(numbers[:100])
    parts.merge(of(numbers[100:]))
    assert parts.quantiles() == of(numbers).quantiles()
    assert parts.histogram() == of(numbers).histogram()
    assert parts.count == 300


def test_very_many_values_are_kept_to_three_digits():
    numbers = [random.Random(n).uniform(1, 1_000_000) for n in range(25_000)]
    quantiles = of(numbers).quantiles()
    assert quantiles["p50"] == pytest.approx(np.quantile(numbers, 0.5), rel=0.01)


@pytest.mark.parametrize("numbers", [[3], [3, 3], [1, 2], [0, 1_000], [0.5, 0.7], [-5, 5]])
def test_a_histogram_holds_every_number_in_its_range(numbers):
    bins = of(numbers).histogram()
    assert sum(one.count for one in bins) == len(numbers)
    assert bins[0].low == min(numbers)
    assert bins[-1].high == pytest.approx(max(numbers))


def test_nothing_seen_has_neither():
    assert (of([]).quantiles(), of([]).histogram()) == ({}, ())
