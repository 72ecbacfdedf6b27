"""Capture while everything around it breaks: every row ends captured, and none twice or wrong."""

import asyncio
import itertools
import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from actors.capture_file import StatesFile
from pipelines.capture import capture, commit, plan_capture
from pipelines.capture_session import CaptureSession
from pipelines.errors import PreflightFailed
from pipelines.recipe import Recipe
from pipelines.state_reader import Handover
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog
from pipelines.witness import Witness
from tests.support.capture_server import serving
from tests.support.hooked_server import HookedServer
from tests.support.small_disk import DISK_BYTES, fill, mounted
from tests.support.tiny_run import tiny_run, write_responses
from tests.support.tiny_target import AUX_LAYER_IDS
from training.features import FeatureStore

PATIENT = "capture.pool={attempts: 6, backoff_seconds: 0.01, rest_seconds: 0.05}"
ROWS = 40
ROW_BYTES = 2 * 4 * 64 + 4  # of a token: three layers and the last, and its id


def captured(recipe: Recipe, run: RunFolder, folder: Path, *, nonce="run1", **settings):
    """One pass with a server that hands over through the hook; returns the counts."""
    folder.mkdir(exist_ok=True)
    plan = plan_capture(recipe, run)
    run.features.mkdir(exist_ok=True)
    server = HookedServer(recipe.target, folder, layer_ids=AUX_LAYER_IDS, nonce=nonce, **settings)
    handover = Handover.of(plan.config, folder, nonce, late_seconds=20.0)
    session = CaptureSession(recipe, run, EventLog(run), plan, handover)
    try:
        with serving(server) as url:
            made = asyncio.run(session.run([url]))
    finally:
        server.hook.close()
    counts = commit(run, [{**plan.done, **made}[shard.name] for shard in plan.shards])
    return {**counts, "asked_again": session.asked_again, "faults": dict(session.faults)}


def assert_conserved(recipe: Recipe, run: RunFolder, rows: list[dict]) -> None:
    """Every row once, in order, with its own ids and the target's own states."""
    witness = Witness(recipe.target, torch.float32)
    store = FeatureStore(run.features, aux_layer_ids=AUX_LAYER_IDS)
    assert store.sample_ids == [row["sample_id"] for row in rows]
    for number, row in enumerate(rows):
        seen, ids = store.row(number), row["prompt_ids"] + row["output_ids"]
        assert seen.input_ids.tolist() == ids
        own = witness.states(ids)
        aux = torch.cat([own[layer + 1] for layer in AUX_LAYER_IDS], -1)
        torch.testing.assert_close(seen.aux.float(), aux, rtol=2**-8, atol=1e-4)
        first = len(row["prompt_ids"])
        torch.testing.assert_close(
            seen.last[first:].float(), own[-1][first:], rtol=2**-8, atol=1e-4
        )


def events_of(run: RunFolder, kind: str) -> list[dict]:
    lines = (run.root / "events.jsonl").read_text().splitlines()
    return [one for one in map(json.loads, lines) if one["event"] == kind]


@pytest.fixture
def small_run(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target, PATIENT)
    return recipe, run, write_responses(run, ROWS)


def test_states_come_through_the_hook_and_nothing_is_left(small_run, tmp_path):
    recipe, run, rows = small_run
    counts = captured(recipe, run, tmp_path / "states")
    assert_conserved(recipe, run, rows)
    assert (counts["samples"], counts["asked_again"], counts["faults"]) == (ROWS, 0, {})
    assert list((tmp_path / "states").iterdir()) == []
    assert events_of(run, "captured_again") == []


def test_writes_that_fail_in_the_hook_are_asked_again_and_counted(small_run, tmp_path, monkeypatch):
    recipe, run, rows = small_run
    calls, write = itertools.count(), StatesFile.write

    def sometimes(self, *rows_of_a_part):
        if next(calls) % 13 == 12:
            raise PermissionError("injected")
        write(self, *rows_of_a_part)

    monkeypatch.setattr(StatesFile, "write", sometimes)
    counts = captured(recipe, run, tmp_path / "states")
    assert_conserved(recipe, run, rows)
    assert counts["faults"].keys() == {"capture_not_written"}
    assert 0 < counts["asked_again"] <= counts["faults"]["capture_not_written"]
    (told,) = events_of(run, "captured_again")
    assert (told["samples"], told["faults"]) == (counts["asked_again"], counts["faults"])
    assert list((tmp_path / "states").iterdir()) == []


