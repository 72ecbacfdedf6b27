"""The draft reader computes what SGLang would, and refuses what SGLang would take in silence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.reference_cache import SlotCache
from actors.reference_draft import DraftRefused, TargetFacts, draft_logits, read_draft
from actors.reference_model import Target
from actors.reference_speculation import Speculation
from tests.support.draft_folder import TARGET_WIDTH, random_draft
from tests.support.tiny_target import AUX_LAYER_IDS

V = 259


@pytest.fixture
def folder(tmp_path):
    return random_draft(tmp_path / "draft", vocab_size=V)


def facts(**changes):
    embedding = torch.randn(V, 32, generator=torch.Generator().manual_seed(1))
    return TargetFacts(
        **{"layers": 6, "hidden_size": TARGET_WIDTH, "vocab_size": V, "embedding": embedding}
        | changes
    )


def sequence(tokens=12):
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, V, (tokens,), generator=generator)
    return ids, torch.randn(tokens, 3 * TARGET_WIDTH, generator=generator)


def change_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def change_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def by_hand(folder, ids, aux):
    """One row at a time, loops and all, from the file's own numbers. [T-1, U]"""
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    heads, kv_heads, dim = 4, 2, 8

    def norm(x, name):
        return x / (x.pow(2).mean() + 1e-5).sqrt() * w[name]

    def rotate(x, position):
        out = x.clone()
        for i in range(dim // 2):
            angle = torch.tensor(position / 10000.0 ** (2 * i / dim)).double()
            a, b = x[i], x[i + dim // 2]
            out[i] = a * angle.cos() - b * angle.sin()
            out[i + dim // 2] = b * angle.cos() + a * angle.sin()
        return out

    layer, keys, values, rows = "layers.0.", [], [], []
    for position in range(len(ids) - 1):
        hidden = w["fc.weight"] @ aux[position].double()
        embedded = w["embed_tokens.weight"][ids[position + 1]]
        both = torch.cat(
            [
                norm(embedded, layer + "input_layernorm.weight"),
                norm(hidden, layer + "hidden_norm.weight"),
            ]
        )
        q, k, v = (
            (w[f"{layer}self_attn.{name}_proj.weight"] @ both).view(-1, dim) for name in "qkv"
        )
        keys.append([rotate(one, position) for one in k])
        values.append(v)
        out = []
        for head in range(heads):
            group = head // (heads // kv_heads)
            query = rotate(q[head], position)
            weight = torch.stack([query @ one[group] for one in keys]).div(dim**0.5).softmax(0)
            out.append(sum(p * one[group] for p, one in zip(weight, values, strict=True)))
        hidden = hidden + w[layer + "self_attn.o_proj.weight"] @ torch.cat(out)
        normed = norm(hidden, layer + "post_attention_layernorm.weight")
        gate = torch.nn.functional.silu(w[layer + "mlp.gate_proj.weight"] @ normed)
        up = w[layer + "mlp.up_proj.weight"] @ normed
        hidden = hidden + w[layer + "mlp.down_proj.weight"] @ (gate * up)
        rows.append(w["lm_head.weight"] @ norm(hidden, "norm.weight"))
    return torch.stack(rows)


def test_logits_are_those_of_the_formula_written_out_by_hand(folder):
    ids, aux = sequence()
    seen = draft_logits(read_draft(folder), ids, aux)
    assert seen.shape == (11, 120)
    torch.testing.assert_close(seen.double(), by_hand(folder, ids, aux), rtol=1e-4, atol=1e-4)


def test_each_half_of_the_input_has_its_own_norm(folder):
    ids, aux = sequence()
    before = draft_logits(read_draft(folder), ids, aux)

    def swap(tensors):
        first, second = "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"
        tensors[first], tensors[second] = tensors[second], tensors[first]

    change_tensors(folder, swap)
    assert (draft_logits(read_draft(folder), ids, aux) - before).abs().max() > 1e-2


def test_the_older_names_mean_the_same_weights(folder):
    ids, aux = sequence()
    before = draft_logits(read_draft(folder), ids, aux)

    def rename(tensors):
        for name in list(tensors):
            older = name.replace("layers.0.", "midlayer.")
            tensors[older if name in ("d2t", "t2d") else f"model.{older}"] = tensors.pop(name)

    change_tensors(folder, rename)
    assert torch.equal(draft_logits(read_draft(folder), ids, aux), before)


def test_a_draft_without_an_embedding_takes_the_targets(folder):
    change_tensors(folder, lambda tensors: tensors.pop("embed_tokens.weight"))
    with pytest.raises(DraftRefused, match=r"embed_tokens\.weight is missing"):
        read_draft(folder)
    ids, aux = sequence()
    target = facts()
    seen = draft_logits(read_draft(folder, target=target), ids, aux)
    change_tensors(
        folder, lambda tensors: tensors.update({"embed_tokens.weight": target.embedding})
    )
    assert torch.equal(seen, draft_logits(read_draft(folder), ids, aux))


def test_the_best_token_is_named_by_its_target_id(folder):
    draft = read_draft(folder)
    d2t = load_file(folder / "model.safetensors")["d2t"]
    recycled = torch.randn(5, 32, generator=torch.Generator().manual_seed(2))
    best = draft.logits(recycled).argmax(-1)
    assert torch.equal(draft.best(recycled), best + d2t[best])


@torch.inference_mode()
def test_rows_added_in_parts_are_those_of_the_whole_sequence(folder, tiny_target):
    draft = read_draft(folder)
    target = Target(
        tiny_target, dtype="float32", device="cpu", slots=3, aux_layer_ids=AUX_LAYER_IDS
    )
    speculation = Speculation(target, draft, 3, 3)
    ids, aux = sequence()
    whole = draft.layer(
        draft.fuse(aux[None, :-1]), ids[None, 1:], torch.arange(11)[None], None, None
    )
    first = speculation.prefill([ids[1:6].tolist()], aux[None, :5], first_slot=0)
    torch.testing.assert_close(first[0].recycled, whole[0, 4], rtol=1e-4, atol=1e-5)
    speculation.chains(first, [5])  # provisional rows, to be replaced
    then = speculation.extend(ids[None, 6:10], aux[None, 5:9], [5], torch.tensor([2]))
    torch.testing.assert_close(then[0].recycled, whole[0, 7], rtol=1e-4, atol=1e-5)
    last = speculation.extend(ids[None, 9:12], aux[None, 8:11], [8], torch.tensor([2]))
    torch.testing.assert_close(last[0].recycled, whole[0, 10], rtol=1e-4, atol=1e-5)


def drop(name):
    return lambda tensors: tensors.pop(name)


def put(name, make):
    return lambda tensors: tensors.update({name: make(tensors)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("lm_head.weight"), r"lm_head\.weight is missing"),
        (drop("layers.0.hidden_norm.weight"), r"hidden_norm\.weight is missing"),
        (put("layers.1.mlp.up_proj.weight", lambda _: torch.zeros(2)), r"layers\.1.* is unknown"),
        (put("fc.bias", lambda _: torch.zeros(32)), r"fc\.bias is unknown"),
        (put("fc.weight", lambda t: t["fc.weight"][:, :64].clone()), r"fc\.weight is \(32, 64\)"),
        (put("norm.weight", lambda _: torch.full((32,), float("nan"))), "finite"),
        (put("midlayer.hidden_norm.weight", lambda _: torch.ones(32)), "twice"),
        (drop("d2t"), "d2t is missing"),
        (put("d2t", lambda t: t["d2t"].int()), r"d2t is torch\.int32"),
        (put("d2t", lambda t: t["d2t"] + torch.arange(120)), "must hold offsets"),
        (put("d2t", lambda t: t["d2t"].flip(0)), "d2t"),
        (put("d2t", lambda t: t["d2t"] - 300), "must hold offsets"),
        (put("t2d", lambda t: ~t["t2d"]), "t2d is not"),
    ],
)
def test_weights_that_sglang_would_misread_in_silence_are_refused(folder, change, message):
    change_tensors(folder, change)
    with pytest.raises(DraftRefused, match=message):
        read_draft(folder)


def test_one_refusal_names_everything_that_is_wrong(folder):
    def spoil(tensors):
        del tensors["norm.weight"], tensors["lm_head.weight"]
        tensors["extra"] = torch.zeros(1)

    change_tensors(folder, spoil)
    with pytest.raises(DraftRefused) as caught:
        read_draft(folder)
    for name in ("norm.weight is missing", "lm_head.weight is missing", "extra is unknown"):
        assert name in str(caught.value)


def set_key(key, value):
    return lambda config: config.update({key: value})


def set_aux(ids):
    return lambda config: config["eagle_config"].update({"eagle_aux_hidden_state_layer_ids": ids})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_key("tie_word_embeddings", True), "tie_word_embeddings"),
        (set_key("architectures", ["LlamaForCausalLM"]), "architectures"),
        (set_key("num_hidden_layers", 2), "num_hidden_layers"),
        (set_key("hidden_act", "gelu"), "hidden_act"),
        (set_key("draft_vocab_size", None), "draft_vocab_size is None"),
        (set_key("draft_vocab_size", 300), "larger than vocab_size"),
        (set_key("norm_output", True), "norm_output is not supported"),
        (set_key("num_aux_hidden_states", 2), "num_aux_hidden_states"),
        (lambda config: config.pop("rope_theta"), "rope_theta is absent"),
        (lambda config: config.pop("eagle_config"), "is absent"),
        (set_aux([3, 2, 1]), "not ascending"),
        (set_aux([1, 1, 2]), "not ascending"),
        (lambda config: config["eagle_config"].update({"use_aux_hidden_state": False}), "not true"),
    ],
)
def test_a_config_that_sglang_would_misread_is_refused(folder, change, message):
    change_config(folder, change)
    with pytest.raises(DraftRefused, match=message):
        read_draft(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 300}, "vocab_size is 259, the target's 300"),
        ({"hidden_size": 128}, "made for hidden size 64, not 128"),
        ({"layers": 4}, "aux layer 3 of a target with 4 layers"),
    ],
)
def test_a_draft_of_another_target_is_refused(folder, change, message):
    with pytest.raises(DraftRefused, match=message):
        read_draft(folder, target=facts(**change))


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(DraftRefused, match="cannot be read"):
        read_draft(tmp_path)


def test_a_pass_without_a_plan_is_a_bug_of_ours():
    with pytest.raises(AssertionError, match="without a plan"):
        SlotCache(1, 1).update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 0)
