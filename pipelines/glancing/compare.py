"""Two sets side by side: what differs, in few lines."""

from collections.abc import Iterator, Mapping

from pipelines.glancing.report import Difference, ResponseGlance, SetGlance
from pipelines.glancing.words import byte_size, mix, number, rows_text, share


def compare(first: SetGlance, second: SetGlance) -> tuple[Difference, ...]:
    """Every line that can be said of one of the two; equal ones, too."""
    before, after = dict(_facts(first)), dict(_facts(second))
    names = list(dict.fromkeys([*before, *after]))
    return tuple(Difference(name, before.get(name, "-"), after.get(name, "-")) for name in names)


def _facts(one: SetGlance) -> Iterator[tuple[str, str]]:
    yield "rows", rows_text(one)
    yield "size", byte_size(one.alive.bytes)
    yield "format", f"{one.format}, {one.kind}"
    yield "malformed", f"{one.malformed_count:,}"
    yield "faults", _named(one, "fault")
    yield "warnings", _named(one, "warning")
    if one.responses is not None and one.responses.answers:
        yield from _answers(one.responses)
    for field in one.fields:
        filled = share(field.filled, one.rows_read)
        yield f"field {field.name}", f"{'/'.join(field.types) or '-'} {filled}"


def _answers(answers: ResponseGlance) -> Iterator[tuple[str, str]]:
    yield "with reasoning", share(answers.with_reasoning, answers.answers)
    if answers.reasoning_share is not None:
        yield "text in reasoning", f"{answers.reasoning_share:.0%}"
    yield "completion_tokens", mix(answers.usage, answers.answers)
    yield "finish", mix(answers.finish, answers.answers)
    yield "scripts", mix(answers.scripts, answers.answers)
    yield from _quantiles("tokens", answers.completion_tokens.quantiles)
    yield from _quantiles("characters", answers.characters.quantiles)


def _quantiles(what: str, quantiles: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    for name in ("p10", "p50", "p90", "max"):
        if name in quantiles:
            yield f"{what} {name}", number(quantiles[name])


def _named(one: SetGlance, severity: str) -> str:
    return ", ".join(f.name for f in one.findings if f.severity == severity) or "none"
