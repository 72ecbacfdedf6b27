"""Source files of prompts: JSONL or Parquet of `messages`, and `tools` where any.

Every row becomes a `SourceRow` or a `BadRow` that names its file, its line and the reason.
"""

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.errors import BadRecipe

Reason = Literal[
    "malformed_json",
    "invalid_utf8",
    "lone_surrogate",
    "nul_character",
    "not_an_object",
    "bad_messages",  # missing, not a list, empty, or a message that is not an object
    "unknown_role",
    "empty_content",
    "unsupported_content",
    "bad_tool_call",
    "last_message_not_user",
    "bad_tools",
    "bad_field",
    # Found later, by the template and by `prepare`:
    "template_error",
    "special_token_in_content",
    "content_lost",
    "double_bos",
    "round_trip",
    "turns_not_separable",
    "prompt_too_long",
    "duplicate",
    "id_collision",
]

ROLES = ("system", "user", "assistant", "tool")
UNSTATED = "unstated"  # the license of a row that names none
_MAX_DEPTH = 64

Json = dict[str, Any]


@dataclass(frozen=True)
class SourceRow:
    """One prompt as its source gives it: checked, its own answer dropped, its tools normalised."""

    file: str
    line: int  # 1-based: line of a JSONL file, row of a Parquet file
    messages: tuple[Json, ...]
    tools: tuple[Json, ...]
    source: str
    license: str

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


def read_prompts(path: Path) -> Iterator[SourceRow | BadRow]:
    """Read a source row by row, in file order. Blank JSONL lines are skipped and not counted.

    Raises `BadRecipe` where the file as a whole cannot be read.
    """
    match path.suffix:
        case ".jsonl":
            rows = _read_jsonl(path)
        case ".parquet":
            rows = _read_parquet(path)
        case _:
            raise BadRecipe(
                f"the prompt set {path} ends in {path.suffix!r}",
                expected="a .jsonl or a .parquet file",
                change="convert the file, or correct the path in the recipe",
            )
    try:
        yield from rows
    except (OSError, pa.ArrowException) as error:
        raise BadRecipe(
            f"the prompt set {path} cannot be read: {error}",
            expected="a readable .jsonl or .parquet file",
            change="correct the path in the recipe, or mend the file",
        ) from error


def parse_row(value: Any, *, file: str, line: int) -> SourceRow | BadRow:
    """Check one decoded row and bring it to one form. Pure.

    Trailing assistant messages are the set's own answer; they are dropped, because the target
    answers. Tool schemas are normalised, see `normalise_tools`.
    """
    try:
        if not isinstance(value, dict):
            raise _Refusal("not_an_object", f"a {_kind(value)}, expected an object with messages")
        _check_values(value)
        return SourceRow(
            file=file,
            line=line,
            messages=_messages(value),
            tools=normalise_tools(value.get("tools")),
            source=_text_field(value, "source", f"{file} #{line}"),
            license=_text_field(value, "license", UNSTATED),
        )
    except _Refusal as refusal:
        return BadRow(file, line, refusal.reason, refusal.detail)


def dump_json(value: Any) -> str:
    """Nested values as they are stored: compact, keys in the order of the source, never NaN."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class _Refusal(ValueError):
    """Carries a row's reason from where it is found to where it becomes a `BadRow`."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


# Files


def _read_jsonl(path: Path) -> Iterator[SourceRow | BadRow]:
    with path.open("rb") as handle:
        for line, raw in enumerate(handle, start=1):
            content = raw.removeprefix(b"\xef\xbb\xbf") if line == 1 else raw
            if not content.strip():
                continue
            try:
                value = _decode(content)
            except _Refusal as refusal:
                yield BadRow(path.name, line, refusal.reason, refusal.detail)
            else:
                yield parse_row(value, file=path.name, line=line)


def _read_parquet(path: Path) -> Iterator[SourceRow | BadRow]:
    with pq.ParquetFile(path) as parquet:
        names = parquet.schema_arrow.names
        if "messages" not in names:
            raise BadRecipe(
                f"the prompt set {path} has the columns {', '.join(names)}",
                expected="a column messages: a list of {role, content}, or that list as JSON",
                change="rename or convert the column",
            )
        wanted = [name for name in ("messages", "tools", "source", "license") if name in names]
        line = 0
        for batch in parquet.iter_batches(batch_size=512, columns=wanted):
            for i in range(batch.num_rows):
                line += 1
                try:
                    value = {name: _cell(name, batch.column(name)[i]) for name in wanted}
                except _Refusal as refusal:
                    yield BadRow(path.name, line, refusal.reason, refusal.detail)
                else:
                    present = {key: cell for key, cell in value.items() if cell is not None}
                    yield parse_row(present, file=path.name, line=line)


