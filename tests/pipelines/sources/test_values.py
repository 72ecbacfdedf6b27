"""Values: what JSON in UTF-8 cannot hold is named, wherever it stands."""

import math

import pytest

from pipelines.sources.row import Refused
from pipelines.sources.values import check_values, decode_text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a\0b", "nul_character"),
        ("\ud83d", "lone_surrogate"),
        (math.inf, "bad_field"),
        (math.nan, "bad_field"),
        (b"raw", "bad_field"),
    ],
)
def test_a_value_that_cannot_be_stored_is_named_in_any_place(value, reason):
    for placed in (value, [value], {"a": [{"b": value}]}):
        with pytest.raises(Refused) as refusal:
            check_values(placed)
        assert refusal.value.reason == reason
    check_values({"a": [1, 2.5, None, True, "é🦅", {}]})


@pytest.mark.parametrize(
    ("key", "reason"), [("\0", "nul_character"), ("\udc00", "lone_surrogate"), (3, "bad_field")]
)
def test_keys_are_looked_at_too(key, reason):
    with pytest.raises(Refused) as refusal:
        check_values({key: 1})
    assert refusal.value.reason == reason


def test_deep_nesting_is_refused_before_it_can_exhaust_the_stack():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(Refused, match="nested deeper than 64"):
        check_values(nested)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "malformed_json"),
        ('{"a": 1, "a": 2}', "malformed_json"),
        ("NaN", "malformed_json"),
        ("1e999", "bad_field"),
        ('"\\u0000"', "nul_character"),
        ('"\\ud83d"', "lone_surrogate"),
        ("\ud83d", "lone_surrogate"),
        ("[" * 100_000, "malformed_json"),
        ("[" * 100 + "]" * 100, "bad_field"),
    ],
)
def test_what_the_escapes_of_a_text_bring_in_is_looked_at(text, reason):
    with pytest.raises(Refused) as refusal:
        decode_text(text)
    assert refusal.value.reason == reason
    assert decode_text('{"a": "\\ud83e\\udd85"}') == {"a": "🦅"}
