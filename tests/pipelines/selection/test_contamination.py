"""Passages that training and evaluation prompts share: all of them, and nothing else."""

import pickle
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.selection import contamination as module
from pipelines.selection.contamination import EvaluationPassages
from pipelines.selection.words import Grams

RNG = random.Random(3)
EVALUATION = " ".join(f"told{i}" for i in range(40))
OTHER = [f"other{i}" for i in range(30)]


@pytest.mark.parametrize("n", [1, 8, 13])
def test_a_planted_passage_is_found_wherever_it_stands(n):
    passages = EvaluationPassages({"first": "unlike this one " * 20, "eval-1": EVALUATION}, n)
    told = EVALUATION.split()
    for start in range(len(told) - n + 1):
        for place in range(0, len(OTHER) + 1, 3):
            words = [*OTHER[:place], *told[start : start + n], *OTHER[place:]]
            expected = ("eval-1", " ".join(told[start : start + n]))
            assert passages.overlap(" ".join(words)) == expected


@pytest.mark.parametrize("n", [2, 8, 13])
def test_one_word_fewer_is_no_passage(n):
    passages = EvaluationPassages({"eval-1": EVALUATION}, n)
    told = EVALUATION.split()
    for start in range(len(told) - n + 2):
        shared = told[start : start + n - 1]
        assert passages.overlap(" ".join([*OTHER, *shared, *OTHER])) is None
        assert passages.overlap(" ".join([*shared, "x", *shared])) is None


@pytest.mark.parametrize(
    "text",
    [
        "THE QUICK BROWN FOX JUMPS OVER THE STRASSE TODAY",
        "«The quick, brown fox» jumps... over the straße, today!",
        "so the\nquick\t\tbrown  fox - jumps (over) *the* straße today it is",
        "the quick-brown fox jumps/over the_straße today",
    ],
)
def test_case_punctuation_and_spacing_hide_nothing(text):
    passages = EvaluationPassages({"eval": "The quick brown fox jumps over the Straße today."}, 9)
    assert passages.overlap(text) == ("eval", "the quick brown fox jumps over the strasse today")


def test_an_added_letter_or_another_order_is_another_passage():
    passages = EvaluationPassages({"eval": "one two three four five"}, 5)
    assert passages.overlap("one two three four fives") is None
    assert passages.overlap("bone two three four five") is None
    assert passages.overlap("two one three four five") is None
    assert passages.overlap("one two three fourfive") is None


def test_chinese_is_compared_by_the_character():
    passages = EvaluationPassages({"eval": "请写一首关于灯塔看守人的短诗。"}, 8)
    assert passages.overlap("题目：关于灯塔，看守人的故事")[0] == "eval"
    assert passages.overlap("题目：关于灯塔的故事") is None


def test_the_first_prompt_that_holds_a_passage_is_named():
    passages = EvaluationPassages({"a": "no", "b": "one two three", "c": "one two three"}, 3)
    assert passages.overlap("zero one two three") == ("b", "one two three")


def test_no_passage_reaches_from_one_prompt_into_the_next():
    passages = EvaluationPassages({"a": "one two", "b": "three four"}, 3)
    assert passages.too_short == 2
    assert passages.overlap("one two three four") is None


def test_prompts_of_fewer_words_are_counted():
    passages = EvaluationPassages({"a": "one two", "b": "one two three", "c": "", "d": "?!"}, 3)
    assert passages.too_short == 3


def test_equal_hashes_of_other_words_are_no_hit(monkeypatch):
    """Every n-gram is made to collide: only the words can tell them apart."""
    real = module.grams

    def colliding(words, n, *, whole_if_shorter):
        found = real(words, n, whole_if_shorter=whole_if_shorter)
        return Grams(np.zeros_like(found.hashes), found.firsts, found.offsets)

    monkeypatch.setattr(module, "grams", colliding)
    passages = EvaluationPassages(
        {"a": "one two three four", "c": "five six seventy", "b": "five six seven"}, 3
    )
    assert passages.overlap("one two four three six seven") is None
    assert passages.overlap("zero five six seven") == ("b", "five six seven")
    assert passages.overlap("two three four") == ("a", "two three four")


WORDS = st.lists(st.sampled_from("abc"), max_size=12)


@settings(deadline=None)
@given(st.lists(WORDS, max_size=4), st.lists(WORDS, max_size=4), st.integers(1, 5))
def test_overlaps_are_those_of_an_exhaustive_search(evaluation, training, n):
    named = {f"e{at}": " ".join(words) for at, words in enumerate(evaluation)}
    passages = EvaluationPassages(named, n)

    def windows(words):
        return [" ".join(words[i : i + n]) for i in range(len(words) - n + 1)]

    def expected(words):
        for window in windows(words):
            for at, told in enumerate(evaluation):
                if window in windows(told):
                    return f"e{at}", window
        return None

    texts = [" ".join(words) for words in training]
    assert passages.overlaps(texts) == [expected(words) for words in training]
    assert [passages.overlap(text) for text in texts] == passages.overlaps(texts)


def test_it_travels_to_a_worker_for_a_few_bytes_a_word():
    texts = {f"e{i}": " ".join(f"w{RNG.randrange(10_000)}" for _ in range(100)) for i in range(100)}
    pickled = pickle.dumps(EvaluationPassages(texts, 13))
    assert len(pickled) < 30 * 100 * 100
    assert pickle.loads(pickled).overlap(texts["e7"])[0] == "e7"


def test_nothing_to_look_for_finds_nothing():
    assert EvaluationPassages({}, 13).overlap(EVALUATION) is None
    assert EvaluationPassages({"a": EVALUATION}, 13).overlaps([]) == []
    with pytest.raises(ValueError, match="passages of 0 words"):
        EvaluationPassages({}, 0)
