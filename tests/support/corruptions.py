"""Damage to a good run: each breaks one promise, at a place that dice choose.

A corruption gets the run and dice, breaks one thing, and returns the name of the place that it
broke: a sample id, a file, a weight. Except for those that are about the manifest itself, the
manifest is sealed again afterwards, as if the stage had written the damage: a checksum then finds
nothing, and the promise itself has to be proved.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from pipelines.store import RunFolder, sha256_of, stage_files, write_json, write_parquet

Corrupt = Callable[[RunFolder, Random], str]
Row = dict[str, Any]


@dataclass(frozen=True)
class Corruption:
    """What is broken, which check has to find it, and the words it has to say."""

    corrupt: Corrupt
    check: str
    words: str
    promise: str  # what is broken, in a person's words
    sealed: bool = True  # the manifest agrees with the damage


# --- where things lie


def committed(run: RunFolder) -> Path:
    """The ok rows of the one training set."""
    return run.root / "responses" / "chat" / "part-00000.parquet"


def aside(run: RunFolder) -> Path:
    """Its rejected and failed rows."""
    return run.root / "responses" / "_rejected" / "chat" / "part-00000.parquet"


def prompts(run: RunFolder, name: str = "chat") -> Path:
    """The prompts of a set."""
    return run.prompts / name / "part-00000.parquet"


def shard(run: RunFolder) -> Path:
    """One of the files of hidden states."""
    return run.features / "shard-00001.safetensors"


def draft(run: RunFolder) -> Path:
    """The exported weights."""
    return run.draft / "model.safetensors"


# --- how they are changed


def edit_rows(path: Path, change: Callable[[list[Row]], object]) -> None:
    """Read, change and write rows, with the schema that the file has."""
    table = pq.read_table(path, partitioning=None)
    rows = table.to_pylist()
    change(rows)
    write_parquet(path, pa.Table.from_pylist(rows, schema=table.schema))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Read, change and write tensors, with the metadata that the file has."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = {name: one.clone() for name, one in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata=metadata)


def edit_json(path: Path, change: Callable[[dict], object]) -> None:
    """Read, change and write one JSON object."""
    value = json.loads(path.read_bytes())
    change(value)
    write_json(path, value)


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


def _answer(change: Callable[[Row, Random], object]) -> Corrupt:
    """Damage to one committed response that stopped by itself."""

    def corrupt(run: RunFolder, dice: Random) -> str:
        broken: list[str] = []

        def one(rows: list[Row]) -> None:
            row = dice.choice([one for one in rows if one["finish_reason"] == "stop"])
            change(row, dice)
            broken.append(row["sample_id"])

        edit_rows(committed(run), one)
        return broken[0]

    return corrupt


def _prompt(change: Callable[[Row, Random], object], name: str = "chat") -> Corrupt:
    """Damage to one prompt."""

    def corrupt(run: RunFolder, dice: Random) -> str:
        broken: list[str] = []

        def one(rows: list[Row]) -> None:
            row = dice.choice(rows)
            broken.append(row["sample_id"])
            change(row, dice)

        edit_rows(prompts(run, name), one)
        return broken[0]

    return corrupt


def _weights(
    path: Callable[[RunFolder], Path], change: Callable[[dict, Random], str | None]
) -> Corrupt:
    """Damage to a file of tensors; `change` may name the place."""

    def corrupt(run: RunFolder, dice: Random) -> str:
        named: list[str | None] = []
        edit_tensors(path(run), lambda tensors: named.append(change(tensors, dice)))
        return named[0] or ""

    return corrupt


def _page(path: Callable[[RunFolder], Path], change: Callable[[dict], object]) -> Corrupt:
    """Damage to a JSON file."""

    def corrupt(run: RunFolder, _dice: Random) -> str:
        edit_json(path(run), change)
        return ""

    return corrupt


# --- rows that are not all there, or too many


def drop_a_row(run: RunFolder, dice: Random) -> str:
    """A rejected row vanishes."""
    gone: list[str] = []
    edit_rows(
        aside(run), lambda rows: gone.append(rows.pop(dice.randrange(len(rows)))["sample_id"])
    )
    return gone[0]


def repeat_a_row(run: RunFolder, dice: Random) -> str:
    """A committed row comes twice."""
    twice: list[str] = []

    def repeat(rows: list[Row]) -> None:
        at = dice.randrange(len(rows))
        rows.insert(at, rows[at])
        twice.append(rows[at]["sample_id"])

    edit_rows(committed(run), repeat)
    return twice[0]


def keep_a_row_twice(run: RunFolder, dice: Random) -> str:
    """A committed row is kept aside as well."""
    row = dice.choice(pq.read_table(committed(run), partitioning=None).to_pylist())
    edit_rows(aside(run), lambda rows: rows.append({**row, "status": "rejected:x"}))
    return str(row["sample_id"])


def answer_no_prompt(run: RunFolder, dice: Random) -> str:
    """A row answers a prompt that nobody asked."""
    name = f"chat-{dice.randrange(10**12):012d}"
    edit_rows(aside(run), lambda rows: rows.append({**rows[0], "sample_id": name}))
    return name


def shuffle_rows(run: RunFolder, dice: Random) -> str:
    """Rows lie in another order than that of their ids."""
    later: list[str] = []

    def swap(rows: list[Row]) -> None:
        at = dice.randrange(1, len(rows))
        rows[at - 1], rows[at] = rows[at], rows[at - 1]
        later.append(rows[at]["sample_id"])

    edit_rows(committed(run), swap)
    return later[0]


def count_tokens_of_no_reply(run: RunFolder, _dice: Random) -> str:
    """A failed row counts tokens."""
    row: list[Row] = []

    def count(rows: list[Row]) -> None:
        row.append(next(one for one in rows if one["status"].startswith("failed")))
        row[0]["usage"]["total_tokens"] = 9

    edit_rows(aside(run), count)
    return str(row[0]["sample_id"])


def flag_a_row(run: RunFolder, _dice: Random) -> str:
    """A committed row has a flag that nothing in it explains."""
    row: list[Row] = []

    def flag(rows: list[Row]) -> None:
        row.append(rows[0])
        rows[0]["flags"] = '["truncated_thinking"]'

    edit_rows(committed(run), flag)
    return str(row[0]["sample_id"])


def reject_under_another_name(run: RunFolder, _dice: Random) -> str:
    """A rejected row names a gate that did not reject it."""
    row: list[Row] = []

    def rename(rows: list[Row]) -> None:
        row.append(next(one for one in rows if one["status"].startswith("rejected")))
        row[0]["status"] = "rejected:repetition"

    edit_rows(aside(run), rename)
    return str(row[0]["sample_id"])


def repeat_a_prompt(run: RunFolder, dice: Random) -> str:
    """One prompt stands in the place of another."""
    twice: list[str] = []

    def repeat(rows: list[Row]) -> None:
        one, other = dice.sample(range(len(rows)), 2)
        rows[one] = rows[other]
        twice.append(rows[other]["sample_id"])

    edit_rows(prompts(run), repeat)
    return twice[0]


def drop_a_prompt(run: RunFolder, dice: Random) -> str:
    """A held-out prompt vanishes."""
    edit_rows(prompts(run, "eval"), lambda rows: rows.pop(dice.randrange(len(rows))))
    return "eval"


def hold_out_what_is_trained(run: RunFolder, dice: Random) -> str:
    """A held-out prompt says what a training prompt says."""
    trained = dice.choice(pq.read_table(prompts(run), partitioning=None).to_pylist())
    said = {key: trained[key] for key in ("messages", "prompt_ids")}
    return _prompt(lambda row, _: row.update(said), "eval")(run, dice)


def make_nullable(run: RunFolder, dice: Random) -> str:
    """A column may hold nulls."""
    table = pq.read_table(committed(run), partitioning=None)
    at = dice.randrange(table.num_columns)
    field = table.schema.field(at)
    schema = table.schema.set(at, field.with_nullable(True))
    write_parquet(committed(run), table.cast(schema))
    return str(field.name)


def drop_a_column(run: RunFolder, dice: Random) -> str:
    """A column is missing."""
    table = pq.read_table(committed(run), partitioning=None)
    name = dice.choice(["queued_ms", "flags", "weight_version"])
    write_parquet(committed(run), table.drop_columns([name]))
    return name


# --- hidden states


def drop_states(run: RunFolder, dice: Random) -> str:
    """The index forgets a captured row."""
    gone: list[str] = []
    edit_rows(
        run.features / "index.parquet",
        lambda rows: gone.append(rows.pop(dice.randrange(len(rows)))["sample_id"]),
    )
    return gone[0]


def _first_row(run: RunFolder) -> tuple[str, int]:
    """The row that begins the shard, and how many tokens it has."""
    rows = pq.read_table(run.features / "index.parquet").to_pylist()
    row = next(one for one in rows if one["shard"] == shard(run).name and one["start"] == 0)
    return row["sample_id"], row["length"]


def _states(change: Callable[[dict, int, Random], object], path: Callable = shard) -> Corrupt:
    """Damage to the first row of a shard; `change` gets tensors and that row's length."""

    def corrupt(run: RunFolder, dice: Random) -> str:
        name, length = _first_row(run)
        edit_tensors(path(run), lambda tensors: change(tensors, length, dice))
        return name

    return corrupt


