"""Proofs about the trained draft: its weights, its checkpoints, and the folder that is served.

Independent of the code that wrote them: names and shapes are written down here once more.
"""

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.artefact_proofs import stored_vocabulary
from pipelines.errors import VerificationFailed
from pipelines.proof import Broken, Evidence, NotThere, load_json, load_tensors

_EMBEDDING = "embed_tokens.weight"
_WEIGHTS, _EXPORTED = "weights.safetensors", "model.safetensors"
_CHECKPOINT_PARTS = ("weights", "exp_avg", "exp_avg_sq", "ema")
_PROOF_ROWS, _PROOF_TOKENS = 2, 128  # whose logits are compared


def training_weights(evidence: Evidence) -> str:
    """What training wrote is complete, finite, and shaped as the recipe's draft."""
    evidence.need("train")
    weights = load_tensors(evidence.run.training / _WEIGHTS)
    embedding = {name for name in weights if "embed_tokens" in name}
    return _compare_weights(evidence, weights, without=set() if embedding else {_EMBEDDING})


def training_checkpoints(evidence: Evidence) -> str:
    """Each checkpoint is whole: weights, moments and averages of the recipe's draft, all finite,
    and its place in the data, which is the one in its name."""
    evidence.need("train")
    folders = sorted(evidence.run.checkpoints.glob("step-*"))
    if not folders:
        raise NotThere("no checkpoint is kept")
    last = load_json(evidence.run.training / "summary.json")["steps"]
    averaged = evidence.recipe.train.ema_decay > 0
    marks = set()
    for folder in folders:
        state = load_json(folder / "state.json")
        if folder.name != f"step-{state['step']:08d}" or not 0 < state["step"] <= last:
            raise Broken(f"{folder.name} says it is step {state['step']} of {last}")
        marks.add(state["fingerprint"])
        if len(marks) > 1:
            raise Broken(f"{folder.name} belongs to other data or another recipe")
        for part in _CHECKPOINT_PARTS:
            tensors = load_tensors(folder / f"{part}.safetensors")
            if part == "ema" and not averaged and not tensors:
                continue
            try:
                # A moment may be zero where a weight was never taught.
                _compare_weights(evidence, tensors, without={_EMBEDDING}, may_be_zero=True)
            except Broken as fault:
                raise Broken(f"{folder.name}/{part}: {fault}") from fault
    return f"{len(folders)}, the last of step {state['step']}"


def training_metrics(evidence: Evidence) -> str:
    """Steps are logged in order and without a hole of their own, every figure is a number, and the
    last step is the one that the summary names."""
    evidence.need("train")
    path = evidence.run.training / "metrics.jsonl"
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise Broken(f"{path.name} cannot be read: {error}") from error
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    for before, after in itertools.pairwise(steps):
        if after <= before:
            raise Broken(f"{path.name}: step {after} follows step {before}")
    for line in lines:
        for name, value in line.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise Broken(f"{path.name}: {name} is {value} at step {line['step']}")
    summary = load_json(evidence.run.training / "summary.json")
    if steps and steps[-1] > summary["steps"]:
        raise Broken(f"{path.name} ends with step {steps[-1]}, the summary with {summary['steps']}")
    if not steps:
        raise Broken(f"{path.name} holds no step")
    return f"{len(steps):,} of {summary['steps']:,} steps logged"


def export_complete(evidence: Evidence) -> str:
    """SGLang would read every weight of the file and miss none; its config says the same shapes."""
    evidence.need("export")
    tensors = load_tensors(evidence.run.draft / _EXPORTED, {"d2t"})
    config = load_json(evidence.run.draft / "config.json")
    expected = {**_promised_config(evidence), **_trained_config(evidence)}
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
    exported = load_tensors(evidence.run.draft / _EXPORTED, {"d2t"})
    trained = stored_vocabulary(evidence)
    for name in ("d2t", "t2d"):
        if name in exported and not torch.equal(exported[name], trained[name]):
            raise Broken(f"{name} of the draft is not that of draft_vocab.safetensors")
    return f"{len(exported['d2t']):,} offsets"


def export_embedding(evidence: Evidence) -> str:
    """The draft's embedding is the target's."""
    import torch

    evidence.need("export")
    exported = load_tensors(evidence.run.draft / _EXPORTED)
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


def export_values(evidence: Evidence) -> str:
    """Every exported weight is the trained one, rounded to the recipe's dtype and no further."""
    import torch

    evidence.need("export")
    trained = load_tensors(evidence.run.training / _WEIGHTS)
    exported = {
        _canonical(name): one for name, one in load_tensors(evidence.run.draft / _EXPORTED).items()
    }
    for name, one in trained.items():
        if _canonical(name) not in exported:
            raise Broken(f"{_canonical(name)} was trained and is not in the draft")
        theirs = exported[_canonical(name)]
        if not torch.equal(theirs, one.to(theirs.dtype)):
            raise Broken(f"{_canonical(name)} is not what was trained")
    return f"{len(trained)} weights are those that were trained"


def export_loads_back(evidence: Evidence) -> str:
    """The engine's own reader takes the folder, and gives the trainer's logits on captured rows."""
    import torch

    from pipelines.export import proof_rows, prove, read_draft_config
    from training.features import FeatureFault

    evidence.need("export")
    run = evidence.run
    config, embedding = read_draft_config(run), _target_embedding(evidence)
    try:
        rows = proof_rows(run, config)
    except FeatureFault as fault:
        raise Broken(f"no captured row to compare with: {fault}") from fault
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[evidence.recipe.train.dtype]
    weights = load_tensors(run.training / _WEIGHTS)
    try:
        worst = prove(run.draft, weights, embedding, config, rows, dtype=dtype)
    except (VerificationFailed, RuntimeError) as fault:  # torch refuses a weight of another shape
        raise Broken(str(fault).splitlines()[0]) from fault
    return f"logits within {worst:.1g} of the trainer's on {len(rows)} rows"


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


def _trained_config(evidence: Evidence) -> dict[str, Any]:
    """What decides how the draft computes beside its weights: as it was trained, so it is served.

    Another rotary embedding is loaded without a message, and costs acceptance only.
    """
    trained = load_json(evidence.run.training / "draft_config.json")
    return {name: trained[name] for name in ("rope_theta", "rope_scaling", "rms_norm_eps")}


def _compare_weights(
    evidence: Evidence,
    weights: Mapping[str, Any],
    *,
    without: set[str],
    may_be_zero: bool = False,
) -> str:
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
        if len(shape) == 2 and not may_be_zero and not bool(seen[name].any()):
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
