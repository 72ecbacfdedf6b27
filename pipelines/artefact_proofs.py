"""Proofs about hidden states and the draft vocabulary. See also `draft_proofs`."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.capture_probe import TOLERANCE, check_layers, relative_error
from pipelines.errors import PreflightFailed
from pipelines.proof import (
    Breaks,
    Broken,
    Evidence,
    NotThere,
    SampleMark,
    digest_of,
    load_tensors,
)
from training.config import Storage

_SAMPLED_ROWS_PER_SHARD = 4
_WITNESSED_ROWS = 4  # spread over all; of each so many tokens, which no later one changes
_WITNESSED_TOKENS = 256  # or more: the prompt, and so many of its answer
_WITNESSED_ANSWER = 16
_SAFETENSORS: dict[Storage, str] = {"bfloat16": "BF16", "float8_e4m3": "F8_E4M3", "int8": "I8"}


# --- features


def feature_index(evidence: Evidence) -> str:
    """The index has its schema, each sample once, and only samples that have a response."""
    from training.features import failed_samples

    rows = _index(evidence)
    breaks, seen = Breaks(), set()
    for row in rows:
        sample_id = row["sample_id"]
        if sample_id in seen:
            breaks.add(sample_id, "it is in the index twice")
        elif sample_id not in evidence.responses:
            breaks.add(sample_id, "it has hidden states and no ok response")
        seen.add(sample_id)
    missing = evidence.responses.keys() - seen
    failed = failed_samples(evidence.run.features).keys()
    for sample_id in sorted(missing - failed):
        breaks.add(sample_id, "it has an ok response and no hidden states")
    breaks.raise_if_any()
    return f"{len(rows):,} rows" + (f", {len(missing):,} could not be captured" if missing else "")


def feature_rows(evidence: Evidence) -> str:
    """Ids are prompt + output ids, the mask is the response's span, rows tile their shards."""
    evidence.need("capture")
    if evidence.recipe.capture.mode != "offline":
        return _token_rows(evidence)
    breaks, tokens = Breaks(), 0
    for shard, rows in _shards(evidence):
        at = last_at = 0
        ids, mask = shard.get_tensor("input_ids").numpy(), shard.get_tensor("loss_mask").numpy()
        for row in sorted(rows, key=lambda one: one["start"]):
            name, start, end = row["sample_id"], row["start"], row["start"] + row["length"]
            if start != at or end > len(ids):
                breaks.add(name, f"it lies at {start} to {end}, expected {at}, of {len(ids)}")
                break
            if row["last_start"] != last_at:
                breaks.add(name, f"its last states begin at {row['last_start']}, not {last_at}")
                break
            at, tokens = end, tokens + row["length"]
            last_at += row["length"] - row["teaches_from"]
            mark = evidence.responses.get(name)
            if mark is not None:  # the index check names it
                for fault in _faults(row, mark, ids[start:end], mask[start:end]):
                    breaks.add(name, fault)
        else:
            if at != len(ids):
                breaks.add(rows[0]["shard"], f"{len(ids) - at} tokens belong to no row")
    breaks.raise_if_any()
    return f"{tokens:,} tokens"


def _faults(row: dict[str, Any], mark: SampleMark, ids: Any, mask: Any) -> Iterator[str]:
    """Where one row of a shard is not its response."""
    if row["length"] != mark.prompt_tokens + mark.output_tokens:
        yield f"{row['length']} tokens, its response has another number"
    elif digest_of(ids) != mark.digest:
        yield "its input_ids are not its prompt and output ids"
    if mask[: mark.prompt_tokens].any() or not mask[mark.prompt_tokens :].all():
        yield "its loss mask is not the span of the response"
    if row["loss_tokens"] != int(mask.sum()):
        yield f"loss_tokens is {row['loss_tokens']}, the mask {mask.sum()}"
    first = int(mask.argmax()) if mask.any() else row["length"]
    if row["teaches_from"] != first:
        yield f"teaches_from is {row['teaches_from']}, the mask says {first}"