def shift_states_by_a_layer(run: RunFolder, _dice: Random) -> str:
    """Each layer's states stand under the name of the next: nothing else would notice."""
    path = run.features / "shard-00000.safetensors"

    def shift(tensors: dict[str, torch.Tensor]) -> None:
        one, two, three = tensors["aux"].chunk(3, dim=1)
        tensors["aux"] = torch.cat([three, one, two], dim=1).contiguous()

    edit_tensors(path, shift)
    rows = pq.read_table(run.features / "index.parquet").to_pylist()
    return str(rows[0]["sample_id"])


def name_other_layers(run: RunFolder, _dice: Random) -> str:
    """The shard says that it holds other layers."""
    metadata = {"aux_layer_ids": "[1, 2, 4]"}
    save_file(load_file(shard(run)), shard(run), metadata=metadata)
    return shard(run).name


# --- training and export


def _last_checkpoint(run: RunFolder) -> Path:
    return sorted(run.checkpoints.glob("step-*"))[-1]


def lose_a_part_of_a_checkpoint(run: RunFolder, dice: Random) -> str:
    """A file of the newest checkpoint is missing."""
    part = dice.choice(["weights", "exp_avg", "exp_avg_sq", "ema"])
    (_last_checkpoint(run) / f"{part}.safetensors").unlink()
    return part


