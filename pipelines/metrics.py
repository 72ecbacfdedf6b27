"""Every metric that a run publishes, declared once: METRICS.md and the dashboard are made from it.

`python -m pipelines.metrics` prints METRICS.md. Pure.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]

RUN_LABEL = "run"  # of every series: the run folder's name


class UndeclaredMetric(Exception):
    """A reading that no declaration allows: its name, its labels or its value."""


@dataclass(frozen=True)
class Metric:
    """One metric, as code names it; `exported` is what Prometheus sees."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = ()  # of a histogram's buckets, in its unit
    adds_up: bool = False  # a gauge: several processes each publish their part

    @property
    def exported(self) -> str:
        """Ray puts `ray_` before a name, and its exporter `_total` behind a counter's."""
        return f"ray_{self.name}{'_total' if self.kind == 'counter' else ''}"


@dataclass(frozen=True)
class Reading:
    """One value of a declared metric: what a counter grew by, what a gauge shows, what was seen.

    Raises `UndeclaredMetric` where name, labels or value are none that the declaration allows.
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in METRICS:
            raise UndeclaredMetric(f"{self.name} is not declared in pipelines/metrics.py")
        declared = METRICS[self.name]
        if set(self.labels) != set(declared.labels):
            raise UndeclaredMetric(
                f"{self.name} has the labels {sorted(self.labels)}; "
                f"{sorted(declared.labels)} are declared"
            )
        if not math.isfinite(self.value) or (declared.kind == "counter" and self.value < 0):
            raise UndeclaredMetric(f"{self.name} cannot be {self.value}")

    @property
    def series(self) -> str:
        """Name and labels, as Prometheus writes them."""
        labels = ",".join(f'{key}="{self.labels[key]}"' for key in METRICS[self.name].labels)
        return f"{self.name}{{{labels}}}" if labels else self.name


def _by_name(*metrics: Metric) -> Mapping[str, Metric]:
    named = {one.name: one for one in metrics}
    assert len(named) == len(metrics), "a metric is declared twice"
    return MappingProxyType(named)


GROUPS: Mapping[str, Mapping[str, Metric]] = {
    "Progress": _by_name(
        Metric("eyas_progress_done", "gauge", "units", "how far a stage is", ("stage", "unit")),
        Metric("eyas_progress_wanted", "gauge", "units", "where it ends", ("stage", "unit")),
    ),
    "Generate": _by_name(
        Metric(
            "eyas_rows",
            "counter",
            "rows",
            "response rows made durable; `status` is ok, rejected or failed",
            ("dataset", "status"),
        ),
        Metric(
            "eyas_row_faults",
            "counter",
            "rows",
            "durable rows that are not ok, by their whole status",
            ("dataset", "reason"),
        ),
        Metric(
            "eyas_tokens",
            "counter",
            "tokens",
            "tokens of durable rows; `kind` is prompt, output or reasoning (a part of output)",
            ("dataset", "kind"),
        ),
        Metric(
            "eyas_row_latency_seconds",
            "histogram",
            "seconds",
            "how long the attempt took that gave a row its reply",
            boundaries=(0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
        ),
        Metric("eyas_canary_passed", "gauge", "0 or 1", "whether the tap is open"),
    ),
    "Pool": _by_name(
        Metric(
            "eyas_pool_in_flight",
            "gauge",
            "requests",
            "requests that one worker has at a server; add up over workers",
            ("server",),
            adds_up=True,
        ),
        Metric(
            "eyas_pool_limit",
            "gauge",
            "requests",
            "how many it would send there now",
            ("server",),
            adds_up=True,
        ),
        Metric(
            "eyas_pool_trusted",
            "gauge",
            "0 or 1",
            "whether it sends there in the normal course of things",
            ("server",),
        ),
        Metric(
            "eyas_request_faults",
            "counter",
            "attempts",
            "attempts that ended as a fault, whatever became of their rows",
            ("server", "fault"),
        ),
    ),
    "Servers": _by_name(
        Metric("eyas_servers", "gauge", "servers", "servers of the stage by state", ("state",)),
        Metric("eyas_server_ready", "gauge", "0 or 1", "whether rows may go there", ("server",)),
        Metric("eyas_server_running", "gauge", "requests", "requests it works on", ("server",)),
        Metric("eyas_server_queue", "gauge", "requests", "requests that wait in it", ("server",)),
        Metric("eyas_server_kv_usage", "gauge", "share", "used part of its KV memory", ("server",)),
        Metric(
            "eyas_server_tokens_per_second",
            "gauge",
            "tokens/s",
            "what it says that it generates",
            ("server",),
        ),
        Metric("eyas_server_restarts", "gauge", "starts", "how often it began again", ("server",)),
    ),
    "Capture": _by_name(
        Metric(
            "eyas_capture_samples",
            "counter",
            "samples",
            "samples of finished shards; `status` is captured or set_aside",
            ("status",),
        ),
        Metric("eyas_capture_tokens", "counter", "tokens", "tokens of finished shards"),
        Metric("eyas_capture_shards", "counter", "shards", "finished shards"),
    ),
    "Train": _by_name(
        Metric("eyas_train_step", "gauge", "steps", "optimiser steps so far"),
        Metric("eyas_train_loss", "gauge", "nats", "TTT loss, mean since the last reading"),
        Metric("eyas_train_learning_rate", "gauge", "1", "learning rate of the last step"),
        Metric("eyas_train_grad_norm", "gauge", "1", "gradient norm of the last step, unclipped"),
        Metric("eyas_train_tokens_per_second", "gauge", "tokens/s", "since the last reading"),
        Metric(
            "eyas_train_step_seconds",
            "gauge",
            "seconds",
            "mean time of a step; `part` is data_wait or compute",
            ("part",),
        ),
        Metric(
            "eyas_train_accuracy",
            "gauge",
            "share",
            "rows that the draft gets right at a TTT step; `split` is train or heldout",
            ("split", "ttt_step"),
        ),
        Metric(
            "eyas_train_acceptance_rate",
            "gauge",
            "share",
            "the same where all steps before were right",
            ("split", "ttt_step"),
        ),
        Metric(
            "eyas_train_acceptance_length",
            "gauge",
            "tokens",
            "simulated acceptance length of greedy chain drafting",
            ("split",),
        ),
    ),
}
METRICS: Mapping[str, Metric] = _by_name(
    *(metric for group in GROUPS.values() for metric in group.values())
)


def page() -> str:
    """METRICS.md."""
    lines = [_HEAD]
    for group, metrics in GROUPS.items():
        lines += [f"## {group}\n", "| metric | kind | unit | labels | meaning |", "|" + "---|" * 5]
        for one in metrics.values():
            labels = ", ".join(f"`{label}`" for label in one.labels)
            cells = (f"`{one.exported}`", one.kind, one.unit, labels, one.meaning)
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


_HEAD = f"""\
# Metrics

Printed by `python -m pipelines.metrics` from the declaration in `pipelines/metrics.py`; a name that
is not declared there cannot be published. The driver and the workers publish them through Ray once
a second, so they are on each node's metrics endpoint beside Ray's own (GPUs, memory, actors), under
the names below. Every series has the label `{RUN_LABEL}` (the run folder's name), and those that
Ray adds. A gauge that nobody reads any more is gone after some 20 seconds: absent is not zero.

* `monitoring/prometheus.yml` scrapes every node of a Ray cluster whose dashboard runs on this
  machine: `prometheus --config.file=monitoring/prometheus.yml`.
* `monitoring/grafana.json` is a dashboard of all of them, printed from the same declaration by
  `python -m pipelines.dashboard`. Import it, and choose the Prometheus data source.
* Without either, `eyas status RUN --watch` shows a run in a terminal, and `RUN/events.jsonl` gets a
  line `figures` a minute with the totals and the latest values.

A Ray that was started with metrics collection disabled has no endpoint; nothing else changes.
"""


if __name__ == "__main__":
    sys.stdout.write(page())