def _cell(column: str, scalar: pa.Scalar) -> Any:
    """A Parquet cell as Python. `messages` and `tools` may be nested columns or JSON strings."""
    try:
        value = scalar.as_py()
    except UnicodeDecodeError as error:
        raise _Refusal("invalid_utf8", str(error)) from error
    if isinstance(value, str) and column in ("messages", "tools"):
        return _decode(value.encode())
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    """Arrow gives every struct all keys of its column; a null there stands for an absent key."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    if isinstance(value, list):
        return [_without_nulls(one) for one in value]
    return value


def _decode(content: bytes) -> Any:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _Refusal("invalid_utf8", str(error)) from error
    try:
        return json.loads(text, object_pairs_hook=_distinct_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise _Refusal("malformed_json", str(error)) from error


def _distinct_keys(pairs: list[tuple[str, Any]]) -> Json:
    """json.loads keeps the last of two equal keys in silence; a row must not lose a value."""
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} is there twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


# Rows


def _check_values(value: Any, depth: int = 0) -> None:
    """Refuse what cannot be stored as JSON in UTF-8 exactly as it came."""
    if depth > _MAX_DEPTH:
        raise _Refusal("bad_field", f"nested deeper than {_MAX_DEPTH} levels")
    match value:
        case str():
            _check_text(value)
        case dict():
            for key, one in value.items():
                _check_text(key)
                _check_values(one, depth + 1)
        case list():
            for one in value:
                _check_values(one, depth + 1)
        case float() if not math.isfinite(value):
            raise _Refusal("bad_field", f"the number {value}")
        case None | bool() | int() | float():
            pass
        case _:
            raise _Refusal("bad_field", f"a {_kind(value)}, which JSON cannot hold")


def _check_text(text: str) -> None:
    if "\0" in text:
        raise _Refusal("nul_character", f"a NUL character in {text[:40]!r}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise _Refusal("lone_surrogate", f"half of a UTF-16 pair: {error.reason}") from error


def _messages(row: Json) -> tuple[Json, ...]:
    given = row.get("messages")
    if not isinstance(given, list) or not given:
        seen = "no messages" if given in (None, []) else f"messages is a {_kind(given)}"
        raise _Refusal("bad_messages", f"{seen}, expected a list of objects")
    for index, message in enumerate(given):
        if not isinstance(message, dict):
            raise _Refusal("bad_messages", f"message {index} is a {_kind(message)}")
        if message.get("role") not in ROLES:
            raise _Refusal(
                "unknown_role",
                f"message {index} has the role {message.get('role')!r}, "
                f"expected one of {', '.join(ROLES)}",
            )
    end = len(given)
    while end and given[end - 1]["role"] == "assistant":
        end -= 1
    if not end or given[end - 1]["role"] not in ("user", "tool"):
        last = given[end - 1]["role"] if end else "assistant"
        raise _Refusal("last_message_not_user", f"the last message before an answer is from {last}")
    return tuple(_message(index, message) for index, message in enumerate(given[:end]))


def _message(index: int, message: Json) -> Json:
    calls = message.get("tool_calls")
    content = message.get("content")
    if calls is not None and message["role"] != "assistant":
        raise _Refusal("bad_tool_call", f"message {index}: tool_calls from {message['role']}")
    if content is None:
        content = ""
    if not isinstance(content, str):
        raise _Refusal("unsupported_content", f"message {index}: content is a {_kind(content)}")
    if not content.strip() and not calls:
        raise _Refusal("empty_content", f"message {index} ({message['role']}) says nothing")
    kept = {**message, "content": content}
    if calls is None:
        kept.pop("tool_calls", None)
        return kept
    if not isinstance(calls, list):
        raise _Refusal("bad_tool_call", f"message {index}: tool_calls is a {_kind(calls)}")
    kept["tool_calls"] = [_tool_call(index, call) for call in calls]
    return kept


def _tool_call(index: int, call: Any) -> Json:
    """One form for all sources: arguments are a mapping. The template decides how it writes it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Refusal("bad_tool_call", f"message {index}: a tool call without a function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _decode(arguments.encode())
        except _Refusal as refusal:
            raise _Refusal(
                "bad_tool_call", f"message {index}: arguments are not JSON: {refusal.detail}"
            ) from refusal
    if not isinstance(arguments, dict):
        raise _Refusal(
            "bad_tool_call", f"message {index}: arguments are a {_kind(arguments)}, not an object"
        )
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _text_field(row: Json, key: str, absent: str) -> str:
    value = row.get(key, absent)
    if not isinstance(value, str):
        raise _Refusal("bad_field", f"{key} is a {_kind(value)}, expected a string")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


# Tools

_TYPES = {
    "any": None,  # JSON schema says it by leaving the type out
    "array": "array",
    "arraylist": "array",
    "bool": "boolean",
    "boolean": "boolean",
    "byte": "integer",
    "char": "string",
    "dict": "object",
    "double": "number",
    "float": "number",
    "hashmap": "object",
    "int": "integer",
    "integer": "integer",
    "list": "array",
    "long": "integer",
    "none": "null",
    "null": "null",
    "number": "number",
    "object": "object",
    "set": "array",
    "short": "integer",
    "str": "string",
    "string": "string",
    "tuple": "array",
}


def normalise_tools(given: Any) -> tuple[Json, ...]:
    """Declarations as `{"type": "function", "function": {name, description, parameters}}`.

    A bare `{name, description, parameters}` is wrapped; `parameters` becomes JSON schema: type
    names of programming languages are mapped (dict, float, tuple ...), an object has `properties`
    and `required`. Raises `ValueError` on what has no certain reading.
    """
    if given is None:
        return ()
    if not isinstance(given, list):
        raise _Refusal("bad_tools", f"tools is a {_kind(given)}, expected a list")
    tools = tuple(_tool(index, tool) for index, tool in enumerate(given))
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise _Refusal("bad_tools", f"two tools are named {name!r}")
    return tools


def _tool(index: int, tool: Any) -> Json:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _Refusal("bad_tools", f"tool {index} has no function name")
    description = function.get("description", "")
    if not isinstance(description, str):
        raise _Refusal("bad_tools", f"tool {index}: description is a {_kind(description)}")
    parameters = function.get("parameters") or {"type": "object"}
    where = f"tool {function['name']!r}"
    schema = _schema(parameters, where)
    if schema.get("type") != "object":
        raise _Refusal("bad_tools", f"{where}: parameters are a {schema.get('type')}")
    return {
        "type": "function",
        "function": {"name": function["name"], "description": description, "parameters": schema},
    }


def _schema(given: Any, where: str) -> Json:
    if not isinstance(given, dict):
        raise _Refusal("bad_tools", f"{where}: a schema is a {_kind(given)}")
    schema = dict(given)
    if "type" in schema:
        kind = _type(schema.pop("type"), where)
        if kind is not None:
            schema = {"type": kind, **schema}
    if "properties" in schema:
        schema["properties"] = _properties(schema["properties"], where)
    if isinstance(schema.get("items"), dict):
        schema["items"] = _schema(schema["items"], f"{where}.items")
    if schema.get("type") == "object":
        schema.setdefault("properties", {})
        schema["required"] = _required(schema, where)
    return schema


def _type(given: Any, where: str) -> str | list[str] | None:
    """A type name or a list of them in JSON schema's words; None where any type will do."""
    if not isinstance(given, list):
        return _type_name(given, where)
    names = [_type_name(one, where) for one in given]
    known = [name for name in names if name is not None]
    return known if known and len(known) == len(names) else None


def _type_name(given: Any, where: str) -> str | None:
    if not isinstance(given, str) or given.lower() not in _TYPES:
        raise _Refusal("bad_tools", f"{where}: the type {given!r} is not known")
    return _TYPES[given.lower()]


def _properties(given: Any, where: str) -> Json:
    if not isinstance(given, dict):
        raise _Refusal("bad_tools", f"{where}: properties is a {_kind(given)}")
    return {name: _schema(one, f"{where}.{name}") for name, one in given.items()}


def _required(schema: Json, where: str) -> list[str]:
    required = schema.get("required", [])
    if not isinstance(required, list):
        raise _Refusal("bad_tools", f"{where}: required is a {_kind(required)}")
    unknown = [name for name in required if name not in schema["properties"]]
    if unknown:
        raise _Refusal("bad_tools", f"{where}: {unknown[0]!r} is required but not declared")
    return required
