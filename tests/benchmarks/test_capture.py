"""The capture benchmark's parts: its server hands over what is read, its rows are whole."""

import pytest
import torch

from benchmarks import capture
from benchmarks.capture import (
    LAYERS,
    batch_ids,
    batch_states,
    best_of,
    consume,
    hooked_server,
    new_hook,
    prefill_arguments,
    read_batches,
    read_row,
    rids,
    role_of,
    write_features,
    write_file,
    write_run,
)
from pipelines.capture_plan import read_responses
from pipelines.recipe import load_recipe
from pipelines.run import done_stages
from pipelines.store import RunFolder
from training.features import FeatureStore

WIDTH = 8


@pytest.fixture
def short_prompts(monkeypatch):
    monkeypatch.setattr(capture, "LENGTHS", (5, 3))


def test_a_packed_batch_holds_the_states_that_the_hook_was_shown(tmp_path):
    with hooked_server(tmp_path, WIDTH) as server:
        batches = list(read_batches(server, tmp_path, WIDTH, [7, 8, 9]))
    *aux, last = batch_states(WIDTH)
    assert [one.sample_ids for one in batches] == [tuple(rids(number)) for number in (7, 8, 9)]
    for one in batches:
        assert torch.equal(one.input_ids, batch_ids())
        assert torch.equal(one.aux, torch.cat(aux, -1))
        assert torch.equal(one.last, last)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("short_prompts")
def test_the_file_that_is_compared_is_gone_afterwards(tmp_path):
    hook, names, (*aux, last) = new_hook(tmp_path), rids(0), batch_states(WIDTH)
    hook(torch.nn.Identity(), prefill_arguments(names, (5, 3), batch_ids(), aux, last), None)
    hook.close()
    row = read_row(tmp_path, names[0], batch_ids()[:5].tolist(), WIDTH)
    packed = capture.pack([row], steps=2, aux_size=len(LAYERS) * WIDTH, last_size=WIDTH)
    write_file(tmp_path, packed)
    assert [one.name for one in tmp_path.iterdir()] == [f"{names[1]}.safetensors"]


@pytest.mark.usefixtures("short_prompts")
def test_the_folder_holds_rows_of_every_length_twice_in_each_shard(tmp_path):
    write_features(tmp_path, 2, WIDTH)
    store = FeatureStore(tmp_path, aux_layer_ids=capture.DRAFT.aux_layer_ids)
    assert store.lengths == [5, 3, 5, 3] * 2
    assert len(set(store.sample_ids)) == 8
    *aux, _ = batch_states(WIDTH)
    assert torch.equal(store.row(3).aux, torch.cat(aux, -1)[5:])


def test_a_run_is_ready_to_capture(tmp_path, tiny_target):
    recipe = load_recipe(write_run(tmp_path / "one", tiny_target, 40))
    assert [one.stage for one in done_stages(recipe)] == ["prepare", "generate"]
    rows = read_responses(RunFolder(tmp_path / "one" / "run"), ["chat"])
    assert rows.num_rows == 40
    lengths = {len(row["prompt_ids"]) + len(row["output_ids"]) for row in rows.to_pylist()}
    assert 300 <= min(lengths) < max(lengths) <= 900


def test_only_the_command_itself_is_the_driver():
    assert role_of(["python", "-m", "pipelines.cli", "capture", "r.yaml"]) == "driver"
    assert role_of(["ray::Keeper", "pipelines.cli capture"]) is None
    assert role_of(["python", "-m", "pipelines.cli", "generate", "r.yaml"]) is None


def test_the_best_turn_counts_and_the_first_does_not(monkeypatch):
    moments = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0])
    monkeypatch.setattr(capture.time, "perf_counter", lambda: next(moments))
    assert best_of({"one": lambda: None}, 2) == {"one": 2.0}


def test_everything_is_made():
    made = []
    consume(made.append(one) for one in range(3))
    assert made == [0, 1, 2]
