"""The dashboard shows the declared metrics, all of them and no others."""

import json
import re
from pathlib import Path

import yaml

from pipelines.dashboard import dashboard, queries_of
from pipelines.metrics import METRICS

MONITORING = Path(__file__).parents[2] / "monitoring"
# What Prometheus makes of a histogram.
EXPORTED = {
    f"{one.exported}{'_bucket' if one.kind == 'histogram' else ''}": one for one in METRICS.values()
}


def panels() -> list[dict]:
    return json.loads((MONITORING / "grafana.json").read_text())["panels"]


def test_the_file_is_printed_from_the_declaration():
    text = json.dumps(dashboard(), indent=2) + "\n"
    assert (MONITORING / "grafana.json").read_text() == text, (
        "python -m pipelines.dashboard > monitoring/grafana.json"
    )


def test_every_panel_asks_for_a_declared_metric_and_every_metric_has_a_panel():
    asked = [
        name
        for panel in panels()
        if panel["type"] != "row"
        for target in panel["targets"]
        for name in set(re.findall(r"ray_\w+", target["expr"]))
    ]
    assert set(asked) == set(EXPORTED)


def test_panels_have_ids_of_their_own_and_do_not_overlap():
    ids = [panel["id"] for panel in panels()]
    assert len(set(ids)) == len(ids)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels())
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def test_series_are_grouped_by_declared_labels_only():
    for metric in METRICS.values():
        for query, legend in queries_of(metric):
            (labels,) = re.findall(r"by \(([^)]*)\)", query)
            kept = [one for one in labels.split(", ") if one != "le"]
            assert kept == ["run", *metric.labels]
            assert re.findall(r"{{(\w+)}}", legend) == kept


def test_what_several_workers_publish_is_added_up():
    ((query, _),) = queries_of(METRICS["eyas_pool_in_flight"])
    assert query.startswith("sum by")
    ((query, _),) = queries_of(METRICS["eyas_train_loss"])
    assert query.startswith("max by")


def test_prometheus_reads_rays_own_discovery_file():
    from ray._private.ray_constants import PROMETHEUS_SERVICE_DISCOVERY_FILE

    config = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    ((discovery,),) = [one["file_sd_configs"] for one in config["scrape_configs"]]
    assert discovery["files"] == [f"/tmp/ray/{PROMETHEUS_SERVICE_DISCOVERY_FILE}"]
