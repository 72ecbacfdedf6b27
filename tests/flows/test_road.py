"""From prompts to an evaluated draft, as a user runs it."""

import json
import shutil

import pyarrow.parquet as pq

from tests.support.road import EVALUATION_PROMPTS, TRAIN_PROMPTS, ask_eyas


def test_one_command_goes_from_prompts_to_a_measured_draft(finished):
    recipe, outcome = finished
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    run = recipe.parent / "run"
    assert "What happened" in outcome.stdout
    assert "acceptance length" in outcome.stdout.lower()
    ok = pq.read_table(run / "responses" / "chat", columns=["sample_id", "status"])
    assert ok.num_rows == TRAIN_PROMPTS
    assert set(ok["status"].to_pylist()) == {"ok"}
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    assert evaluation["lossless"] is True
    for artefact in ("draft/model.safetensors", "draft/config.json", "report.html", "events.jsonl"):
        assert (run / artefact).stat().st_size > 0


def test_every_stage_on_ray_sums_its_figures_up(finished):
    recipe, _ = finished
    run = recipe.parent / "run"
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    figures = {one["stage"]: one for one in lines if one["event"] == "figures"}  # the last ones
    assert figures["generate"]['eyas_rows{dataset="chat",status="ok"}'] == TRAIN_PROMPTS
    assert figures["generate"]["eyas_canary_passed"] == 1
    assert figures["generate"]['eyas_progress_done{stage="generate",unit="rows"}'] == TRAIN_PROMPTS
    assert figures["capture"]['eyas_capture_samples{status="captured"}'] == TRAIN_PROMPTS
    summary = json.loads((run / "training" / "summary.json").read_bytes())
    assert figures["train"]["eyas_train_step"] == summary["steps"]
    assert 'eyas_train_accuracy{split="train",ttt_step="0"}' in figures["train"]
    assert not (run / "servers.json").exists()


def test_a_finished_run_says_so_without_starting_anything(finished):
    recipe, _ = finished
    events = (recipe.parent / "run" / "events.jsonl").read_bytes()
    again = ask_eyas("run", recipe)
    assert again.returncode == 0, again.stderr
    assert "everything was done before" in again.stdout
    assert "starting Ray" not in again.stderr
    assert (recipe.parent / "run" / "events.jsonl").read_bytes() == events


def test_machines_get_one_json_object(finished):
    recipe, _ = finished
    outcome = ask_eyas("run", recipe, "--json")
    summary = json.loads(outcome.stdout)
    assert summary["is_complete"] is True
    assert summary["stages"][0]["stage"] == "prepare"


def test_a_finished_run_verifies(finished):
    recipe, _ = finished
    outcome = ask_eyas("verify", recipe.parent / "run")
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_a_flipped_byte_is_named_and_exits_5(finished, tmp_path):
    recipe, _ = finished
    copy = shutil.copytree(recipe.parent / "run", tmp_path / "run")
    victim = next((copy / "responses" / "chat").glob("*.parquet"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 0xFF
    victim.write_bytes(bytes(content))
    outcome = ask_eyas("verify", copy)
    assert outcome.returncode == 5
    assert victim.name in outcome.stdout


def test_glance_and_status_read_the_run(finished):
    recipe, _ = finished
    run = recipe.parent / "run"
    looked = ask_eyas("glance", run / "responses")
    assert looked.returncode == 0, looked.stdout
    assert "completion" in looked.stdout
    state = json.loads(ask_eyas("status", run, "--json").stdout)
    assert "finished" in json.dumps(state)


def test_another_recipe_on_the_same_folder_is_refused(finished):
    recipe, _ = finished
    outcome = ask_eyas("run", recipe, "--set", "train.epochs=9")
    assert outcome.returncode == 2
    assert "--from train" in outcome.stderr


def test_committed_responses_are_never_thrown_away(finished):
    recipe, _ = finished
    outcome = ask_eyas(
        "run", recipe, "--from", "generate", "--set", "generate.sampling.temperature=0.5"
    )
    assert outcome.returncode == 2
    assert "run_folder" in outcome.stderr
    assert (recipe.parent / "run" / "evaluation.json").exists()


def test_the_prompts_of_both_kinds_are_disjoint(finished):
    recipe, _ = finished
    prompts = recipe.parent / "run" / "prompts"
    train = pq.read_table(prompts / "chat")["messages"].to_pylist()
    evaluation = pq.read_table(prompts / "eval")["messages"].to_pylist()
    assert (len(train), len(evaluation)) == (TRAIN_PROMPTS, EVALUATION_PROMPTS)
    assert not set(train) & set(evaluation)