def rename_a_checkpoint(run: RunFolder, _dice: Random) -> str:
    """A checkpoint says that it is of another step."""
    path = _last_checkpoint(run)
    path.rename(path.with_name("step-00000019"))
    return "step-00000019"


def _checkpoint(part: str, change: Callable[[dict, Random], str | None]) -> Corrupt:
    return _weights(lambda run: _last_checkpoint(run) / f"{part}.safetensors", change)


def _drop_a_tensor(tensors: dict, dice: Random) -> str:
    name = dice.choice(sorted(one for one in tensors if "proj" in one))
    tensors.pop(name)
    return name.rpartition("layers.0.")[2]


def _poison(value: float) -> Callable[[dict, Random], str]:
    def change(tensors: dict, dice: Random) -> str:
        name = dice.choice(sorted(one for one in tensors if "proj" in one))
        tensors[name].view(-1)[dice.randrange(tensors[name].numel())] = value
        return name.rpartition("layers.0.")[2]

    return change


def repeat_a_step(run: RunFolder, _dice: Random) -> str:
    """The metrics tell of a step twice."""
    path = run.training / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:5], lines[4], *lines[5:]]))
    return "step 5"


def log_no_number(run: RunFolder, _dice: Random) -> str:
    """A loss is not a number."""
    path = run.training / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = json.dumps({**json.loads(lines[3]), "loss": float("nan")})
    path.write_text("\n".join(lines) + "\n")
    return "step 4"


def _add_to_embedding(tensors: dict, dice: Random) -> str:
    name = next(one for one in tensors if "embed_tokens" in one)
    token = dice.randrange(len(tensors[name]))
    tensors[name][token].add_(1)
    return f"token {token}"


def _shift_offsets(tensors: dict, _dice: Random) -> str:
    tensors["d2t"].add_(1)
    return "d2t"


def _shift_last_offset(tensors: dict, _dice: Random) -> str:
    tensors["d2t"][-1].add_(1)
    return "d2t"


