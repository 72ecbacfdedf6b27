"""Proofs about what is made of responses: features, draft vocabulary, weights, export, evaluation.

Independent of the code that wrote them: names and shapes are written down here once more.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.proof import Breaks, Broken, Evidence, NotThere, digest_of

_SAMPLED_ROWS_PER_SHARD = 4


# --- features


def feature_index(evidence: Evidence) -> str:
    """The index has its schema, each sample once, and only samples that have a response."""
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
    failed = _failed_captures(evidence)
    for sample_id in sorted(missing - failed):
        breaks.add(sample_id, "it has an ok response and no hidden states")
    breaks.raise_if_any()
    return f"{len(rows):,} rows" + (f", {len(missing):,} could not be captured" if missing else "")


def feature_rows(evidence: Evidence) -> str:
    """Ids are prompt + output ids, the mask is the response's span, rows tile their shards."""
    breaks, tokens = Breaks(), 0
    for shard, rows in _shards(evidence):
        at = 0
        ids, mask = shard.get_tensor("input_ids").numpy(), shard.get_tensor("loss_mask").numpy()
        for row in sorted(rows, key=lambda one: one["start"]):
            name, start, end = row["sample_id"], row["start"], row["start"] + row["length"]
            if start != at or end > len(ids):
                breaks.add(name, f"it lies at {start} to {end}, expected {at}, of {len(ids)}")
                break
            at, tokens = end, tokens + row["length"]
            mark = evidence.responses.get(name)
            if mark is None:
                continue  # the index check names it
            if row["length"] != mark.prompt_tokens + mark.output_tokens:
                breaks.add(name, f"{row['length']} tokens, its response has another number")
            elif digest_of(ids[start:end]) != mark.digest:
                breaks.add(name, "its input_ids are not its prompt and output ids")
            part = mask[start:end]
            if part[: mark.prompt_tokens].any() or not part[mark.prompt_tokens :].all():
                breaks.add(name, "its loss mask is not the span of the response")
            if row["loss_tokens"] != int(part.sum()):
                breaks.add(name, f"loss_tokens is {row['loss_tokens']}, the mask {part.sum()}")
        else:
            if at != len(ids):
                breaks.add(rows[0]["shard"], f"{len(ids) - at} tokens belong to no row")
    breaks.raise_if_any()
    return f"{tokens:,} tokens"


