"""Finished, running, stopped and dead runs are told apart, quickly and from the files alone."""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from pipelines.errors import PreflightFailed
from pipelines.last_seen import GpuSeen, LastSeen, RaySeen, ServerSeen, write_last_seen
from pipelines.recipe import load_recipe
from pipelines.status import StageStatus, StatusReport, status
from pipelines.status_render import render
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
    assert (report.history, report.seen) == ((), None)


def test_sets_are_counted_with_their_reasons(finished):
    (chat,) = status(finished).sets
    assert (chat.total, chat.done, chat.ok, chat.rejected, chat.failed) == (40, 40, 37, 2, 1)
    assert chat.reasons == {"rejected:empty_content": 2, "failed:deadline": 1}


def test_rates_are_those_that_the_stages_measured(finished):
    generate = stage(status(finished), "generate")
    assert generate.tokens_per_second == 300.0
    assert generate.rows_per_second == pytest.approx(20.0)


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
    assert (report.driver_pid, report.dead_pid) == (None, process.pid)
    assert stage(report, "generate").state == "stopped"
    assert f"eyas run {generating.recipe}" in report.next_command
    assert f"the driver is dead (pid {process.pid}, in generate)" in report.alarms[0]
    assert f"dead: its driver (pid {process.pid}) was killed" in shown(report)


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
    assert report.history == ()
    assert "QualityStop" in shown(report)


def test_a_stop_that_was_mended_is_history_and_no_alarm(generating, driver):
    events = EventLog(generating)
    events.append("quality_stop", scope="set chat", phase="canary", reason="markers in 9 rows")
    events.append("stage_stopped", stage="generate", error="QualityStop")
    events.append("stage_started", stage="generate")
    driver(generating)
    assert "markers in 9 rows" in status(generating).alarms[0]  # asked again, and not passed yet
    events.append("canary_passed")
    report = status(generating)
    assert report.alarms == ()
    assert "markers in 9 rows" in report.history[0]
    assert "past" in shown(report)
    assert "ALARM" not in shown(report)


def test_rates_and_time_left_come_from_the_rows_of_this_session(generating, driver):
    (segment, *others) = sorted(generating.segments.rglob("*.arrow"))
    at = time.time()
    began = json.loads(generating.events.read_text().splitlines()[-1])
    generating.events.write_text(json.dumps({**began, "at": at - 1000}) + "\n")
    driver(generating)
    os.utime(segment, (at - 10, at - 10))
    for other in others:
        os.utime(other, (at - 500, at - 500))
    report = status(generating, now=at)
    generate, (chat,) = stage(report, "generate"), report.sets
    assert generate.rows_per_second_now == pytest.approx(16 / 60)
    assert generate.rows_per_second == pytest.approx(chat.done / 1000)
    assert chat.rows_per_second == generate.rows_per_second_now
    assert generate.eta_seconds == pytest.approx((40 - chat.done) * 60 / 16, abs=0.1)
    assert generate.tokens_per_second_now > generate.tokens_per_second > 0
    assert report.last_row_age_seconds == pytest.approx(10, abs=0.1)
    text = shown(report)
    assert "now 0.267 rows/s" in text
    assert f"{chat.done} / 40" in text
    assert "last durable row  10s ago" in text


def test_where_no_row_comes_the_rate_is_zero_and_the_time_left_unknown(generating, driver):
    for segment in generating.segments.rglob("*.arrow"):
        os.utime(segment, (1.0, 1.0))
    driver(generating)
    generate = stage(status(generating, now=time.time() + 120), "generate")
    assert generate.rows_per_second_now == 0
    assert generate.eta_seconds is None


def test_a_run_that_nobody_works_on_has_no_rate(generating):
    report = status(generating)
    assert stage(report, "generate").rows_per_second_now is None
    assert report.sets[0].rows_per_second is None
    assert report.sets[0].eta_seconds is None


def server(name: str, state: str = "ready", **changes) -> ServerSeen:
    fields = {"running": 3, "queue": 1, "kv_usage": 0.25, "tokens_per_second": 812.4}
    fields |= {"restarts": 0, "error": ""}
    return ServerSeen(name=name, url="http://127.0.0.1:1", state=state, **{**fields, **changes})


