"""Tool declarations of any set as JSON schema."""

from collections.abc import Callable
from typing import Any

from pipelines.sources.row import Json, Refused, kind_of
from pipelines.sources.values import decode_text

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
_PARAMETER_KEYS = ("parameters", "input_schema", "inputSchema")  # one of them in a declaration
_NOTHING: tuple[Any, ...] = (None, {}, [], "")


def normalise_tools(given: Any) -> tuple[Json, ...]:
    """Declarations as `{"type": "function", "function": {name, description, parameters}}`.

    The list, and each of its declarations, may be JSON text. A bare `{name, description,
    parameters}` is wrapped; `parameters` becomes JSON schema: type names of programming languages
    are mapped (dict, float, tuple ...), an object has `properties` and `required`, and a property
    that says itself whether it is required, or optional, is in that list. What else JSON schema
    knows stays as it is. Raises `Refused` (bad_tools) on what has no certain reading.
    """
    decoded = _decoded(given, "tools")
    if decoded is None:
        return ()
    if not isinstance(decoded, list):
        raise Refused("bad_tools", f"tools is a {kind_of(decoded)}, expected a list")
    tools = tuple(_tool(index, tool) for index, tool in enumerate(decoded))
    names: set[str] = set()
    for tool in tools:
        name = tool["function"]["name"]
        if name in names:
            raise Refused("bad_tools", f"two tools are named {name!r}")
        names.add(name)
    return tools


def _decoded(given: Any, where: str) -> Any:
    if not isinstance(given, str):
        return given
    if not given.strip():
        return None
    try:
        return decode_text(given)
    except Refused as refusal:
        reason = "bad_tools" if refusal.reason == "malformed_json" else refusal.reason
        raise Refused(reason, f"{where}: {refusal.detail}") from refusal


def _tool(index: int, given: Any) -> Json:
    tool = _decoded(given, f"tool {index}")
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("bad_tools", f"tool {index} has no function name")
    where = f"tool {function['name']!r}"
    if not function["name"] or ("function" in tool and tool.get("type") not in (None, "function")):
        raise Refused("bad_tools", f"{where} is of type {tool.get('type')!r}, expected a function")
    description = function.get("description")
    if not isinstance(description, str | None):
        raise Refused("bad_tools", f"{where}: description is a {kind_of(description)}")
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": description or "",
            "parameters": _parameters(function, where),
        },
    }


def _parameters(function: Json, where: str) -> Json:
    given = [one for key in _PARAMETER_KEYS if (one := function.get(key)) not in _NOTHING]
    if len(given) > 1:
        raise Refused("bad_tools", f"{where} has parameters under two names")
    parameters = given[0] if given else {"type": "object"}
    if isinstance(parameters, dict) and not isinstance(parameters.get("type"), str):
        if isinstance(parameters.get("properties"), dict) and "type" not in parameters:
            parameters = {"type": "object", **parameters}
        elif all(isinstance(one, dict) for one in parameters.values()):
            parameters = {"type": "object", "properties": parameters}
    schema = _schema(parameters, where)
    if schema.get("type") != "object":
        raise Refused("bad_tools", f"{where}: parameters are a {schema.get('type')}")
    return schema


def _schema(given: Any, where: str) -> Json:
    if not isinstance(given, dict):
        raise Refused("bad_tools", f"{where}: a schema is a {kind_of(given)}")
    schema = dict(given)
    if "type" in schema:
        kind = _type(schema.pop("type"), where)
        if kind is not None:
            schema = {"type": kind, **schema}
    said: Json = {}
    if "properties" in schema:
        schema["properties"], said = _properties(schema["properties"], where)
    for key, inner in _NESTED.items():
        if key in schema:
            schema[key] = inner(schema[key], f"{where}.{key}")
    if schema.get("type") == "object":
        schema.setdefault("properties", {})
        schema["required"] = _required(schema, said, where)
    return schema


def _or_truth(given: Any, where: str) -> Any:
    """A schema, or true or false: anything goes, nothing does."""
    return given if isinstance(given, bool) else _schema(given, where)


def _each(given: Any, where: str) -> list[Any]:
    if not isinstance(given, list):
        raise Refused("bad_tools", f"{where}: a {kind_of(given)}, expected a list")
    return [_or_truth(one, where) for one in given]


def _items(given: Any, where: str) -> Any:
    return _each(given, where) if isinstance(given, list) else _or_truth(given, where)


def _named(given: Any, where: str) -> Json:
    if not isinstance(given, dict):
        raise Refused("bad_tools", f"{where}: a {kind_of(given)}, expected an object")
    return {name: _or_truth(one, f"{where}.{name}") for name, one in given.items()}


# Where a schema holds schemas, but for `properties`.
_NESTED: dict[str, Callable[[Any, str], Any]] = {
    "items": _items,
    "prefixItems": _each,
    "additionalProperties": _or_truth,
    "not": _or_truth,
    "anyOf": _each,
    "oneOf": _each,
    "allOf": _each,
    "$defs": _named,
    "definitions": _named,
}


def _type(given: Any, where: str) -> str | list[str] | None:
    """A type name or a list of them in JSON schema's words; None where any type will do."""
    if not isinstance(given, list):
        return _type_name(given, where)
    names = [_type_name(one, where) for one in given]
    known = [name for name in names if name is not None]
    return known if known and len(known) == len(names) else None


def _type_name(given: Any, where: str) -> str | None:
    if not isinstance(given, str) or given.lower() not in _TYPES:
        raise Refused("bad_tools", f"{where}: the type {given!r} is not known")
    return _TYPES[given.lower()]


def _properties(given: Any, where: str) -> tuple[Json, dict[str, bool]]:
    """Their schemas, and which of them say themselves whether they are required."""
    if not isinstance(given, dict):
        raise Refused("bad_tools", f"{where}: properties is a {kind_of(given)}")
    schemas: Json = {}
    said: dict[str, bool] = {}
    for name, one in given.items():
        schema, needed = _without_flags(one, f"{where}.{name}")
        if needed is not None:
            said[name] = needed
        schemas[name] = _schema(schema, f"{where}.{name}")
    return schemas, said


def _without_flags(given: Any, where: str) -> tuple[Any, bool | None]:
    """A property's schema without what it says of itself, and whether it is required by that.

    JSON schema has no place for a truth under `required` or `optional`.
    """
    if not isinstance(given, dict):
        return given, None
    flags = {
        key: one for key in ("required", "optional") if isinstance(one := given.get(key), bool)
    }
    if len(set(flags.values())) == 1 < len(flags):
        raise Refused("bad_tools", f"{where} is both required and optional, or neither")
    schema = {key: one for key, one in given.items() if key not in flags}
    return schema, flags.get("required", not flags["optional"] if "optional" in flags else None)


def _required(schema: Json, said: dict[str, bool], where: str) -> list[str]:
    required = schema.get("required")
    if required is None:
        required = []
    if not isinstance(required, list):
        raise Refused("bad_tools", f"{where}: required is a {kind_of(required)}")
    for name in required:
        if not isinstance(name, str) or name not in schema["properties"]:
            raise Refused("bad_tools", f"{where}: {name!r} is required but not declared")
        if said.get(name) is False:
            raise Refused("bad_tools", f"{where}: {name!r} is both required and optional")
    return [*required, *(name for name, one in said.items() if one and name not in required)]
