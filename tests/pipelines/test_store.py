"""The run folder: atomic writes, one writer, a manifest that knows every file."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.errors import PreflightFailed
from pipelines.store import (
    RunFolder,
    forget_stages,
    read_manifest,
    record_stage,
    sha256_of,
    write_atomically,
    write_json,
    write_parquet,
)


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
