"""Tool declarations of any set as JSON schema."""

from typing import Any

from pipelines.sources.row import Json, Refused, kind_of

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
        raise Refused("bad_tools", f"tools is a {kind_of(given)}, expected a list")
    tools = tuple(_tool(index, tool) for index, tool in enumerate(given))
    names = [tool["function"]["name"] for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise Refused("bad_tools", f"two tools are named {name!r}")
    return tools


def _tool(index: int, tool: Any) -> Json:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("bad_tools", f"tool {index} has no function name")
    description = function.get("description", "")
    if not isinstance(description, str):
        raise Refused("bad_tools", f"tool {index}: description is a {kind_of(description)}")
    parameters = function.get("parameters") or {"type": "object"}
    where = f"tool {function['name']!r}"
    schema = _schema(parameters, where)
    if schema.get("type") != "object":
        raise Refused("bad_tools", f"{where}: parameters are a {schema.get('type')}")
    return {
        "type": "function",
        "function": {"name": function["name"], "description": description, "parameters": schema},
    }


def _schema(given: Any, where: str) -> Json:
    if not isinstance(given, dict):
        raise Refused("bad_tools", f"{where}: a schema is a {kind_of(given)}")
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
        raise Refused("bad_tools", f"{where}: the type {given!r} is not known")
    return _TYPES[given.lower()]


def _properties(given: Any, where: str) -> Json:
    if not isinstance(given, dict):
        raise Refused("bad_tools", f"{where}: properties is a {kind_of(given)}")
    return {name: _schema(one, f"{where}.{name}") for name, one in given.items()}


def _required(schema: Json, where: str) -> list[str]:
    required = schema.get("required", [])
    if not isinstance(required, list):
        raise Refused("bad_tools", f"{where}: required is a {kind_of(required)}")
    unknown = [name for name in required if name not in schema["properties"]]
    if unknown:
        raise Refused("bad_tools", f"{where}: {unknown[0]!r} is required but not declared")
    return required
