"""The fast loss against a worked example, the plain oracle, and numerical gradients."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiny_draft import TINY_DRAFT
from training import attention, fused, ttt
from training.config import DraftConfig
from training.dense import DenseOutcome, dense_loss
from training.features import FeatureRow
from training.model import DraftModel, initial_weights
from training.packing import pack
from training.ttt import TTTLoss, teacher

CONFIG = TINY_DRAFT.model_copy(
    update={
        "hidden_size": 8,
        "target_hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 30,
        "draft_vocab_size": 17,
    }
)
DECAY = 0.8


def make(steps: int, *, config: DraftConfig = CONFIG, seed: int = 0) -> TTTLoss:
    """A loss with random weights everywhere, in fp64."""
    dice = torch.Generator().manual_seed(seed)
    size = (config.vocab_size, config.target_hidden_size)
    head = torch.randn(size, generator=dice, dtype=torch.float64)
    used = torch.randperm(len(head), generator=dice)[: config.draft_vocab_size].sort().values
    weights = initial_weights(config, head, used, seed=seed)
    draft = DraftModel(config).double()
    noisy = {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=dice)
        for name, tensor in weights.items()
    }
    noisy["embed_tokens.weight"] = torch.randn(size, generator=dice, dtype=torch.float64)
    draft.load_state_dict(noisy)
    return TTTLoss(draft, head, used, steps=steps, step_decay=DECAY)


def make_rows(masks: list[list[bool]], *, seed: int = 0) -> list[FeatureRow]:
    dice = torch.Generator().manual_seed(seed)
    return [
        FeatureRow(
            sample_id=f"s{number}",
            dataset="d",
            domain="chat",
            input_ids=torch.randint(0, CONFIG.vocab_size, (len(mask),), generator=dice),
            loss_mask=torch.tensor(mask),
            aux=torch.randn(len(mask), 24, generator=dice, dtype=torch.float64),
            last=torch.randn(len(mask), 8, generator=dice, dtype=torch.float64),
        )
        for number, mask in enumerate(masks)
    ]


def packed(rows: list[FeatureRow], steps: int):
    return pack(rows, steps=steps, aux_size=24, last_size=8)


def oracle(loss: TTTLoss, row: FeatureRow) -> DenseOutcome:
    used = (loss.draft_ids >= 0).nonzero().flatten()
    weights = dict(loss.draft.named_parameters())
    data = (row.input_ids, row.loss_mask, row.aux, row.last)
    steps = {"steps": loss.steps, "step_decay": DECAY}
    return dense_loss(weights, CONFIG, *data, loss.head, used, **steps)


def gradients(loss: TTTLoss, value: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {name: p for name, p in loss.draft.named_parameters() if p.requires_grad}
    return dict(zip(named, torch.autograd.grad(value, list(named.values())), strict=True))


def test_the_loss_of_two_spans_is_what_a_hand_computes():
    """A draft whose logits are 0 whatever it reads: each counted label costs ln 17.

    Tokens 0..8, spans [3..5] and [7..8]. Step 0 counts rows with m[p+1] and m[p+2]: p = 2, 3, 6.
    Step 1 (m[p+1] and m[p+3]): p = 2 (labels 5), p = 4 (starts at 5, label 7). Step 2
    (m[p+1] and m[p+4]): p = 3 (starts at 4, label 7), p = 4 (starts at 5, label 8).
    """
    loss = make(3)
    with torch.no_grad():
        loss.draft.lm_head.weight.zero_()
    loss.draft_ids.clamp_(min=0)  # every label may be spoken
    mask = [False, False, False, True, True, True, False, True, True]
    batch = packed(make_rows([mask]), 3)
    value, speakable, _ = loss(batch)
    counted = {(int(batch.rows[r]), k) for r, k in batch.counted.nonzero().tolist()}
    assert counted == {(2, 0), (3, 0), (6, 0), (2, 1), (4, 1), (3, 2), (4, 2)}
    assert torch.equal(speakable, batch.counted)
    expected = (3 * 1.0 + 2 * 0.8 + 2 * 0.64) * math.log(17)
    assert value.item() == pytest.approx(expected, rel=1e-6)


MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=14), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(masks=MASKS, steps=st.integers(1, 4), seed=st.integers(0, 3))
def test_fast_and_plain_agree_in_value_counts_and_gradients(
    masks: list[list[bool]], steps: int, seed: int
):
    loss = make(steps, seed=seed)
    rows = make_rows(masks, seed=seed)
    batch = packed(rows, steps)
    value, speakable, correct = loss(batch)
    plain = [oracle(loss, row) for row in rows]
    some = torch.cat([one.counted for one in plain]).any(-1)
    assert torch.equal(torch.cat([one.counted for one in plain])[some], batch.counted)
    assert torch.equal(torch.cat([one.speakable for one in plain])[some], speakable)
    assert torch.equal(torch.cat([one.correct for one in plain])[some], correct)
    total = sum(one.loss for one in plain)
    torch.testing.assert_close(value, total)
    if speakable.any():
        fast, slow = gradients(loss, value), gradients(loss, total)
        for name in fast:
            torch.testing.assert_close(fast[name], slow[name], msg=name)


def test_small_pieces_of_queries_vocabulary_and_logits_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    loss, batch = make(3), packed(make_rows([[False] * 4 + [True] * 12, [True] * 9]), 3)
    value, *flags = loss(batch)
    expected = gradients(loss, value)
    monkeypatch.setitem(attention._SCORES_PER_BLOCK, "cpu", 4 * 7 * 3)
    monkeypatch.setitem(ttt._LOGITS_PER_PIECE, "cpu", 17 * 5)
    monkeypatch.setitem(ttt._VOCAB_PER_PIECE, "cpu", 7)
    monkeypatch.setitem(ttt._LABELS_PER_PIECE, "cpu", 3)
    again, *flags_again = loss(batch)
    torch.testing.assert_close(again, value)
    assert all(torch.equal(a, b) for a, b in zip(flags, flags_again, strict=True))
    for name, gradient in gradients(loss, again).items():
        torch.testing.assert_close(gradient, expected[name], msg=name)


@pytest.mark.parametrize("lacks", [True, False])
def test_bfloat16_agrees_with_the_plain_loss_of_the_same_numbers(
    lacks: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(fused, "_lacks_bfloat16", lambda: lacks)
    loss = make(3).bfloat16()
    rows = [
        replace(row, aux=row.aux.bfloat16().double(), last=row.last.bfloat16().double())
        for row in make_rows([[False] * 4 + [True] * 12, [True] * 9])
    ]
    value, *_ = loss(packed(rows, 3))
    exact = copy.deepcopy(loss).double()
    total = sum(oracle(exact, row).loss for row in rows)
    assert value.item() == pytest.approx(total.item(), rel=0.02)
    narrow, wide = gradients(loss, value), gradients(exact, total)
    for name in wide:
        found, expected = narrow[name].double().flatten(), wide[name].flatten()
        assert torch.cosine_similarity(found, expected, dim=0) > 0.99, name


def test_gradients_agree_with_finite_differences():
    loss, batch = make(3), packed(make_rows([[False, True, True, True, True, True]]), 3)
    names = ["layers.0.self_attn.k_proj.weight", "fc.weight", "lm_head.weight", "norm.weight"]
    parameters = dict(loss.draft.named_parameters())

    def value(*weights: torch.Tensor) -> torch.Tensor:
        given = {f"draft.{name}": weight for name, weight in zip(names, weights, strict=True)}
        return torch.func.functional_call(loss, given, (batch,))[0]

    inputs = [parameters[name].detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(value, inputs, fast_mode=True)


def test_a_document_sees_nothing_of_its_neighbours():
    loss = make(3)
    rows = make_rows([[False, True, True, True, True], [True] * 8, [False] * 3 + [True] * 5])
    alone, *_ = loss(packed(rows[1:2], 3))
    together, *_ = loss(packed(rows, 3))
    others, *_ = loss(packed([rows[0], rows[2]], 3))
    torch.testing.assert_close(together, alone + others)
    backwards, *_ = loss(packed(rows[::-1], 3))
    torch.testing.assert_close(together, backwards)


def test_a_batch_of_nothing_has_a_loss_of_zero_and_gradients_of_zero():
    loss = make(3)
    value, *_ = loss(packed([], 3))
    assert value.item() == 0
    assert all(not gradient.any() for gradient in gradients(loss, value).values())


def test_a_label_outside_the_draft_vocabulary_counts_as_wrong_and_teaches_nothing():
    loss, batch = make(2), packed(make_rows([[True] * 10]), 2)
    loss.draft_ids.fill_(-1)
    value, speakable, correct = loss(batch)
    assert batch.counted.any()
    assert value.item() == 0
    assert not speakable.any()
    assert not correct.any()


@pytest.mark.parametrize("piece", [1, 3, 100])
def test_the_lowest_of_equal_target_tokens_wins(piece: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ttt._VOCAB_PER_PIECE, "cpu", piece)
    head = torch.zeros(9, 2, dtype=torch.bfloat16)
    head[[2, 5, 8]] = 1.0
    ids, logits = teacher(torch.ones(3, 2, dtype=torch.bfloat16), head, torch.tensor([0, 5, 7, 8]))
    assert ids.tolist() == [2, 2, 2]
    assert logits.tolist() == [[0.0, 2.0, 0.0, 2.0]] * 3
