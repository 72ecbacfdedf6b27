"""Responses behind a URI: as durable as on a disk, and any machine goes on with them."""

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines import generate as generate_stage
from pipelines.errors import BadRecipe, PreflightFailed, StorageFailed
from pipelines.recipe import dump_recipe, load_recipe
from pipelines.report import report
from pipelines.run import run_of, run_stages
from pipelines.segments import (
    SegmentWriter,
    commit,
    committed_ids,
    durable_ids,
    durable_reports,
    reopen_failed,
)
from pipelines.status import status
from pipelines.storage import RemotePath, listed, readable
from pipelines.store import RunFolder, open_run, stage_files
from pipelines.verify import verify
from tests.support.good_run import make_good_run
from tests.support.response_rows import IDS, ROWS, fingerprint, row, write
from tests.support.road import ROOT, write_recipe


@pytest.fixture
def run(tmp_path, object_store) -> RunFolder:
    folder = RunFolder(tmp_path / "run", object_store.uri)
    folder.create()
    return folder


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> dict[str, bytes]:
    """What a commit on a disk makes of all rows."""
    run = RunFolder(tmp_path_factory.mktemp("expected"))
    write(run, ROWS)
    commit(run, "set", IDS, rows_per_part=4)
    return fingerprint(run)


def test_a_store_holds_the_same_bytes_as_a_folder_and_the_run_folder_no_row(run, expected):
    with run.lock():
        write(run, reversed(ROWS))
        assert committed_ids(run, "set") == set()
        assert durable_ids(run, "set") == set(IDS)
        commit(run, "set", IDS, rows_per_part=4)
        commit(run, "set", IDS, rows_per_part=4)  # nothing to do
    assert fingerprint(run) == expected
    assert listed(run.segments, "*/*") == []
    assert committed_ids(run, "set") == durable_ids(run, "set") == set(IDS)
    assert sorted(one.name for one in run.root.iterdir()) == [".lease", ".lock"]


# Kills itself at the n-th step of the commit.
KILLED = """
import os, signal, sys
from pathlib import Path
from pipelines.segments import commit
from pipelines.store import RunFolder
left = int(sys.argv[3])
def hook(step):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
run = RunFolder(Path(sys.argv[1]), sys.argv[2])
with run.lock():
    commit(run, "set", [f"set-{n:04d}" for n in range(30)], rows_per_part=4, hook=hook)
"""


@pytest.mark.parametrize("step", [0, 3, 9, 12])
def test_a_commit_killed_on_a_store_is_finished_by_the_next_run_of_that_folder(run, expected, step):
    write(run, ROWS)
    command = [sys.executable, "-c", KILLED, str(run.root), str(run.store), str(step)]
    assert subprocess.run(command, check=False, cwd=ROOT, timeout=60).returncode == -signal.SIGKILL
    assert durable_ids(run, "set") == set(IDS)
    with run.lock():  # at once: the lease of a dead run of this folder does not hold it up
        commit(run, "set", IDS, rows_per_part=4)
    assert fingerprint(run) == expected
    assert not list(run.root.glob(".commit-*"))


def test_failed_rows_in_a_store_are_reopened(run):
    with run.lock():
        write(run, ROWS)
        commit(run, "set", IDS)
        failed = [one for one in durable_reports(run, "set") if not one.has_reply]
        assert reopen_failed(run, "set") == len(failed) == 6
        assert committed_ids(run, "set") == set()
        write(run, [row(int(one.sample_id[4:]), attempt=2) for one in failed])
        commit(run, "set", IDS)
    assert all(one.has_reply for one in durable_reports(run, "set"))
    assert durable_ids(run, "set") == set(IDS)


def test_rows_that_a_store_refuses_stay_until_it_takes_them(run, object_store, expected):
    writer = SegmentWriter(run, "set")
    for one in ROWS:
        writer.add(one)
    object_store.refuse = lambda method, _: "AccessDenied" if method == "PUT" else None
    with pytest.raises(StorageFailed, match="cannot be used"):
        writer.flush()
    object_store.refuse = lambda *_: None
    writer.flush()
    with run.lock():
        object_store.refuse = lambda method, path: (
            "AccessDenied" if method == "PUT" and path.endswith("00002.parquet") else None
        )
        with pytest.raises(StorageFailed):
            commit(run, "set", IDS, rows_per_part=4)
        assert durable_ids(run, "set") == set(IDS)
        object_store.refuse = lambda *_: None
        commit(run, "set", IDS, rows_per_part=4)
    assert fingerprint(run) == expected


def test_a_part_that_the_store_keeps_otherwise_costs_no_segment(run, monkeypatch):
    put = RemotePath.write_bytes

    def damage(self, content):
        put(self, bytes(content[:-8]) + b"x" * 8 if self.suffix == ".parquet" else content)

    with run.lock():
        write(run, ROWS)
        with monkeypatch.context() as patch:
            patch.setattr(RemotePath, "write_bytes", damage)
            with pytest.raises(StorageFailed, match="other bytes"):
                commit(run, "set", IDS)
        assert len(listed(run.segments, "*/*.arrow")) == 5


def test_a_commit_without_the_store_replaces_nothing(run, tmp_path, object_store):
    write(run, ROWS)
    with run.lock():
        other = RunFolder(tmp_path / "other", object_store.uri)
        other.create()
        with pytest.raises(PreflightFailed, match="held by another run"), other.lock():
            pass
        with pytest.raises(StorageFailed, match="no longer by this run"):
            commit(other, "set", IDS)
    assert len(listed(run.segments, "*/*.arrow")) == 5


