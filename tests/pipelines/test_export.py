"""An export is done when it loaded back as the trainer's own model; otherwise it is not there."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelines.errors import VerificationFailed
from pipelines.export import LOGIT_TOLERANCE, export, prove, trainer_logits, write_untrained_draft
from pipelines.store import write_parquet
from pipelines.telemetry import EventLog
from tests.support.tiny_draft import TINY_DRAFT, tiny_weights
from tests.support.tiny_run import tiny_run, write_training
from training.features import FeatureRow, write_shard
from training.model import DraftModel, target_weights


def write_features(run, *, seed=0):
    """Three rows of noise: an export has to be right on any."""
    noise = torch.Generator().manual_seed(seed)
    rows = [
        FeatureRow(
            sample_id=f"chat-{number:012x}",
            dataset="chat",
            domain="chat",
            input_ids=torch.randint(3, TINY_DRAFT.vocab_size, (tokens,), generator=noise),
            loss_mask=torch.arange(tokens) >= 3,
            aux=torch.randn(tokens, 192, generator=noise).bfloat16(),
            last=torch.randn(tokens, 64, generator=noise).bfloat16(),
        )
        for number, tokens in enumerate((9, 40, 300))
    ]
    index = write_shard(run.features, "shard-00000.safetensors", rows, aux_layer_ids=(1, 2, 3))
    write_parquet(run.features / "index.parquet", index)
    return rows


@pytest.fixture
def trained(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target)
    write_training(run)
    return recipe, run, write_features(run)


def test_an_export_loads_back_with_the_trainers_logits(trained):
    recipe, run, _ = trained
    counts = export(recipe, run, EventLog(run))
    assert sorted(path.name for path in run.draft.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert counts["worst_logit_error"] <= LOGIT_TOLERANCE
    assert counts["weights"] == 14
    embedding, _ = target_weights_of(recipe)
    stored = load_file(run.draft / "model.safetensors")
    assert torch.equal(stored["embed_tokens.weight"], embedding)


def test_the_card_says_how_to_serve_it(trained):
    recipe, run, _ = trained
    export(recipe, run, EventLog(run))
    card = (run.draft / "README.md").read_text()
    for words in (
        "--speculative-algorithm EAGLE3 --speculative-draft-model-path",
        "--speculative-num-steps 3 --speculative-eagle-topk 1",
        "--speculative-num-draft-tokens 4",
        "layers 1, 2, 3",
    ):
        assert words in card


def test_a_draft_trained_in_bf16_is_proved_with_the_numbers_that_are_stored(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target, "train.dtype=bfloat16")
    write_training(run)
    write_features(run)
    export(recipe, run, EventLog(run))
    assert load_file(run.draft / "model.safetensors")["fc.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("lm_head.weight", lambda weights: weights.pop("lm_head.weight")),
        ("fc.weight", lambda weights: weights.update({"fc.weight": torch.zeros(64, 128)})),
        ("extra.weight", lambda weights: weights.update({"extra.weight": torch.zeros(1)})),
    ],
    ids=["missing", "mis-shaped", "unknown"],
)
def test_broken_weights_are_refused_by_name_and_leave_no_draft(trained, name, harm):
    recipe, run, _ = trained
    weights = tiny_weights()
    harm(weights)
    write_training(run, weights)
    with pytest.raises(VerificationFailed, match=name):
        export(recipe, run, EventLog(run))
    assert not run.draft.exists()
    assert not list(run.root.glob(".draft*"))


def edit_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("said", "harm"),
    [
        ("lm_head.weight is missing", lambda f: edit_tensors(f, lambda t: t.pop("lm_head.weight"))),
        ("d2t is missing", lambda f: edit_tensors(f, lambda t: t.pop("d2t"))),
        (
            "d2t leads to ids .* it must hold offsets",
            lambda f: edit_tensors(f, lambda t: t.update(d2t=t["d2t"] + torch.arange(128))),
        ),
        (
            r"fc\.weight is \(64, 64\)",
            lambda f: edit_tensors(f, lambda t: t.update({"fc.weight": torch.zeros(64, 64)})),
        ),
        ("tie_word_embeddings", lambda f: edit_config(f, tie_word_embeddings=True)),
        ("rope_theta is absent", lambda f: edit_config_without(f, "rope_theta")),
        ("logits of the exported draft differ", lambda f: edit_config(f, rope_theta=500.0)),
        ("logits of the exported draft differ", lambda f: swap_halves(f)),
    ],
    ids=["head", "no-d2t", "ids-for-offsets", "shape", "tied", "no-rope", "other-rope", "halves"],
)
def test_a_folder_that_sglang_would_load_wrongly_is_refused(trained, tmp_path, said, harm):
    recipe, run, rows = trained
    export(recipe, run, EventLog(run))
    broken = tmp_path / "broken"
    shutil.copytree(run.draft, broken)
    embedding, _ = target_weights_of(recipe)
    proof = {"dtype": torch.float32}
    prove(broken, tiny_weights(), embedding, TINY_DRAFT, rows, **proof)
    harm(broken)
    with pytest.raises(VerificationFailed, match=said):
        prove(broken, tiny_weights(), embedding, TINY_DRAFT, rows, **proof)


def edit_config_without(folder, key):
    config = json.loads((folder / "config.json").read_text())
    del config[key]
    (folder / "config.json").write_text(json.dumps(config))


def swap_halves(folder):
    """Hidden first and embedding second: the order that loads without a message and is wrong."""

    def change(tensors):
        for name in ("q_proj", "k_proj", "v_proj"):
            key = f"layers.0.self_attn.{name}.weight"
            tensors[key] = torch.cat(tensors[key].chunk(2, dim=1)[::-1], dim=1).contiguous()

    edit_tensors(folder, change)


def target_weights_of(recipe):
    return target_weights(Path(recipe.target.path))


def test_an_export_replaces_an_older_one_whole(trained):
    recipe, run, _ = trained
    export(recipe, run, EventLog(run))
    (run.draft / "stray").write_text("x")
    before = (run.draft / "model.safetensors").read_bytes()
    export(recipe, run, EventLog(run))
    assert not (run.draft / "stray").exists()
    assert (run.draft / "model.safetensors").read_bytes() == before


def test_the_untrained_draft_is_a_draft_like_any_other(trained, tmp_path):
    recipe, run, rows = trained
    write_untrained_draft(recipe, run, tmp_path / "untrained")
    stored = load_file(tmp_path / "untrained" / "model.safetensors")
    embedding, head = target_weights_of(recipe)
    assert torch.equal(stored["lm_head.weight"], head[2 * torch.arange(128) + 1].float())
    weights = {
        name: one
        for name, one in stored.items()
        if name not in ("d2t", "t2d", "embed_tokens.weight")
    }
    prove(tmp_path / "untrained", weights, embedding, TINY_DRAFT, rows, dtype=torch.float32)


def test_row_i_of_the_trainers_logits_sees_nothing_after_token_i_plus_1(trained):
    _, _, rows = trained
    model = DraftModel(TINY_DRAFT)
    embedding = torch.randn(TINY_DRAFT.vocab_size, 64)
    model.load_state_dict({**tiny_weights(), "embed_tokens.weight": embedding})
    row = rows[1]
    changed = FeatureRow(
        row.sample_id,
        row.dataset,
        row.domain,
        torch.cat([row.input_ids[:20], row.input_ids[20:] - 1]),
        row.loss_mask,
        torch.cat([row.aux[:20], -row.aux[20:]]),
        row.last,
    )
    one, other = trainer_logits(model, row), trainer_logits(model, changed)
    assert torch.equal(one[:19], other[:19])
    assert not torch.equal(one[19], other[19])
