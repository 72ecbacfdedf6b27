"""Figures reach Ray's endpoint and the event log; a failure of it reaches neither run nor rows."""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.protocol import Load
from actors.supervision import ServerStatus
from pipelines import publish
from pipelines.last_seen import place_of, read_last_seen
from pipelines.metrics import METRICS, Reading
from pipelines.publish import publishing
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog

ROOT = Path(__file__).parents[2]
_PATIENCE_SECONDS = 60.0
# Publishes two of each kind, and prints what the node's endpoint says once all are there.
_PROGRAM = """
import sys, time, urllib.request
from pathlib import Path
import ray
from pipelines.metrics import METRICS, Reading
from pipelines.publish import publishing
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog

is_on = sys.argv[2] == "on"
ray.init(
    address="local", num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False,
    log_to_driver=False,
    _system_config={"metrics_report_interval_ms": 1000, "enable_metrics_collection": is_on},
)
run = RunFolder(Path(sys.argv[1]))
events = EventLog(run)
names = ("eyas_rows", "eyas_train_loss", "eyas_row_latency_seconds")
deadline = time.monotonic() + 120
with publishing(run, events, "generate"):
    rows = Reading("eyas_rows", 3, {"dataset": "chat", "status": "ok"})
    seen = [Reading("eyas_row_latency_seconds", value) for value in (0.7, 700.0)]
    events.figures.take([rows, rows, Reading("eyas_train_loss", 2.5), *seen])
    (node,) = ray.nodes()
    text = ""
    while is_on and time.monotonic() < deadline:
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        text = urllib.request.urlopen(url, timeout=10).read().decode()
        if all(METRICS[name].exported in text for name in names):
            break
        time.sleep(0.2)
print(node["MetricsExportPort"])
print("\\n".join(line for line in text.splitlines() if "eyas_" in line))
"""


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path)


def events_of(run: RunFolder) -> list[dict]:
    return [json.loads(line) for line in run.events.read_text().splitlines()]


def until(is_so) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def in_a_ray_of_its_own(run: RunFolder, collection: str) -> list[str]:
    result = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(run.root), collection],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return result.stdout.splitlines()


def value_of(lines: list[str], name: str, **labels: str) -> float:
    (found,) = [
        line
        for line in lines
        if line.startswith(f"{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items())
    ]
    return float(found.rpartition(" ")[2])


def test_the_nodes_endpoint_has_our_names_labels_and_values(run):
    _, *lines = in_a_ray_of_its_own(run, "on")
    rows = {"dataset": "chat", "status": "ok", "run": run.root.name}
    assert value_of(lines, METRICS["eyas_rows"].exported, **rows) == 6
    assert value_of(lines, METRICS["eyas_train_loss"].exported) == 2.5
    latency = METRICS["eyas_row_latency_seconds"].exported
    assert value_of(lines, f"{latency}_count") == 2
    assert value_of(lines, f"{latency}_bucket", le="1.0") == 1
    kinds = dict(re.findall(r"^# TYPE (\w+) (\w+)", "\n".join(lines), re.MULTILINE))
    assert kinds["ray_eyas_rows_total"] == "counter"
    assert kinds["ray_eyas_train_loss"] == "gauge"
    assert kinds["ray_eyas_row_latency_seconds"] == "histogram"


def test_without_metrics_collection_nothing_else_changes(run):
    port, *lines = in_a_ray_of_its_own(run, "off")
    assert port == "-1"
    assert lines in ([], [""])
    assert events_of(run)[-1]["eyas_train_loss"] == 2.5


@pytest.mark.usefixtures("local_ray")
def test_what_was_counted_is_summed_up_in_the_event_log(run):
    events = EventLog(run)
    with publishing(run, events, "capture"):
        events.figures.take([Reading("eyas_capture_tokens", 7), Reading("eyas_capture_tokens", 5)])
    (event,) = events_of(run)
    assert (event["event"], event["stage"]) == ("figures", "capture")
    assert event["eyas_capture_tokens"] == 12


@pytest.mark.usefixtures("local_ray")
def test_a_stage_that_counts_nothing_leaves_no_event(run):
    with publishing(run, EventLog(run), "capture"):
        pass
    assert not run.events.exists()


@pytest.mark.usefixtures("local_ray")
def test_a_stage_begins_with_nothing_of_the_one_before(run):
    events = EventLog(run)
    with publishing(run, events, "generate"):
        events.figures.take([Reading("eyas_canary_passed", 1)])
    with publishing(run, events, "train"):
        assert events.figures.summary() == {}
        assert list(events.figures.servers()) == []


@pytest.mark.usefixtures("local_ray")
def test_what_the_driver_sees_is_a_file_until_the_stage_ends(run):
    events = EventLog(run)
    load = Load(running=3, waiting=2, used_tokens=50, max_total_num_tokens=200)
    servers = (
        ServerStatus("generate-0", borrowed=True, url="http://a", state="ready", load=load),
        ServerStatus("generate-1", borrowed=True, state="left", error="x" * 9000),
    )
    events.figures.servers = lambda: servers
    desk = publish._Desk(run, events, "generate")
    desk._turn(time.monotonic())
    seen = read_last_seen(run)
    assert seen is not None
    assert (seen.servers[0].running, seen.servers[0].queue, seen.servers[0].kv_usage) == (
        3,
        2,
        0.25,
    )
    assert (seen.servers[1].running, seen.servers[1].state) == (None, "left")
    assert len(seen.servers[1].error) < 1000
    assert seen.ray.nodes == 1
    assert 0 <= seen.ray.free["CPU"] <= seen.ray.total["CPU"] == 4
    with publishing(run, events, "generate"):
        until(lambda: (now := read_last_seen(run)) is not None and now.at > seen.at)
    assert not place_of(run).exists()


@pytest.mark.usefixtures("local_ray")
def test_a_folder_that_cannot_be_written_ends_no_stage(run, caplog):
    events = EventLog(RunFolder(run.root / "absent"))
    with publishing(RunFolder(run.root / "absent"), events, "generate"):
        until(lambda: "is not written" in caplog.text)


@pytest.mark.usefixtures("local_ray")
def test_a_failure_is_logged_and_ends_no_stage(run, caplog):
    events = EventLog(run)

    def broken():
        raise RuntimeError("no servers today")

    with publishing(run, events, "generate"):
        events.figures.servers = broken
        until(lambda: "no servers today" in caplog.text)
        events.figures.take([Reading("eyas_capture_tokens", 7)])
    assert events_of(run)[-1]["eyas_capture_tokens"] == 7
