"""What leaves as a draft is complete, in shape, and says what SGLang has to know."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.support.tiny_draft import TINY_DRAFT, tiny_vocabulary, tiny_weights
from training.export import ExportFault, draft_shapes, sglang_config, write_draft
from training.model import DraftModel


def export(folder, weights=None, **changes):
    d2t, t2d = tiny_vocabulary()
    embedding = torch.randn(TINY_DRAFT.vocab_size, TINY_DRAFT.hidden_size)
    given = {"config": TINY_DRAFT, "d2t": d2t, "t2d": t2d, "embedding": embedding}
    given |= {"dtype": torch.float32, **changes}
    write_draft(folder, tiny_weights() if weights is None else weights, **given)
    return given


def test_the_file_holds_every_weight_the_embedding_and_the_vocabulary_mapping(tmp_path):
    given = export(tmp_path / "draft")
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert stored.keys() == {*draft_shapes(TINY_DRAFT), "d2t", "t2d"}
    assert torch.equal(stored["embed_tokens.weight"], given["embedding"])
    assert torch.equal(stored["d2t"], given["d2t"])
    assert stored["t2d"].dtype == torch.bool


def test_the_table_of_shapes_agrees_with_the_trainers_model():
    shapes = {name: tuple(one.shape) for name, one in DraftModel(TINY_DRAFT).state_dict().items()}
    assert draft_shapes(TINY_DRAFT) == shapes


def test_weights_are_stored_in_the_dtype_asked_for_and_the_mapping_stays_exact(tmp_path):
    export(tmp_path / "draft", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "draft" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16
    assert stored["d2t"].dtype == torch.int64
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["torch_dtype"] == "bfloat16"


def test_the_config_says_what_sglang_reads():
    config = sglang_config(TINY_DRAFT, torch.float32)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == TINY_DRAFT.draft_vocab_size
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["rope_theta"] == TINY_DRAFT.rope_theta
    assert config["rope_scaling"] is None


@pytest.mark.parametrize("name", sorted(tiny_weights()))
def test_a_missing_weight_is_named(tmp_path, name):
    weights = tiny_weights()
    del weights[name]
    with pytest.raises(ExportFault, match=name):
        export(tmp_path / "draft", weights)
    assert not (tmp_path / "draft").exists()


def test_a_weight_that_sglang_would_drop_is_named(tmp_path):
    weights = {**tiny_weights(), "midlayer.gate.weight": torch.zeros(1)}
    with pytest.raises(ExportFault, match=r"midlayer\.gate\.weight is unknown"):
        export(tmp_path / "draft", weights)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path):
    weights = {**tiny_weights(), "fc.weight": torch.zeros(64, 64)}
    with pytest.raises(ExportFault, match=r"fc\.weight is \(64, 64\).*\(64, 192\)"):
        export(tmp_path / "draft", weights)


def test_a_weight_that_is_not_finite_is_refused(tmp_path):
    weights = tiny_weights()
    weights["norm.weight"][3] = float("nan")
    with pytest.raises(ExportFault, match=r"norm\.weight holds a value that is not finite"):
        export(tmp_path / "draft", weights)


def test_ids_in_place_of_offsets_are_refused(tmp_path):
    d2t, _ = tiny_vocabulary()
    used = d2t + torch.arange(len(d2t))
    with pytest.raises(ExportFault, match="offsets"):
        export(tmp_path / "draft", d2t=used)


def test_ids_in_place_of_offsets_are_refused_even_where_they_stay_in_the_vocabulary(tmp_path):
    config = TINY_DRAFT.model_copy(update={"draft_vocab_size": 4})
    weights = {**tiny_weights(), "lm_head.weight": torch.zeros(4, 64)}
    used = torch.tensor([3, 5, 8, 13])
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[used] = True
    with pytest.raises(ExportFault, match="offsets"):
        export(tmp_path / "draft", weights, config=config, d2t=used, t2d=t2d)
    export(tmp_path / "draft", weights, config=config, d2t=used - torch.arange(4), t2d=t2d)


def test_two_draft_ids_for_one_target_id_are_refused(tmp_path):
    d2t, t2d = tiny_vocabulary()
    d2t[1] = d2t[0] - 1
    with pytest.raises(ExportFault, match="strictly ascending"):
        export(tmp_path / "draft", d2t=d2t, t2d=t2d)


def test_a_mapping_of_another_type_is_refused(tmp_path):
    d2t, t2d = tiny_vocabulary()
    with pytest.raises(ExportFault, match=r"d2t is torch\.int32"):
        export(tmp_path / "draft", d2t=d2t.to(torch.int32))
    with pytest.raises(ExportFault, match=r"t2d is torch\.uint8"):
        export(tmp_path / "draft", t2d=t2d.to(torch.uint8))


def test_one_aux_state_as_wide_as_the_draft_is_refused_because_sglang_would_skip_fc(tmp_path):
    config = TINY_DRAFT.model_copy(update={"aux_layer_ids": (2,)})
    weights = {**tiny_weights(), "fc.weight": torch.zeros(64, 64)}
    with pytest.raises(ExportFault, match="skip fc"):
        export(tmp_path / "draft", weights, config=config)
