"""The run folder: atomic writes, one writer, a manifest that knows every file."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.errors import PreflightFailed, StorageFailed
from pipelines.storage import location_of
from pipelines.store import (
    RunFolder,
    forget_stages,
    open_run,
    read_manifest,
    record_stage,
    sha256_of,
    stage_files,
    write_atomically,
    write_json,
    write_parquet,
)
from pipelines.telemetry import EventLog
from tests.support.small_disk import fill


@pytest.fixture
def run(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    return folder


def test_a_failed_write_leaves_the_old_content_and_no_litter(run, monkeypatch):
    path = run.root / "file"
    write_atomically(path, b"old")
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in run.root.iterdir()] == ["file"]


def test_the_same_table_gives_the_same_bytes(run):
    table = pa.table({"a": list(range(1000)), "b": [str(n) for n in range(1000)]})
    write_parquet(run.root / "one.parquet", table)
    write_parquet(run.root / "two.parquet", pa.concat_tables([table.slice(0, 7), table.slice(7)]))
    assert sha256_of(run.root / "one.parquet") == sha256_of(run.root / "two.parquet")


def test_nan_never_reaches_a_json_file(run):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(run.root / "x.json", {"a": float("nan")})
    assert not (run.root / "x.json").exists()


def test_a_second_writer_is_refused_and_a_dead_one_holds_nothing(run):
    program = (
        "import sys; from pathlib import Path; from pipelines.store import RunFolder\n"
        "with RunFolder(Path(sys.argv[1])).lock():\n    print('held', flush=True); input()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, str(run.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert other.stdout is not None
    assert other.stdout.readline() == b"held\n"
    with pytest.raises(PreflightFailed, match=f"pid {other.pid}"), run.lock():
        pass
    other.kill()
    other.communicate()
    with run.lock():
        pass


def test_a_folder_that_cannot_be_made_is_a_preflight_failure(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(PreflightFailed, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").create()


def test_a_stage_is_recorded_with_every_committed_file(run):
    write_atomically(run.prompts / "chat" / "part-00000.parquet", b"rows")
    write_atomically(run.segments / "chat" / "one.arrow", b"on its way")
    write_atomically(run.responses / "chat" / "part-00000.parquet", b"answers")
    record_stage(run, "prepare", fingerprint="a", counts={"rows": 1}, seconds=1.23)
    record_stage(run, "generate", fingerprint="b", counts={}, seconds=2.0)
    stages = read_manifest(run)["stages"]
    assert list(stages["prepare"]["files"]) == ["prompts/chat/part-00000.parquet"]
    assert list(stages["generate"]["files"]) == ["responses/chat/part-00000.parquet"]
    file = stages["prepare"]["files"]["prompts/chat/part-00000.parquet"]
    assert file == {"bytes": 4, "sha256": sha256_of(run.prompts / "chat/part-00000.parquet")}


def test_recording_a_stage_again_takes_the_marks_of_later_ones(run):
    for stage in ("prepare", "generate", "capture"):
        record_stage(run, stage, fingerprint="a", counts={}, seconds=0)
    record_stage(run, "generate", fingerprint="a", counts={}, seconds=0)
    assert list(read_manifest(run)["stages"]) == ["prepare", "generate"]
    forget_stages(run, ["generate"])
    assert list(read_manifest(run)["stages"]) == ["prepare"]
    assert json.loads(run.manifest.read_bytes())["stages"]["prepare"]["counts"] == {}


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_the_manifest_covers_responses_that_are_kept_elsewhere(run, tmp_path, object_store, kind):
    where = object_store.uri if kind == "bucket" else str(tmp_path / "elsewhere")
    other = RunFolder(run.root, where)
    parts = other.responses / "chat" / "part-00000.parquet", other.rejected_responses / "chat" / "x"
    for part in parts:
        write_atomically(part, b"answers")
    write_atomically(other.segments / "chat" / "one.arrow", b"on its way")
    write_json(other.origin, {})
    write_json(other.lease, {})
    record_stage(other, "generate", fingerprint="a", counts={}, seconds=1)
    files = read_manifest(other)["stages"]["generate"]["files"]
    assert list(files) == ["responses/_rejected/chat/x", "responses/chat/part-00000.parquet"]
    assert [other.locate(name) for name in files] == stage_files(other, "generate")
    assert files["responses/_rejected/chat/x"] == {"bytes": 7, "sha256": sha256_of(parts[1])}
    assert not (run.root / "responses").exists()


def test_a_run_knows_its_store_by_its_recipe(run):
    assert open_run(run.root) == run
    run.recipe.write_text("generate: {store: 's3://bucket/rows'}")
    assert open_run(run.root).responses == location_of("s3://bucket/rows")
    for damaged in ("generate: {store: null}", "- no\n- recipe", "{"):
        run.recipe.write_text(damaged)
        assert open_run(run.root) == run


def test_a_full_disk_leaves_manifest_and_events_whole(small_disk):
    run = RunFolder(small_disk / "run")
    run.create()
    record_stage(run, "prepare", fingerprint="a", counts={}, seconds=1)
    events = EventLog(run)
    events.append("first")
    filler = fill(small_disk)
    with pytest.raises(StorageFailed, match=r"manifest\.json cannot be written: the disk is full"):
        record_stage(run, "generate", fingerprint="a", counts={"a": "b" * 9000}, seconds=1)
    with pytest.raises(StorageFailed, match=r"events\.jsonl"):
        events.append("too much", why="b" * 9000)
    assert list(read_manifest(run)["stages"]) == ["prepare"]
    filler.unlink()
    events.append("last")
    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [one["event"] for one in lines] == ["first", "last"]
    assert not list(run.root.glob(".*.tmp"))
