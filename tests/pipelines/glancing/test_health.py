"""Counts over answers: what repeats, within memory, and what is a loop."""

import pytest

from pipelines.glancing import health
from pipelines.glancing.health import Repeats, ResponseHealth, repeats_itself
from pipelines.glancing.reading import At
from tests.support.faulty_files import answer


def test_duplicates_are_estimated_once_memory_is_short(monkeypatch):
    monkeypatch.setattr(health, "_HASHES", 500)
    repeats = Repeats()
    for value in [*range(3_000), *range(1_000)]:
        repeats.add(str(value), None)
    assert repeats.halvings > 0
    assert len(repeats.hashes) <= 500
    assert repeats.twice().count == pytest.approx(1_000, rel=0.4)


def test_parts_find_what_comes_twice_between_them():
    first, second = Repeats(), Repeats()
    for value in ("a", "b"):
        first.add(value, value)
    for value in ("c", "a", "b"):
        second.add(value, value)
    first.merge(second)
    assert (first.twice().count, first.twice().first) == (2, "a")


@pytest.mark.parametrize(
    ("text", "is_loop"),
    [
        ("!" * 400, True),
        ("Well, " + "and then again, " * 40, True),
        ("x" * 119, False),  # too short to tell
        ("One thing after another, and no phrase that is said again at the end. " * 2, False),
        (
            "ab" * 100 + "and then something quite different that goes on for a good while. " * 1,
            False,
        ),
        ("".join(f"{n} is a number. " for n in range(100)), False),
        ("0123456789" * 6 + "abcdefghij" * 24, True),
    ],
)
def test_a_phrase_said_four_times_at_the_end_is_a_loop(text, is_loop):
    assert repeats_itself(text) is is_loop


def test_long_texts_that_differ_are_no_duplicates():
    judged = ResponseHealth()
    base = " ".join(f"word{n}" for n in range(2_000))
    for number in range(3):
        text = base.replace("word7", f"w{number}rd7")  # equal length, differs in many places
        judged.add(answer(number, content=text), At("line", number + 1))
    judged.add(answer(9, reasoning=answer(2)["reasoning"], content=text), At("line", 4))
    assert judged.same_text.twice().count == 1
