"""Rows count once, in their best version, and what cannot be read is told and stops nothing."""

import shutil

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.report_look import Look, look_at, read_rows, whole_lines
from pipelines.schema import RESPONSE_SCHEMA
from pipelines.store import RunFolder
from tests.support.good_run import make_good_run


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny_target) -> RunFolder:
    return make_good_run(tmp_path_factory.mktemp("good"), tiny_target, until="generate")


def add_segment(run: RunFolder, name: str, rows: pa.Table) -> None:
    folder = run.segments / "chat"
    folder.mkdir(parents=True, exist_ok=True)
    with pa.ipc.new_file(str(folder / name), RESPONSE_SCHEMA) as writer:
        writer.write_table(rows)


def test_a_row_in_several_files_counts_once_in_its_best_version(good, tmp_path):
    run = RunFolder(shutil.copytree(good.root, tmp_path / "run"))
    before = read_rows(look_at(run), "chat")
    ok = pq.read_table(run.responses / "chat", partitioning=None).cast(RESPONSE_SCHEMA)
    at = RESPONSE_SCHEMA.get_field_index("status")
    failed = pa.array(["failed:deadline"] * 5, pa.string())
    worse = ok.slice(0, 5).set_column(at, RESPONSE_SCHEMA.field(at), failed)
    add_segment(run, "worse.arrow", worse)
    add_segment(run, "again.arrow", ok.slice(2, 9))
    after = read_rows(look_at(run), "chat")
    assert after.sort_by("sample_id").equals(before.sort_by("sample_id"))
    assert after.num_rows == 40


def test_a_damaged_file_is_told_and_the_others_are_read(good, tmp_path):
    run = RunFolder(shutil.copytree(good.root, tmp_path / "run"))
    add_segment(run, "one.arrow", RESPONSE_SCHEMA.empty_table())
    (run.segments / "chat" / "two.arrow").write_bytes(b"half")
    look = look_at(run)
    assert read_rows(look, "chat").num_rows == 40
    assert list(look.faults) == ["rows"]


def test_without_a_recipe_the_manifest_names_the_sets(good, tmp_path):
    run = RunFolder(shutil.copytree(good.root, tmp_path / "run"))
    run.recipe.write_text("name: [")
    look = look_at(run)
    assert [(one.name, one.use) for one in look.sets] == [
        ("chat", "training"),
        ("eval", "evaluation"),
    ]
    assert "recipe" in look.faults


def test_a_fault_is_kept_short(tmp_path):
    look = Look(RunFolder(tmp_path))

    def fails() -> None:
        raise ValueError("x" * 10_000)

    assert look.tried("part", fails) is None
    assert len(look.faults["part"][0]) == 300


def test_lines_that_are_no_objects_are_counted_and_a_half_last_one_is_not(tmp_path):
    path = tmp_path / "lines"
    path.write_text('{"a": 1}\n[]\nno\n\n{"b": 2}\n{"half')
    assert whole_lines(path) == ([{"a": 1}, {"b": 2}], 2)