# --- whole runs; what asks the servers is a stand-in, the rest is what a user calls


def answer(run: RunFolder, name: str, statuses: dict[int, str]) -> list[str]:
    """Do what generate does: ask for what is missing, then commit. Return what was asked."""
    prompts = pq.read_table(run.prompts / name, partitioning=None)["sample_id"].to_pylist()
    held = committed_ids(run, name)
    held |= {one.sample_id for one in durable_reports(run, name) if one.has_reply}
    asked = [one for one in prompts if one not in held]
    writer = SegmentWriter(run, name)
    for one in asked:
        status = statuses.get(prompts.index(one), "ok")
        writer.add({**row(1, status), "sample_id": one, "prompt_id": one, "dataset": name})
    writer.flush()
    commit(run, name, prompts)
    return asked


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """What the last call of generate asked for. Of the first prompts, two fail the first time."""
    found: list[str] = []
    faults = [{0: "failed:refused", 1: "failed:deadline"}]

    def generate(_recipe, run, _events):
        found[:] = answer(run, "chat", faults.pop() if faults else {})
        return {"headline": "", "sets": {}}

    monkeypatch.setattr(generate_stage, "generate", generate)
    monkeypatch.setattr("pipelines.run._NEEDS_RAY", frozenset())
    return found


def until_generate(recipe, **choice):
    return run_stages(recipe, stages=("prepare", "generate"), **choice)


def test_another_machine_goes_on_with_nothing_but_the_recipe(
    tmp_path, tiny_target, object_store, asked
):
    path = write_recipe(tmp_path, tiny_target)
    there = load_recipe(path, [f"generate.store={object_store.uri}"])
    until_generate(there)
    assert len(asked) == 40
    shutil.rmtree(there.run_folder)  # that machine is gone
    elsewhere = f"run_folder={tmp_path / 'elsewhere'}"
    here = load_recipe(path, [f"generate.store={object_store.uri}", elsewhere])
    until_generate(here)
    assert asked == []
    assert all(one.was_done for one in until_generate(here))
    other = load_recipe(
        path, [f"generate.store={object_store.uri}", elsewhere + "2", "generate.sampling.seed=7"]
    )
    with pytest.raises(BadRecipe, match=r"responses of another recipe.*road"):
        until_generate(other)


@pytest.mark.parametrize("is_remote", [False, True])
def test_failed_rows_are_asked_again_when_told_so_and_later_stages_are_stale(
    tmp_path, tiny_target, object_store, asked, is_remote, caplog
):
    caplog.set_level("INFO")
    store = [f"generate.store={object_store.uri}"] if is_remote else []
    recipe = load_recipe(write_recipe(tmp_path, tiny_target), store)
    until_generate(recipe)
    run = run_of(recipe)
    before = fingerprint_of(run)
    until_generate(recipe)
    assert fingerprint_of(run) == before
    assert len(asked) == 40
    (run.training).mkdir()
    (run.training / "weights.safetensors").touch()
    until_generate(recipe, retry_failed=True)
    assert "2 failed rows are asked again" in caplog.text
    assert len(asked) == 2
    assert fingerprint_of(run) != before
    assert not run.training.exists()
    assert [one.status for one in durable_reports(run, "chat")] == ["ok"] * 40
    done = until_generate(recipe, retry_failed=True)
    assert all(one.was_done for one in done)
    assert "0 failed rows are asked again" in caplog.text


def fingerprint_of(run: RunFolder) -> dict[str, bytes]:
    return {run.name_of(one): one.read_bytes() for one in stage_files(run, "generate")}


def test_a_store_out_of_reach_is_no_bug(tmp_path, tiny_target, object_store, asked):
    recipe = load_recipe(
        write_recipe(tmp_path, tiny_target), [f"generate.store={object_store.uri}"]
    )
    object_store.refuse = lambda *_: "AccessDenied"
    with pytest.raises(StorageFailed, match="s3://bucket/runs/one"):
        until_generate(recipe)
    assert asked == []


def test_verify_status_and_report_find_what_is_in_a_store(tmp_path, tiny_target, object_store):
    made = make_good_run(tmp_path, tiny_target, until="capture")
    recipe = load_recipe(made.recipe, [f"generate.store={object_store.uri}"])
    store = run_of(recipe)
    for name in ("responses/chat", "responses/_rejected/chat"):
        for path in sorted(Path(made.root / name).iterdir()):
            store.locate(f"{name}/{path.name}").write_bytes(path.read_bytes())
    shutil.rmtree(made.root / "responses")
    made.recipe.write_text(dump_recipe(recipe))
    run = open_run(made.root)
    assert verify(run).is_sound
    (one,) = status(run).sets
    assert (one.total, one.done, one.rejected, one.failed) == (40, 40, 2, 1)
    assert "failed:deadline" in report(run).read_text()
    part = listed(run.responses, "chat/*.parquet")[0]
    assert pq.read_metadata(readable(part)).num_rows == 37
    part.write_bytes(part.read_bytes()[:-1] + b"?")
    broken = [one.detail for one in verify(run).checks if one.outcome == "failed"]
    assert any("responses/chat/part-00000.parquet" in one for one in broken)
