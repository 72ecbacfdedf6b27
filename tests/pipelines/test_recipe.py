"""Recipes: strict, resolved, and hashed by what they change."""

import json
from pathlib import Path

import pytest
import yaml

from pipelines.errors import BadRecipe
from pipelines.recipe import ROW_GATES, Gates, dump_recipe, fingerprint, load_recipe

_MARKERS = (
    "{format: %s, section_open_id: null, section_close_id: null, call_open_id: 7, "
    "call_close_id: 8, arguments_id: %s}"
)
QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def test_the_quick_start_is_a_recipe():
    recipe = load_recipe(QUICKSTART)
    assert recipe.train.ttt_steps == 7
    assert recipe.target.profile.aux_layer_ids == (1, 14, 26)


def test_paths_are_taken_from_the_recipe_and_the_run_folder_from_here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    recipe = load_recipe(QUICKSTART)
    assert recipe.run_folder == str(tmp_path / "runs" / "quickstart")
    assert recipe.target.path == str(tmp_path / "cache" / "smollm2-135m-instruct")
    assert recipe.prompts.train[0].path == str(QUICKSTART.parent / "prompts" / "train-chat.jsonl")


def test_a_stored_recipe_reads_back_as_the_same_run(tmp_path):
    recipe = load_recipe(QUICKSTART)
    stored = tmp_path / "recipe.yaml"
    stored.write_text(dump_recipe(recipe))
    assert load_recipe(stored) == recipe


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("train.epoch=3", "train.epoch"),
        ("train.epochs=ten", "train.epochs"),
        ("train.epochs='3'", "train.epochs"),
        ("train.heldout_share=1.5", "train.heldout_share"),
        ("generate.sampling.top_k=0", "top_k is 0"),
        ("name=Not a name", "name"),
        ("prompts.train=[]", "prompts.train"),
        ("generate.servers.kind=vllm", "generate.servers"),
        ("target.profile.think_open_id=7", "think_close_id"),
        ("target.profile.reserved_ids=[[9, 3]]", "[9, 3] is no range"),
        (f"target.profile.tool_markers={_MARKERS % ('kimi', 'null')}", "kimi needs section_open"),
        (f"target.profile.tool_markers={_MARKERS % ('hermes', 9)}", "hermes has neither"),
        (f"target.profile.tool_markers={_MARKERS % ('xml', 'null')}", "tool_markers.format"),
        ("generate.gates.max_length_drift=1.0", "max_length_drift"),
        ("nowhere.at.all=1", "nowhere"),
        ("name.first=1", "name holds a value"),
        ("train", "key.path=value"),
    ],
)
def test_a_wrong_key_or_type_is_refused_by_name(override: str, names: str):
    with pytest.raises(BadRecipe) as refused:
        load_recipe(QUICKSTART, [override])
    assert names in str(refused.value)
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    "text", ["", "- a list", "a: [unclosed", "name: 3"], ids=["empty", "list", "torn", "partial"]
)
def test_what_is_not_a_recipe_is_refused(tmp_path, text: str):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(BadRecipe):
        load_recipe(path)


def test_a_missing_recipe_or_profile_is_named(tmp_path):
    with pytest.raises(BadRecipe, match=r"nothing\.yaml"):
        load_recipe(tmp_path / "nothing.yaml")
    mapping = yaml.safe_load(QUICKSTART.read_text())
    mapping["target"]["profile"] = "targets/lost.yaml"
    path = tmp_path / "recipe.yaml"
    path.write_text(json.dumps(mapping))
    with pytest.raises(BadRecipe, match=r"lost\.yaml"):
        load_recipe(path)


def test_states_that_are_never_on_disk_have_no_storage_there():
    with pytest.raises(BadRecipe, match="streaming keeps none there"):
        load_recipe(QUICKSTART, ["capture.mode=streaming", "capture.storage=int8"])


def test_two_sets_of_one_name_are_refused():
    one = "{name: chat, path: a.jsonl, domain: chat}"
    with pytest.raises(BadRecipe, match="two prompt sets"):
        load_recipe(QUICKSTART, [f"prompts.train=[{one}, {one}]"])


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("run_folder=/elsewhere", set()),
        ("target.path=/elsewhere/smollm2-135m-instruct", set()),
        ("generate.pool.attempts=9", set()),
        ("train.log_every_steps=3", set()),
        ("generate.gates.max_rejected_share=0.9", set()),  # it only stops a run
        ("generate.gates.max_silent_seconds=9.0", set()),
        (
            "generate.gates.max_repeated_share=0.9",
            {"generate", "capture", "train", "export", "evaluate"},
        ),
        ("generate.servers.threads_per_server=1", set()),
        ("evaluate.draft_steps=2", {"evaluate"}),
        ("capture.storage=int8", {"capture", "train", "export", "evaluate"}),
        ("train.epochs=1", {"train", "export", "evaluate"}),
        (
            "generate.sampling.temperature=0.5",
            {"generate", "capture", "train", "export", "evaluate"},
        ),
        (
            "prompts.context_tokens=1024",
            {"prepare", "generate", "capture", "train", "export", "evaluate"},
        ),
    ],
)
def test_a_fingerprint_changes_with_what_changes_the_artefact(override: str, changed: set[str]):
    before, after = load_recipe(QUICKSTART), load_recipe(QUICKSTART, [override])
    stages = ("prepare", "generate", "capture", "train", "export", "evaluate")
    assert {s for s in stages if fingerprint(before, s) != fingerprint(after, s)} == changed


def test_a_gate_without_a_default_comes_before_those_that_only_stop_a_run():
    required = [name for name, one in Gates.model_fields.items() if one.is_required()]
    assert required == [*ROW_GATES, "canary_rows", "max_rejected_share", "min_reasoning_share"]


def test_reserved_ranges_are_written_out():
    recipe = load_recipe(QUICKSTART, ["target.profile.reserved_ids=[0, [5, 7]]"])
    assert recipe.target.profile.reserved == {0, 5, 6, 7}
    assert recipe.target.profile.marker_ids == {}
