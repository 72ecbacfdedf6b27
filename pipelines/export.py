"""From trained weights to `draft/`, the folder that SGLang serves; done when it loaded back.

The proof reads the folder with `actors/reference_draft.py`, which shares no code with the trainer,
and compares its logits on real rows with those of the trainer's own model.
"""

import logging
import os
import platform
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention

from actors.reference_draft import DraftRefused, draft_logits, read_draft
from pipelines.errors import VerificationFailed
from pipelines.recipe import Recipe, fingerprint
from pipelines.stages import STAGES
from pipelines.store import RunFolder, read_manifest
from pipelines.telemetry import EventLog
from training import draft_vocab
from training.config import DraftConfig
from training.export import WEIGHTS_FILE, ExportFault, draft_shapes, write_draft
from training.features import FeatureRow, FeatureStore
from training.model import DraftModel, initial_weights, target_weights
from training.stream import TOKENS_FILE, TokenStore

logger = logging.getLogger(__name__)

# Both run in fp32 on the same weights, and differ only in the order of their sums.
LOGIT_TOLERANCE = 1e-3
_PROOF_ROWS = 4
_PROOF_TOKENS = 256
_VERSIONED = ("torch", "transformers", "deepspeed", "ray", "safetensors")


def export(recipe: Recipe, run: RunFolder, events: EventLog) -> dict[str, Any]:
    """Write `draft/`, whole and proved, or not at all; return what the proof measured.

    Raises `VerificationFailed` where the folder does not load back as the trainer's model.
    """
    config, vocab = read_draft_config(run), draft_vocab.load(run.draft_vocab)
    weights = load_file(run.training / "weights.safetensors")
    embedding, _ = target_weights(Path(recipe.target.path))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.train.dtype]
    temporary = run.root / f".draft-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        try:
            write_draft(
                temporary,
                weights,
                config=config,
                d2t=vocab.d2t,
                t2d=vocab.t2d,
                embedding=embedding,
                dtype=dtype,
            )
        except ExportFault as fault:
            raise _unexportable(str(fault)) from fault
        rows = proof_rows(run, config)
        worst = prove(temporary, weights, embedding, config, rows, dtype=dtype)
        (temporary / "README.md").write_text(model_card(recipe, run, config, dtype, worst))
        shutil.rmtree(run.draft, ignore_errors=True)
        temporary.rename(run.draft)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    size = (run.draft / WEIGHTS_FILE).stat().st_size
    events.append("draft_exported", bytes=size, worst_logit_error=worst)
    logger.info("export: the draft loaded back; its logits differ by at most %.2g", worst)
    return {
        "headline": f"{size / 1e6:.0f} MB, loaded back, logits within {worst:.1g} of the trainer's",
        "bytes": size,
        "weights": len(draft_shapes(config)),
        "dtype": recipe.train.dtype,
        "proof_tokens": sum(len(row.input_ids) for row in rows),
        "worst_logit_error": worst,
    }


def read_draft_config(run: RunFolder) -> DraftConfig:
    """The configuration that training wrote beside its weights."""
    return DraftConfig.model_validate_json((run.training / "draft_config.json").read_bytes())


def write_untrained_draft(recipe: Recipe, run: RunFolder, folder: Path) -> None:
    """Write the draft as it was before its first step: what training has to beat."""
    config, vocab = read_draft_config(run), draft_vocab.load(run.draft_vocab)
    embedding, head = target_weights(Path(recipe.target.path))
    weights = initial_weights(config, head, vocab.used, seed=recipe.train.seed)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_draft(
        folder,
        weights,
        config=config,
        d2t=vocab.d2t,
        t2d=vocab.t2d,
        embedding=embedding,
        dtype=torch.float32,
    )


def prove(
    folder: Path,
    weights: Mapping[str, torch.Tensor],
    embedding: torch.Tensor,  # [V, D]
    config: DraftConfig,
    rows: list[FeatureRow],
    *,
    dtype: torch.dtype,
) -> float:
    """Read `folder` back independently and compare; return the largest difference of a logit.

    Raises `VerificationFailed` on a refused folder, or on logits that are not the trainer's.
    """
    try:
        draft = read_draft(folder)
    except DraftRefused as refusal:
        raise _unexportable(str(refusal)) from refusal
    model = DraftModel(config)
    stored = {**weights, "embed_tokens.weight": embedding}
    # What the trainer's model says with the numbers as they are stored.
    model.load_state_dict({name: tensor.to(dtype).float() for name, tensor in stored.items()})
    worst = 0.0
    for row in rows:
        expected = trainer_logits(model, row)
        seen = draft_logits(draft, row.input_ids, row.aux.float())
        worst = max(worst, float((seen - expected).abs().max()))
    if not worst <= LOGIT_TOLERANCE:  # a NaN is refused as well
        raise VerificationFailed(
            f"logits of the exported draft differ from the trainer's by up to {worst:.3g}",
            expected=f"at most {LOGIT_TOLERANCE}, both in fp32 on the same weights",
            change="this is a fault of the exporter or of the model code; please report it",
        )
    return worst


