"""A good run is proved good; each seeded corruption is found, and by the check that should."""

import io
import json
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from pipelines import witness
from pipelines.commands import app
from pipelines.recipe import load_recipe
from pipelines.store import RunFolder, sha256_of
from pipelines.verify import VerifyReport, render, verify
from tests.support.corruption_table import CORRUPTIONS
from tests.support.corruptions import (
    committed,
    draft,
    edit_rows,
    edit_tensors,
    reseal,
    shard,
)
from tests.support.good_run import make_good_run, write_segments


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny_target) -> RunFolder:
    return make_good_run(tmp_path_factory.mktemp("good"), tiny_target)


@pytest.fixture
def run(good, tmp_path) -> RunFolder:
    return RunFolder(shutil.copytree(good.root, tmp_path / "run"))


def failures(report: VerifyReport) -> dict[str, str]:
    return {one.name: one.detail for one in report.checks if one.outcome == "failed"}


def snapshot(run: RunFolder) -> dict[Path, tuple[int, str]]:
    """When each file was written, and its content; folders by their time alone."""
    return {
        path: (path.stat().st_mtime_ns, sha256_of(path) if path.is_file() else "")
        for path in (run.root, *run.root.rglob("*"))
    }


def test_a_good_run_passes_every_check_and_is_not_touched(good, monkeypatch):
    monkeypatch.setenv("EYAS_API_KEY", "a-key-that-is-nowhere")
    before = snapshot(good)
    report = verify(good)
    assert report.is_sound
    assert [one for one in report.checks if one.outcome != "passed"] == []
    assert snapshot(good) == before
    assert CliRunner().invoke(app, ["verify", str(good.root)]).exit_code == 0


@pytest.fixture(scope="module", params=["float8_e4m3", "int8"])
def in_eight_bits(request, tmp_path_factory, tiny_target) -> RunFolder:
    folder = tmp_path_factory.mktemp(request.param)
    return make_good_run(folder, tiny_target, f"capture.storage={request.param}", until="capture")


def test_states_in_eight_bits_are_proved_with_what_storing_costs(in_eight_bits):
    report = verify(in_eight_bits)
    features = [one for one in report.checks if one.name.startswith("features")]
    assert [one.outcome for one in features] == ["passed"] * 4


@pytest.mark.parametrize(
    ("change", "check", "words"),
    [
        (lambda t: t["aux_scale"][0].fill_(torch.nan), "features: states", "not finite"),
        (lambda t: t.update(aux_scale=t["aux_scale"][:-1].clone()), "features: states", "scale is"),
        (lambda t: t["aux_scale"].mul_(1.2), "features: target", "is off by"),
        (
            lambda t: t.update(aux=t["aux"].roll(64, 1), aux_scale=t["aux_scale"].roll(1, 1)),
            "features: target",
            "shifted by",
        ),
        (lambda t: t.pop("aux_scale"), "features: states", "has no aux_scale"),
        (lambda t: t.update(aux=t["aux"].to(torch.bfloat16)), "features: states", "is BF16, not"),
    ],
)
def test_damage_to_states_in_eight_bits_is_found(in_eight_bits, tmp_path, change, check, words):
    run = RunFolder(shutil.copytree(in_eight_bits.root, tmp_path / "run"))
    edit_tensors(run.features / "shard-00000.safetensors", change)
    assert words in failures(verify(run))[check]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_corruption_is_found_by_its_check_and_named_with_its_place(run, name):
    corruption = CORRUPTIONS[name]
    place = corruption.corrupt(run, Random(name))
    if corruption.sealed:
        reseal(run)
    before = snapshot(run)
    ended = CliRunner().invoke(app, ["verify", str(run.root), "--json"])
    assert ended.exit_code == 5, ended.output
    assert snapshot(run) == before
    checks = json.loads(ended.stdout)["checks"]
    found = {one["name"]: one["detail"] for one in checks if one["outcome"] == "failed"}
    assert corruption.check in found, found
    assert corruption.words in found[corruption.check]
    assert place in found[corruption.check]


