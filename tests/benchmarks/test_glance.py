"""The glance benchmark's file is healthy, and its peer answers the same questions."""

import json
import subprocess
import sys

import duckdb
import pytest

from benchmarks.glance import QUESTIONS, command_of, peak_bytes, write_responses
from pipelines.glance import glance


@pytest.fixture
def responses(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = write_responses(path, 3_000_000)
    return path, rows


def test_the_file_is_healthy_and_as_large_as_asked(responses):
    path, rows = responses
    assert 3_000_000 <= path.stat().st_size < 3_050_000
    one = glance([str(path)], full=True).sets[0]
    assert (one.findings, one.rows, one.kind) == ((), rows, "responses")


def test_duckdb_and_a_full_look_agree(responses):
    path, rows = responses
    (row,) = duckdb.sql(QUESTIONS.format(path=path)).fetchall()
    one = glance([str(path)], full=True).sets[0].responses
    assert one is not None
    count, ids, texts, reasoning, _, _, markers, counted, quantiles, finish = row
    assert (count, ids, texts, reasoning, markers) == (rows, rows, rows, one.with_reasoning, 0)
    assert counted == one.usage["ok"]
    assert finish == one.finish
    ours = list(one.completion_tokens.quantiles.values())
    assert quantiles == pytest.approx(ours, rel=0.02)


def test_memory_is_that_of_the_whole_tree():
    hungry = "import time; kept = bytearray(b'x' * (60 << 20)); time.sleep(1.5)"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {hungry!r}])"
    assert 60 << 20 < peak_bytes([sys.executable, "-c", child]) < 160 << 20
    with pytest.raises(subprocess.CalledProcessError):
        peak_bytes([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_command_is_the_one_that_a_person_starts(responses):
    path, rows = responses
    done = subprocess.run(command_of(path), capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["sets"][0]["rows"] == rows
