"""A Grafana dashboard of the declared metrics: `python -m pipelines.dashboard` prints it. Pure."""

import json
import sys
from typing import Any

from pipelines.metrics import GROUPS, RUN_LABEL, Metric

_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3  # of Grafana's 24 columns
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_OF_RUN = f'{{{RUN_LABEL}=~"${RUN_LABEL}"}}'
_UNITS = {"seconds": "s", "share": "percentunit"}
_QUANTILES = (0.5, 0.95)


def dashboard() -> dict[str, Any]:
    """One row of panels for each group, one panel for each metric."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, metrics in GROUPS.items():
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place})
        top += 1
        for number, metric in enumerate(metrics.values()):
            row, column = divmod(number, _PER_ROW)
            place = {"x": column * _WIDTH, "y": top + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            panels.append({"id": len(panels) + 1, **_panel(metric), "gridPos": place})
        top += -(-len(metrics) // _PER_ROW) * _HEIGHT
    return {
        "uid": "eyas",
        "title": "Eyas",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def queries_of(metric: Metric) -> list[tuple[str, str]]:
    """What Prometheus is asked of a metric, and how each answer's series are called."""
    labels = (RUN_LABEL, *metric.labels)
    legend, by = " ".join(f"{{{{{label}}}}}" for label in labels), ", ".join(labels)
    match metric.kind:
        case "counter":
            rate = f"rate({metric.exported}{_OF_RUN}[$__rate_interval])"
            return [(f"sum by ({by}) ({rate})", legend)]
        case "gauge":
            across = "sum" if metric.adds_up else "max"
            return [(f"{across} by ({by}) ({metric.exported}{_OF_RUN})", legend)]
        case "histogram":
            rate = f"rate({metric.exported}_bucket{_OF_RUN}[$__rate_interval])"
            return [
                (f"histogram_quantile({one}, sum by (le, {by}) ({rate}))", f"{legend} {one:.0%}")
                for one in _QUANTILES
            ]


def _panel(metric: Metric) -> dict[str, Any]:
    per_second = " per second" if metric.kind == "counter" else ""
    return {
        "type": "timeseries",
        "title": f"{metric.name.removeprefix('eyas_')} ({metric.unit}{per_second})",
        "description": metric.meaning,
        "datasource": _SOURCE,
        "fieldConfig": {
            "defaults": {
                "unit": _UNITS.get(metric.unit, "short"),
                "custom": {"spanNulls": False},  # absent is not zero, nor what it was before
            },
            "overrides": [],
        },
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": name,
            }
            for at, (query, name) in enumerate(queries_of(metric))
        ],
    }


def _variables() -> list[dict[str, Any]]:
    source = {"name": "datasource", "type": "datasource", "query": "prometheus"}
    runs = {
        "name": RUN_LABEL,
        "type": "query",
        "datasource": _SOURCE,
        "query": f"label_values({{__name__=~'ray_eyas_.+'}}, {RUN_LABEL})",
        "refresh": 2,  # whenever the time range changes
        "includeAll": True,
        "multi": True,
    }
    return [source, runs]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(dashboard(), indent=2) + "\n")
