"""A good run is proved good; each seeded corruption is found, and by the check that should."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipelines.recipe import load_recipe
from pipelines.store import RunFolder, sha256_of, stage_files, write_json, write_parquet
from pipelines.verify import VerifyReport, render, verify
from tests.support.good_run import make_good_run, write_segments


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny_target) -> RunFolder:
    return make_good_run(tmp_path_factory.mktemp("good"), tiny_target)


@pytest.fixture
def run(good, tmp_path) -> RunFolder:
    return RunFolder(shutil.copytree(good.root, tmp_path / "run"))


def failures(report: VerifyReport) -> dict[str, str]:
    return {one.name: one.detail for one in report.checks if one.outcome == "failed"}


def reseal(run: RunFolder) -> None:
    """List the files as they are now, as if the stages had written them so."""
    manifest = json.loads(run.manifest.read_bytes())
    for stage, entry in manifest["stages"].items():
        entry["files"] = {
            str(path.relative_to(run.root)): {
                "bytes": path.stat().st_size,
                "sha256": sha256_of(path),
            }
            for path in stage_files(run, stage)
        }
    write_json(run.manifest, manifest)


def edit_rows(path: Path, change: Callable[[list[dict]], object]) -> None:
    table = pq.read_table(path, partitioning=None)
    rows = table.to_pylist()
    change(rows)
    write_parquet(path, pa.Table.from_pylist(rows, schema=table.schema))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    value = json.loads(path.read_bytes())
    change(value)
    write_json(path, value)


def test_a_good_run_passes_every_check_and_is_not_touched(good):
    before = {path: sha256_of(path) for path in good.root.rglob("*") if path.is_file()}
    report = verify(good)
    assert report.is_sound
    assert [one.name for one in report.checks if one.outcome != "passed"] == []
    assert {path: sha256_of(path) for path in good.root.rglob("*") if path.is_file()} == before


def ok(run: RunFolder) -> Path:
    return run.responses / "chat" / "part-00000.parquet"


def aside(run: RunFolder) -> Path:
    return run.rejected_responses / "chat" / "part-00000.parquet"


def prompts(run: RunFolder, name: str = "chat") -> Path:
    return run.prompts / name / "part-00000.parquet"


def shard(run: RunFolder) -> Path:
    return run.features / "shard-00001.safetensors"


def draft(run: RunFolder) -> Path:
    return run.draft / "model.safetensors"


ROW_CORRUPTIONS = {
    "a count that is not that of the ids": (
        "responses: usage",
        "completion_tokens",
        lambda row: row["usage"].update(completion_tokens=7),
    ),
    "a count that was lost and became zero": (
        "responses: usage",
        "prompt_tokens is 0",
        lambda row: row["usage"].update(prompt_tokens=0),
    ),
    "reasoning tokens from nowhere": (
        "responses: usage",
        "reasoning_tokens",
        lambda row: row["usage"].update(reasoning_tokens=3),
    ),
    "a total that is no sum": (
        "responses: usage",
        "total_tokens",
        lambda row: row["usage"].update(total_tokens=1),
    ),
    "a stop at another token": (
        "responses: finish",
        "stopped at 1",
        lambda row: row.update(finish_reason="stop", finish_matched="1"),
    ),
    "a NaN dressed as a stop": (
        "responses: finish",
        "NaN happened",
        lambda row: row.update(finish_reason="stop", finish_matched='"NaN happened"'),
    ),
    "a length that was clipped in silence": (
        "responses: finish",
        "the cap was 32",
        lambda row: row.update(finish_reason="length", finish_matched="null"),
    ),
    "segments with a hole": (
        "responses: segments",
        "expected it to start at",
        lambda row: row["segments"][0].update(start=1),
    ),
    "segments that end too early": (
        "responses: segments",
        "segments end at",
        lambda row: row["segments"].pop(),
    ),
    "a status that is not ok": (
        "responses: status",
        "rejected:loop",
        lambda row: row.update(status="rejected:loop"),
    ),
    "content that its ids do not say": (
        "responses: decoding",
        "content",
        lambda row: row.update(content="something else"),
    ),
    "a tool call that its ids do not hold": (
        "responses: decoding",
        "tool_calls",
        lambda row: row.update(tool_calls='[{"id": "call_0"}]'),
    ),
    "reasoning that is called content": (
        "responses: decoding",
        "segments",
        lambda row: row["segments"][0].update(kind="marker"),
    ),
    "messages of another prompt": (
        "responses: prompts",
        "messages",
        lambda row: row.update(messages='[{"role":"user","content":"other"}]'),
    ),
}


@pytest.mark.parametrize("name", ROW_CORRUPTIONS)
def test_a_broken_response_row_is_named(run, name: str):
    check, words, change = ROW_CORRUPTIONS[name]
    broken: list[str] = []

    def corrupt(rows: list[dict]) -> None:
        row = next(one for one in rows[5:] if one["finish_reason"] == "stop")
        change(row)
        broken.append(row["sample_id"])

    edit_rows(ok(run), corrupt)
    reseal(run)
    found = failures(verify(run))
    assert found.keys() - {"responses: decoding"} <= {check}
    assert broken[0] in found[check]
    assert words in found[check]


def test_an_id_outside_the_vocabulary_is_named(run):
    edit_rows(ok(run), lambda rows: rows[4]["output_ids"].__setitem__(0, 259))
    found = failures(verify(run))
    assert "259" in found["responses: vocabulary"]


def test_prompt_ids_that_are_not_those_of_the_prompt_are_named(run):
    edit_rows(ok(run), lambda rows: rows[4]["prompt_ids"].__setitem__(2, 99))
    found = failures(verify(run))
    assert "responses: prompts" in found
    assert "features: rows" in found  # the states were made from the old ids


FOLDER_CORRUPTIONS: dict[str, tuple[str, str, Callable[[RunFolder], object]]] = {
    "a row that vanished": (
        "responses: conservation",
        "is in no committed file",
        lambda run: edit_rows(aside(run), lambda rows: rows.pop()),
    ),
    "a row that is ok and rejected": (
        "responses: conservation",
        "both",
        lambda run: edit_rows(
            aside(run),
            lambda rows: rows.append(
                {**pq.read_table(ok(run), partitioning=None).to_pylist()[0], "status": "rejected:x"}
            ),
        ),
    ),
    "a row that comes twice": (
        "responses: conservation",
        "twice",
        lambda run: edit_rows(ok(run), lambda rows: rows.append(rows[3])),
    ),
    "an answer to no prompt": (
        "responses: conservation",
        "answers no prompt",
        lambda run: edit_rows(
            aside(run), lambda rows: rows.append({**rows[0], "sample_id": "chat-foreign"})
        ),
    ),
    "a failed row that counts tokens": (
        "responses: usage",
        "no reply",
        lambda run: edit_rows(
            aside(run),
            lambda rows: next(one for one in rows if one["status"].startswith("failed"))[
                "usage"
            ].update(total_tokens=9),
        ),
    ),
    "a prompt that comes twice": (
        "prompts: unique",
        "twice",
        lambda run: edit_rows(prompts(run), lambda rows: rows.__setitem__(0, rows[1])),
    ),
    "a prompt that was dropped": (
        "prompts: conservation",
        "6 source rows, 5 prompts",
        lambda run: edit_rows(prompts(run, "eval"), lambda rows: rows.pop()),
    ),
    "a prompt whose ids the template does not give": (
        "prompts: rendering",
        "from token 5 on",
        lambda run: edit_rows(
            prompts(run, "eval"), lambda rows: rows[2]["prompt_ids"].__setitem__(5, 77)
        ),
    ),
    "a held-out prompt that was trained on": (
        "prompts: held out",
        "yet trained on",
        lambda run: edit_rows(
            prompts(run, "eval"),
            lambda rows: rows[0].update(
                {
                    key: pq.read_table(prompts(run), partitioning=None).to_pylist()[0][key]
                    for key in ("messages", "prompt_ids")
                }
            ),
        ),
    ),
    "a column that became nullable": (
        "schemas",
        "content string null, expected content string not null",
        lambda run: _make_nullable(ok(run), "content"),
    ),
    "a sample without hidden states": (
        "features: index",
        "no hidden states",
        lambda run: edit_rows(run.features / "index.parquet", lambda rows: rows.pop(9)),
    ),
    "a loss mask that covers the prompt": (
        "features: rows",
        "loss mask",
        lambda run: edit_tensors(shard(run), lambda t: t["loss_mask"].__setitem__(0, True)),
    ),
    "a feature row with another token": (
        "features: rows",
        "prompt and output ids",
        lambda run: edit_tensors(shard(run), lambda t: t["input_ids"].__setitem__(1, 5)),
    ),
    "a NaN among the states": (
        "features: states",
        "not finite",
        lambda run: edit_tensors(shard(run), lambda t: t["aux"][1].__setitem__(3, torch.nan)),
    ),
    "states of the wrong layers": (
        "features: states",
        "layers [1, 2, 4]",
        lambda run: save_file(
            load_file(shard(run)), shard(run), metadata={"aux_layer_ids": "[1, 2, 4]"}
        ),
    ),
    "ids in place of offsets": (
        "draft vocabulary",
        "t2d marks other tokens",
        lambda run: edit_tensors(run.draft_vocab, lambda t: t["d2t"].add_(1)),
    ),
    "counts of other rows": (
        "draft vocabulary: counts",
        "is counted",
        lambda run: edit_tensors(run.draft_vocab, lambda t: t["counts"][60].add_(1)),
    ),
    "an infinite weight": (
        "training: weights",
        "not finite",
        lambda run: edit_tensors(
            run.training / "weights.safetensors",
            lambda t: t["fc.weight"][0].__setitem__(0, torch.inf),
        ),
    ),
    "a weight that was not exported": (
        "export: weights",
        "lm_head.weight is missing",
        lambda run: edit_tensors(draft(run), lambda t: t.pop("lm_head.weight")),
    ),
    "a weight of another shape": (
        "export: weights",
        "expected [64, 192]",
        lambda run: edit_tensors(draft(run), lambda t: t.update({"fc.weight": torch.ones(64, 64)})),
    ),
    "a head that the config ties": (
        "export: weights",
        "tie_word_embeddings",
        lambda run: edit_json(
            run.draft / "config.json", lambda config: config.update(tie_word_embeddings=True)
        ),
    ),
    "another draft vocabulary in the export": (
        "export: vocabulary",
        "d2t",
        lambda run: edit_tensors(draft(run), lambda t: t["d2t"][-1].add_(1)),
    ),
    "an embedding that is not the target's": (
        "export: embedding",
        "token 7",
        lambda run: edit_tensors(
            draft(run),
            lambda t: next(one for name, one in t.items() if "embed_tokens" in name)[7].add_(1),
        ),
    ),
    "an acceptance length that its counters do not give": (
        "evaluation",
        "acceptance length 3.5",
        lambda run: edit_json(
            run.evaluation,
            lambda page: page["acceptance"]["trained"]["chat"].update(acceptance_length=3.5),
        ),
    ),
    "an evaluation that changed an output": (
        "evaluation",
        "lossless",
        lambda run: edit_json(run.evaluation, lambda page: page.update(lossless=False)),
    ),
    "an evaluation of another draft": (
        "evaluation",
        "draft_sha256",
        lambda run: edit_json(run.evaluation, lambda page: page.update(draft_sha256="0" * 64)),
    ),
    "a recipe that was changed after the run": (
        "recipe",
        "another recipe",
        lambda run: run.recipe.write_text(run.recipe.read_text().replace("top_k: -1", "top_k: 5")),
    ),
}


def _make_nullable(path: Path, name: str) -> None:
    table = pq.read_table(path, partitioning=None)
    at = table.schema.get_field_index(name)
    schema = table.schema.set(at, table.schema.field(at).with_nullable(True))
    write_parquet(path, table.cast(schema))


@pytest.mark.parametrize("name", FOLDER_CORRUPTIONS)
def test_a_broken_artefact_is_named(run, name: str):
    check, words, corrupt = FOLDER_CORRUPTIONS[name]
    corrupt(run)
    reseal(run)
    report = verify(run)
    assert not report.is_sound
    found = failures(report)
    assert check in found, found
    assert words in found[check]


@pytest.mark.parametrize(
    ("corrupt", "check", "words"),
    [
        (lambda run: ok(run).unlink(), "manifest: files", "missing"),
        (lambda run: ok(run).open("ab").write(b"x"), "manifest: files", "bytes"),
        (
            lambda run: ok(run).write_bytes(bytes(reversed(ok(run).read_bytes()))),
            "manifest: files",
            "sha256",
        ),
        (
            lambda run: shutil.copy(ok(run), ok(run).with_name("part-00009.parquet")),
            "manifest: complete",
            "part-00009",
        ),
        (lambda run: run.manifest.write_text("{half"), "manifest: files", "not JSON"),
        (lambda run: run.recipe.unlink(), "recipe", "missing"),
        (lambda run: shutil.rmtree(run.responses), "responses: conservation", "no responses"),
    ],
)
def test_what_the_manifest_promises_is_compared_with_the_files(run, corrupt, check, words):
    corrupt(run)
    found = failures(verify(run))
    assert words in found[check]


def test_a_file_that_is_cut_short_is_a_failed_check_and_no_traceback(run):
    for path in (ok(run), shard(run), draft(run), run.evaluation, run.features / "index.parquet"):
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
    edit_rows(ok(run), lambda rows: rows[2]["usage"].update(completion_tokens=1))
    report = verify(run)
    console = Console(file=io.StringIO(), width=80, record=True, no_color=True)
    render(report, console)
    text = console.export_text()
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "FAILED responses: usage" in text
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["is_sound"] is False
    assert {"name", "outcome", "detail", "seconds"} == set(data["checks"][0])