def feature_states(evidence: Evidence) -> str:
    """States are finite, not constant and as wide as the target says; layers are the profile's."""
    import torch

    profile, breaks, count = evidence.recipe.target.profile, Breaks(), 0
    for shard, rows in _shards(evidence):
        name = rows[0]["shard"]
        written = json.loads(shard.metadata()["aux_layer_ids"])
        if written != list(profile.aux_layer_ids):
            breaks.add(name, f"layers {written}, the profile says {list(profile.aux_layer_ids)}")
        width = _hidden_size(evidence)
        total = shard.get_slice("input_ids").get_shape()[0]
        for part, layers in (("aux", len(profile.aux_layer_ids)), ("last", 1)):
            view = shard.get_slice(part)
            if width is not None and view.get_shape() != [total, layers * width]:
                breaks.add(name, f"{part} is {view.get_shape()}, not {[total, layers * width]}")
                continue
            if view.get_dtype() != "BF16":
                breaks.add(name, f"{part} is {view.get_dtype()}, not BF16")
            step = max(1, len(rows) // _SAMPLED_ROWS_PER_SHARD)
            for row in rows[::step]:
                count += 1
                states = view[row["start"] : row["start"] + row["length"]]
                if not bool(torch.isfinite(states).all()):
                    breaks.add(row["sample_id"], f"{part} holds a value that is not finite")
                elif not bool(states.any(dim=-1).all()):
                    breaks.add(row["sample_id"], f"{part} holds a token whose state is all zero")
    breaks.raise_if_any()
    return f"{count:,} blocks of states sampled"


def _index(evidence: Evidence) -> list[dict[str, Any]]:
    from training.features import INDEX_SCHEMA

    evidence.need("capture")
    path = evidence.run.features / "index.parquet"
    try:
        table = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise Broken(f"features/index.parquet cannot be read: {error}") from error
    if not table.schema.equals(INDEX_SCHEMA, check_metadata=True):
        raise Broken("features/index.parquet has another schema than training/features.py says")
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _shards(evidence: Evidence) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Each shard, opened, with its rows of the index; one is open at a time."""
    from safetensors import SafetensorError, safe_open

    by_shard: dict[str, list[dict[str, Any]]] = {}
    for row in _index(evidence):
        by_shard.setdefault(row["shard"], []).append(row)
    for name, rows in by_shard.items():
        try:
            with safe_open(evidence.run.features / name, framework="pt") as shard:
                missing = {"input_ids", "loss_mask", "aux", "last"} - set(shard.keys())
                if missing:
                    raise Broken(f"{name} has no {min(missing)}")
                yield shard, rows
        except (OSError, SafetensorError) as error:
            raise Broken(f"{name} cannot be read: {error}") from error


def _failed_captures(evidence: Evidence) -> set[str]:
    path = evidence.run.features / "failed.json"
    if not path.exists():
        return set()
    return {one["sample_id"] for one in json.loads(path.read_bytes())}


def _hidden_size(evidence: Evidence) -> int | None:
    try:
        return int(evidence.target_config["hidden_size"])
    except NotThere:
        return None


# --- draft vocabulary


def draft_vocabulary(evidence: Evidence) -> str:
    """`d2t` holds ascending offsets, `t2d` marks the same tokens, the size is the recipe's."""
    import torch

    tensors = _vocabulary(evidence)
    d2t, t2d, counts = (tensors[name] for name in ("d2t", "t2d", "counts"))
    size = evidence.recipe.draft.draft_vocab_size
    if d2t.dtype != torch.int64 or list(d2t.shape) != [size]:
        raise Broken(f"d2t is {d2t.dtype} {list(d2t.shape)}, the recipe says int64 [{size}]")
    if t2d.dtype != torch.bool or t2d.shape != counts.shape:
        raise Broken(f"t2d is {t2d.dtype} {list(t2d.shape)}, counts are {list(counts.shape)}")
    vocab_size = _target_vocab_size(evidence)
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

    tensors = _vocabulary(evidence)
    stored = tensors["counts"]
    counts = torch.zeros_like(stored)
    cut = evidence.recipe.train.max_tokens_per_sample
    heldout = _heldout(evidence)
    for shard, rows in _shards(evidence):
        for row in rows:
            if row["sample_id"] in heldout:
                continue
            part = slice(row["start"], row["start"] + min(row["length"], cut))
            ids = shard.get_slice("input_ids")[part].long()
            teaching = ids[shard.get_slice("loss_mask")[part]]
            if len(teaching) and int(teaching.max()) >= len(counts):
                raise Broken(f"{row['sample_id']} holds id {int(teaching.max())}, out of range")
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


def _vocabulary(evidence: Evidence) -> dict[str, Any]:
    evidence.need("train")
    return _load(evidence.run.draft_vocab, {"d2t", "t2d", "counts"})


def _heldout(evidence: Evidence) -> set[str]:
    from training.packing import is_heldout

    share = evidence.recipe.train.heldout_share
    return {one for one in evidence.responses if is_heldout(one, share)}


def _target_vocab_size(evidence: Evidence) -> int | None:
    try:
        return int(evidence.target_config["vocab_size"])
    except NotThere:
        return None


# --- weights and export


def training_weights(evidence: Evidence) -> str:
    """What training wrote is complete, finite, and shaped as the recipe's draft."""
    evidence.need("train")
    weights = _load(evidence.run.training / "weights.safetensors", set())
    embedding = {name for name in weights if "embed_tokens" in name}
    return _compare_weights(evidence, weights, without=set() if embedding else {_EMBEDDING})


def export_complete(evidence: Evidence) -> str:
    """SGLang would read every weight of the file and miss none; its config says the same shapes."""
    evidence.need("export")
    tensors = _load(evidence.run.draft / "model.safetensors", {"d2t"})
    config = _draft_config(evidence)
    expected = _promised_config(evidence)
    for name, value in expected.items():
        if name not in config or config[name] != value:
            raise Broken(f"config.json: {name} is {config.get(name)!r}, expected {value!r}")
    weights = {name: one for name, one in tensors.items() if name not in ("d2t", "t2d")}
    said = _compare_weights(evidence, weights, without=set())
    kinds = {str(one.dtype).removeprefix("torch.") for one in weights.values()}
    wanted = {evidence.recipe.train.dtype}
    if kinds != wanted or config.get("torch_dtype", config.get("dtype")) not in wanted:
        raise Broken(f"weights are {sorted(kinds)}, the recipe says {sorted(wanted)}")
    return said


def export_vocabulary(evidence: Evidence) -> str:
    """The exported `d2t` is the one that training used."""
    import torch

    evidence.need("export")
    exported = _load(evidence.run.draft / "model.safetensors", {"d2t"})
    trained = _vocabulary(evidence)
    for name in ("d2t", "t2d"):
        if name in exported and not torch.equal(exported[name], trained[name]):
            raise Broken(f"{name} of the draft is not that of draft_vocab.safetensors")
    return f"{len(exported['d2t']):,} offsets"


def export_embedding(evidence: Evidence) -> str:
    """The draft's embedding is the target's."""
    import torch

    evidence.need("export")
    exported = _load(evidence.run.draft / "model.safetensors", set())
    own = {_canonical(name): one for name, one in exported.items()}.get(_EMBEDDING)
    if own is None:
        raise Broken("the draft holds no embedding")
    theirs = _target_embedding(evidence).to(own.dtype)
    if own.shape != theirs.shape:
        raise Broken(f"the embedding is {list(own.shape)}, the target's {list(theirs.shape)}")
    if not torch.equal(own, theirs):
        row = int((own != theirs).any(dim=-1).nonzero()[0])
        raise Broken(f"the embedding of token {row} is not the target's")
    return f"{own.shape[0]:,} x {own.shape[1]:,}"


_EMBEDDING = "embed_tokens.weight"


def _expected_shapes(evidence: Evidence) -> dict[str, list[int]]:
    """What SGLang 0.5.23 builds (`models/llama_eagle3.py`), by the names of EAGLE's own files."""
    draft = evidence.recipe.draft
    wide, inner = draft.hidden_size, draft.intermediate_size
    queries = draft.num_attention_heads * draft.head_dim
    keys = draft.num_key_value_heads * draft.head_dim
    target_wide = evidence.target_config["hidden_size"]
    aux = len(evidence.recipe.target.profile.aux_layer_ids)
    return {
        _EMBEDDING: [evidence.target_config["vocab_size"], wide],
        "fc.weight": [wide, aux * target_wide],
        "midlayer.self_attn.q_proj.weight": [queries, 2 * wide],
        "midlayer.self_attn.k_proj.weight": [keys, 2 * wide],
        "midlayer.self_attn.v_proj.weight": [keys, 2 * wide],
        "midlayer.self_attn.o_proj.weight": [wide, queries],
        "midlayer.mlp.gate_proj.weight": [inner, wide],
        "midlayer.mlp.up_proj.weight": [inner, wide],
        "midlayer.mlp.down_proj.weight": [wide, inner],
        "midlayer.input_layernorm.weight": [wide],
        "midlayer.hidden_norm.weight": [wide],
        "midlayer.post_attention_layernorm.weight": [wide],
        "norm.weight": [wide],
        "lm_head.weight": [draft.draft_vocab_size, wide],
    }


def _promised_config(evidence: Evidence) -> dict[str, Any]:
    draft = evidence.recipe.draft
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": draft.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.num_attention_heads,
        "num_key_value_heads": draft.num_key_value_heads,
        "head_dim": draft.head_dim,
        "draft_vocab_size": draft.draft_vocab_size,
        "vocab_size": evidence.target_config["vocab_size"],
        "rms_norm_eps": evidence.target_config["rms_norm_eps"],
        "tie_word_embeddings": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(evidence.recipe.target.profile.aux_layer_ids),
        },
    }


