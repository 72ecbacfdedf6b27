"""Gates of a row, and the watch over a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.protocol import Finish
from pipelines.quality import (
    Accepted,
    Go,
    Rejected,
    Stop,
    Window,
    figures_of,
    judge,
    judge_window,
)
from pipelines.row_report import RowReport
from pipelines.split import Splitter
from tests.support.profiles import CLOSE, OPEN, STOP, THINKS, gates

GATES = gates()


def text_of(ids):
    return "".join(chr(64 + one) for one in ids)


def verdict(ids, *, thinks=False, of=THINKS, rule=GATES, content=None, **more):
    stopped = ids[-1] == STOP
    cut = Splitter(of, text_of).split([OPEN] if thinks else [], ids, STOP if stopped else None)
    finish = Finish("stop", STOP, None) if stopped else Finish("length", None, len(ids))
    parts = [ids[one.start : one.end] for one in cut.segments if one.kind == "content"]
    said = "".join(map(text_of, parts)) if content is None else content
    return judge(ids, cut, finish, content=said, gates=rule, reserved=of.reserved, **more)


@pytest.mark.parametrize(
    ("ids", "thinks", "gate"),
    [
        ([5, 0, STOP], False, "reserved_id"),
        ([STOP], False, "empty_content"),
        ([5, CLOSE, STOP], True, "empty_content"),
        ([5, 6, STOP], True, "missing_think_close"),
        ([5, CLOSE, 6, STOP], False, "unopened_think_close"),
        ([5, 6], True, "truncated_thinking"),
        ([7] * 20 + [STOP], False, "one_token_loop"),
        ([7, 8] * 20 + [7] * 5, False, "one_token_loop"),
        ([7, 8, 9] * 20, False, "repetition"),
        ([5, CLOSE, 6, CLOSE, STOP], True, "residual_marker"),
        ([5, CLOSE, 6, STOP, 7, STOP], True, "residual_marker"),
    ],
)
def test_each_fault_is_rejected_by_its_gate(ids, thinks, gate):
    result = verdict(ids, thinks=thinks)
    assert isinstance(result, Rejected)
    assert result.gate == gate
    assert result.detail


@pytest.mark.parametrize(
    ("ids", "thinks"),
    [
        ([5, 6, STOP], False),
        ([4, STOP], False),  # a one-word answer is no loop
        ([5, 6], False),
        ([5, CLOSE, 6, STOP], True),
        ([*range(100, 130), *[7] * 30], False),  # exactly half
        ([7] * 15 + [STOP], False),
    ],
)
def test_a_sane_answer_is_accepted(ids, thinks):
    assert verdict(ids, thinks=thinks) == Accepted(())


def test_only_the_finish_reasons_of_the_recipe_pass():
    result = verdict([5, 6], rule=gates(finish_reasons=("stop",)))
    assert isinstance(result, Rejected)
    assert result.gate == "finish_reason"


def test_cut_thinking_may_pass_where_no_content_is_asked_and_says_so():
    rule = gates(min_content_tokens=0)
    assert verdict([5, 6], thinks=True, rule=rule) == Accepted(("truncated_thinking",))


def test_a_marker_within_the_thinking_is_flagged():
    assert verdict([5, OPEN, CLOSE, 6, STOP], thinks=True) == Accepted(("stray_marker",))


def report(status="ok", *, reasoning=3, tokens=10):
    return RowReport(
        "id", "id", "set", status, 5, tokens, reasoning, 0, "http://s", "stop", True, 1, 70
    )


def test_a_window_stops_on_too_many_bad_rows_and_names_the_usual_one():
    bad = [report("failed:missing_completion_tokens"), report("rejected:empty_content")]
    stop = judge_window([report(), *bad, bad[0]], GATES)
    assert isinstance(stop, Stop)
    assert "3 of 4" in stop.reason
    assert "failed:missing_completion_tokens" in stop.reason
    assert isinstance(judge_window([report(), report(), *bad], GATES), Go)


def test_a_window_stops_when_a_thinking_target_does_not_think():
    rule = gates(min_reasoning_share=0.5)
    rows = [report(reasoning=0), report(reasoning=0), report(reasoning=9)]
    stop = judge_window(rows, rule)
    assert isinstance(stop, Stop)
    assert "33%" in stop.reason
    assert isinstance(judge_window([*rows, report()], rule), Go)


@pytest.mark.parametrize(
    "gate",
    [
        "missing_think_close",
        "unopened_think_close",
        "truncated_thinking",
        "finish_reason",
        "empty_content",
        "one_token_loop",
        "reserved_id",
    ],
)
def test_every_gate_that_stops_a_run_has_a_cause_and_a_cure(gate):
    stop = judge_window([report(f"rejected:{gate}")], GATES)
    assert isinstance(stop, Stop)
    assert stop.cause
    assert stop.cure


def test_a_share_of_nothing_is_absent_and_not_zero():
    assert figures_of([]).rejected_share is None
    only_failed = figures_of([report("failed:refused", reasoning=0, tokens=0)])
    assert only_failed.reasoning_share is None
    assert only_failed.mean_output_tokens is None
    assert only_failed.rejected_share == 1.0


@given(size=st.integers(1, 5), statuses=st.lists(st.sampled_from(["ok", "rejected:x"])))
def test_a_window_holds_the_last_rows_only(size, statuses):
    window = Window(size)
    for one in statuses:
        window = window.after(report(one))
    assert [one.status for one in window.reports] == statuses[-size:]
    assert window.is_full is (len(statuses) >= size)
