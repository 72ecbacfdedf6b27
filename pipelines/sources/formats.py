"""The formats of prompt sets, and which of them the rows of a file are in.

A format reads one row into `Given`, and refuses a row that is not of its shape; nothing is checked
here. Tools are handed on as they stand, text of a column `system` opens the conversation, and a
thought in front of any answer becomes its reasoning.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipelines.errors import BadRecipe
from pipelines.sources import bfcl, glaive, openthoughts, pairs, sharegpt, swe_agent
from pipelines.sources.columns import list_of, looks_listed, opened_by_system, tools_of
from pipelines.sources.row import Format, FormatName, Given, Json, Refused, kind_of
from pipelines.sources.thinking import think_apart


def recognise(rows: Sequence[Json], *, file: str) -> Format:
    """The format of a file, by its first rows: of those that fit most rows, the first in the table.

    A few broken rows hide no format; a format refuses them when it reads. Raises `BadRecipe` where
    no format fits more than half of the rows.
    """
    for known in _TABLE:
        if 2 * sum(map(known.recognises, rows)) > len(rows):
            return format_of(known.name)
    columns = Counter(column for row in rows for column in row)
    seen = ", ".join(f"{name} ({kind_of(_first(rows, name))})" for name in columns) or "no columns"
    raise BadRecipe(
        f"the rows of {file} are in no known format: they have {seen}",
        expected="one of\n" + "\n".join(f"    {known.name}: {known.columns}" for known in _TABLE),
        change="name the format in the recipe, or rename the columns to those of one",
    )


def format_of(name: FormatName) -> Format:
    """A format by its name: it is not asked whether it fits."""
    return _FORMATS[name]


def _first(rows: Sequence[Json], column: str) -> Any:
    return next(row[column] for row in rows if column in row)


def _read_messages(row: Json) -> Given:
    """`messages` in OpenAI's words, a list or JSON; so does open-r1/Mixture-of-Thoughts."""
    return Given(opened_by_system(row, list_of(row, "messages")), tools_of(row))


def _read_ultrachat(row: Json) -> Given:
    """`messages` of HuggingFaceH4/ultrachat_200k; `data` of UltraChat, where two take turns."""
    if row.get("messages") is not None:
        return _read_messages(row)
    data = list_of(row, "data")
    if not all(isinstance(text, str) for text in data):
        raise Refused("wrong_format", "data is not a list of texts")
    roles = ("user", "assistant")
    return Given([{"role": roles[i % 2], "content": text} for i, text in enumerate(data)])


def _has_messages(row: Json) -> bool:
    return looks_listed(row.get("messages"))


def _is_ultrachat(row: Json) -> bool:
    data = row.get("data")
    texts = isinstance(data, list) and all(isinstance(text, str) for text in data)
    return (_has_messages(row) and "prompt_id" in row) or (texts and "id" in row)


class _Known(NamedTuple):
    name: FormatName
    columns: str  # by which a row is known
    recognises: Callable[[Json], bool]
    read: Callable[[Json], Given]


# The first that fits wins: a set by name stands before the general form that it also has.
_TABLE = (
    _Known("glaive", "system and chat as text with labels", glaive.recognises, glaive.read),
    _Known("bfcl", "question as lists of messages, function", bfcl.recognises, bfcl.read),
    _Known(
        "swe_agent",
        "trajectory, or messages with instance_id or traj_id",
        swe_agent.recognises,
        swe_agent.read,
    ),
    _Known(
        "openthoughts",
        "conversations of from and value with marked thoughts",
        openthoughts.recognises,
        openthoughts.read,
    ),
    _Known("sharegpt", "conversations of from and value", sharegpt.recognises, sharegpt.read),
    _Known(
        "mixture_of_thoughts",
        "messages, num_tokens",
        lambda row: _has_messages(row) and "num_tokens" in row,
        _read_messages,
    ),
    _Known(
        "ultrachat",
        "messages with prompt_id, or data as texts with id",
        _is_ultrachat,
        _read_ultrachat,
    ),
    _Known("messages", "messages", _has_messages, _read_messages),
    _Known(
        "magicoder_oss",
        "problem, solution, lang",
        pairs.has_texts("problem", "solution", "lang"),
        pairs.read_columns("problem", "solution"),
    ),
    _Known(
        "opencode_instruct",
        "input, output, generation_algorithm",
        pairs.has_texts("input", "output", "generation_algorithm", without=("instruction",)),
        pairs.read_columns("input", "output", without=("instruction",)),
    ),
    _Known(
        "alpaca",
        "instruction, output (input, history)",
        pairs.has_texts("instruction", "output"),
        pairs.read_alpaca,
    ),
    _Known(
        "magicoder_evol",
        "instruction, response",
        pairs.has_texts("instruction", "response", without=("input",)),
        pairs.read_columns("instruction", "response", without=("input",)),
    ),
    _Known(
        "prompt_completion",
        "prompt (completion or response)",
        pairs.recognises_prompt,
        pairs.read_prompt,
    ),
    _Known(
        "problem_solution",
        "problem or question, solution, answer, answers or response",
        pairs.recognises_problem,
        pairs.read_problem,
    ),
)


def _format(known: _Known) -> Format:
    def read(row: Json) -> Given:
        given = known.read(row)
        return Given([think_apart(message) for message in given.messages], given.tools)

    return Format(known.name, known.recognises, read)


_FORMATS = {known.name: _format(known) for known in _TABLE}
