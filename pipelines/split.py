"""Cut one response into segments. Token ids only: text is never searched. Pure."""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipelines.schema import Segment, SegmentKind


class Close(enum.Enum):
    """How the reasoning of a response ended. Every consumer matches all of them."""

    NOT_REASONING = "not_reasoning"  # the target has no thinking markers
    NEVER_OPENED = "never_opened"  # it has, and this response holds none of them
    EXPLICIT = "explicit"
    TRUNCATED = "truncated"  # out of tokens while thinking
    MISSING_ON_STOP = "missing_on_stop"  # stopped while thinking: answer or thought, nobody knows
    UNOPENED = "unopened"  # closed, though neither the prompt nor the response had opened


@dataclass(frozen=True)
class Markers:
    """The two ids of a target that thinks."""

    open_id: int
    close_id: int


@dataclass(frozen=True)
class Split:
    """Segments that tile the output ids exactly, in order, none empty."""

    segments: tuple[Segment, ...]
    close: Close
    stray_markers: int  # thinking markers beyond the ones that bound the reasoning

    def tokens(self, kind: SegmentKind) -> int:
        """How many ids belong to segments of this kind."""
        return sum(one.end - one.start for one in self.segments if one.kind == kind)

    def ids(self, kind: SegmentKind, output_ids: Sequence[int]) -> list[int]:
        """The ids of the segments of this kind, in order."""
        return [
            token
            for one in self.segments
            if one.kind == kind
            for token in output_ids[one.start : one.end]
        ]


def is_open_at_start(prompt_ids: Sequence[int], markers: Markers | None) -> bool:
    """Whether the prompt ends inside a thinking block: its last open has no close after it."""
    if markers is None:
        return False
    for token in reversed(prompt_ids):
        if token == markers.close_id:
            return False
        if token == markers.open_id:
            return True
    return False


def split(
    output_ids: Sequence[int],
    *,
    stop_id: int | None,
    markers: Markers | None,
    open_at_start: bool,
    is_whitespace: Callable[[int], bool],
) -> Split:
    """Cut `output_ids`; `stop_id` is the token that ended them, None if they ran out of tokens
    (or ended at a stop string, which leaves no token of its own)."""
    end = len(output_ids)
    stopped = stop_id is not None
    if stopped:
        assert output_ids[-1] == stop_id, "the client lets no other reply pass"
        end -= 1
    tail = [Segment("stop", end, len(output_ids))]
    body = output_ids[:end]
    if markers is None:
        return _tiled([Segment("content", 0, end), *tail], Close.NOT_REASONING, 0)

    start = 0 if open_at_start else _after_opening(body, markers, is_whitespace)
    strays = sum(token in (markers.open_id, markers.close_id) for token in body[start:])
    if not open_at_start and start == 0:
        close = Close.UNOPENED if markers.close_id in body else Close.NEVER_OPENED
        return _tiled([Segment("content", 0, end), *tail], close, strays)
    head = [Segment("marker", 0, start)]
    if markers.close_id not in body[start:]:
        close = Close.MISSING_ON_STOP if stopped else Close.TRUNCATED
        return _tiled([*head, Segment("reasoning", start, end), *tail], close, strays)
    cut = start + list(body[start:]).index(markers.close_id)
    parts = [
        Segment("reasoning", start, cut),
        Segment("marker", cut, cut + 1),
        Segment("content", cut + 1, end),
    ]
    return _tiled([*head, *parts, *tail], Close.EXPLICIT, strays - 1)


def _after_opening(
    body: Sequence[int], markers: Markers, is_whitespace: Callable[[int], bool]
) -> int:
    """Where the reasoning starts if the response opens it itself; 0 if it does not."""
    for position, token in enumerate(body):
        if token == markers.open_id:
            return position + 1
        if not is_whitespace(token):
            return 0
    return 0


def _tiled(segments: Sequence[Segment], close: Close, strays: int) -> Split:
    return Split(tuple(one for one in segments if one.end > one.start), close, strays)
