"""Bytes prove what decoding proves, and are only used where the decoder does no more than join."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from pipelines.target import prepare_quickstart_target
from pipelines.token_bytes import token_bytes

WORDS = ["a", "b", "ab", "Ġ", "Ã", "©", "Ļ", "ł", "<end>"]  # ids 0 to 8; é is two of them


def backend(decoder=None, words=WORDS, numbers=None) -> Tokenizer:
    of = dict(zip(words, numbers or range(len(words)), strict=True))
    made = Tokenizer(models.WordLevel(of, unk_token="a"))
    made.decoder = decoders.ByteLevel() if decoder is None else decoder
    return made


def decoded(one: Tokenizer, ids: list[int]) -> str:
    return one.decode_batch([ids], skip_special_tokens=False)[0]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(WORDS) + 2), max_size=8), st.text("ab é�<end>", max_size=6))
def test_a_text_is_spelled_if_its_ids_decode_to_it(ids, other):
    one = backend()
    one.add_special_tokens([AddedToken("<|x y|>"), AddedToken("Ġé")])
    one.add_tokens(["🦅"])
    known = token_bytes(one)
    assert known is not None
    back = decoded(one, ids)
    if "�" not in back:  # which stands for bytes that are no text
        assert known.spell(back, ids)
    assert known.spell(other, ids) == (other == back and "�" not in back)
    if max(ids, default=0) < len(one.get_vocab()):
        assert known.decode(ids) == back


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=12))
def test_bytes_that_are_no_text_become_the_marks_that_the_decoder_makes(codes):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    one = backend(words=alphabet)
    known = token_bytes(one)
    assert known is not None
    assert known.decode(codes) == decoded(one, codes)


def test_an_id_beyond_the_vocabulary_is_not_made_up():
    known = token_bytes(backend())
    assert known is not None
    with pytest.raises(IndexError):
        known.decode([len(WORDS)])


def test_bytes_that_are_no_text_spell_no_replacement_character():
    known = token_bytes(backend())
    assert known is not None
    assert decoded(backend(), [4]) == "�"
    assert not known.spell("�", [4])
    assert known.spell("é", [4, 5])


def test_an_id_without_a_token_says_nothing():
    one = backend(words=["a", "b"], numbers=[0, 5])
    known = token_bytes(one)
    assert known is not None
    assert decoded(one, [0, 3, 5]) == "ab"
    assert known.spell("ab", [0, 3, 5])


@pytest.mark.parametrize(
    "decoder",
    [decoders.Metaspace(), decoders.Sequence([decoders.ByteLevel(), decoders.Strip("a", 1, 0)])],
)
def test_a_decoder_that_does_more_is_asked_itself(decoder):
    assert token_bytes(backend(decoder)) is None


def test_a_tokenizer_that_decodes_an_id_to_something_else_is_asked_itself():
    class Other:
        def __init__(self) -> None:
            self.decoder, self._one = decoders.ByteLevel(), backend()

        def get_vocab(self, **given):
            return self._one.get_vocab(**given)

        def decode_batch(self, ids, **given):
            return [one.replace("b", "B") for one in self._one.decode_batch(ids, **given)]

    assert token_bytes(Other()) is None


@pytest.fixture(scope="module")
def real():
    one = Tokenizer.from_file(str(prepare_quickstart_target() / "tokenizer.json"))
    known = token_bytes(one)
    assert known is not None
    return one, known


@pytest.mark.smollm
@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="�"), max_size=60))
def test_a_real_tokenizer_loses_what_its_bytes_do_not_spell(real, text):
    one, known = real  # it has no token for some control characters, and drops them
    ids = one.encode(text, add_special_tokens=False).ids
    assert known.spell(text, ids) == (decoded(one, ids) == text)
    assert not known.spell(text + "a", ids)
