"""Cut one response into segments. Token ids only: text is never searched, but for the header of a
channel, which is text between two ids. Pure.
"""

import enum
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipelines.recipe import ChannelMarkers, TargetProfile
from pipelines.schema import Segment, SegmentKind

Decode = Callable[[Sequence[int]], str]  # ids to text, special tokens shown

_RECIPIENT = re.compile(r"\bto=(\S+)")


class Close(enum.Enum):
    """How the reasoning of a response ended. Every consumer matches all of them."""

    NOT_REASONING = "not_reasoning"  # the target has no thinking markers
    NEVER_OPENED = "never_opened"  # it has, and this response holds no reasoning
    EXPLICIT = "explicit"
    IMPLICIT_TOOL = "implicit_tool"  # no marker, but a tool call began
    TRUNCATED = "truncated"  # out of tokens while thinking
    MISSING_ON_STOP = "missing_on_stop"  # stopped while thinking: answer or thought, nobody knows
    UNOPENED = "unopened"  # closed, though neither the prompt nor the response had opened


@dataclass(frozen=True)
class Split:
    """Segments that tile the output ids exactly, in order, none empty.

    A segment of kind tool_call holds one or several calls, markers and all.
    """

    segments: tuple[Segment, ...]
    close: Close
    tool_calls_closed: bool = True  # False: the last tool call has no end
    stray_markers: int = 0  # marker ids within the reasoning: kept there, and suspicious
    residual: tuple[int, int] | None = None  # position and id of the first marker in the content

    def tokens(self, kind: SegmentKind) -> int:
        """How many ids belong to segments of this kind."""
        return sum(one.end - one.start for one in self.segments if one.kind == kind)


@dataclass(frozen=True)
class Header:
    """What stands before the text of a message on a channel."""

    channel: str  # analysis | commentary | final, or what else was written; "" without one
    recipient: str  # of a tool call; "" in a message to the user


