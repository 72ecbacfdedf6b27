"""Rows are cut where they end, wherever the blocks of a stream happen to end."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.row_ends import BrokenFile, ElementEnds, LineEnds, cut_rows

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
# Whatever is wrong in it, its quotes and brackets balance.
BROKEN = st.sampled_from(
    [b"", b" ", b"tru", b"{]", b'{"a" 1}', b'"\xff\0"', b'"\\u12"', b"[}", b"-"]
)


def cut(content: bytes, ends_in, *, block=7, chunk_bytes=10, row_limit=100_000):
    """Rows of all pieces in order; None for one that is too large."""
    blocks = [content[start : start + block] for start in range(0, len(content), block)]
    rows = []
    for piece in cut_rows(blocks, ends_in, chunk_bytes=chunk_bytes, row_limit=row_limit):
        if piece is None:
            rows.append(None)
            continue
        payload, ends = piece
        starts = [0, *(end + 1 for end in ends)]
        assert len(payload) == ends[-1]
        rows += [payload[start:end] for start, end in zip(starts, ends, strict=False)]
    return rows


@settings(deadline=None)
@given(st.binary(max_size=300), st.integers(1, 50), st.integers(1, 60))
def test_lines_are_those_of_a_plain_split(content, block, chunk_bytes):
    expected = content.split(b"\n")
    if not expected[-1]:
        expected.pop()
    assert cut(content, LineEnds(), block=block, chunk_bytes=chunk_bytes) == expected


@settings(deadline=None)
@given(
    st.lists(st.builds(lambda one: json.dumps(one, indent=1).encode(), JSON) | BROKEN, min_size=1),
    st.sampled_from([b",", b" ,\n ", b",\r\n"]),
    st.integers(1, 50),
    st.integers(1, 60),
)
def test_elements_are_cut_at_the_commas_between_them(elements, comma, block, chunk_bytes):
    content = comma.join(elements) + b"]\n "
    rows = cut(content, ElementEnds(), block=block, chunk_bytes=chunk_bytes)
    assert [row.strip() for row in rows] == [one.strip() for one in elements]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["\\", '"', "a", "\\\\", "{", ",", "]"])), st.integers(1, 5))
def test_a_text_of_backslashes_and_quotes_is_one_element(parts, block):
    element = json.dumps("".join(parts)).encode()
    rows = cut(element + b"," + element + b"]", ElementEnds(), block=block)
    assert rows == [element, element]


@pytest.mark.parametrize("block", [1, 3, 1000])
@pytest.mark.parametrize(
    ("content", "seen"),
    [
        (b'{"a": 1}', "not closed"),
        (b'{"a": 1', "not closed"),
        (b'"a]', "not closed"),
        (b'"\\"]', "not closed"),
        (b"{}}", "closed by a brace"),
        (b"{}] x", "followed by b'x'"),
        (b"{}],", "followed by"),
        (b"", "not closed"),
    ],
)
def test_an_array_that_is_not_whole_is_a_broken_file(content, seen, block):
    with pytest.raises(BrokenFile, match=seen):
        cut(content, ElementEnds(), block=block)


@pytest.mark.parametrize("length", [20, 21, 500])
@pytest.mark.parametrize("block", [1, 7, 30, 5000])
@pytest.mark.parametrize("chunk_bytes", [1, 25, 5000])
def test_a_row_above_the_limit_is_none_and_its_neighbours_are_whole(length, block, chunk_bytes):
    large = b"x" * length
    limits = {"block": block, "chunk_bytes": chunk_bytes, "row_limit": 20}
    for ends_in, content in [
        (LineEnds(), b"a\n" + large + b"\nb\n" + large),
        (LineEnds(), b"a\n" + large + b"\nb\n" + large + b"\n"),
        (ElementEnds(), b"a," + large + b",b," + large + b"]"),
    ]:
        rows = cut(content, ends_in, **limits)
        assert [None if row is None or len(row) > 20 else row for row in rows] == [
            b"a",
            large if length == 20 else None,
            b"b",
            large if length == 20 else None,
        ]


def test_a_row_above_the_limit_is_not_held():
    def blocks():
        yield b'"'
        yield from (b"x" * 1000 for _ in range(1000))
        yield b'"]'

    pieces = list(cut_rows(blocks(), ElementEnds(), chunk_bytes=10, row_limit=5000))
    assert pieces == [None]
