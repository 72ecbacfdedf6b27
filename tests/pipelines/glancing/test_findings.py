"""Every finding has a stable name, a cause, a cure, and its entry in the runbook."""

import re
from pathlib import Path

from pipelines.glancing.findings import KNOWN, found, in_order

RUNBOOK = Path(__file__).parents[3] / "RUNBOOK.md"


def test_the_runbook_has_an_entry_for_every_finding_and_no_other():
    section = RUNBOOK.read_text().split("## What `eyas glance` finds\n", 1)[1].split("\n## ", 1)[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{name}` | {known.severity} | {known.cause} | {known.cure} |"
        for name, known in KNOWN.items()
    ]


def test_names_are_stable_words_and_texts_are_for_people():
    for name, known in KNOWN.items():
        assert re.fullmatch(r"[a-z0-9_]+", name)
        assert known.cause
        assert known.cure
        assert "|" not in known.cause + known.cure  # they stand in a table


def test_the_worst_comes_first_and_among_equals_the_most_telling():
    names = ("reasoning_empty", "malformed_lines", "reasoning_and_usage_lost", "carriage_returns")
    ordered = [one.name for one in in_order(found(name, "seen") for name in names)]
    assert ordered == [
        "reasoning_and_usage_lost",
        "malformed_lines",
        "reasoning_empty",
        "carriage_returns",
    ]


def test_a_share_of_rows_may_change_how_bad_it_is():
    assert found("repetition", "seen").severity == "warning"
    assert found("repetition", "seen", "fault").severity == "fault"