def _change_a_count(tensors: dict, dice: Random) -> str:
    token = dice.randrange(len(tensors["counts"]))
    tensors["counts"][token].add_(1)
    return f"token {token}"


# --- the folder


def lose_a_file(run: RunFolder, _dice: Random) -> str:
    """A listed file is gone."""
    committed(run).unlink()
    return run.name_of(committed(run))


def lengthen_a_file(run: RunFolder, _dice: Random) -> str:
    """A listed file grew."""
    with committed(run).open("ab") as handle:
        handle.write(b"x")
    return run.name_of(committed(run))


def flip_a_bit(run: RunFolder, dice: Random) -> str:
    """One bit of a file of states is another: no reader would notice."""
    content = bytearray(shard(run).read_bytes())
    content[dice.randrange(len(content) // 2, len(content))] ^= 1 << dice.randrange(8)
    shard(run).write_bytes(content)
    return run.name_of(shard(run))


def add_a_file(run: RunFolder, _dice: Random) -> str:
    """A file lies among the committed ones that nobody wrote."""
    shutil.copy(committed(run), committed(run).with_name("part-00009.parquet"))
    return "part-00009"


def tear_the_manifest(run: RunFolder, _dice: Random) -> str:
    """The manifest is cut short."""
    run.manifest.write_text("{half")
    return run.manifest.name


def lose_the_recipe(run: RunFolder, _dice: Random) -> str:
    """The recipe is gone."""
    run.recipe.unlink()
    return "recipe.yaml"


def change_the_recipe(run: RunFolder, _dice: Random) -> str:
    """The recipe was changed after the run."""
    run.recipe.write_text(run.recipe.read_text().replace("top_k: -1", "top_k: 5"))
    return "generate"


def lose_all_responses(run: RunFolder, _dice: Random) -> str:
    """The folder of the responses is gone."""
    shutil.rmtree(run.root / "responses")
    return "responses"


def tear_an_event(run: RunFolder, dice: Random) -> str:
    """A line of the events is cut in its middle."""
    lines = run.events.read_text().splitlines(keepends=True)
    at = dice.randrange(len(lines) - 1)
    lines[at] = lines[at][: len(lines[at]) // 2] + "\n"
    run.events.write_text("".join(lines))
    return f"line {at + 1}"


def leave_a_pickle(run: RunFolder, _dice: Random) -> str:
    """A file that runs code when it is read lies in the run."""
    (run.training / "model.pt").write_bytes(b"\x80\x04.")
    return "training/model.pt"


def _miscount(change: Callable[[dict], object]) -> Corrupt:
    """The manifest counts what is not there."""

    def corrupt(run: RunFolder, _dice: Random) -> str:
        def edit(manifest: dict) -> None:
            change(manifest["stages"]["generate"]["counts"]["sets"]["chat"])

        edit_json(run.manifest, edit)
        return "chat"

    return corrupt


def _accepted(change: Callable[[dict], object]) -> Corrupt:
    """Damage to the figures of one domain."""

    def edit(page: dict) -> None:
        change(page["acceptance"]["trained"]["chat"])

    return _page(lambda run: run.evaluation, edit)


def _set(**values: Any) -> Callable[[Any], object]:
    return lambda mapping: mapping.update(values)


def _row(**values: Any) -> Callable[[Row, Random], object]:
    return lambda row, _: row.update(values)


def _usage(**values: int) -> Callable[[Row, Random], object]:
    return lambda row, _: row["usage"].update(values)


def _params(**values: Any) -> Callable[[Row, Random], object]:
    def change(row: Row, _dice: Random) -> None:
        row["params"] = json.dumps({**json.loads(row["params"]), **values}, sort_keys=True)

    return change


def _put_id(column: str, value: int) -> Callable[[Row, Random], object]:
    def change(row: Row, dice: Random) -> None:
        row[column][dice.randrange(len(row[column]) - 1)] = value

    return change


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
        _answer(_row(prompt_id="chat-other")), "responses: identity", "its id", "unique ids"
    ),
    "a row in another set's folder": C(
        _answer(_row(dataset="math")), "responses: identity", "in folder chat", "unique ids"
    ),
    "rows in another order": C(
        shuffle_rows, "responses: order", "larger id", "a commit is deterministic"
    ),
    # counts
    "completion tokens that are not those of the ids": C(
        _answer(_usage(completion_tokens=7)), "responses: usage", "completion_tokens", "counts"
    ),
    "a count that was lost and became zero": C(
        _answer(_usage(prompt_tokens=0)),
        "responses: usage",
        "prompt_tokens is 0",
        "absent is not zero",
    ),
    "reasoning tokens from nowhere": C(
        _answer(_usage(reasoning_tokens=3)), "responses: usage", "reasoning_tokens", "counts"
    ),
    "a total that is no sum": C(
        _answer(_usage(total_tokens=1)), "responses: usage", "total_tokens", "counts"
    ),
    "more cached tokens than the prompt has": C(
        _answer(_usage(cached_tokens=9999)), "responses: usage", "cached_tokens", "counts"
    ),
    "a failed row counts tokens": C(
        count_tokens_of_no_reply, "responses: usage", "no reply", "absent is not zero"
    ),
    "the manifest counts other rows": C(
        _miscount(_set(ok=36)), "responses: counts", "counts ok 36", "counts"
    ),
    "the manifest counts other tokens": C(
        _miscount(_set(output_tokens=1)), "responses: counts", "output_tokens 1", "counts"
    ),
    "the manifest names another fault": C(
        _miscount(_set(failed={})), "responses: counts", "failed {}", "conservation"
    ),
    # replies
    "a stop at another token": C(
        _answer(_row(finish_matched="1")), "responses: finish", "stopped at 1", "typed ends"
    ),
    "a NaN dressed as a stop": C(
        _answer(_row(finish_matched='"NaN happened"')),
        "responses: finish",
        "NaN happened",
        "absent is not zero",
    ),
    "a length that was clipped in silence": C(
        _answer(_row(finish_reason="length", finish_matched="null")),
        "responses: finish",
        "the cap was 32",
        "typed ends",
    ),
    "an end of no known kind": C(
        _answer(_row(finish_reason="abort")), "responses: finish", "'abort'", "typed ends"
    ),
    "an output id outside the vocabulary": C(
        _answer(_put_id("output_ids", 259)), "responses: vocabulary", "259", "ids in vocabulary"
    ),
    "a prompt id below zero": C(
        _answer(_put_id("prompt_ids", -1)), "responses: vocabulary", "-1", "ids in vocabulary"
    ),
    "a status that is not ok": C(
        _answer(_row(status="rejected:loop")), "responses: status", "rejected:loop", "named ends"
    ),
    "a gate of another name": C(
        reject_under_another_name, "responses: gates", "judged again", "named ends"
    ),
    "a flag from nowhere": C(flag_a_row, "responses: gates", "flags", "named ends"),
    "another temperature was sent": C(
        _answer(_params(temperature=1.0)), "responses: sampling", "temperature 1.0", "parameters"
    ),
    "another row's seed was sent": C(
        _answer(_params(sampling_seed=1)), "responses: sampling", "sampling_seed 1", "parameters"
    ),
    "a cap above the recipe's": C(
        _answer(_params(max_new_tokens=33)), "responses: sampling", "at most 32", "parameters"
    ),
    # tokens are the truth
    "segments with a hole": C(
        _answer(lambda row, _: row["segments"][0].update(start=1)),
        "responses: segments",
        "expected it to start at",
        "segments cover the ids",
    ),
    "segments that end too early": C(
        _answer(lambda row, _: row["segments"].pop()),
        "responses: segments",
        "segments end at",
        "segments cover the ids",
    ),
    "content that its ids do not say": C(
        _answer(_row(content="something else")), "responses: decoding", "content", "re-decoding"
    ),
    "a tool call that its ids do not hold": C(
        _answer(_row(tool_calls='[{"id": "call_0"}]')),
        "responses: decoding",
        "tool_calls",
        "re-decoding",
    ),
    "content that is called a marker": C(
        _answer(lambda row, _: row["segments"][0].update(kind="marker")),
        "responses: decoding",
        "segments",
        "re-decoding",
    ),
    "messages of another prompt": C(
        _answer(_row(messages='[{"role":"user","content":"other"}]')),
        "responses: prompts",
        "messages",
        "prompts are those that were asked",
    ),
    "tools that the prompt does not have": C(
        _answer(_row(tools='[{"type":"function","function":{"name":"f"}}]')),
        "responses: prompts",
        "tools",
        "prompts are those that were asked",
    ),
    "prompt ids that are not the prompt's": C(
        _answer(_put_id("prompt_ids", 99)),
        "responses: prompts",
        "prompt ids",
        "prompts are those that were asked",
    ),
    "a prompt whose ids the template does not give": C(
        _prompt(lambda row, _: row["prompt_ids"].__setitem__(5, 77), "eval"),
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
        _states(lambda t, _, __: t["loss_mask"].__setitem__(0, True)),
        "features: rows",
        "loss mask",
        "the mask is the response's span",
    ),
    "a feature row with another token": C(
        _states(lambda t, length, dice: t["input_ids"].__setitem__(dice.randrange(length), 5)),
        "features: rows",
        "prompt and output ids",
        "features are of the rows",
    ),
    "a NaN among the states": C(
        _states(lambda t, length, dice: t["aux"][dice.randrange(length)].__setitem__(3, torch.nan)),
        "features: states",
        "not finite",
        "finite values",
    ),
    "a token whose state is zero": C(
        _states(lambda t, length, dice: t["last"][dice.randrange(length)].zero_()),
        "features: states",
        "all zero",
        "finite values",
    ),
    "states that are cut short": C(
        lambda run, dice: (
            _states(lambda t, _, __: t.update(last=t["last"][:-1].contiguous()))(run, dice)
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
        _weights(lambda run: run.draft_vocab, _shift_offsets),
        "draft vocabulary",
        "t2d marks other tokens",
        "draft vocabulary",
    ),
    "counts of other rows": C(
        _weights(lambda run: run.draft_vocab, _change_a_count),
        "draft vocabulary: counts",
        "is counted",
        "draft vocabulary",
    ),
    # training
    "an infinite weight": C(
        _weights(lambda run: run.training / "weights.safetensors", _poison(torch.inf)),
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
        _checkpoint("exp_avg_sq", _drop_a_tensor),
        "training: checkpoints",
        "is missing",
        "checkpoints are whole",
    ),
    "a checkpoint with a NaN": C(
        _checkpoint("exp_avg", _poison(torch.nan)),
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
        _weights(draft, _drop_a_tensor), "export: weights", "is missing", "export is complete"
    ),
    "a weight of another shape": C(
        _weights(draft, lambda t, _: t.update({"fc.weight": torch.ones(64, 64)}) or "fc.weight"),
        "export: weights",
        "expected [64, 192]",
        "export is complete",
    ),
    "a head that the config ties": C(
        _page(lambda run: run.draft / "config.json", _set(tie_word_embeddings=True)),
        "export: weights",
        "tie_word_embeddings",
        "export is complete",
    ),
    "a weight that is not what was trained": C(
        _weights(draft, _poison(0.5)), "export: values", "not what was trained", "load-back"
    ),
    "another rotary embedding in the draft's config": C(
        _page(lambda run: run.draft / "config.json", _set(rope_theta=500000.0)),
        "export: load-back",
        "logits",
        "load-back",
    ),
    "a rotary embedding that was not trained": C(
        _page(lambda run: run.draft / "config.json", _set(rope_theta=500000.0)),
        "export: weights",
        "rope_theta is 500000.0",
        "export is complete",
    ),
    "another draft vocabulary in the export": C(
        _weights(draft, _shift_last_offset),
        "export: vocabulary",
        "d2t",
        "load-back",
    ),
    "an embedding that is not the target's": C(
        _weights(draft, _add_to_embedding), "export: embedding", "not the target's", "load-back"
    ),
    # evaluation
    "an acceptance length that its counters do not give": C(
        _accepted(_set(acceptance_length=3.5)), "evaluation", "acceptance length 3.5", "figures"
    ),
    "a domain that the whole does not hold": C(
        _accepted(lambda one: one["histogram"].__setitem__(0, one["histogram"][0] + 4)),
        "evaluation",
        "chat",
        "figures",
    ),
    "an evaluation that changed an output": C(
        _page(lambda run: run.evaluation, _set(lossless=False)),
        "evaluation",
        "lossless",
        "lossless",
    ),
    "an evaluation of another draft": C(
        _page(lambda run: run.evaluation, _set(draft_sha256="0" * 64)),
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
