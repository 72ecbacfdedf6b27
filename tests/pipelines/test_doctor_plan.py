"""Estimates of a run follow from the recipe's own numbers."""

import pytest

from pipelines.doctor_plan import (
    Sizes,
    disk_needed,
    memory_needed,
    open_files_needed,
    rows_wanted,
    threads_needed,
)
from pipelines.recipe import Recipe, load_recipe
from tests.support.road import write_recipe

SIZES = Sizes(
    target_numbers=1000,
    target_bytes=4000,
    target_hidden_size=64,
    draft_numbers=100,
    frozen_numbers=10,
    prompts=40,
)


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return load_recipe(write_recipe(tmp_path, tmp_path / "target"))


def test_the_disk_of_a_run_is_added_up_from_its_parts(recipe):
    disk = disk_needed(recipe, SIZES)
    tokens = 40 * 256  # prompts x prompts.context_tokens
    assert disk.responses == tokens * 12
    assert disk.states == tokens * (4 * 64 * 2 + 5)  # three aux layers and the last, an id, a mask
    # Three checkpoints of masters, two moments and averages; the trained weights; the fp32 export.
    assert disk.checkpoints == 3 * 4 * 400 + 400 + 4 * 110
    assert disk.whole == disk.responses + disk.states + disk.checkpoints


def test_without_a_count_of_prompts_the_quota_is_what_states_take(recipe):
    disk = disk_needed(recipe, Sizes(1000, 4000, 64, 100, 10, prompts=None))
    assert disk.responses is None
    assert disk.states == recipe.capture.max_bytes
    assert disk.whole == disk.certain


def test_a_mix_and_samples_decide_how_many_rows_are_asked(recipe):
    mixed = recipe.prompts.selection.model_validate(
        {
            **recipe.prompts.selection.model_dump(),
            "mix": {"rows": 10, "weights": {"chat": 1.0}},
        }
    )
    prompts = recipe.prompts.model_copy(update={"selection": mixed})
    generate = recipe.generate.model_copy(update={"samples_per_prompt": 3})
    planned = recipe.model_copy(update={"prompts": prompts, "generate": generate})
    assert rows_wanted(recipe, 40) == 40
    assert rows_wanted(planned, 40) == 30
    assert rows_wanted(planned, 5) == 15
    assert rows_wanted(planned, None) == 30
    assert rows_wanted(recipe, None) is None


def test_memory_threads_and_files_are_those_of_each_stage(recipe):
    assert memory_needed(recipe, SIZES)["generate"] == 4000
    assert memory_needed(recipe, SIZES)["train"] == (2 * 100 + 10) * 4 + 4 * 4 * 100
    assert threads_needed(recipe) == {"generate": 1, "capture": 1, "evaluate": 1, "train": 1}
    assert open_files_needed(recipe) == 1024 + 64
