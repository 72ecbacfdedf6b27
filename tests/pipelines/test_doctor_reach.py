"""What a recipe names is looked at where it lies: a folder, a store, a server on loopback."""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from actors.config import AttachedServers, LaunchedServers
from pipelines.doctor_finding import Finding
from pipelines.doctor_reach import (
    check_attached,
    check_kinds,
    check_prompts,
    check_run_folder,
    check_storage,
    check_store,
    check_target,
    read_weights,
    sizes_of,
)
from pipelines.errors import PreflightFailed
from pipelines.recipe import Recipe, load_recipe
from pipelines.storage import location_of
from tests.support.fake_server import FakeServer
from tests.support.road import TRAIN_PROMPTS, write_recipe


@pytest.fixture
def target(tmp_path, tiny_target) -> Path:
    return shutil.copytree(tiny_target, tmp_path / "target")


@pytest.fixture
def recipe(tmp_path, target) -> Recipe:
    return load_recipe(write_recipe(tmp_path, target))


def broken(findings: Iterable[Finding]) -> dict[str, Finding]:
    return {one.name: one for one in findings if one.outcome != "pass"}


def attached(recipe: Recipe, *urls: str) -> Recipe:
    servers = AttachedServers(kind="attach", urls=urls)
    generate = recipe.generate.model_copy(update={"servers": servers})
    return recipe.model_copy(update={"generate": generate})


# --- the target


def test_a_whole_target_passes_and_its_sizes_are_read(recipe):
    findings, weights = check_target(recipe)
    assert broken(findings) == {}
    assert weights is not None
    assert weights.bytes == (Path(recipe.target.path) / "model.safetensors").stat().st_size
    assert weights.numbers * 4 < weights.bytes < weights.numbers * 4 + 10_000  # fp32 and a header
    sizes = sizes_of(recipe, weights, 40)
    assert sizes is not None
    assert (sizes.target_hidden_size, sizes.frozen_numbers) == (64, 259 * 64)


def _cut_weights(target: Path) -> None:
    os.truncate(target / "model.safetensors", 100_000)


def _no_header(target: Path) -> None:
    (target / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def _missing_shard(target: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def _no_index(target: Path) -> None:
    (target / "model.safetensors.index.json").write_text("[1]")


def _no_template(target: Path) -> None:
    (target / "chat_template.jinja").unlink()


def _no_tokenizer(target: Path) -> None:
    (target / "tokenizer.json").unlink()


def _no_config(target: Path) -> None:
    (target / "config.json").unlink()


def _other_layers(target: Path) -> None:
    config = json.loads((target / "config.json").read_bytes())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))


@pytest.mark.parametrize(
    ("damage", "name", "words"),
    [
        (_cut_weights, "target weights", "its header promises"),
        (_no_header, "target weights", "no safetensors"),
        (_missing_shard, "target weights", "has no model-00002.safetensors"),
        (_no_index, "target weights", "is no index"),
        (_no_template, "tokenizer", "no chat template"),
        (_no_tokenizer, "tokenizer", "no tokenizer"),
        (_no_config, "target", "no config.json"),
        (_other_layers, "profile", "layer"),
        (shutil.rmtree, "target", "no target folder"),
    ],
)
def test_each_part_of_a_target_that_is_missing_or_torn_is_named(
    recipe, target, damage, name, words
):
    damage(target)
    findings, weights = check_target(recipe)
    found = broken(findings)
    assert found[name].outcome == "fail"
    assert words in found[name].seen
    if name == "target weights":
        assert weights is None
        assert sizes_of(recipe, weights, 40) is None


def test_an_index_whose_shards_are_all_there_is_whole(target):
    shutil.copy(target / "model.safetensors", target / "model-00002.safetensors")
    _missing_shard(target)
    assert read_weights(target).files == 2


def test_a_draft_that_does_not_fit_its_target_is_named(recipe):
    too_many = recipe.draft.model_copy(update={"draft_vocab_size": 5000})
    findings, _ = check_target(recipe.model_copy(update={"draft": too_many}))
    assert "5000" in broken(findings)["draft"].seen


def test_code_of_a_target_that_may_run_is_a_warning(recipe):
    trusting = recipe.target.model_copy(update={"trust_remote_code": True})
    findings, _ = check_target(recipe.model_copy(update={"target": trusting}))
    assert broken(findings)["remote code"].outcome == "warn"


