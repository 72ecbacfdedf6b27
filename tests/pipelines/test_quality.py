"""Gates of a row."""

import json
import re
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.protocol import Finish
from pipelines.quality import (
    Accepted,
    Rejected,
    judge,
    last_question,
    repeated_runs,
)
from pipelines.split import Splitter
from pipelines.tool_calls import ToolCall, ToolCalls
from tests.support.profiles import CALL, CALL_END, CLOSE, OPEN, QWEN, STOP, THINKS, gates

ROOT = Path(__file__).parents[2]

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


# Loops

WORD = re.compile(r"\w+|\s+|[^\w\s]")


def tokens_of(text):
    """Words, white space and signs as ids: near enough to a tokenizer's."""
    return [zlib.crc32(word.encode()) for word in WORD.findall(text)]


def repeated_share(ids):
    repeated, runs = repeated_runs(ids, 0.0)
    return repeated / runs if runs else 0.0


QUESTION = "How many voles does a kite need in a week, if it eats two each day and fasts once? "
TABLE = "| bird | voles |\n|---|---|\n" + "".join(f"| b{n} | {n * 7 % 5} |\n" for n in range(60))


@pytest.mark.parametrize(
    "text",
    [
        "!" * 200,
        QUESTION + "I think that is right. " * 30,
        QUESTION * 5,
        QUESTION * 2 + "Wait, no. " * 60 + QUESTION,
    ],
)
def test_loops_of_any_length_are_caught(text):
    assert repeated_share(tokens_of(text)) > 0.5
    assert verdict([*tokens_of(text), STOP], content="x").gate in ("repetition", "one_token_loop")


@pytest.mark.parametrize("size", [200, 500, 2000])
def test_code_prose_and_tables_are_no_loops(size):
    files = [*sorted(ROOT.glob("*/*.py"))[::3], *ROOT.glob("*.md")]
    texts = [*(path.read_text() for path in files), TABLE]
    for path in ROOT.glob("recipes/prompts/train-*.jsonl"):
        records = [json.loads(line) for line in path.read_text().splitlines()[:200]]
        texts += ["\n".join(said["content"] for said in one["messages"]) for one in records]
    worst = 0.0
    for text in texts:
        ids = tokens_of(text)
        for start in range(0, len(ids), size):
            worst = max(worst, repeated_share(ids[start : start + size]))
    assert worst < 0.5


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 3), max_size=80),
    share=st.floats(0, 1),
)
def test_counting_pairs_first_changes_no_verdict(ids, share):
    runs = [tuple(ids[at : at + 16]) for at in range(len(ids) - 15)]
    repeated = len(runs) - len(set(runs))
    found, total = repeated_runs(ids, share)
    assert total == len(runs)
    assert (found > share * total) == (repeated > share * total)
    assert found in (0, repeated)


@settings(deadline=None)
@given(ids=st.lists(st.integers(5, 8), min_size=1, max_size=80), share=st.floats(0, 1))
def test_a_loop_is_one_token_sixteen_times_and_more_than_its_share(ids, share):
    rule = gates(max_one_token_share=share, max_repeated_share=1.0)
    result = verdict(ids, rule=rule, content="x")
    times = max(map(ids.count, ids))
    is_loop = isinstance(result, Rejected) and result.gate == "one_token_loop"
    assert is_loop == (times >= 16 and times > share * len(ids))
    assert not is_loop or f"is {times} of {len(ids)}" in result.detail


# Tool calls


def test_a_broken_tool_call_is_rejected_or_flagged_as_the_recipe_says():
    broken = ToolCalls((), "invalid_tool_json", "call 0: no")
    ids = [CALL, 7, CALL_END, STOP]
    result = verdict(ids, of=QWEN, calls=broken)
    assert isinstance(result, Rejected)
    assert (result.gate, result.detail) == ("invalid_tool_json", "call 0: no")
    flagged = verdict(ids, of=QWEN, calls=broken, rule=gates(broken_tool_calls="flag"))
    assert flagged == Accepted(("invalid_tool_json",))


def test_a_tool_call_is_an_answer_and_an_undeclared_tool_a_flag():
    calls = ToolCalls((ToolCall("call_0", "look", "{}"),))
    ids = [CALL, 7, CALL_END, STOP]
    assert verdict(ids, of=QWEN, calls=calls, declared=["look"]) == Accepted(())
    assert verdict(ids, of=QWEN, calls=calls) == Accepted(("undeclared_tool",))


@pytest.mark.parametrize(("content", "gate"), [(" \n ", "empty_content"), ("yes", "short_content")])
def test_an_answer_has_to_say_something(content, gate):
    result = verdict([5, STOP], content=content, rule=gates(min_content_tokens=2))
    assert isinstance(result, Rejected)
    assert result.gate == gate


# Languages

ENGLISH = "A kite eats two voles on each day of the week but one, so it eats twelve of them."
CHINESE = "一只鸢每天吃两只田鼠，每周有一天不吃，所以它一周一共要吃十二只田鼠。" * 2
RUSSIAN = "Коршун съедает двух полёвок в день, кроме одного дня, то есть двенадцать в неделю."
CODE = (
    "```python\ndef voles_in_a_week(each_day: int, fasting_days: int) -> int:\n    return 12\n```"
)


@pytest.mark.parametrize(
    ("question", "answer", "drifts"),
    [
        (ENGLISH, ENGLISH, False),
        (CHINESE, CHINESE, False),
        (ENGLISH, CHINESE, True),
        (CHINESE, ENGLISH, True),
        (RUSSIAN, ENGLISH, True),
        (f"{ENGLISH} {RUSSIAN}", RUSSIAN, False),  # it asks about Russian
        (CHINESE, CODE, False),  # code has no language
        (CHINESE, f"{CHINESE}\n{CODE}", False),
        (CHINESE, "12 voles", False),  # too short to tell
        ("12?", ENGLISH, False),
    ],
)
def test_an_answer_in_another_script_drifts(question, answer, drifts):
    rule = gates(languages="same_script")
    result = verdict([5, STOP], content=answer, question=question, rule=rule)
    assert isinstance(result, Rejected) == drifts
    if drifts:
        assert result.gate == "language_drift"
    assert verdict([5, STOP], content=answer, question=question) == Accepted(())


def test_the_last_question_is_the_last_user_message():
    said = [("system", "a"), ("user", "b"), ("assistant", "c"), ("user", "d"), ("tool", "e")]
    messages = json.dumps([{"role": role, "content": text} for role, text in said])
    assert last_question(messages) == "d"
    assert last_question("[]") == ""
