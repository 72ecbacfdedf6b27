"""Exact duplicates: the first row is found again, however many came between."""

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.selection import seen as module
from pipelines.selection.seen import ID_BYTES, Seen


def digest(said: object) -> bytes:
    return hashlib.sha256(str(said).encode()).digest()


def test_the_first_of_equal_rows_is_named_by_its_number():
    seen = Seen()
    assert [seen.offer(digest(one)) for one in "abab"] == [
        (None, False),
        (None, False),
        (0, True),
        (1, True),
    ]
    assert len(seen) == 2


def test_another_row_whose_id_would_be_the_same_is_told_apart():
    seen, one = Seen(), digest("one")
    seen.offer(one)
    assert seen.offer(one[:ID_BYTES] + digest("other")[ID_BYTES:]) == (0, False)


@settings(deadline=None, max_examples=50)
@given(said=st.lists(st.integers(0, 30), max_size=200), merged_after=st.integers(1, 20))
def test_it_agrees_with_a_plain_dictionary_whenever_it_merges(said, merged_after):
    kept, first = module._RECENT_ROWS, {}
    module._RECENT_ROWS = merged_after
    try:
        seen = Seen()
        for one in said:
            expected = (first[one], True) if one in first else (None, False)
            assert seen.offer(digest(one)) == expected
            first.setdefault(one, len(first))
    finally:
        module._RECENT_ROWS = kept