def test_every_check_has_a_corruption_that_it_finds(good):
    found = {one.check for one in CORRUPTIONS.values()}
    assert {one.name for one in verify(good).checks} == found


def test_a_key_of_this_environment_in_a_file_is_named_and_not_shown(run, monkeypatch):
    monkeypatch.setenv("EYAS_API_KEY", "a-key-nobody-may-see")
    with run.events.open("a") as events:
        events.write('{"at": 1.0, "event": "x", "header": "Bearer a-key-nobody-may-see"}\n')
    found = failures(verify(run))
    assert "events.jsonl: it holds the value of EYAS_API_KEY" in found["no code, no keys"]
    assert "nobody-may-see" not in json.dumps(verify(run).to_json())


def test_a_last_event_on_its_way_is_no_fault(run):
    with run.events.open("a") as events:
        events.write('{"at": 1.0, "ev')
    assert verify(run).is_sound


def test_states_of_a_large_target_are_not_computed_again_and_that_is_said(run, monkeypatch):
    monkeypatch.setattr(witness, "MAX_TARGET_BYTES", 1000)
    (said,) = (one for one in verify(run).checks if one.name == "features: target")
    assert said.outcome == "skipped"
    assert "larger than 1,000 bytes" in said.detail


def test_a_file_that_is_cut_short_is_a_failed_check_and_no_traceback(run):
    for path in (
        committed(run),
        shard(run),
        draft(run),
        run.evaluation,
        run.features / "index.parquet",
    ):
        path.write_bytes(path.read_bytes()[:100])
    reseal(run)
    found = failures(verify(run))
    assert {"schemas", "features: index", "export: weights", "evaluation"} <= set(found)


def test_a_run_on_its_way_is_sound_and_says_what_is_not_there_yet(tmp_path, tiny_target):
    run = make_good_run(tmp_path, tiny_target, until="prepare")
    write_segments(load_recipe(run.recipe), run)
    next(iter(run.segments.rglob("*.arrow"))).unlink()
    report = verify(run)
    assert report.is_sound, failures(report)
    said = {one.name: one for one in report.checks}
    assert "not yet done" in said["responses: conservation"].detail
    assert said["features: rows"].outcome == "skipped"
    assert "not there yet" in said["features: rows"].detail


def test_a_torn_segment_is_named(tmp_path, tiny_target):
    run = make_good_run(tmp_path, tiny_target, until="prepare")
    write_segments(load_recipe(run.recipe), run)
    segment = next(iter(run.segments.rglob("*.arrow")))
    segment.write_bytes(segment.read_bytes()[:-20])
    assert segment.name in failures(verify(run))["responses: conservation"]


def test_an_empty_folder_is_nothing_yet(tmp_path):
    report = verify(RunFolder(tmp_path))
    assert report.is_sound
    assert {one.outcome for one in report.checks} == {"skipped"}


def test_a_target_out_of_reach_skips_what_needs_it_and_says_so(run):
    run.recipe.write_text(run.recipe.read_text().replace("targets/", "lost/").replace("tiny", "no"))
    said = {one.name: one for one in verify(run).checks}
    assert said["prompts: rendering"].outcome == "skipped"
    assert "out of reach" in said["prompts: rendering"].detail
    assert said["responses: usage"].outcome == "passed"


def test_the_report_reads_in_80_columns_and_as_json(run):
    edit_rows(committed(run), lambda rows: rows[2]["usage"].update(completion_tokens=1))
    report = verify(run)
    console = Console(file=io.StringIO(), width=80, record=True, no_color=True)
    render(report, console)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "FAILED responses: usage" in text
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["is_sound"] is False
    assert {"name", "outcome", "detail", "seconds"} == set(data["checks"][0])