def test_a_file_that_is_something_else_is_no_weight_file(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(PreflightFailed, match="no safetensors"):
        read_weights(tmp_path)


# --- prompts


def test_prompt_files_are_found_and_their_rows_counted(recipe):
    findings, prompts = check_prompts(recipe)
    assert broken(findings) == {}
    assert prompts == TRAIN_PROMPTS


def test_a_cap_is_the_most_that_a_set_gives(recipe):
    capped = tuple(one.model_copy(update={"cap": 7}) for one in recipe.prompts.train)
    prompts = recipe.prompts.model_copy(update={"train": capped})
    assert check_prompts(recipe.model_copy(update={"prompts": prompts}))[1] == 7


def test_a_set_that_is_not_there_is_named_and_nothing_is_counted(tmp_path, recipe):
    (tmp_path / "train.jsonl").unlink()
    findings, prompts = check_prompts(recipe)
    assert list(broken(findings)) == ["prompts: chat"]
    assert prompts is None


def test_rows_that_only_reading_would_count_are_not_known(tmp_path, recipe):
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    (tmp_path / "train.json").write_text(json.dumps(rows))
    other = tuple(
        one.model_copy(update={"path": str(tmp_path / "train.json")})
        for one in recipe.prompts.train
    )
    prompts = recipe.prompts.model_copy(update={"train": other})
    findings, count = check_prompts(recipe.model_copy(update={"prompts": prompts}))
    assert (broken(findings), count) == ({}, None)


def test_a_torn_parquet_file_is_a_finding(tmp_path, recipe):
    (tmp_path / "train.parquet").write_bytes(b"PAR1 torn")
    other = tuple(
        one.model_copy(update={"path": str(tmp_path / "train.parquet")})
        for one in recipe.prompts.train
    )
    prompts = recipe.prompts.model_copy(update={"train": other})
    findings, _ = check_prompts(recipe.model_copy(update={"prompts": prompts}))
    assert list(broken(findings)) == ["prompts: chat"]


# --- storage


def test_a_folder_is_probed_and_left_as_it_was(tmp_path):
    assert broken(check_storage("run folder", tmp_path)) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_does_not_exist_is_judged_by_its_parent(recipe):
    _, weights = check_target(recipe)
    findings = list(check_run_folder(recipe, sizes_of(recipe, weights, 40)))
    assert broken(findings) == {}
    assert [one.name for one in findings] == ["run folder", "disk"]
    assert not Path(recipe.run_folder).exists()


def test_a_disk_without_room_fails(recipe):
    _, weights = check_target(recipe)
    capture = recipe.capture.model_copy(update={"max_bytes": 10**17})
    context = recipe.prompts.model_copy(update={"context_tokens": 10**15})
    planned = recipe.model_copy(update={"capture": capture, "prompts": context})
    assert broken(check_run_folder(planned, sizes_of(planned, weights, 40)))["disk"].outcome == (
        "fail"
    )


def test_a_full_disk_is_a_finding(small_disk):
    (small_disk / "fill").write_bytes(b"x" * _free(small_disk))
    found = broken(check_storage("run folder", small_disk))
    assert "the disk is full" in found["run folder"].seen


def _free(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def test_a_store_takes_a_probe_and_keeps_nothing(recipe, object_store):
    generate = recipe.generate.model_copy(update={"store": object_store.uri})
    stored = recipe.model_copy(update={"generate": generate})
    assert broken(check_store(stored)) == {}
    assert list(location_of(object_store.uri).rglob("*")) == []
    assert list(check_store(recipe)) == []


@pytest.mark.parametrize("refused", ["PUT", "GET", "DELETE"])
def test_a_store_that_refuses_one_verb_fails(recipe, object_store, refused):
    object_store.refuse = lambda method, _: "AccessDenied" if method == refused else None
    generate = recipe.generate.model_copy(update={"store": object_store.uri})
    found = broken(check_store(recipe.model_copy(update={"generate": generate})))
    assert found["store"].outcome == "fail"


# --- servers


def test_an_attached_server_that_fits_is_only_looked_at(recipe):
    with FakeServer(model_path=recipe.target.path) as server:
        findings = list(check_attached(attached(recipe, server.url)))
    assert broken(findings) == {}
    assert "0.5.23" in findings[0].seen
    assert server.requests == []


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        ({"model_path": "/models/other"}, "serves /models/other"),
        ({"server_info": {"version": "0.4.1"}}, "0.4.1"),
        ({"server_info": {"allow_auto_truncate": True}}, "allow-auto-truncate"),
    ],
)
def test_an_attached_server_that_does_not_fit_is_named(recipe, fake, words):
    with FakeServer(**{"model_path": recipe.target.path, **fake}) as server:
        found = broken(check_attached(attached(recipe, server.url)))
    assert words in found[f"server {server.url}"].seen


def test_each_server_that_does_not_answer_is_named(recipe):
    with FakeServer(model_path=recipe.target.path) as server:
        pass
    found = broken(check_attached(attached(recipe, server.url, "http://127.0.0.1:9")))
    assert list(found) == [f"server {server.url}", "server http://127.0.0.1:9"]
    assert {one.outcome for one in found.values()} == {"fail"}


def test_stages_that_take_no_such_servers_say_so(recipe):
    launched = LaunchedServers(
        kind="launch", count=1, python="python", tensor_parallel_size=1, device="cpu"
    )
    attached = AttachedServers(kind="attach", urls=("http://127.0.0.1:9",), ready_seconds=1.0)
    assert list(broken(check_kinds(recipe))) == []
    for servers, stages in ((launched, ["evaluate"]), (attached, ["capture", "evaluate"])):
        planned = recipe.model_copy(
            update={
                stage: of.model_copy(update={"servers": servers})
                for stage, of in (("capture", recipe.capture), ("evaluate", recipe.evaluate))
            }
        )
        found = broken(check_kinds(planned))
        assert list(found) == [f"{stage} servers" for stage in stages]
