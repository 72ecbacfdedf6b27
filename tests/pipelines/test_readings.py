"""What stages count becomes readings; what is not known becomes none."""

import json

from actors.pool import ServerSnapshot
from actors.protocol import Load
from actors.supervision import ServerStatus
from pipelines.readings import (
    kv_usage,
    pool_readings,
    row_readings,
    server_readings,
    shard_readings,
    step_readings,
    tally_readings,
)
from pipelines.row_report import RowReport
from tests.support.good_run import _train_figures


def report(status: str, *, dataset: str = "chat", output: int = 10) -> RowReport:
    return RowReport(
        sample_id="s",
        prompt_id="s",
        dataset=dataset,
        status=status,
        prompt_tokens=0 if status.startswith("failed:") else 5,
        output_tokens=0 if status.startswith("failed:") else output,
        reasoning_tokens=0 if status.startswith("failed:") else 4,
        finished_us=0,
        server="http://127.0.0.1:1",
        finish_reason="stop",
        closed=True,
        output_hash=0,
        latency_ms=1500,
    )


def values(readings) -> dict[str, float]:
    found = {one.series: one.value for one in readings}
    assert found
    return found


def test_rows_are_counted_by_set_and_status_with_their_tokens():
    reports = [report("ok"), report("ok", output=20), report("rejected:empty_content")]
    found = values(row_readings([*reports, report("failed:deadline"), report("ok", dataset="b")]))
    assert found['eyas_rows{dataset="chat",status="ok"}'] == 2
    assert found['eyas_rows{dataset="b",status="ok"}'] == 1
    assert found['eyas_rows{dataset="chat",status="failed"}'] == 1
    assert found['eyas_row_faults{dataset="chat",reason="rejected:empty_content"}'] == 1
    assert found['eyas_tokens{dataset="chat",kind="output"}'] == 40
    assert found['eyas_tokens{dataset="chat",kind="reasoning"}'] == 12


def test_a_row_without_a_reply_has_neither_tokens_nor_latency():
    found = list(row_readings([report("failed:deadline")]))
    assert {one.name for one in found} == {"eyas_rows", "eyas_row_faults"}


def test_a_server_that_says_nothing_has_no_load():
    load = Load(running=3, waiting=2, used_tokens=50, max_total_num_tokens=200)
    ready = ServerStatus("a", borrowed=True, state="ready", load=load, starts=3)
    silent = ServerStatus("b", borrowed=True, state="left")
    found = values(server_readings([ready, silent]))
    assert found['eyas_servers{state="ready"}'] == 1
    assert found['eyas_servers{state="left"}'] == 1
    assert found['eyas_servers{state="failed"}'] == 0
    assert found['eyas_server_running{server="a"}'] == 3
    assert found['eyas_server_kv_usage{server="a"}'] == 0.25
    assert found['eyas_server_restarts{server="a"}'] == 2
    assert 'eyas_server_tokens_per_second{server="a"}' not in found
    assert [one for one in found if 'server="b"' in one] == [
        'eyas_server_ready{server="b"}',
        'eyas_server_restarts{server="b"}',
    ]


def test_kv_usage_is_what_the_server_says_before_what_can_be_reckoned():
    def server(**load) -> ServerStatus:
        load = Load(running=0, waiting=0, used_tokens=50, **load)
        return ServerStatus("a", borrowed=True, load=load, max_total_num_tokens=100)

    assert kv_usage(server(token_usage=0.9, max_total_num_tokens=200)) == 0.9
    assert kv_usage(server(max_total_num_tokens=200)) == 0.25
    assert kv_usage(server()) == 0.5
    assert kv_usage(ServerStatus("a", borrowed=True)) is None


def test_faults_of_attempts_are_counted_once():
    def look(**faults: int) -> ServerSnapshot:
        return ServerSnapshot("http://a", "resting", 4, 16.0, 9, 90, faults)

    name = 'eyas_request_faults{server="http://a",fault="deadline"}'
    assert values(pool_readings([], [look(deadline=2)]))[name] == 2
    assert values(pool_readings([look(deadline=2)], [look(deadline=5)]))[name] == 3
    found = values(pool_readings([look(deadline=2)], [look(deadline=2)]))
    assert found[name] == 0
    assert found['eyas_pool_trusted{server="http://a"}'] == 0
    assert found['eyas_pool_in_flight{server="http://a"}'] == 4


def test_a_shard_counts_what_was_set_aside():
    found = values(shard_readings(10, 2, 900))
    assert found['eyas_capture_samples{status="set_aside"}'] == 2
    assert found["eyas_capture_tokens"] == 900


def test_a_training_line_gives_curves_for_each_ttt_step_and_the_parts_of_a_step():
    line = {**_train_figures(4, 3), "seconds": 8.0, "data_wait_share": 0.25}
    found = values(step_readings(json.loads(json.dumps(line)), steps=4))
    assert found["eyas_train_step"] == 4
    assert found["eyas_train_loss"] == line["loss"]
    assert found['eyas_train_step_seconds{part="data_wait"}'] == 0.5
    assert found['eyas_train_step_seconds{part="compute"}'] == 1.5
    for step, share in enumerate(line["accuracy"]):
        assert found[f'eyas_train_accuracy{{split="train",ttt_step="{step}"}}'] == share


def test_a_rate_of_nothing_is_absent():
    nothing = {"accuracy": [0.5, None], "acceptance_rate": [None], "acceptance_length": None}
    (only,) = tally_readings(nothing, "heldout")
    assert only.series == 'eyas_train_accuracy{split="heldout",ttt_step="0"}'
