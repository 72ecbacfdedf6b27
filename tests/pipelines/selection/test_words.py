"""Word and n-gram hashes: equal where the words are, and only there."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.selection import words as module
from pipelines.selection.words import grams, words_between_spaces, words_of_letters

TEXT = st.text(st.sampled_from("ab ß.,é\n\t 中文"), max_size=30)


def spelled(words):
    return [words.spelled(at) for at in range(len(words.folded))]


@settings(deadline=None)
@given(st.lists(TEXT, max_size=5))
def test_words_between_spaces_are_what_split_gives(texts):
    texts = [text.replace("中", "x").replace("文", "y") for text in texts]
    assert spelled(words_between_spaces(texts)) == [text.casefold().split() for text in texts]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello, world! It's 3.5", ["hello", "world", "it", "s", "3", "5"]),
        ("snake_case STRASSE straße", ["snake", "case", "strasse", "strasse"]),
        ("e\u0301te\u0301 हिन्दी", ["e\u0301te\u0301", "हिन्दी"]),
        ("用Python写", ["用", "python", "写"]),
        ("😀 -- ", []),
    ],
)
def test_words_of_letters_leave_punctuation_out(text, expected):
    assert spelled(words_of_letters([text])) == [expected]


def test_a_character_is_a_word_where_no_spaces_are_written():
    assert spelled(words_between_spaces(["写一首 诗。 한국어 말"])) == [
        ["写", "一", "首", "诗", "。", "한국어", "말"]
    ]


@settings(deadline=None)
@given(st.lists(TEXT, min_size=1, max_size=6), st.integers(1, 7), st.booleans())
def test_ngrams_are_equal_where_their_words_are(texts, n, whole):
    words = words_between_spaces(texts)
    found = grams(words, n, whole_if_shorter=whole)
    by_hash, firsts = {}, []
    for at, said in enumerate(spelled(words)):
        start, end = found.offsets[at : at + 2]
        windows = [tuple(said[i : i + n]) for i in range(len(said) - n + 1)]
        if whole and not windows:
            windows = [tuple(said)]
        assert len(windows) == end - start
        firsts += [int(words.offsets[at]) + i for i in range(len(windows))]
        for window, hashed in zip(windows, found.hashes[start:end].tolist(), strict=True):
            assert by_hash.setdefault(window, hashed) == hashed
    assert found.firsts.tolist() == firsts
    assert len(set(by_hash.values())) == len(by_hash)


@pytest.mark.parametrize("block", [1, 3, 40])
def test_how_texts_share_a_block_changes_nothing(monkeypatch, block):
    texts = ["one two", "", "three four five six", " ", "中文 seven", "eight" * 20, ""]
    whole = words_of_letters(texts)
    monkeypatch.setattr(module, "_BLOCK", block)
    cut = words_of_letters(texts)
    assert spelled(cut) == spelled(whole)
    for name in ("starts", "ends", "hashes", "offsets"):
        assert np.array_equal(getattr(cut, name), getattr(whole, name))


def test_the_order_of_letters_and_of_words_counts():
    texts = ["ab", "ba", "a", "aa", "a b", "b a", "aab b", "a abb"]
    found = grams(words_between_spaces(texts), 5, whole_if_shorter=True)
    assert len(set(found.hashes.tolist())) == len(texts)


def test_another_process_gives_the_same_hashes():
    program = (
        "from pipelines.selection.words import *\n"
        "w = words_of_letters(['Some words, 中文', 'and others'])\n"
        "print(w.hashes.tolist() + grams(w, 2, whole_if_shorter=True).hashes.tolist())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_half_of_a_utf16_pair_is_refused():
    with pytest.raises(UnicodeEncodeError):
        words_of_letters(["\ud800"])
