"""One declaration: nothing else can be read, and the page is what it prints."""

import re
from pathlib import Path

import pytest

from pipelines.metrics import GROUPS, METRICS, Reading, UndeclaredMetric, page

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "value", "labels"),
    [
        ("eyas_nothing", 1.0, {}),
        ("eyas_rows", 1.0, {}),
        ("eyas_rows", 1.0, {"dataset": "chat"}),
        ("eyas_rows", 1.0, {"dataset": "chat", "status": "ok", "server": "one too many"}),
        ("eyas_rows", -1.0, {"dataset": "chat", "status": "ok"}),
        ("eyas_train_loss", float("nan"), {}),
        ("eyas_train_loss", float("inf"), {}),
    ],
)
def test_what_is_not_declared_cannot_be_read(name, value, labels):
    with pytest.raises(UndeclaredMetric):
        Reading(name, value, labels)


def test_a_series_is_named_as_prometheus_names_it():
    reading = Reading("eyas_rows", 2, {"status": "ok", "dataset": "chat"})
    assert reading.series == 'eyas_rows{dataset="chat",status="ok"}'
    assert Reading("eyas_train_loss", 2.5).series == "eyas_train_loss"


def test_names_are_prometheus_names_with_a_unit_and_a_meaning():
    for one in METRICS.values():
        assert re.fullmatch(r"eyas_[a-z_]+", one.name)
        assert not one.name.endswith("_total")  # the exporter puts it there
        assert one.unit
        assert one.meaning
        assert bool(one.boundaries) == (one.kind == "histogram")
        assert not one.adds_up or one.kind == "gauge"


def test_every_metric_is_in_one_group():
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(METRICS)


def test_the_page_is_printed_from_the_declaration():
    assert (ROOT / "METRICS.md").read_text() == page(), "python -m pipelines.metrics > METRICS.md"


def test_the_page_has_every_metric_by_its_exported_name():
    named = re.findall(r"^\| `(ray_\w+)` \|", page(), re.MULTILINE)
    assert sorted(named) == sorted(one.exported for one in METRICS.values())
