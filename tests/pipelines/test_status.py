"""Finished, running, stopped and dead runs are told apart, quickly and from the files alone."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.errors import PreflightFailed
from pipelines.recipe import load_recipe
from pipelines.status import StageStatus, StatusReport, living_driver, render, status
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog
from tests.support.good_run import STEPS, make_good_run, write_segments

ROOT = Path(__file__).parents[2]
_HOLD = """
import sys, time
from pathlib import Path
from pipelines.store import RunFolder
with RunFolder(Path(sys.argv[1])).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tiny_target) -> RunFolder:
    return make_good_run(tmp_path_factory.mktemp("finished"), tiny_target)


@pytest.fixture
def generating(tmp_path, tiny_target) -> RunFolder:
    """A run in the middle of generate: segments of all but the last rows, nothing committed."""
    run = make_good_run(tmp_path, tiny_target, until="prepare")
    EventLog(run).append("stage_started", stage="generate")
    write_segments(load_recipe(run.recipe), run)
    sorted(run.segments.rglob("*.arrow"))[-1].unlink()
    return run


@pytest.fixture
def driver():
    """Start a process that holds a run's lock, and end it."""
    started: list[subprocess.Popen[str]] = []

    def start(run: RunFolder) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _HOLD, str(run.root)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def stage(report: StatusReport, name: str) -> StageStatus:
    return next(one for one in report.stages if one.stage == name)


def shown(report: StatusReport) -> str:
    console = Console(file=io.StringIO(), width=80, record=True, no_color=True)
    render(report, console)
    return console.export_text()


def test_a_finished_run_says_so_with_the_next_command(finished):
    report = status(finished)
    assert report.state == "finished"
    assert {one.state for one in report.stages} == {"done"}
    assert report.next_command == f"eyas verify {finished.root}"
    assert stage(report, "train").done == STEPS
    assert report.alarms == ()


def test_sets_are_counted_with_their_reasons(finished):
    (chat,) = status(finished).sets
    assert (chat.total, chat.done, chat.ok, chat.rejected, chat.failed) == (40, 40, 37, 2, 1)
    assert chat.reasons == {"rejected:empty_content": 2, "failed:deadline": 1}


def test_rates_are_those_that_the_stages_measured(finished):
    generate = stage(status(finished), "generate")
    assert generate.tokens_per_second == 300.0
    assert generate.rows_per_second == pytest.approx(20.0)


def test_training_tells_step_loss_and_time_left(finished, tmp_path):
    run = RunFolder(tmp_path)
    run.training.mkdir()
    lines = (finished.training / "metrics.jsonl").read_text().splitlines()[:10]
    (run.training / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "tr')
    training = status(run).training
    assert training is not None
    assert (training.step, training.total_steps) == (10, STEPS)
    assert training.loss == json.loads(lines[9])["loss"]
    assert training.eta_seconds == pytest.approx(10 * 0.1)


def test_a_living_driver_is_seen_and_not_disturbed(generating, driver):
    process = driver(generating)
    report = status(generating)
    assert report.state == "running"
    assert report.driver_pid == process.pid
    assert stage(report, "generate").state == "running"
    assert process.poll() is None
    with pytest.raises(PreflightFailed), generating.lock():
        raise AssertionError("the driver still holds its lock")


def test_durable_rows_count_before_any_commit(generating, driver):
    driver(generating)
    report = status(generating)
    generate = stage(report, "generate")
    assert generate.total == 40
    assert 0 < generate.done < 40
    assert report.sets[0].done == generate.done


def test_a_killed_driver_leaves_a_dead_run_that_says_how_to_go_on(generating, driver):
    process = driver(generating)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    report = status(generating)
    assert report.state == "dead"
    assert report.driver_pid is None
    assert stage(report, "generate").state == "stopped"
    assert f"eyas run {generating.recipe}" in report.next_command


def test_a_run_that_stopped_by_itself_names_its_error(generating):
    events = EventLog(generating)
    events.append(
        "quality_stop", scope="set chat", phase="canary", reason="9 of 16 rows are rejected"
    )
    events.append("stage_stopped", stage="generate", error="QualityStop")
    report = status(generating)
    assert report.state == "stopped"
    assert report.last_error == "QualityStop in generate"
    assert "9 of 16 rows are rejected" in report.alarms[0]
    assert "QualityStop" in shown(report)


def test_a_driver_that_lives_and_writes_nothing_raises_an_alarm(generating, driver):
    driver(generating)
    at = json.loads(generating.events.read_text().splitlines()[-1])["at"]
    quiet = status(generating, now=at + 5)
    hung = status(generating, now=at + 3600)
    assert quiet.alarms == ()
    assert "nothing was written for" in hung.alarms[0]


def test_probing_needs_no_lock_file(tmp_path):
    assert living_driver(RunFolder(tmp_path)) is None
    assert status(RunFolder(tmp_path)).state == "not started"


def test_half_an_event_at_the_end_is_a_writer_that_was_killed(generating):
    with generating.events.open("a") as handle:
        handle.write('{"at": 1')
    assert status(generating).last_event == "stage_started"


def test_looking_needs_neither_ray_nor_torch(finished):
    program = (
        "import sys; from pathlib import Path; from pipelines.status import status\n"
        "from pipelines.store import RunFolder\n"
        "status(RunFolder(Path(sys.argv[1])))\n"
        "assert not {'ray', 'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program, str(finished.root)], cwd=ROOT, check=True)


def test_it_reads_in_80_columns_and_as_json(finished, generating):
    for run in (finished, generating):
        report = status(run)
        assert json.loads(json.dumps(report.to_json(), allow_nan=False))["state"] == report.state
        lines = [line for line in shown(report).splitlines() if not line.startswith("next")]
        assert max(len(line) for line in lines) <= 80
