"""When a run must stop, and whose fault it is."""

import ast
import random
import re
from pathlib import Path

import pytest

from pipelines.monitor import (
    CONTRACT_FAULTS,
    Go,
    Monitor,
    Scope,
    Stop,
    explain,
)
from pipelines.row_report import RowReport
from tests.support.profiles import gates

ROOT = Path(__file__).parents[2]
CANARY = 32
THINKING = gates(canary_rows=CANARY, min_reasoning_share=0.5)


def report(number, status="ok", *, server="http://a", dataset="b1", **changes):
    failed = status.startswith("failed:")
    values = {
        "sample_id": f"{dataset}-{number}",
        "prompt_id": f"{dataset}-{number}",
        "dataset": dataset,
        "status": status,
        "prompt_tokens": 0 if failed else 9,
        "output_tokens": 0 if failed else 100,
        "reasoning_tokens": 0 if failed else 60,
        "finished_us": number,
        "server": server,
        "finish_reason": "" if failed else "stop",
        "closed": not failed,
        "output_hash": 0 if failed else number + 1,
        "latency_ms": 1000,
    }
    return RowReport(**{**values, **changes})


def watch(rows, rule=THINKING, *, seconds=1.0, sizes=None):
    """Tell a monitor of rows, one each `seconds`; its first stop with the number of rows, or go."""
    monitor = Monitor(rule, sizes)
    monitor.verdict(0.0)
    verdict = Go()
    for count, one in enumerate(rows, start=1):
        monitor.add(one, count * seconds)
        verdict = monitor.verdict(count * seconds)
        if isinstance(verdict, Stop):
            return verdict, count
    return verdict, len(rows)


def test_a_sane_run_goes_on():
    rows = [report(number, server=f"http://{number % 3}") for number in range(1000)]
    assert watch(rows) == (Go(), 1000)


# The faults that this watch exists for, each within the first canary


def test_replies_without_completion_tokens_stop_within_the_canary():
    rows = [report(number, "failed:missing_completion_tokens") for number in range(CANARY)]
    stop, count = watch(rows)
    assert count < CANARY
    assert (stop.scope, stop.phase) == (Scope("set", "b1"), "canary")
    assert "missing_completion_tokens" in stop.reason
    assert "contract" in stop.reason


def test_markers_of_another_model_stop_within_the_canary():
    rows = [report(number, reasoning_tokens=0, closed=False) for number in range(CANARY)]
    stop, count = watch(rows)
    assert count < CANARY
    assert "0 of" in stop.reason
    assert "reasoning" in stop.reason
    assert "think_open_id" in stop.cure


def test_a_server_without_a_reasoning_parser_is_no_fault():
    """Its replies are ids; the reasoning is found in them, whatever the server thinks of it."""
    assert watch([report(number) for number in range(CANARY)]) == (Go(), CANARY)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"status": "rejected:one_token_loop"}, "one_token_loop"),
        ({"status": "failed:refused"}, "failed:refused"),
        ({"status": "failed:nan"}, "contract"),
        ({"closed": False}, "never end"),
        ({"output_hash": 7}, "very reply"),
    ],
)
def test_each_fault_of_a_whole_set_stops_within_the_canary(changes, word):
    stop, count = watch([report(number, **changes) for number in range(CANARY)])
    assert isinstance(stop, Stop)
    assert count <= CANARY
    assert word in stop.reason
    assert stop.cause
    assert stop.cure


def test_answers_that_are_cut_stop_where_a_share_is_set():
    rows = [report(number, finish_reason="length") for number in range(CANARY)]
    assert watch(rows) == (Go(), CANARY)
    rule = gates(canary_rows=CANARY, max_length_share=0.5)
    stop, _ = watch(rows, rule)
    assert "max_new_tokens" in stop.cure


# Windows


def test_a_fault_that_begins_late_stops_in_the_window():
    good = [report(number) for number in range(200)]
    bad = [report(number, "rejected:empty_content") for number in range(200, 232)]
    stop, count = watch([*good, *bad])
    assert stop.phase == "window"
    assert count == 217  # 17 of the last 32 are more than half


def test_exactly_the_allowed_share_goes_on():
    rows = [
        report(number, "ok" if number % 2 else "rejected:empty_content") for number in range(99)
    ]
    assert watch(rows) == (Go(), 99)


def test_a_set_with_fewer_rows_than_a_canary_is_judged_when_it_is_whole():
    rows = [report(number, "rejected:empty_content") for number in range(4)]
    assert watch(rows) == (Go(), 4)
    stop, count = watch(rows, sizes={"b1": 4})
    assert isinstance(stop, Stop)
    assert count < 5


