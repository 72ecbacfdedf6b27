"""Evaluation: lossless or refused, counters that agree with the tokens, phases that are kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.errors import BadReply
from actors.protocol import Completion, Finish, SpeculationCounters
from pipelines.errors import PreflightFailed, VerificationFailed
from pipelines.evaluate import (
    Answer,
    Measured,
    compare,
    counters_of,
    evaluate,
    first_difference,
    read_prompts,
    refuse_lossy,
)
from pipelines.evaluate_samples import read_samples
from pipelines.telemetry import EventLog
from pipelines.witness import Witness
from tests.support.tiny_draft import TINY_DRAFT, tiny_vocabulary, tiny_weights
from tests.support.tiny_run import tiny_run, write_evaluation_prompts, write_training
from training.acceptance import Counters
from training.export import write_draft
from training.model import target_weights

DOMAINS = ["chat", "math", "code", "tools", "chat", "other"]


@pytest.fixture
def exported(tmp_path, tiny_target):
    """A run up to its export, with a draft that learned nothing, and six held-out prompts."""
    recipe, run = tiny_run(tmp_path, tiny_target, "evaluate.max_new_tokens=12")
    write_training(run)
    write_evaluation_prompts(run, DOMAINS)
    d2t, t2d = tiny_vocabulary()
    embedding, _ = target_weights(Path(recipe.target.path))
    given = {"config": TINY_DRAFT, "d2t": d2t, "t2d": t2d, "embedding": embedding}
    write_draft(run.draft, tiny_weights(seed=3), **given, dtype=torch.float32)
    return recipe, run


@pytest.mark.usefixtures("local_ray")
def test_a_draft_changes_no_token_and_what_was_measured_before_a_fault_is_kept(exported):
    recipe, run = exported
    file = run.draft / "model.safetensors"
    whole = load_file(file)
    save_file({name: one for name, one in whole.items() if name != "lm_head.weight"}, file)
    with pytest.raises(PreflightFailed, match=r"(?s)trained draft.*lm_head\.weight is missing"):
        evaluate(recipe, run, EventLog(run))
    assert not run.evaluation.exists()
    save_file(whole, file)

    plain = run.evaluation_phases / "plain.json"
    plain.write_text(json.dumps({**json.loads(plain.read_text()), "seconds": 1234.5}))
    counts = evaluate(recipe, run, EventLog(run))
    page = json.loads(run.evaluation.read_bytes())
    assert page["seconds"]["plain"] == 1234.5, "a phase that was done is measured again"
    assert not run.evaluation_phases.exists()

    assert page["lossless"] is True
    assert (page["prompts"], counts["prompts"]) == (6, 6)
    assert set(page["acceptance"]) == {"trained", "untrained", "ngram"}
    for kind, groups in page["acceptance"].items():
        assert set(groups) == {"overall", "all_domains", "chat", "math", "code", "tools", "other"}
        prompts = [groups[name]["prompts"] for name in ("overall", "all_domains", "chat")]
        assert prompts == ([2, 2, 1] if kind == "untrained" else [4, 6, 2])
        for group in groups.values():
            assert sum(group["histogram"]) == group["verifications"]
            assert (group["acceptance_length"] is None) == (group["prompts"] == 0)
            assert group["prompts"] == 0 or group["acceptance_length"] >= 1
    # Each token is a prefill's, a draft's or a verification's; the last round of a prompt may hold
    # up to three more. Six prompts with the trained draft, two with the untrained.
    sums = [page["acceptance"][kind]["all_domains"] for kind in ("trained", "untrained")]
    made = 8 + sum(one["verifications"] + one["correct_drafts"] for one in sums)
    assert page["tokens_compared"] <= made <= page["tokens_compared"] + 8 * 3

    # What was replayed here is what the server counted, or it is left out.
    samples = read_samples(run)
    assert page["samples"]["left_out"] == {}
    assert [one.sample_id for one in samples] == [f"eval-{at:012x}" for at in range(6)]
    rounds = sum(len(one.accepted) for one in samples)
    assert rounds == page["acceptance"]["trained"]["all_domains"]["verifications"]
    assert all(len(one.pieces) == 12 for one in samples)


def test_the_first_prompts_by_sample_id_are_taken_and_leave_room_for_the_draft(
    tmp_path, tiny_target
):
    recipe, run = tiny_run(
        tmp_path, tiny_target, "evaluate.prompts_per_set=4", "prompts.context_tokens=40"
    )
    write_evaluation_prompts(run, DOMAINS)
    prompts = read_prompts(recipe, run)
    assert [one.sample_id for one in prompts] == [f"eval-{number:012x}" for number in range(4)]
    for one in prompts:
        assert one.max_new_tokens == min(24, 40 - len(one.input_ids) - 3)


def test_a_set_without_prompts_is_refused(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target)
    with pytest.raises(PreflightFailed, match="holds no prompts"):
        read_prompts(recipe, run)


@pytest.mark.parametrize(
    ("expected", "seen", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
    ],
)
def test_the_first_difference_counts_an_early_end(expected, seen, position):
    assert first_difference(expected, seen) == position


def measured_one(prompt, output, counters):
    return Measured({prompt.sample_id: Answer(output, counters)}, 1.0)


@pytest.fixture
def answered(exported):
    """All phases as the target itself would answer one prompt greedily."""
    recipe, run = exported
    prompt = replace(read_prompts(recipe, run)[0], max_new_tokens=4)
    witness, ids = Witness(recipe.target, torch.float32), list(prompt.input_ids)
    for _ in range(4 + recipe.evaluate.draft_steps):
        ids.append(int(witness.next_logits(ids).argmax()))
    output = tuple(ids[len(prompt.input_ids) :])
    counters = Counters((3, 0, 0, 0))
    measured = {
        "plain": measured_one(prompt, output, None),
        "trained": measured_one(prompt, output[:4], counters),
        "untrained": measured_one(prompt, output[:4], counters),
    }
    return recipe, prompt, output, measured


def test_equal_outputs_are_lossless_though_the_plain_one_is_longer(answered):
    recipe, prompt, _, measured = answered
    refuse_lossy(compare(recipe, [prompt], measured))


def test_a_changed_token_is_refused_with_its_place_and_both_tokens(answered):
    recipe, prompt, output, measured = answered
    changed = (output[0], output[1], (output[2] + 1) % 259, output[3])
    measured["trained"] = measured_one(prompt, changed, Counters((3, 0, 0, 0)))
    differences = compare(recipe, [prompt], measured)
    assert [one["position"] for one in differences] == [2]
    with pytest.raises(VerificationFailed, match=rf"token 2 with the trained draft: \[{output[2]}"):
        refuse_lossy(differences)


def test_an_output_that_ends_early_is_no_tie(answered):
    recipe, prompt, output, measured = answered
    measured["untrained"] = measured_one(prompt, output[:3], Counters((2, 0, 0, 0)))
    with pytest.raises(VerificationFailed, match="untrained draft"):
        refuse_lossy(compare(recipe, [prompt], measured))


def test_two_tokens_with_the_same_logit_are_a_tie_and_go_on_record(answered, tmp_path):
    recipe, prompt, output, measured = answered
    # A target whose best token has a twin: one row of the tied embedding copied onto another.
    twin = 258 if output[2] != 258 else 257
    assert twin not in {*prompt.input_ids, *output}
    folder = tmp_path / "twins"
    folder.mkdir()
    for file in Path(recipe.target.path).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][twin] = weights["model.embed_tokens.weight"][output[2]]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    target = recipe.target.model_copy(update={"path": str(folder)})
    changed = (output[0], output[1], twin, output[3])
    measured["trained"] = measured_one(prompt, changed, Counters((3, 0, 0, 0)))
    differences = compare(recipe.model_copy(update={"target": target}), [prompt], measured)
    refuse_lossy(differences)
    assert differences[0]["is_tie"] is True
    assert differences[0]["logit_gap"] == 0.0


def reply(tokens: int, speculation: SpeculationCounters | None) -> Completion:
    return Completion(
        rid="x",
        output_ids=tuple(range(tokens)),
        text="",
        finish=Finish("length", None, tokens),
        prompt_tokens=1,
        completion_tokens=tokens,
        cached_tokens=0,
        weight_version="default",
        speculation=speculation,
    )


def test_counters_are_padded_to_the_drafts_length():
    seen = counters_of(reply(4, SpeculationCounters(2, 1, (1, 1))), 3)
    assert seen == Counters((1, 1, 0, 0))


@pytest.mark.parametrize(
    ("tokens", "speculation", "steps", "said"),
    [
        (4, None, 3, "counted no verification"),
        (4, SpeculationCounters(2, 1, (1, 1)), None, "without a draft"),
        (4, SpeculationCounters(3, 1, (1, 1)), 3, "sums to"),
        (4, SpeculationCounters(1, 4, (0, 0, 0, 0, 1)), 3, "more than 3 drafts"),
        (9, SpeculationCounters(2, 1, (1, 1)), 3, "explain -5 tokens more"),
        (4, SpeculationCounters(7, 1, (6, 1)), 3, r"explain \+5 tokens more"),
    ],
    ids=["absent", "uncalled-for", "sums", "too-long", "too-few", "too-many"],
)
def test_counters_that_do_not_explain_the_tokens_are_a_fault(tokens, speculation, steps, said):
    with pytest.raises(BadReply, match=said):
        counters_of(reply(tokens, speculation), steps)


def test_attached_servers_are_refused_because_three_drafts_are_served_in_turn(exported):
    recipe, run = exported
    servers = {"kind": "attach", "urls": ("http://127.0.0.1:1",)}
    evaluation = recipe.evaluate.model_validate(
        {**recipe.evaluate.model_dump(exclude={"servers"}), "servers": servers}
    )
    with pytest.raises(PreflightFailed, match="attach"):
        evaluate(recipe.model_copy(update={"evaluate": evaluation}), run, EventLog(run))
