"""Where reasoning ends, by ids alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.schema import Segment
from pipelines.split import Close, Markers, is_open_at_start, split

OPEN, CLOSE, STOP, SPACE = 90, 91, 2, 10
MARKERS = Markers(OPEN, CLOSE)


def cut(ids, *, open_at_start=False, stop=True, markers=MARKERS):
    return split(
        ids,
        stop_id=ids[-1] if stop else None,
        markers=markers,
        open_at_start=open_at_start,
        is_whitespace=lambda token: token == SPACE,
    )


def spans(result):
    return [(one.kind, one.start, one.end) for one in result.segments]


def test_a_target_without_markers_gives_content_and_stop():
    result = cut([5, 6, STOP], markers=None)
    assert spans(result) == [("content", 0, 2), ("stop", 2, 3)]
    assert result.close is Close.NOT_REASONING


def test_thinking_that_the_prompt_opened_ends_at_the_first_close():
    result = cut([5, CLOSE, 6, STOP], open_at_start=True)
    assert spans(result) == [
        ("reasoning", 0, 1),
        ("marker", 1, 2),
        ("content", 2, 3),
        ("stop", 3, 4),
    ]
    assert result.close is Close.EXPLICIT
    assert result.stray_markers == 0


def test_thinking_that_the_response_opens_after_white_space():
    result = cut([SPACE, OPEN, 5, CLOSE, 6, STOP])
    assert spans(result)[:3] == [("marker", 0, 2), ("reasoning", 2, 3), ("marker", 3, 4)]
    assert result.close is Close.EXPLICIT


@pytest.mark.parametrize(
    ("ids", "open_at_start", "stop", "close", "strays"),
    [
        ([5, 6, STOP], True, True, Close.MISSING_ON_STOP, 0),
        ([5, 6], True, False, Close.TRUNCATED, 0),
        ([OPEN, 6, STOP], False, True, Close.MISSING_ON_STOP, 0),
        ([OPEN, 6], False, False, Close.TRUNCATED, 0),
        ([5, 6, STOP], False, True, Close.NEVER_OPENED, 0),
        ([5, CLOSE, 6, STOP], False, True, Close.UNOPENED, 1),
        ([5, OPEN, 6, CLOSE, STOP], False, True, Close.UNOPENED, 2),
        ([5, OPEN, 6, STOP], False, True, Close.NEVER_OPENED, 1),
        ([5, CLOSE, 6, CLOSE, STOP], True, True, Close.EXPLICIT, 1),
        ([5, OPEN, CLOSE, STOP], True, True, Close.EXPLICIT, 1),
        ([CLOSE, STOP], True, True, Close.EXPLICIT, 0),
        ([STOP], True, True, Close.MISSING_ON_STOP, 0),
        ([SPACE, SPACE], False, False, Close.NEVER_OPENED, 0),
    ],
)
def test_every_way_of_ending_has_its_name(ids, open_at_start, stop, close, strays):
    result = cut(ids, open_at_start=open_at_start, stop=stop)
    assert (result.close, result.stray_markers) == (close, strays)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([1, OPEN], True),
        ([1, OPEN, CLOSE], False),
        ([OPEN, 5, CLOSE, 7, OPEN], True),
        ([1, 2], False),
        ([], False),
    ],
)
def test_the_prompt_says_whether_thinking_is_open(prompt, is_open):
    assert is_open_at_start(prompt, MARKERS) is is_open
    assert is_open_at_start(prompt, None) is False


IDS = st.lists(st.sampled_from([OPEN, CLOSE, SPACE, STOP, 5, 6]), max_size=12)


@given(ids=IDS, open_at_start=st.booleans(), stop=st.booleans(), plain=st.booleans())
def test_segments_tile_the_output_and_no_thought_becomes_content(ids, open_at_start, stop, plain):
    stop = stop and bool(ids)
    markers = None if plain else MARKERS
    result = cut(ids, open_at_start=open_at_start, stop=stop, markers=markers)
    position = 0
    for one in result.segments:
        assert isinstance(one, Segment)
        assert one.start == position < one.end
        position = one.end
    assert position == len(ids)
    assert result.tokens("stop") == int(stop)
    assert CLOSE not in result.ids("reasoning", ids) or plain
    parts = ("marker", "reasoning", "marker", "content", "stop")
    kinds = iter(parts)
    assert all(one.kind in kinds for one in result.segments)  # in this order
    if result.close is not Close.EXPLICIT and result.tokens("reasoning"):
        assert result.tokens("content") == 0