def _draft_config(evidence: Evidence) -> dict[str, Any]:
    path = evidence.run.draft / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Broken(f"draft/config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise Broken("draft/config.json is no mapping")
    return config


def _compare_weights(evidence: Evidence, weights: Mapping[str, Any], *, without: set[str]) -> str:
    import torch

    expected = {k: v for k, v in _expected_shapes(evidence).items() if k not in without}
    seen = {_canonical(name): one for name, one in weights.items()}
    missing, unknown = expected.keys() - seen.keys(), seen.keys() - expected.keys()
    if missing:
        raise Broken(f"{min(missing)} is missing; a server would leave it random")
    if unknown:
        raise Broken(f"{min(unknown)} is unknown; a server would drop it")
    for name, shape in expected.items():
        if list(seen[name].shape) != shape:
            raise Broken(f"{name} is {list(seen[name].shape)}, expected {shape}")
        if not bool(torch.isfinite(seen[name]).all()):
            raise Broken(f"{name} holds a value that is not finite")
        if len(shape) == 2 and not bool(seen[name].any()):
            raise Broken(f"{name} is all zero")
    return f"{len(expected)} weights, {sum(math.prod(s) for s in expected.values()):,} numbers"


def _canonical(name: str) -> str:
    return name.removeprefix("model.").replace("layers.0.", "midlayer.")


def _target_embedding(evidence: Evidence) -> Any:
    from safetensors import SafetensorError, safe_open

    folder = Path(evidence.recipe.target.path)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                    if name.endswith(_EMBEDDING):
                        return file.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise NotThere(f"the target's weights cannot be read: {error}") from error
    raise NotThere(f"the target is out of reach: no embedding in {folder}")


def _load(path: Path, names: set[str]) -> dict[str, Any]:
    """All tensors of a file. Raises `Broken` if it cannot be read or a name is not in it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, Any] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise Broken(f"{path.name} cannot be read: {error}") from error
    if missing := names - tensors.keys():
        raise Broken(f"{path.name} has no {min(missing)}")
    return tensors


# --- evaluation


def evaluation_consistent(evidence: Evidence) -> str:
    """Every figure follows from its own counters, groups add up, and no output was changed."""
    from pipelines.recipe import fingerprint
    from pipelines.store import sha256_of

    evidence.need("evaluate")
    page = _evaluation(evidence)
    breaks = Breaks()
    if page["lossless"] is not True:
        breaks.add("lossless", f"it is {page['lossless']}: a draft changed an output")
    for tie in page["numeric_ties"]:
        if tie.get("is_tie") is not True:
            breaks.add(tie["sample_id"], "its output changed, and it was no tie")
    if page["draft_sha256"] != sha256_of(evidence.run.draft / "model.safetensors"):
        breaks.add("draft_sha256", "another draft was measured than the one in draft/")
    if page["recipe"] != fingerprint(evidence.recipe, "evaluate"):
        breaks.add("recipe", "it was measured with another recipe")
    steps = evidence.recipe.evaluate.draft_steps
    for kind, groups in page["acceptance"].items():
        for name, group in groups.items():
            for fault in _acceptance_faults(group, steps):
                breaks.add(f"{kind}, {name}", fault)
        for whole, fault in _sum_faults(groups, page["method"]["overall"]):
            breaks.add(f"{kind}, {whole}", fault)
    breaks.raise_if_any()
    return f"{len(page['acceptance'])} drafts, {page['tokens_compared']:,} tokens unchanged"


def _evaluation(evidence: Evidence) -> dict[str, Any]:
    try:
        page: dict[str, Any] = json.loads(evidence.run.evaluation.read_bytes())
    except (OSError, ValueError) as error:
        raise Broken(f"evaluation.json cannot be read: {error}") from error
    promised = {"lossless", "numeric_ties", "draft_sha256", "recipe", "acceptance", "method"}
    if missing := promised - page.keys():
        raise Broken(f"evaluation.json has no {min(missing)}")
    return page


def _acceptance_faults(group: Mapping[str, Any], steps: int) -> Iterator[str]:
    histogram, length = group["histogram"], group["acceptance_length"]
    if len(histogram) != steps + 1:
        yield f"the histogram has {len(histogram)} counts for {steps} drafted tokens"
        return
    verifications = sum(histogram)
    correct = sum(accepted * count for accepted, count in enumerate(histogram))
    if (group["verifications"], group["correct_drafts"]) != (verifications, correct):
        yield (
            f"{group['correct_drafts']} correct in {group['verifications']} verifications, the "
            f"histogram says {correct} in {verifications}"
        )
    expected = 1 + correct / verifications if verifications else None
    if not _is_close(length, expected):
        yield f"acceptance length {length}, its counters say {expected}"
    if group["interval"] is not None and length is not None:
        low, high = group["interval"]
        if not 1 <= low <= high <= steps + 1:
            yield f"the interval {low} to {high} is impossible"
    reached = [sum(histogram[step:]) for step in range(steps + 1)]
    for step, rate in enumerate(group["acceptance_rates"]):
        said = reached[step + 1] / reached[step] if reached[step] else None
        if not _is_close(rate, said):
            yield f"acceptance rate {rate} at step {step}, its counters say {said}"


def _sum_faults(groups: Mapping[str, Any], overall: list[str]) -> Iterator[tuple[str, str]]:
    domains = {name: one for name, one in groups.items() if name not in ("overall", "all_domains")}
    for whole, members in (("all_domains", set(domains)), ("overall", set(overall))):
        total: Counter[int] = Counter()
        for name in members & domains.keys():
            total.update(dict(enumerate(domains[name]["histogram"])))
        seen = dict(enumerate(groups[whole]["histogram"]))
        if any(total[at] != count for at, count in seen.items()):
            yield whole, "its counters are not the sum of its domains"


def _is_close(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)