def test_one_bad_set_among_good_ones_is_named():
    rows = [
        report(number, "rejected:empty_content" if number % 2 else "ok", dataset=f"b{number % 2}")
        for number in range(64)
    ]
    stop, _ = watch(rows)
    assert stop.scope == Scope("set", "b1")


def test_a_stop_stays_until_better_rows_come():
    monitor = Monitor(THINKING)
    for number in range(CANARY):
        monitor.add(report(number, "rejected:empty_content"), 1.0)
    assert isinstance(monitor.verdict(1.0), Stop)
    assert isinstance(monitor.verdict(1.0), Stop)
    for number in range(CANARY):
        monitor.add(report(number), 2.0)
    assert monitor.verdict(2.0) == Go()


def test_the_same_answer_from_the_same_prompt_is_no_duplicate():
    rows = [
        report(number, output_hash=number // 4, prompt_id=f"{number // 4}") for number in range(99)
    ]
    assert watch(rows) == (Go(), 99)


def test_short_answers_may_be_the_same():
    rows = [report(number, output_hash=7, output_tokens=3) for number in range(99)]
    assert watch(rows) == (Go(), 99)


# Servers


def test_one_bad_server_is_named_and_the_sets_are_not():
    dice = random.Random(1)
    rows = []
    for number in range(2000):
        server = f"http://{dice.randrange(8)}"
        ill = server == "http://3" and number > 500
        rows.append(report(number, "failed:nan" if ill else "ok", server=server))
    stop, count = watch(rows)
    assert stop.scope == Scope("server", "http://3")
    assert 500 < count < 700
    assert "http://3 alone" in stop.cause
    assert "nan" in stop.reason


def test_a_bad_server_of_two_is_named_though_the_set_is_bad_with_it():
    rows = [
        report(
            number, "rejected:one_token_loop" if number % 2 else "ok", server=f"http://{number % 2}"
        )
        for number in range(40)
    ]
    rule = gates(canary_rows=CANARY, max_rejected_share=0.3)
    stop, _ = watch(rows, rule)
    assert stop.scope == Scope("server", "http://1")


def test_a_fault_of_all_servers_is_the_sets():
    dice = random.Random(2)
    rows = [
        report(
            number,
            "rejected:repetition" if dice.random() < 0.7 else "ok",
            server=f"http://{number % 16}",
        )
        for number in range(200)
    ]
    stop, _ = watch(rows)
    assert stop.scope == Scope("set", "b1")


def test_a_server_that_answers_without_reasoning_is_named():
    rows = [
        report(number, server=f"http://{number % 4}", reasoning_tokens=0 if number % 4 == 2 else 60)
        for number in range(400)
    ]
    stop, _ = watch(rows)
    assert stop.scope == Scope("server", "http://2")
    assert "reasoning" in stop.reason


# Drift, speed, silence


@pytest.mark.parametrize("tokens", [1, 100_000])
def test_answers_of_quite_another_length_stop(tokens):
    late = [report(number, output_tokens=tokens) for number in range(CANARY, 40 * CANARY)]
    rows = [*[report(number) for number in range(CANARY)], *late]
    stop, count = watch(rows)
    assert "as long as in the canary" in stop.reason
    assert count <= 20 * CANARY
    milder = [report(number, output_tokens=300) for number in range(CANARY, 40 * CANARY)]
    assert watch([*rows[:CANARY], *milder])[0] == Go()


def test_silence_stops_without_a_row():
    monitor = Monitor(THINKING)
    assert monitor.verdict(100.0) == Go()
    assert monitor.verdict(3600.0) == Go()
    stop = monitor.verdict(3701.0)
    assert isinstance(stop, Stop)
    assert (stop.scope, stop.phase, stop.figures.rows) == (Scope("run"), "stall", 0)
    monitor.add(report(1), 3702.0)
    assert monitor.verdict(3703.0) == Go()


def test_a_run_that_crawls_stops():
    monitor = Monitor(THINKING)
    for number in range(20 * CANARY):
        monitor.add(report(number), number * 0.1)
    at = 20 * CANARY * 0.1
    assert monitor.verdict(at) == Go()
    verdicts = [monitor.verdict(at + later) for later in (600.0, 3599.0)]
    assert verdicts == [Go(), Go()]
    slow = Monitor(gates(canary_rows=CANARY, min_speed_share=0.5))
    for number in range(CANARY):
        slow.add(report(number), number * 0.1)
    for number in range(20 * CANARY):
        slow.add(report(number + CANARY), 10.0 + number)
    stop = slow.verdict(10.0 + 20 * CANARY)
    assert isinstance(stop, Stop)
    assert "tokens/s" in stop.reason


def test_rows_of_an_earlier_start_tell_nothing_about_time():
    monitor = Monitor(gates(canary_rows=CANARY, min_speed_share=0.5))
    for number in range(40 * CANARY):
        monitor.add(report(number), None)
    assert monitor.verdict(5.0) == Go()
    assert monitor.figures(Scope("set", "b1")).rows == CANARY


# Figures and causes


def test_the_suspects_of_a_scope_are_the_rows_of_its_window_by_set():
    monitor = Monitor(gates(canary_rows=2))
    for number in range(4):
        monitor.add(report(number, dataset=f"b{number % 2}"), None)
    assert monitor.suspects(Scope("server", "http://a")) == {"b0": ("b0-2",), "b1": ("b1-3",)}
    assert monitor.suspects(Scope("set", "b1")) == {"b1": ("b1-1", "b1-3")}
    assert monitor.suspects(Scope("run")) == {}


def test_a_share_of_nothing_is_absent_and_not_zero():
    monitor = Monitor(THINKING)
    assert monitor.figures(Scope("set", "b1")).rejected_share is None
    monitor.add(report(1, "failed:refused"), 0.0)
    figures = monitor.figures(Scope("set", "b1"))
    assert (figures.rejected_share, figures.failed_share) == (1.0, 1.0)
    assert figures.reasoning_share is figures.mean_output_tokens is figures.closed_share is None


def test_the_counts_of_a_window_are_those_of_its_rows():
    dice = random.Random(3)
    monitor, rows = Monitor(gates(canary_rows=10)), []
    for number in range(300):
        status = dice.choice(["ok", "ok", "rejected:repetition", "failed:nan", "failed:refused"])
        row = report(number, status)
        if not status.startswith("failed"):
            row = report(
                number,
                status,
                reasoning_tokens=dice.choice([0, 5]),
                closed=dice.random() < 0.5,
                finish_reason=dice.choice(["stop", "length"]),
                output_hash=dice.randrange(4),
            )
        rows.append(row)
        monitor.add(row, None)
        last = rows[-10:]
        seen = monitor.figures(Scope("set", "b1"))
        replies = [one for one in last if one.has_reply]
        thought = [one for one in replies if one.reasoning_tokens]
        assert seen.rows == len(last)
        assert seen.rejected_share == sum(not one.is_ok for one in last) / len(last)
        assert seen.fault_share == sum(one.status == "failed:nan" for one in last) / len(last)
        if thought:
            assert seen.closed_share == sum(one.closed for one in thought) / len(thought)
        if replies:
            assert seen.length_share == sum(one.finish_reason == "length" for one in replies) / len(
                replies
            )
            distinct = len({one.output_hash for one in replies})
            assert seen.duplicate_share == (len(replies) - distinct) / len(replies)


def test_every_fault_that_a_bad_reply_can_have_counts_as_one():
    named = set()
    for path in (ROOT / "actors").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "BadReply"
                and isinstance(node.args[0], ast.Constant)
            ):
                named.add(node.args[0].value)
    # What is asked of /v1/loads and of a batch of texts makes no row.
    assert named - {"loads", "texts"} <= CONTRACT_FAULTS


