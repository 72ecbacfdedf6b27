"""Sets of one question and one answer, each in a column of its own.

A row that holds more of its question than its format has a place for is refused: to ask a part of
a question would be to ask another one. The answer is not asked for; where it is null there is none.

Sets in these forms: tatsu-lab/alpaca and LLaMA-Factory's files; TRL's prompt-completion and
prompt-only types; openai/gsm8k, AI-MO's and open-r1's problems, Open-Orca/OpenOrca;
ise-uiuc/Magicoder-OSS-Instruct-75K and -Evol-Instruct-110K; nvidia/OpenCodeInstruct.
"""

from collections.abc import Callable
from typing import Any

from pipelines.sources.columns import list_of, opened_by_system, optional_text, text_of, tools_of
from pipelines.sources.row import Given, Json, Refused, kind_of

_ELSEWHERE = ("context", "passage", "choices", "options")  # where other sets keep half a question
_PROMPT_ELSEWHERE = (*_ELSEWHERE, "input", "instruction", "question")
_PROBLEMS = ("problem", "question")
_SOLUTIONS = ("solution", "answer", "answers", "response")


def has_texts(*columns: str, without: tuple[str, ...] = ()) -> Callable[[Json], bool]:
    """Recognises a row by columns of text, of which one may be null, and by what it lacks."""

    def recognises(row: Json) -> bool:
        texts = all(isinstance(row.get(column, 0), str | None) for column in columns)
        return texts and not any(column in row for column in (*_ELSEWHERE, *without))

    return recognises


def read_columns(
    question: str, answer: str, *, without: tuple[str, ...] = ()
) -> Callable[[Json], Given]:
    """Reads rows with one column for the question and one for the answer."""

    def read(row: Json) -> Given:
        _refuse_more(row, *_ELSEWHERE, *without)
        return _given(row, [], text_of(row, question), optional_text(row, answer))

    return read


def read_alpaca(row: Json) -> Given:
    """`instruction` and, on the next line, `input`; `output`; earlier turns in `history`."""
    _refuse_more(row, *_ELSEWHERE)
    earlier: list[Json] = []
    for pair in [] if row.get("history") is None else list_of(row, "history"):
        if not isinstance(pair, list) or len(pair) != 2:
            raise Refused("wrong_format", "history is not a list of pairs")
        earlier += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    parts = (text_of(row, "instruction"), optional_text(row, "input"))
    question = "\n".join(part for part in parts if part)
    return _given(row, earlier, question, optional_text(row, "output"))


def recognises_prompt(row: Json) -> bool:
    """By `prompt`, as text or as messages."""
    asked = isinstance(row.get("prompt"), str | list)
    return asked and not any(column in row for column in _PROMPT_ELSEWHERE)


def read_prompt(row: Json) -> Given:
    """`prompt` and `completion` or `response`, each as text or as messages; also `prompt` alone."""
    _refuse_more(row, *_PROMPT_ELSEWHERE)
    answer = row.get("completion") if row.get("response") is None else row["response"]
    answers = [] if answer is None else _said("assistant", "the answer", answer)
    messages = [*_said("user", "prompt", row.get("prompt")), *answers]
    return Given(opened_by_system(row, messages), tools_of(row))


def recognises_problem(row: Json) -> bool:
    """By `problem` or `question` as text beside `solution`, `answer`, `answers` or `response`."""
    asked = any(isinstance(row.get(column), str) for column in _PROBLEMS)
    answered = any(column in row for column in _SOLUTIONS)
    return asked and answered and not any(column in row for column in (*_ELSEWHERE, "input"))


def read_problem(row: Json) -> Given:
    """`problem` or `question`; of several answers the first, a worked-out one before a result."""
    _refuse_more(row, *_ELSEWHERE, "input")
    questions = [column for column in _PROBLEMS if row.get(column) is not None]
    if len(questions) != 1:
        raise Refused("wrong_format", "expected one of problem and question")
    answer = next((one for key in _SOLUTIONS if (one := row.get(key)) is not None), None)
    if isinstance(answer, list):
        answer = answer[0] if answer else None
    if isinstance(answer, int | float):
        answer = str(answer)
    if not isinstance(answer, str | None):
        raise Refused("wrong_format", f"the answer is a {kind_of(answer)}")
    return _given(row, [], text_of(row, questions[0]), answer)


def _refuse_more(row: Json, *columns: str) -> None:
    for column in columns:
        if row.get(column) not in (None, "", []):
            detail = f"{column} may hold a part of the question, and has no place in the format"
            raise Refused("wrong_format", detail)


def _given(row: Json, earlier: list[Json], question: str, answer: str | None) -> Given:
    messages = [*earlier, {"role": "user", "content": question}]
    if answer is not None:
        messages.append({"role": "assistant", "content": answer})
    return Given(opened_by_system(row, messages), tools_of(row))


def _said(role: str, where: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, list):
        return value
    raise Refused("wrong_format", f"{where} is a {kind_of(value)}, expected text or messages")
