"""Every corruption of a good run that verify has to find: which promise, which check, which words.

Except for those that are about the manifest itself, the manifest is sealed again after the damage,
as if the stage had written it so: no checksum finds it, and the promise itself has to be proved.
"""

from dataclasses import dataclass

import torch

from tests.support.artefact_corruptions import (
    add_a_file,
    add_to_embedding,
    change_a_count,
    change_the_recipe,
    domain,
    drop_a_tensor,
    drop_states,
    flip_a_bit,
    last_checkpoint,
    leave_a_pickle,
    lengthen_a_file,
    log_no_number,
    lose_a_file,
    lose_a_part_of_a_checkpoint,
    lose_all_responses,
    lose_the_recipe,
    name_other_layers,
    poison,
    rename_a_checkpoint,
    repeat_a_step,
    shift_last_offset,
    shift_offsets,
    shift_states_by_a_layer,
    states,
    tear_an_event,
    tear_the_manifest,
)
from tests.support.corruptions import (
    Corrupt,
    answer,
    answer_no_prompt,
    count_tokens_of_no_reply,
    counting,
    draft,
    drop_a_column,
    drop_a_prompt,
    drop_a_row,
    flag_a_row,
    having,
    hold_out_what_is_trained,
    keep_a_row_twice,
    make_nullable,
    miscount,
    page_of,
    prompt_of,
    put_id,
    reject_under_another_name,
    repeat_a_prompt,
    repeat_a_row,
    saying,
    sent,
    shard,
    shuffle_rows,
    tensors_of,
)


@dataclass(frozen=True)
class Corruption:
    """What is broken, which check has to find it, and the words it has to say."""

    corrupt: Corrupt
    check: str
    words: str
    promise: str  # what is broken, in a person's words
    sealed: bool = True  # the manifest agrees with the damage