@torch.inference_mode()
def trainer_logits(model: DraftModel, row: FeatureRow) -> torch.Tensor:
    """Logits [T-1, U] of the first draft step: row i sees state i and token i+1."""
    tokens = len(row.input_ids) - 1
    hidden = model.step(
        model.embed_tokens(row.input_ids[1:]),
        model.fc(row.aux[:-1].float()),
        torch.arange(tokens),
        _causal_attention,
    )
    logits: torch.Tensor = model.lm_head(model.norm(hidden))
    return logits


def _causal_attention(
    query: torch.Tensor,  # [T, heads, d]
    key: torch.Tensor,  # [T, kv_heads, d]
    value: torch.Tensor,  # [T, kv_heads, d]
) -> torch.Tensor:  # [T, heads, d]
    query, key, value = (one.transpose(0, 1)[None] for one in (query, key, value))
    out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1)


def model_card(
    recipe: Recipe, run: RunFolder, config: DraftConfig, dtype: torch.dtype, worst: float
) -> str:
    """`README.md` of the draft: what it is, what it was made from, how it is served."""
    target, steps = Path(recipe.target.path).name, recipe.evaluate.draft_steps
    stages = "".join(
        f"* {stage}: {entry['counts']['headline']}\n"
        for stage, entry in read_manifest(run)["stages"].items()
        if stage in STAGES[: STAGES.index("export")]
    )
    versions = ", ".join(f"{name} {version(name)}" for name in _VERSIONED)
    train = recipe.train
    return f"""# EAGLE-3 draft for {target}

Made by Eyas, run `{recipe.name}`, recipe fingerprint `{fingerprint(recipe, "export")}`.

## Serve it

```
python -m sglang.launch_server --model-path {target} \\
  --speculative-algorithm EAGLE3 --speculative-draft-model-path draft \\
  --speculative-num-steps {steps} --speculative-eagle-topk 1 \\
  --speculative-num-draft-tokens {steps + 1}
```

`EAGLE` in place of `EAGLE3` is accepted by the server without a message, and accepts nothing.

## What it is

* One Llama layer, hidden size {config.hidden_size}, draft vocabulary {config.draft_vocab_size:,} of
  {config.vocab_size:,} tokens, weights in {str(dtype).removeprefix("torch.")}.
* It reads the outputs of target layers {", ".join(map(str, config.aux_layer_ids))}
  (of {config.target_num_layers}, counted from 0).
* The embedding is the target's own, so the target's licence applies to it.
* `d2t` holds offsets (target id - draft id); `t2d` marks the target ids that the draft can say.

## What it was made from

{stages or "* no record of earlier stages in the manifest"}
Training sets: {", ".join(f"{one.name} ({one.domain})" for one in recipe.prompts.train)}.
Training: {train.epochs} epochs, {train.batch_samples} samples a step, {train.ttt_steps} TTT steps
weighted {train.step_decay}^k, learning rate {train.learning_rate}, {train.dtype},
seed {train.seed}.

Loaded back by a reader of its own; logits on real rows differ from the trainer's by at most
{worst:.2g}. Acceptance lengths are in the run's `evaluation.json`.

Versions: {versions}, Python {platform.python_version()}.
"""


def proof_rows(run: RunFolder, config: DraftConfig) -> list[FeatureRow]:
    """A few rows, spread over all, cut to a length that is quick on a CPU.

    Where states are not kept, random ones serve as well: what is compared is arithmetic. Raises
    `FeatureFault` where there are no rows at all.
    """
    if (run.features / TOKENS_FILE).exists():
        tokens = TokenStore(run.features / TOKENS_FILE)
        return [_random_row(tokens, number, config) for number in _spread(len(tokens.sample_ids))]
    store = FeatureStore(run.features, aux_layer_ids=config.aux_layer_ids)
    return [_cut(store.row(number)) for number in _spread(len(store))]


def _spread(count: int) -> list[int]:
    return sorted({n * (count - 1) // (_PROOF_ROWS - 1) for n in range(_PROOF_ROWS)})


def _random_row(tokens: TokenStore, number: int, config: DraftConfig) -> FeatureRow:
    ids, mask = (part[:_PROOF_TOKENS] for part in tokens.tokens(number))
    generator = torch.Generator().manual_seed(number)
    width = config.target_hidden_size
    aux, last = (
        torch.randn(len(ids), size, generator=generator).to(torch.bfloat16)
        for size in (len(config.aux_layer_ids) * width, width)
    )
    name, dataset, domain = (
        some[number] for some in (tokens.sample_ids, tokens.datasets, tokens.domains)
    )
    return FeatureRow(name, dataset, domain, ids, mask, aux, last)


def _cut(row: FeatureRow) -> FeatureRow:
    return FeatureRow(
        row.sample_id,
        row.dataset,
        row.domain,
        row.input_ids[:_PROOF_TOKENS],
        row.loss_mask[:_PROOF_TOKENS],
        row.aux[:_PROOF_TOKENS],
        row.last[:_PROOF_TOKENS],
    )


def _unexportable(fault: str) -> VerificationFailed:
    return VerificationFailed(
        f"the trained draft cannot be exported: {fault}",
        expected="every weight that SGLang's LlamaForCausalLMEagle3 reads, no other, in its shape",
        change="train again with --from train; if it comes back, please report it",
    )
