"""A run stops with what to mend where nothing more can be written, and says so in its events."""

import errno
import json

import pytest

from pipelines import generate as generate_stage
from pipelines.errors import BadRecipe, QualityStop, StorageFailed
from pipelines.quality_stop import QualityMark, remember_stop
from pipelines.recipe import load_recipe
from pipelines.run import run_of, run_stages
from pipelines.segments import SegmentWriter
from tests.support.response_rows import row
from tests.support.road import write_recipe


@pytest.fixture
def recipe(tmp_path, tiny_target):
    return load_recipe(write_recipe(tmp_path, tiny_target))


def stop_generate_with(error, recipe, monkeypatch):
    def generate(*_):
        raise error

    monkeypatch.setattr(generate_stage, "generate", generate)
    monkeypatch.setattr("pipelines.run._NEEDS_RAY", frozenset())
    run_stages(recipe, stages=("prepare", "generate"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_is_full_anywhere_is_no_bug(recipe, monkeypatch, number):
    with pytest.raises(StorageFailed, match="bytes free") as stopped:
        stop_generate_with(OSError(number, "no room"), recipe, monkeypatch)
    assert stopped.value.exit_code == 3
    last = json.loads(run_of(recipe).events.read_text().splitlines()[-1])
    assert (last["event"], last["error"]) == ("stage_stopped", "StorageFailed")


def test_another_fault_of_the_system_stays_what_it_is(recipe, monkeypatch):
    with pytest.raises(ConnectionError):
        stop_generate_with(ConnectionError("refused"), recipe, monkeypatch)


def test_a_relative_store_lies_beside_the_recipe_and_the_cache_may_be_named(tmp_path, tiny_target):
    path = write_recipe(tmp_path, tiny_target)
    assert load_recipe(path, ["generate.store=rows"]).generate.store == str(tmp_path / "rows")
    uri = "s3://bucket/rows"
    assert load_recipe(path, [f"generate.store={uri}"]).generate.store == uri


@pytest.mark.parametrize("store", ["null", "rows"])
def test_the_cure_of_a_failed_canary_may_be_in_the_recipe(
    tmp_path, tiny_target, monkeypatch, store
):
    """Every row of it is suspect and set aside; with one good row more it is another run's."""

    def asks(stopped, *names):
        def generate(recipe, run, events):
            del recipe, events
            writer = SegmentWriter(run, "chat")
            for name in names:
                writer.add({**row(1), "sample_id": name, "dataset": "chat"})
            writer.flush()
            remember_stop(run, QualityMark("loops", "canary", {"chat": tuple(stopped)}))
            raise QualityStop("loops", expected="answers", change="the sampling")

        monkeypatch.setattr(generate_stage, "generate", generate)

    monkeypatch.setattr("pipelines.run._NEEDS_RAY", frozenset())
    path = write_recipe(tmp_path, tiny_target)
    recipe = load_recipe(path, [f"generate.store={store}"])
    hotter = load_recipe(
        path, [f"generate.store={store}", "generate.sampling.repetition_penalty=1.1"]
    )
    asks(["chat-1"], "chat-1")
    with pytest.raises(QualityStop):
        run_stages(recipe, stages=("prepare", "generate"))
    asks(["chat-1"], "chat-1", "chat-2")
    with pytest.raises(QualityStop):
        run_stages(hotter, stages=("prepare", "generate"))
    assert len(list((run_of(recipe).root / "suspect").iterdir())) == 1
    with pytest.raises(BadRecipe, match="holds responses"):
        run_stages(recipe, stages=("prepare", "generate"))