C = Corruption
CORRUPTIONS: dict[str, Corruption] = {
    # conservation, unique ids
    "a row vanished": C(
        drop_a_row, "responses: conservation", "is in no committed file", "conservation"
    ),
    "a row comes twice": C(repeat_a_row, "responses: conservation", "twice", "unique ids"),
    "a row is ok and rejected": C(
        keep_a_row_twice, "responses: conservation", "both", "conservation"
    ),
    "an answer to no prompt": C(
        answer_no_prompt, "responses: conservation", "answers no prompt", "conservation"
    ),
    "all responses are gone": C(
        lose_all_responses, "responses: conservation", "no responses", "conservation"
    ),
    "a prompt comes twice": C(repeat_a_prompt, "prompts: unique", "twice", "unique ids"),
    "a prompt was dropped": C(
        drop_a_prompt, "prompts: conservation", "6 source rows, 5 prompts", "conservation"
    ),
    "an id of another prompt": C(
        answer(saying(prompt_id="chat-other")),
        "responses: identity",
        "its id",
        "unique ids",
    ),
    "a row in another set's folder": C(
        answer(saying(dataset="math")),
        "responses: identity",
        "in folder chat",
        "unique ids",
    ),
    "rows in another order": C(
        shuffle_rows, "responses: order", "larger id", "a commit is deterministic"
    ),
    # counts
    "completion tokens that are not those of the ids": C(
        answer(counting(completion_tokens=7)),
        "responses: usage",
        "completion_tokens",
        "counts",
    ),
    "a count that was lost and became zero": C(
        answer(counting(prompt_tokens=0)),
        "responses: usage",
        "prompt_tokens is 0",
        "absent is not zero",
    ),
    "reasoning tokens from nowhere": C(
        answer(counting(reasoning_tokens=3)),
        "responses: usage",
        "reasoning_tokens",
        "counts",
    ),
    "a total that is no sum": C(
        answer(counting(total_tokens=1)), "responses: usage", "total_tokens", "counts"
    ),
    "more cached tokens than the prompt has": C(
        answer(counting(cached_tokens=9999)), "responses: usage", "cached_tokens", "counts"
    ),
    "a failed row counts tokens": C(
        count_tokens_of_no_reply, "responses: usage", "no reply", "absent is not zero"
    ),
    "the manifest counts other rows": C(
        miscount(having(ok=36)), "responses: counts", "counts ok 36", "counts"
    ),
    "the manifest counts other tokens": C(
        miscount(having(output_tokens=1)), "responses: counts", "output_tokens 1", "counts"
    ),
    "the manifest names another fault": C(
        miscount(having(failed={})), "responses: counts", "failed {}", "conservation"
    ),
    # replies
    "a stop at another token": C(
        answer(saying(finish_matched="1")),
        "responses: finish",
        "stopped at 1",
        "typed ends",
    ),
    "a NaN dressed as a stop": C(
        answer(saying(finish_matched='"NaN happened"')),
        "responses: finish",
        "NaN happened",
        "absent is not zero",
    ),
    "a length that was clipped in silence": C(
        answer(saying(finish_reason="length", finish_matched="null")),
        "responses: finish",
        "the cap was 32",
        "typed ends",
    ),
    "an end of no known kind": C(
        answer(saying(finish_reason="abort")), "responses: finish", "'abort'", "typed ends"
    ),
    "an output id outside the vocabulary": C(
        answer(put_id("output_ids", 259)), "responses: vocabulary", "259", "ids in vocabulary"
    ),
    "a prompt id below zero": C(
        answer(put_id("prompt_ids", -1)), "responses: vocabulary", "-1", "ids in vocabulary"
    ),
    "a status that is not ok": C(
        answer(saying(status="rejected:loop")),
        "responses: status",
        "rejected:loop",
        "named ends",
    ),
    "a gate of another name": C(
        reject_under_another_name, "responses: gates", "judged again", "named ends"
    ),
    "a flag from nowhere": C(flag_a_row, "responses: gates", "flags", "named ends"),
    "another temperature was sent": C(
        answer(sent(temperature=1.0)),
        "responses: sampling",
        "temperature 1.0",
        "parameters",
    ),
    "another row's seed was sent": C(
        answer(sent(sampling_seed=1)),
        "responses: sampling",
        "sampling_seed 1",
        "parameters",
    ),
    "a cap above the recipe's": C(
        answer(sent(max_new_tokens=33)),
        "responses: sampling",
        "at most 32",
        "parameters",
    ),
    # tokens are the truth
    "segments with a hole": C(
        answer(lambda row, _: row["segments"][0].update(start=1)),
        "responses: segments",
        "expected it to start at",
        "segments cover the ids",
    ),
    "segments that end too early": C(
        answer(lambda row, _: row["segments"].pop()),
        "responses: segments",
        "segments end at",
        "segments cover the ids",
    ),
    "content that its ids do not say": C(
        answer(saying(content="something else")),
        "responses: decoding",
        "content",
        "re-decoding",
    ),
    "a tool call that its ids do not hold": C(
        answer(saying(tool_calls='[{"id": "call_0"}]')),
        "responses: decoding",
        "tool_calls",
        "re-decoding",
    ),
    "content that is called a marker": C(
        answer(lambda row, _: row["segments"][0].update(kind="marker")),
        "responses: decoding",
        "segments",
        "re-decoding",
    ),
    "messages of another prompt": C(
        answer(saying(messages='[{"role":"user","content":"other"}]')),
        "responses: prompts",
        "messages",
        "prompts are those that were asked",
    ),
    "tools that the prompt does not have": C(
        answer(saying(tools='[{"type":"function","function":{"name":"f"}}]')),
        "responses: prompts",
        "tools",
        "prompts are those that were asked",
    ),
    "prompt ids that are not the prompt's": C(
        answer(put_id("prompt_ids", 99)),
        "responses: prompts",
        "prompt ids",
        "prompts are those that were asked",
    ),
    "a prompt whose ids the template does not give": C(
        prompt_of(lambda row, _: row["prompt_ids"].__setitem__(5, 77), "eval"),
        "prompts: rendering",
        "from token 5 on",
        "prompts are rendered again",
    ),
    "a held-out prompt that is trained on": C(
        hold_out_what_is_trained, "prompts: held out", "yet trained on", "held out"
    ),
    # schema
    "a column that may hold nulls": C(make_nullable, "schemas", "expected", "schema"),
    "a column that is missing": C(drop_a_column, "schemas", "has no column", "schema"),
    # hidden states
    "a sample without hidden states": C(
        drop_states, "features: index", "no hidden states", "row counts of features"
    ),
    "a loss mask that covers the prompt": C(
        states(lambda t, _, __: t["loss_mask"].__setitem__(0, True)),
        "features: rows",
        "loss mask",
        "the mask is the response's span",
    ),
    "a feature row with another token": C(
        states(lambda t, length, dice: t["input_ids"].__setitem__(dice.randrange(length), 5)),
        "features: rows",
        "prompt and output ids",
        "features are of the rows",
    ),
    "a NaN among the states": C(
        states(lambda t, length, dice: t["aux"][dice.randrange(length)].__setitem__(3, torch.nan)),
        "features: states",
        "not finite",
        "finite values",
    ),
    "a token whose state is zero": C(
        states(lambda t, _, __: t["last"][0].zero_()),
        "features: states",
        "all zero",
        "finite values",
    ),
    "states that are cut short": C(
        lambda run, dice: (
            states(lambda t, _, __: t.update(last=t["last"][:-1].contiguous()))(run, dice)
            and shard(run).name
        ),
        "features: states",
        "last is",
        "row counts of features",
    ),
    "the names of other layers": C(
        name_other_layers, "features: states", "layers [1, 2, 4]", "features are of the target"
    ),
    "states of a neighbouring layer": C(
        shift_states_by_a_layer, "features: target", "shifted by", "features are of the target"
    ),
    # draft vocabulary
    "ids in place of offsets": C(
        tensors_of(lambda run: run.draft_vocab, shift_offsets),
        "draft vocabulary",
        "t2d marks other tokens",
        "draft vocabulary",
    ),
    "counts of other rows": C(
        tensors_of(lambda run: run.draft_vocab, change_a_count),
        "draft vocabulary: counts",
        "is counted",
        "draft vocabulary",
    ),
    # training
    "an infinite weight": C(
        tensors_of(lambda run: run.training / "weights.safetensors", poison(torch.inf)),
        "training: weights",
        "not finite",
        "finite weights",
    ),
    "a checkpoint without one of its parts": C(
        lose_a_part_of_a_checkpoint,
        "training: checkpoints",
        "cannot be read",
        "checkpoints are whole",
    ),
    "a checkpoint without a moment": C(
        last_checkpoint("exp_avg_sq", drop_a_tensor),
        "training: checkpoints",
        "is missing",
        "checkpoints are whole",
    ),
    "a checkpoint with a NaN": C(
        last_checkpoint("exp_avg", poison(torch.nan)),
        "training: checkpoints",
        "not finite",
        "checkpoints are whole",
    ),
    "a checkpoint of another step": C(
        rename_a_checkpoint, "training: checkpoints", "says it is step 20", "place in the data"
    ),
    "a step that was logged twice": C(
        repeat_a_step, "training: metrics", "follows step 5", "place in the data"
    ),
    "a loss that is no number": C(log_no_number, "training: metrics", "nan", "finite weights"),
    # export
    "a weight that was not exported": C(
        tensors_of(draft, drop_a_tensor), "export: weights", "is missing", "export is complete"
    ),
    "a weight of another shape": C(
        tensors_of(draft, lambda t, _: t.update({"fc.weight": torch.ones(64, 64)}) or "fc.weight"),
        "export: weights",
        "expected [64, 192]",
        "export is complete",
    ),
    "a head that the config ties": C(
        page_of(lambda run: run.draft / "config.json", having(tie_word_embeddings=True)),
        "export: weights",
        "tie_word_embeddings",
        "export is complete",
    ),
    "a weight that is not what was trained": C(
        tensors_of(draft, poison(0.5)), "export: values", "not what was trained", "load-back"
    ),
    "another rotary embedding in the draft's config": C(
        page_of(lambda run: run.draft / "config.json", having(rope_theta=500000.0)),
        "export: load-back",
        "logits",
        "load-back",
    ),
    "a rotary embedding that was not trained": C(
        page_of(lambda run: run.draft / "config.json", having(rope_theta=500000.0)),
        "export: weights",
        "rope_theta is 500000.0",
        "export is complete",
    ),
    "another draft vocabulary in the export": C(
        tensors_of(draft, shift_last_offset),
        "export: vocabulary",
        "d2t",
        "load-back",
    ),
    "an embedding that is not the target's": C(
        tensors_of(draft, add_to_embedding), "export: embedding", "not the target's", "load-back"
    ),
    # evaluation
    "an acceptance length that its counters do not give": C(
        domain(having(acceptance_length=3.5)),
        "evaluation",
        "acceptance length 3.5",
        "figures",
    ),
    "a domain that the whole does not hold": C(
        domain(lambda one: one["histogram"].__setitem__(0, one["histogram"][0] + 4)),
        "evaluation",
        "chat",
        "figures",
    ),
    "an evaluation that changed an output": C(
        page_of(lambda run: run.evaluation, having(lossless=False)),
        "evaluation",
        "lossless",
        "lossless",
    ),
    "answers of another evaluation": C(
        page_of(lambda run: run.evaluation_samples, having(samples=[])),
        "evaluation",
        "evaluation_samples.json",
        "figures",
    ),
    "an evaluation of another draft": C(
        page_of(lambda run: run.evaluation, having(draft_sha256="0" * 64)),
        "evaluation",
        "draft_sha256",
        "figures",
    ),
    # the folder
    "a recipe that was changed after the run": C(
        change_the_recipe, "recipe", "another recipe", "the run's own recipe"
    ),
    "a recipe that is gone": C(lose_the_recipe, "recipe", "missing", "the run's own recipe"),
    "an event that is cut": C(tear_an_event, "events", "is not JSON", "events are whole"),
    "a pickle": C(leave_a_pickle, "no code, no keys", "may run code", "no code from data"),
    "a file that is gone": C(lose_a_file, "manifest: files", "missing", "checksums", sealed=False),
    "a file that grew": C(lengthen_a_file, "manifest: files", "bytes", "checksums", sealed=False),
    "a bit that flipped": C(flip_a_bit, "manifest: files", "sha256", "checksums", sealed=False),
    "a file that nobody wrote": C(
        add_a_file, "manifest: complete", "did not list it", "checksums", sealed=False
    ),
    "a manifest that is cut": C(
        tear_the_manifest, "manifest: files", "not JSON", "checksums", sealed=False
    ),
}
