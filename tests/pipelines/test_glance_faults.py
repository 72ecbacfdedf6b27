"""Every broken file is known by name, in every way of looking at it, and none ends the command."""

import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from pipelines.glance import glance
from pipelines.glancing.findings import KNOWN
from pipelines.glancing.render import render
from pipelines.glancing.report import GlanceReport
from tests.support.faulty_files import HEALTHY, KINDS, answer, lines, make_all

_NOBODY = 65_534
# Found first although worse could be said: what a person has to know before all else.
_BORN_FROM = [name for name in KINDS if name.startswith("seed")]


@contextmanager
def powerless() -> Iterator[None]:
    """As a user who may not read everything; root may."""
    if os.geteuid():
        yield
        return
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def shown(report: GlanceReport) -> str:
    console = Console(file=io.StringIO(), width=80, record=True, no_color=True)
    render(report, console)
    text = console.export_text()
    assert max((cell_len(line) for line in text.splitlines()), default=0) <= 80
    return text


def made(folder: Path, name: str) -> str:
    """Make one kind in the current folder; its relative path, which needs no leave of parents."""
    KINDS[name].write(folder / KINDS[name].file)
    return KINDS[name].file


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("full", [False, True], ids=["sample", "full"])
@pytest.mark.parametrize("name", KINDS)
def test_a_broken_file_is_known_by_name(here, name, full):
    path = made(here, name)
    with powerless() if name == "no permission" else nullcontext():
        report = glance([path], full=full)
    (one,) = report.sets
    assert KINDS[name].finding in {finding.name for finding in one.findings}
    json.dumps(report.to_json(), allow_nan=False)
    text = " ".join(shown(report).split())
    assert f"{KINDS[name].finding}:" in text
    assert KNOWN[KINDS[name].finding].cure.split()[0] in text


@pytest.mark.parametrize("name", _BORN_FROM)
def test_the_fault_that_this_project_was_born_from_is_said_first(here, name):
    report = glance([made(here, name)])
    assert not report.is_healthy
    assert report.sets[0].findings[0].name == KINDS[name].finding
    lines_shown = [line for line in shown(report).splitlines() if line.strip()]
    assert lines_shown[1].startswith("verdict")
    assert "NOT HEALTHY" in lines_shown[1]
    assert KINDS[name].finding in " ".join(lines_shown[1:3])


def test_there_are_many_kinds_and_no_finding_is_without_one():
    assert len(KINDS) >= 40
    never_in_a_file = {"no_answer", "writer_silent", "reasoning_empty", "json_too_large"}
    assert {kind.finding for kind in KINDS.values()} | never_in_a_file == set(KNOWN)


def test_the_whole_folder_is_looked_at_at_once(here):
    make_all(here / "faulty")
    report = glance([str(here / "faulty")])
    shown(report)
    found = {finding.name for one in report.sets for finding in one.findings}
    missing = {kind.finding for kind in KINDS.values()} - found
    assert missing <= {"no_files", "unknown_format", "not_permitted"}  # no such files in a listing


def test_a_healthy_file_has_none_of_these_findings(here):
    (here / "rows.jsonl").write_bytes(lines(HEALTHY))
    assert glance(["rows.jsonl"]).sets[0].findings == ()


def test_broken_lines_among_many_files_are_counted_and_placed(here):
    for part in range(5):
        rows = [answer(100 * part + number) for number in range(9)]
        (here / f"{part}.jsonl").write_bytes(lines(rows) + b"{broken\n")
    (one,) = glance(["."]).sets
    assert one.malformed_count == 5
    assert one.malformed[1].startswith("1.jsonl line 10: ")
    (finding,) = one.findings
    assert finding.name == "malformed_lines"
    assert "and 2 more" in finding.seen
