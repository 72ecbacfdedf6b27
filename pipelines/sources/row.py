"""What a source row becomes on its way to a prompt, and the names of what can be wrong with it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Json = dict[str, Any]

FormatName = Literal[
    "messages",
    "sharegpt",
    "alpaca",
    "prompt_completion",
    "problem_solution",
    "ultrachat",
    "magicoder_oss",
    "magicoder_evol",
    "opencode_instruct",
    "mixture_of_thoughts",
    "openthoughts",
    "glaive",
    "swe_agent",
    "bfcl",
]
FORMAT_NAMES: tuple[str, ...] = get_args(FormatName)

Reason = Literal[
    # A row that cannot be read
    "malformed_json",
    "invalid_utf8",
    "lone_surrogate",
    "nul_character",
    "row_too_large",
    "not_an_object",
    "wrong_format",  # not of the shape that its file's format has
    # A conversation that cannot be asked
    "bad_messages",  # missing, not a list, empty, or a message that is not an object
    "unknown_role",
    "empty_content",
    "unsupported_content",  # an image, audio, or a shape that is no text
    "page_markup",  # an answer saved as the HTML of a web page
    "bad_tool_call",
    "orphan_tool_result",  # it answers no call
    "unanswered_tool_call",  # a call whose result is missing where the conversation goes on
    "no_question",  # nothing to answer: no message of a user, nor a tool's result
    "bad_tools",
    "bad_field",
    # Found by the template
    "template_error",
    "special_token_in_content",
    "content_lost",
    "double_bos",
    "round_trip",
    "turns_not_separable",
    # Found by `prepare`
    "prompt_too_short",
    "prompt_too_long",
    "duplicate",
    "near_duplicate",
    "contaminated",  # it shares a passage with an evaluation prompt
    "other_language",
    "not_drawn",  # usable; the recipe takes fewer rows of this set
    "id_collision",
]

# What a recipe asked for, rather than what is wrong with a row.
CHOICES: frozenset[str] = frozenset(
    {"prompt_too_short", "near_duplicate", "contaminated", "other_language", "not_drawn"}
)

UNSTATED = "unstated"  # the license of a row that names none


@dataclass(frozen=True)
class Given:
    """What a format finds in a row, unchecked: messages in OpenAI's words, answers included.

    A message is `{"role": system | user | assistant | tool, "content": ...}`, where an assistant
    may have `tool_calls` and `reasoning_content`, and a tool's result `tool_call_id` and `name`.
    """

    messages: Sequence[Any]
    tools: Any = None  # declarations as the set writes them; None where it has none


@dataclass(frozen=True)
class Format:
    """How one kind of data set writes a row. Both functions are pure."""

    name: FormatName
    recognises: Callable[[Json], bool]  # by the row's keys and their types
    read: Callable[[Json], Given]  # raises `Refused`


@dataclass(frozen=True)
class SourceRow:
    """One conversation as its set gives it: checked, its own last answer dropped."""

    file: str
    line: int  # 1-based: line of a JSONL file, row of any other
    messages: tuple[Json, ...]
    tools: tuple[Json, ...]  # normalised, see `sources.tools`
    source: str
    license: str
    format: FormatName = "messages"
    tools_given: Any = None  # as the set declares them; None where it has none
    repairs: tuple[str, ...] = ()  # names of what was mended, each once
    answer: str = ""  # the set's own answer, which is dropped: a measure of how long answers are

    @property
    def content_sha256(self) -> str:
        """Identity of a prompt: the same messages and tools, in whatever order of keys."""
        canonical = json.dumps([self.messages, self.tools], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used, and why."""

    file: str
    line: int
    reason: Reason
    detail: str


class Refused(ValueError):
    """Carries a row's reason from where it is found to where it becomes a `BadRow`."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason: Reason = reason
        self.detail = detail


def decode_json(content: bytes) -> Any:
    """Strict JSON in UTF-8. Raises `Refused`: a key that is there twice, NaN, broken UTF-8."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused("invalid_utf8", str(error)) from error
    try:
        return _STRICT.decode(text)
    except (ValueError, RecursionError) as error:
        raise Refused("malformed_json", str(error)) from error


def dump_json(value: Any) -> str:
    """Nested values as they are stored: compact, keys in the order of the source, never NaN."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def kind_of(value: Any) -> str:
    """The type of a decoded value, in words for a message."""
    return "null" if value is None else type(value).__name__


def _distinct_keys(pairs: list[tuple[str, Any]]) -> Json:
    """json.loads keeps the last of two equal keys in silence; a row must not lose a value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} is there twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_distinct_keys, parse_constant=_no_constant)