def test_every_gate_has_a_cause_and_a_cure_of_its_own():
    source = (ROOT / "pipelines" / "quality.py").read_text()
    gate_names = set(re.findall(r'return "([a-z_]+)", ', source))
    tool_faults = {"truncated_tool_call", "malformed_tool_call", "invalid_tool_json"}
    assert len(gate_names) > 9
    for gate in gate_names | tool_faults:
        assert explain(f"rejected:{gate}") != explain("failed:refused"), gate


def test_refusals_that_come_back_first_when_many_rows_are_asked_at_once_are_no_bad_window():
    """A tenth of the prompts is refused at once; the answers of the others take a while."""
    rule, in_flight = gates(canary_rows=8, max_failed_share=0.5), 200
    canary = [report(number) for number in range(8)]
    first = [report(number, "failed:http_400") for number in range(100, 100 + in_flight // 10)]
    answers = [report(number) for number in range(200, 380)]
    narrow, wide = Monitor(rule), Monitor(rule, in_flight={"set": in_flight})
    verdicts = {narrow: [], wide: []}
    for now, one in enumerate([*canary, *first, *answers]):
        for monitor, seen in verdicts.items():
            monitor.add(one, now)
            seen.append(monitor.verdict(now))
    assert any(isinstance(one, Stop) for one in verdicts[narrow])
    assert all(isinstance(one, Go) for one in verdicts[wide])
    for now in range(1000, 1000 + in_flight):  # when everything is bad it is seen all the same
        wide.add(report(now, "failed:http_400"), now)
    assert wide.verdict(1200).phase == "window"