class Splitter:
    """Cuts the responses of one target."""

    def __init__(self, profile: TargetProfile, decode: Decode) -> None:
        self._profile, self._decode = profile, decode
        self._open, self._close = profile.think_open_id, profile.think_close_id
        self._whitespace: dict[int, bool] = {}

    @cached_property
    def _markers(self) -> frozenset[int]:
        return frozenset(self._profile.marker_ids.values())

    @cached_property
    def _control(self) -> frozenset[int]:
        """What no content may hold. Reserved ids have a gate of their own."""
        return self._markers | frozenset(self._profile.stop_token_ids)

    @cached_property
    def _tool_ends(self) -> dict[int, int]:
        """The id that ends what an id begins."""
        tools = self._profile.tool_markers
        if tools is None:
            return {}
        ends = {tools.call_open_id: tools.call_close_id}
        if tools.section_open_id is not None and tools.section_close_id is not None:
            ends[tools.section_open_id] = tools.section_close_id
        return ends

    def is_open_at_start(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends with the opening of a thinking block, and white space at most.

        An opening further up is somebody's text, or an earlier answer's.
        """
        if self._open is None:
            return False
        for token in reversed(prompt_ids):
            if token == self._open or not self._is_whitespace(token):
                return token == self._open
        return False

    def split(
        self, prompt_ids: Sequence[int], output_ids: Sequence[int], stop_id: int | None
    ) -> Split:
        """Cut `output_ids`; `stop_id` is the token that ended them, None if they ran out of tokens
        (or ended at a stop string, which leaves no token of its own)."""
        end = len(output_ids)
        if stop_id is not None:
            assert output_ids[-1] == stop_id, "the client lets no other reply pass"
            end -= 1
        tail = [Segment("stop", end, len(output_ids))]
        closed = True
        if self._profile.channels is not None:
            parts, close, closed = self._on_channels(
                output_ids, end, self._profile.channels, stop_id is not None
            )
        elif self._control.isdisjoint(output_ids[:end]) and not self.is_open_at_start(prompt_ids):
            close = Close.NOT_REASONING if self._open is None else Close.NEVER_OPENED
            return Split(_tiled([Segment("content", 0, end), *tail]), close)
        else:
            parts, start, close = self._reasoning(prompt_ids, output_ids, end, stop_id is not None)
            if close not in (Close.TRUNCATED, Close.MISSING_ON_STOP):
                answer, closed = self._answer(output_ids, start, end)
                parts += answer
        segments = _tiled([*parts, *tail])
        return Split(
            segments,
            close,
            closed,
            self._strays(output_ids, segments),
            self._residual(output_ids, segments),
        )

    def _reasoning(
        self, prompt_ids: Sequence[int], ids: Sequence[int], end: int, stopped: bool
    ) -> tuple[list[Segment], int, Close]:
        """The segments up to the end of the reasoning, and where the answer starts."""
        if self._open is None or self._close is None:  # the profile has both or neither
            return [], 0, Close.NOT_REASONING
        # Some targets open once more what the prompt has opened.
        start = self._after_opening(ids, end)
        if start == 0 and not self.is_open_at_start(prompt_ids):
            close = Close.UNOPENED if self._close in ids[:end] else Close.NEVER_OPENED
            return [], 0, close
        head = [Segment("marker", 0, start)]
        cut = _index(ids, self._close, start, end)
        if cut < end:
            parts = [*head, Segment("reasoning", start, cut), Segment("marker", cut, cut + 1)]
            return parts, cut + 1, Close.EXPLICIT
        # A call that was begun within thinking that nothing closes is meant as one.
        cut = min((_index(ids, one, start, end) for one in self._tool_ends), default=end)
        parts = [*head, Segment("reasoning", start, cut)]
        if cut < end:
            return parts, cut, Close.IMPLICIT_TOOL
        return parts, end, Close.MISSING_ON_STOP if stopped else Close.TRUNCATED

    def _after_opening(self, ids: Sequence[int], end: int) -> int:
        """Where the reasoning starts if the response opens it itself; 0 if it does not."""
        for position in range(end):
            if ids[position] == self._open:
                return position + 1
            if not self._is_whitespace(ids[position]):
                return 0
        return 0

    def _answer(self, ids: Sequence[int], start: int, end: int) -> tuple[list[Segment], bool]:
        """Content and tool calls, and whether the last call has its end."""
        parts: list[Segment] = []
        closed, at = True, start
        while at < end:
            first = min((_index(ids, one, at, end) for one in self._tool_ends), default=end)
            between = range(at, first)
            calls_before = bool(parts) and parts[-1].kind == "tool_call"
            if first < end and calls_before and self._are_whitespace(ids, between):
                begin = parts.pop().start
            else:
                parts.append(Segment("content", at, first))
                begin = first
            if first == end:
                break
            last = _index(ids, self._tool_ends[ids[first]], first + 1, end)
            closed = last < end
            at = min(last + 1, end)
            parts.append(Segment("tool_call", begin, at))
        return parts, closed

    def _on_channels(
        self, ids: Sequence[int], end: int, channels: ChannelMarkers, stopped: bool
    ) -> tuple[list[Segment], Close, bool]:
        """Messages on channels: analysis is reasoning, one with a recipient a tool call."""
        parts: list[Segment] = []
        ends = (channels.end_id, channels.start_id, channels.channel_id)
        at, reasoned = 0, False
        while at < end:
            message = _index(ids, channels.message_id, at, end)
            if message == end:
                is_header = ids[at] in (channels.start_id, channels.channel_id)
                parts.append(Segment("marker" if is_header else "content", at, end))
                break
            stop = min(_index(ids, one, message + 1, end) for one in ends)
            header = read_header(ids[at:message], channels, self._decode)
            if header.recipient:
                parts.append(Segment("tool_call", at, stop))
            else:
                kind: SegmentKind = "reasoning" if header.channel == "analysis" else "content"
                reasoned |= kind == "reasoning"
                parts += [Segment("marker", at, message + 1), Segment(kind, message + 1, stop)]
            at = stop
            if at < end and ids[at] == channels.end_id:
                parts.append(Segment("marker", at, at + 1))
                at += 1
        parts = [one for one in parts if one.end > one.start]
        last = parts[-1].kind if parts else None
        if last == "reasoning" or (last == "marker" and not stopped):
            close = Close.MISSING_ON_STOP if stopped else Close.TRUNCATED
        else:
            close = Close.EXPLICIT if reasoned else Close.NEVER_OPENED
        return parts, close, stopped or last != "tool_call"

    def _strays(self, ids: Sequence[int], segments: Sequence[Segment]) -> int:
        return sum(
            token in self._markers
            for one in segments
            if one.kind == "reasoning" and not self._markers.isdisjoint(ids[one.start : one.end])
            for token in ids[one.start : one.end]
        )

    def _residual(self, ids: Sequence[int], segments: Sequence[Segment]) -> tuple[int, int] | None:
        for one in segments:
            if one.kind == "content" and not self._control.isdisjoint(ids[one.start : one.end]):
                places = range(one.start, one.end)
                return next((at, ids[at]) for at in places if ids[at] in self._control)
        return None

    def _are_whitespace(self, ids: Sequence[int], places: range) -> bool:
        return all(self._is_whitespace(ids[at]) for at in places)

    def _is_whitespace(self, token: int) -> bool:
        if token not in self._whitespace:
            self._whitespace[token] = not self._decode([token]).strip()
        return self._whitespace[token]


def read_header(ids: Sequence[int], channels: ChannelMarkers, decode: Decode) -> Header:
    """The header of a message: the ids before its `message_id`.

    The recipient stands before or after the channel's name.
    """
    channel = _index(ids, channels.channel_id, 0, len(ids))
    constrain = _index(ids, channels.constrain_id, channel, len(ids))
    role, named = decode(ids[:channel]), decode(ids[channel + 1 : constrain])
    recipient = _RECIPIENT.search(f"{role} {named}")
    words = named.split()
    return Header(words[0] if words else "", recipient[1] if recipient else "")


def _index(ids: Sequence[int], token: int, start: int, end: int) -> int:
    """The first place of `token` in `ids[start:end]`; `end` if it is not there."""
    try:
        return ids.index(token, start, end)
    except ValueError:
        return end


def _tiled(parts: Sequence[Segment]) -> tuple[Segment, ...]:
    """Without the empty ones, and neighbouring markers as one."""
    tiles: list[Segment] = []
    for one in parts:
        if one.end == one.start:
            continue
        if tiles and one.kind == tiles[-1].kind == "marker":
            one = Segment("marker", tiles.pop().start, one.end)
        tiles.append(one)
    return tuple(tiles)