def test_files_that_are_cut_or_lost_are_asked_again(small_run, tmp_path, monkeypatch):
    recipe, run, rows = small_run
    calls, finish = itertools.count(), StatesFile.finish

    def harmed(self):
        number = next(calls)
        if number % 11 == 9:
            os.truncate(self._path, 200)
        elif number % 11 == 10:
            self._path.unlink()
        return finish(self)

    monkeypatch.setattr(StatesFile, "finish", harmed)
    counts = captured(recipe, run, tmp_path / "states")
    assert_conserved(recipe, run, rows)
    assert counts["faults"].keys() == {"capture_unreadable", "capture_not_written"}
    assert list((tmp_path / "states").iterdir()) == []


def test_a_reader_that_is_gone_leaves_files_that_no_later_one_takes(small_run, tmp_path):
    """The next pass has another nonce: its rids are others, however alike its requests."""
    recipe, run, rows = small_run
    folder = tmp_path / "states"
    with pytest.raises(PreflightFailed, match="http_500"):
        captured(recipe, run, folder, dies_after=20, nonce="run1")
    stale = {f"run1-{number:032x}-{ROWS}.safetensors" for number in range(5)}
    for name in stale:
        (folder / name).write_bytes(b"of a reader that is gone")
    captured(recipe, run, folder, nonce="run2")
    assert_conserved(recipe, run, rows)
    assert {path.name for path in folder.iterdir()} >= stale


def test_a_full_folder_slows_the_capture_and_breaks_nothing(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target, PATIENT, "capture.samples_per_shard=64")
    rows = write_responses(run, 64)
    tokens = sum(len(row["prompt_ids"] + row["output_ids"]) for row in rows)
    with mounted(tmp_path / "small") as folder:
        filler = folder / "filler"
        filler.write_bytes(b"\0" * (DISK_BYTES - (96 << 10)))
        assert tokens * ROW_BYTES > 4 * (96 << 10), "all of it would have had room at once"
        counts = captured(recipe, run, folder)
        filler.unlink()
        assert list(folder.iterdir()) == []
    assert_conserved(recipe, run, rows)
    assert counts["samples"] == 64


def test_a_folder_that_stays_full_ends_the_run_by_name(small_run, tmp_path):
    recipe, run, _ = small_run
    with mounted(tmp_path / "small") as folder:
        fill(folder)
        with pytest.raises(PreflightFailed, match="capture_no_room"):
            captured(recipe, run, folder, hook_settings={"room_seconds": 0.1})


@pytest.mark.usefixtures("local_ray")
def test_a_server_that_is_killed_is_started_again_and_its_rows_asked_again(tmp_path, tiny_target):
    recipe, run = tiny_run(
        tmp_path,
        tiny_target,
        "capture.servers.restart_seconds=0.1",
        "capture.pool={backoff_seconds: 0.05, rest_seconds: 0.2}",
    )
    rows = write_responses(run, 400)
    killed = []

    def kill_one() -> None:
        """As soon as the first shard is done."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list(run.features.glob(".shard-*.parquet")):
            time.sleep(0.005)
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if words[1:3] == ["-m", "actors.reference"] and str(run.logs) in " ".join(words):
                with suppress(psutil.NoSuchProcess):
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(process.pid)

    killer = threading.Thread(target=kill_one)
    killer.start()
    counts = capture(recipe, run, EventLog(run))
    killer.join()
    assert killed, "the server was not found"
    assert_conserved(recipe, run, rows)
    assert counts["samples"] == 400
    assert counts["asked_again"] > 0
    assert sum(counts["faults"].values()) > 0
    assert [one["event"] for one in events_of(run, "server_died")]
