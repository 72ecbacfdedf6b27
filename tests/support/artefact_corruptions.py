"""Damage to what is made of rows, and to the folder itself; see `corruptions`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from pipelines.store import RunFolder
from tests.support.corruptions import (
    Corrupt,
    committed,
    edit_rows,
    edit_tensors,
    page_of,
    shard,
    tensors_of,
)

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


def states(change: Callable[[dict, int, Random], object], path: Callable = shard) -> Corrupt:
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


def last_checkpoint(part: str, change: Callable[[dict, Random], str | None]) -> Corrupt:
    """Damage to a part of the newest checkpoint."""
    return tensors_of(lambda run: _last_checkpoint(run) / f"{part}.safetensors", change)


def drop_a_tensor(tensors: dict, dice: Random) -> str:
    """A tensor is missing."""
    name = dice.choice(sorted(one for one in tensors if "proj" in one))
    tensors.pop(name)
    return name.rpartition("layers.0.")[2]


def poison(value: float) -> Callable[[dict, Random], str]:
    """A change of tensors: one number is another."""

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


def add_to_embedding(tensors: dict, dice: Random) -> str:
    """A token's embedding is another."""
    name = next(one for one in tensors if "embed_tokens" in one)
    token = dice.randrange(len(tensors[name]))
    tensors[name][token].add_(1)
    return f"token {token}"


def shift_offsets(tensors: dict, _dice: Random) -> str:
    """Ids stand where offsets should."""
    tensors["d2t"].add_(1)
    return "d2t"


def shift_last_offset(tensors: dict, _dice: Random) -> str:
    """The last offset leads to another token."""
    tensors["d2t"][-1].add_(1)
    return "d2t"


def change_a_count(tensors: dict, dice: Random) -> str:
    """A token is counted once more."""
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


def domain(change: Callable[[dict], object]) -> Corrupt:
    """Damage to the figures of one domain."""

    def edit(page: dict) -> None:
        change(page["acceptance"]["trained"]["chat"])

    return page_of(lambda run: run.evaluation, edit)