def seen_by(process: subprocess.Popen[str], *servers: ServerSeen, **changes) -> LastSeen:
    fields = {
        "at": time.time(),
        "host": socket.gethostname(),
        "pid": process.pid,
        "stage": "generate",
        "servers": servers,
        "gpus": (GpuSeen(0, "NVIDIA H200", 81_920, 143_771, 0.93),),
        "ray": RaySeen(2, 0, {"CPU": 16.0, "GPU": 8.0}, {"CPU": 3.5, "GPU": 0.0}),
    }
    return LastSeen(**{**fields, **changes})


def test_servers_gpus_and_ray_are_shown_as_the_driver_saw_them(generating, driver):
    process = driver(generating)
    silent = server("generate-1", "restarting", running=None, queue=None, kv_usage=None, restarts=2)
    write_last_seen(generating, seen_by(process, server("generate-0"), silent))
    report = status(generating)
    assert report.seen.servers[1].restarts == 2
    assert report.alarms == ()
    text = shown(report)
    assert "1 ready, 1 restarting" in text
    assert "812" in text
    assert "25%" in text
    assert "80.0/140.4 GiB, load 93%" in text
    assert "CPU 12.5/16 taken, GPU 8/8 taken" in text


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        ({"servers": (server("a", "left"), server("b", "starting"))}, "no server is ready: 1 left"),
        ({"servers": (server("a"), server("b", "unfit", error="another model\n..."))}, "server b"),
        ({"ray": RaySeen(1, 1, {"CPU": 1.0}, {"CPU": 1.0})}, "1 of Ray's nodes are dead"),
        ({"at": 1000.0}, "has not looked at its servers"),
    ],
)
def test_what_is_wrong_with_the_servers_is_an_alarm(generating, driver, change, alarm):
    process = driver(generating)
    write_last_seen(generating, seen_by(process, server("a")))
    assert status(generating).alarms == ()
    write_last_seen(generating, seen_by(process, **{"servers": (server("a"),), **change}))
    (found,) = status(generating).alarms
    assert alarm in found


def test_a_driver_on_another_machine_is_known_by_what_it_writes(generating):
    at = time.time()
    away = LastSeen(at - 5, "elsewhere", 77, "generate", (), (), RaySeen(1, 0, {}, {}))
    write_last_seen(generating, away)
    report = status(generating, now=at)
    assert (report.state, report.driver_pid, report.driver_host) == ("running", 77, "elsewhere")
    assert "on elsewhere" in shown(report)
    assert status(generating, now=at + 300).state == "dead"


def test_a_segment_that_cannot_be_read_is_an_alarm_and_no_end(generating, driver):
    driver(generating)
    before = status(generating).sets[0].done
    damaged = sorted(generating.segments.rglob("*.arrow"))[0].with_name("torn-0.arrow")
    damaged.write_bytes(b"ARROW1 and no more")
    report = status(generating)
    assert report.sets[0].done == before
    assert str(damaged) in report.alarms[0]


def test_lines_of_figures_are_no_change_of_state(generating, driver):
    driver(generating)
    before = status(generating)
    EventLog(generating).append("figures", stage="generate", eyas_train_loss=1.0)
    after = status(generating, now=time.time() + 3600)
    assert after.last_event == before.last_event == "stage_started"
    assert "nothing was written for" in after.alarms[0]


def test_a_driver_that_lives_and_writes_nothing_raises_an_alarm(generating, driver):
    driver(generating)
    at = json.loads(generating.events.read_text().splitlines()[-1])["at"]
    quiet = status(generating, now=at + 5)
    hung = status(generating, now=at + 3600)
    assert quiet.alarms == ()
    assert "nothing was written for" in hung.alarms[0]


def test_an_empty_folder_is_a_run_that_has_not_started(tmp_path):
    report = status(RunFolder(tmp_path))
    assert report.state == "not started"
    assert (report.sets, report.alarms, report.history, report.seen) == ((), (), (), None)


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
