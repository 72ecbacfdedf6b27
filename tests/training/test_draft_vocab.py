"""The choice of tokens, what is stored, and what is refused."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_training import DRAFT, random_rows, write_features
from training import draft_vocab
from training.draft_vocab import DraftVocabFault
from training.features import FeatureStore


def test_ties_go_to_the_lower_id_and_unused_places_to_the_lowest_ids():
    counts = torch.tensor([0, 5, 0, 2, 2, 9, 2])
    assert draft_vocab.choose(counts, 3, fingerprint="").used.tolist() == [1, 3, 5]
    assert draft_vocab.choose(counts, 6, fingerprint="").used.tolist() == [0, 1, 3, 4, 5, 6]


@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=30), data=st.data())
def test_offsets_and_flags_name_the_same_tokens(counts: list[int], data: st.DataObject):
    size = data.draw(st.integers(1, len(counts)))
    vocab = draft_vocab.choose(torch.tensor(counts), size, fingerprint="")
    used = sorted(sorted(range(len(counts)), key=lambda i: (-counts[i], i))[:size])
    assert (torch.arange(size) + vocab.d2t).tolist() == used
    assert vocab.t2d.nonzero().flatten().tolist() == used
    assert [int(vocab.draft_ids[i]) for i in used] == list(range(size))
    assert vocab.coverage == pytest.approx(sum(counts[i] for i in used) / max(1, sum(counts)))


def test_only_tokens_that_may_teach_and_are_not_cut_are_counted(tmp_path: Path):
    rows = random_rows(6)
    write_features(tmp_path, rows)
    store = FeatureStore(tmp_path, aux_layer_ids=DRAFT.aux_layer_ids)
    counts = draft_vocab.count_tokens(store, [0, 3], max_tokens=20, vocab_size=DRAFT.vocab_size)
    expected = torch.zeros_like(counts)
    for row in (rows[0], rows[3]):
        for token, may_teach in zip(row.input_ids[:20], row.loss_mask[:20], strict=True):
            expected[token] += int(may_teach)
    assert torch.equal(counts, expected)
    with pytest.raises(DraftVocabFault, match="another target"):
        draft_vocab.count_tokens(store, range(6), max_tokens=50, vocab_size=100)


def test_what_was_saved_is_what_is_loaded(tmp_path: Path):
    vocab = draft_vocab.choose(torch.arange(40), 12, fingerprint="abc")
    draft_vocab.save(vocab, tmp_path / "vocab.safetensors")
    loaded = draft_vocab.load(tmp_path / "vocab.safetensors")
    assert torch.equal(loaded.used, vocab.used)
    assert torch.equal(loaded.counts, vocab.counts)
    assert loaded.fingerprint == "abc"


def test_a_file_whose_halves_disagree_is_refused(tmp_path: Path):
    from safetensors.torch import save_file

    path = tmp_path / "vocab.safetensors"
    tensors = {"d2t": torch.zeros(2, dtype=torch.int64), "t2d": torch.ones(5, dtype=torch.bool)}
    save_file({**tensors, "counts": torch.ones(5)}, path, metadata={"fingerprint": ""})
    with pytest.raises(DraftVocabFault, match="different tokens"):
        draft_vocab.load(path)
    path.write_bytes(b"no tensors")
    with pytest.raises(DraftVocabFault, match="is not a draft vocabulary"):
        draft_vocab.load(path)


def test_other_data_or_another_size_has_another_fingerprint():
    rule = {"size": 8, "vocab_size": 100, "max_tokens": 50}
    one = draft_vocab.fingerprint_of(["a", "b"], **rule)
    assert one == draft_vocab.fingerprint_of(["b", "a"], **rule)
    assert one != draft_vocab.fingerprint_of(["a"], **rule)
    assert one != draft_vocab.fingerprint_of(["a", "b"], **(rule | {"size": 9}))