def feature_states(evidence: Evidence) -> str:
    """States are finite, not constant and as wide as the target says; layers are the profile's."""
    import torch

    from training.features import read_aux

    breaks, blocks = Breaks(), 0
    for shard, rows in _shards(evidence):
        faults = list(_misshapen(evidence, shard, rows))
        for fault in faults:
            breaks.add(rows[0]["shard"], fault)
        for row in () if faults else rows[:: max(1, len(rows) // _SAMPLED_ROWS_PER_SHARD)]:
            place = _place(row)
            last = shard.get_slice("last")[place["last"]]
            for part, states in (("aux", read_aux(shard, place["aux"])), ("last", last)):
                blocks += 1
                if not bool(torch.isfinite(states).all()):
                    breaks.add(row["sample_id"], f"{part} holds a value that is not finite")
                elif not bool(states.any(dim=-1).all()):
                    breaks.add(row["sample_id"], f"{part} holds a token whose state is all zero")
    breaks.raise_if_any()
    return f"{blocks:,} blocks of states sampled"


def _misshapen(evidence: Evidence, shard: Any, rows: list[dict[str, Any]]) -> Iterator[str]:
    """Where a shard's layers, types and shapes are not those of the target and the recipe."""
    layers, storage = evidence.recipe.target.profile.aux_layer_ids, evidence.recipe.capture.storage
    written = json.loads(shard.metadata()["aux_layer_ids"])
    if written != list(layers):
        yield f"layers {written}, the profile says {list(layers)}"
    tokens = shard.get_slice("input_ids").get_shape()[0]
    taught = sum(row["length"] - row["teaches_from"] for row in rows)
    expected = {"aux": (_SAFETENSORS[storage], tokens), "last": ("BF16", taught)}
    widths = {"aux_scale": len(layers)}
    if storage != "bfloat16":
        expected["aux_scale"] = ("F32", tokens)
    if (width := evidence.target_number("hidden_size")) is not None:
        widths |= {"aux": len(layers) * width, "last": width}
    for part, (kind, count) in expected.items():
        view = shard.get_slice(part)
        shape = view.get_shape()
        wanted = [count, widths.get(part, shape[-1])]  # a target out of reach says no width
        if shape != wanted:
            yield f"{part} is {shape}, not {wanted}"
        if view.get_dtype() != kind:
            yield f"{part} is {view.get_dtype()}, not {kind}"


def feature_targets(evidence: Evidence) -> str:
    """The target, run once more over a few rows by transformers, gives the stored states."""
    import torch

    from pipelines.witness import MAX_TARGET_BYTES, Witness, can_witness
    from training.features import read_aux

    evidence.need("capture")
    recipe, servers = evidence.recipe, evidence.recipe.capture.servers
    if evidence.target_number("hidden_size") is None:
        raise NotThere("the target is out of reach")
    if not can_witness(recipe.target):
        raise NotThere(f"the target is larger than {MAX_TARGET_BYTES:,} bytes: not run here")
    if servers.kind != "embedded":
        raise NotThere(f"states of a {servers.kind} server have no known tolerance")
    witness, breaks, worst = Witness(recipe.target, getattr(torch, servers.dtype)), Breaks(), 0.0
    total = len(_index(evidence))
    wanted = {n * (total - 1) // max(1, _WITNESSED_ROWS - 1) for n in range(_WITNESSED_ROWS)}
    at = 0
    for shard, rows in _shards(evidence):
        for row in rows:
            at += 1
            if at - 1 not in wanted:
                continue
            tokens = max(_WITNESSED_TOKENS, row["teaches_from"] + _WITNESSED_ANSWER)
            places = _place(row, min(row["length"], tokens))
            ids, last = (shard.get_slice(one)[places[one]] for one in ("input_ids", "last"))
            states, layers = witness.states(ids.tolist()), recipe.target.profile.aux_layer_ids
            cost = _storage_error([states[layer + 1] for layer in layers], recipe.capture.storage)
            try:
                error = check_layers(
                    read_aux(shard, places["aux"]),
                    last,
                    states=states,
                    aux_layer_ids=layers,
                    tolerance=TOLERANCE[servers.dtype] + cost,
                )
            except PreflightFailed as fault:
                breaks.add(row["sample_id"], fault.seen.replace("the server's", "its"))
            else:
                worst = max(worst, error)
    breaks.raise_if_any()
    return f"{len(wanted)} rows computed again, off by at most {worst:.2g}"


def _storage_error(states: Sequence[Any], storage: Storage) -> float:
    """How far storing alone puts the target's own states [T, H] off, at most of all layers."""
    from training.features import from_eight_bits, to_eight_bits

    if storage == "bfloat16":  # what TOLERANCE counts on
        return 0.0
    return max(
        relative_error(from_eight_bits(*to_eight_bits(one, 1, storage)), one) for one in states
    )


def _index(evidence: Evidence) -> list[dict[str, Any]]:
    from training.features import FeatureFault, refuse_another_version

    evidence.need("capture")
    if evidence.recipe.capture.mode != "offline":
        raise NotThere("states were made while training, and are not kept")
    path = evidence.run.features / "index.parquet"
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise Broken(f"features/index.parquet cannot be read: {error}") from error
    try:
        refuse_another_version(table.schema, "features/index.parquet")
    except FeatureFault as fault:
        raise Broken(str(fault)) from fault
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _place(row: dict[str, Any], tokens: int | None = None) -> dict[str, slice]:
    """Where a row's ids, aux and last states lie in its shard, up to so many of its tokens."""
    tokens = row["length"] if tokens is None else tokens
    whole = slice(row["start"], row["start"] + tokens)
    last = slice(row["last_start"], row["last_start"] + max(0, tokens - row["teaches_from"]))
    return {"input_ids": whole, "aux": whole, "last": last}


def _tensors(storage: Storage) -> set[str]:
    scales = set() if storage == "bfloat16" else {"aux_scale"}
    return {"input_ids", "loss_mask", "aux", "last"} | scales


def _shards(evidence: Evidence) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Each shard, opened, with its rows of the index; one is open at a time."""
    from safetensors import SafetensorError, safe_open

    by_shard: dict[str, list[dict[str, Any]]] = {}
    for row in _index(evidence):
        by_shard.setdefault(row["shard"], []).append(row)
    for name, rows in by_shard.items():
        try:
            with safe_open(evidence.run.features / name, framework="pt") as shard:
                missing = _tensors(evidence.recipe.capture.storage) - set(shard.keys())
                if missing:
                    raise Broken(f"{name} has no {min(missing)}")
                yield shard, rows
        except (OSError, SafetensorError) as error:
            raise Broken(f"{name} cannot be read: {error}") from error


def _tokens(evidence: Evidence) -> Iterator[tuple[str, Any, Any]]:
    """Ids and loss mask of every row that training saw, wherever they are."""
    from training.features import FeatureFault
    from training.stream import TOKENS_FILE, TokenStore

    evidence.need("capture")
    if evidence.recipe.capture.mode != "offline":
        try:
            store = TokenStore(evidence.run.features / TOKENS_FILE)
        except FeatureFault as fault:
            raise Broken(str(fault)) from fault
        yield from ((name, *store.tokens(row)) for row, name in enumerate(store.sample_ids))
        return
    for shard, rows in _shards(evidence):
        for row in rows:
            part = slice(row["start"], row["start"] + row["length"])
            ids = shard.get_slice("input_ids")[part].long()
            yield row["sample_id"], ids, shard.get_slice("loss_mask")[part]


def _token_rows(evidence: Evidence) -> str:
    """Rows whose states are not kept: each ok response once, its ids, and its span as the mask."""
    breaks, seen, tokens = Breaks(), set(), 0
    for name, ids, mask in _tokens(evidence):
        mark = evidence.responses.get(name)
        if name in seen:
            breaks.add(name, "it is in the token file twice")
        elif mark is None:
            breaks.add(name, "it has tokens and no ok response")
        elif digest_of(ids.numpy()) != mark.digest:
            breaks.add(name, "its input_ids are not its prompt and output ids")
        elif bool(mask[: mark.prompt_tokens].any()) or not bool(mask[mark.prompt_tokens :].all()):
            breaks.add(name, "its loss mask is not the span of the response")
        seen.add(name)
        tokens += len(ids)
    for name in sorted(evidence.responses.keys() - seen):
        breaks.add(name, "it has an ok response and no tokens")
    breaks.raise_if_any()
    return f"{len(seen):,} rows, {tokens:,} tokens"


# --- draft vocabulary


def draft_vocabulary(evidence: Evidence) -> str:
    """`d2t` holds ascending offsets, `t2d` marks the same tokens, the size is the recipe's."""
    import torch

    tensors = stored_vocabulary(evidence)
    d2t, t2d, counts = (tensors[name] for name in ("d2t", "t2d", "counts"))
    size = evidence.recipe.draft.draft_vocab_size
    if d2t.dtype != torch.int64 or list(d2t.shape) != [size]:
        raise Broken(f"d2t is {d2t.dtype} {list(d2t.shape)}, the recipe says int64 [{size}]")
    if t2d.dtype != torch.bool or t2d.shape != counts.shape:
        raise Broken(f"t2d is {t2d.dtype} {list(t2d.shape)}, counts are {list(counts.shape)}")
    vocab_size = evidence.target_number("vocab_size")
    if vocab_size is not None and len(t2d) != vocab_size:
        raise Broken(f"t2d is made for {len(t2d):,} tokens, the target has {vocab_size:,}")
    used = d2t + torch.arange(size)
    broken = (used[1:] <= used[:-1]).nonzero()
    if len(broken):
        at = int(broken[0]) + 1
        raise Broken(f"d2t[{at}] leads to {int(used[at])}, not above the one before")
    if not torch.equal(t2d.nonzero().flatten(), used):
        raise Broken("t2d marks other tokens than d2t leads to")
    covered = int(counts[used].sum()) / max(1, int(counts.sum()))
    return f"{size:,} of {len(t2d):,} tokens, {covered:.2%} of what was counted"


def draft_vocabulary_counts(evidence: Evidence) -> str:
    """The counts are those of the training rows, counted again; the choice follows from them."""
    import torch

    tensors = stored_vocabulary(evidence)
    stored = tensors["counts"]
    counts = torch.zeros_like(stored)
    cut = evidence.recipe.train.max_tokens_per_sample
    heldout = _heldout(evidence)
    for sample_id, ids, mask in _tokens(evidence):
        if sample_id in heldout:
            continue
        teaching = ids[:cut][mask[:cut]]
        if len(teaching) and int(teaching.max()) >= len(counts):
            raise Broken(f"{sample_id} holds id {int(teaching.max())}, out of range")
        counts += torch.bincount(teaching, minlength=len(counts))
    different = (counts != stored).nonzero()
    if len(different):
        at = int(different[0])
        raise Broken(
            f"token {at} is counted {int(stored[at])} times in the file, {int(counts[at])} in the "
            f"features (and {len(different) - 1:,} more tokens)"
        )
    used = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    order = sorted(range(len(counts)), key=lambda token: (-int(counts[token]), token))
    if set(order[: len(used)]) != set(used.tolist()):
        raise Broken("the draft vocabulary is not the most frequent tokens, ties by lower id")
    return f"{int(counts.sum()):,} tokens counted again"


def stored_vocabulary(evidence: Evidence) -> dict[str, Any]:
    """`d2t`, `t2d` and the counts that they were chosen by."""
    evidence.need("train")
    return load_tensors(evidence.run.draft_vocab, {"d2t", "t2d", "counts"})


def _heldout(evidence: Evidence) -> set[str]:
    from training.packing import is_heldout

    share = evidence.recipe.train.heldout_share
    return {one for one in evidence.responses if is_heldout(one, share)}
