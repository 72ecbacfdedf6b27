"""What a glance says, as values: for the screen, for `--json`, and for a comparison."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.glancing.alive import Alive
from pipelines.glancing.distribution import Bin, Distribution, Number
from pipelines.glancing.drill import FieldDrill
from pipelines.glancing.fields import FieldGlance
from pipelines.glancing.findings import Finding
from pipelines.glancing.health import ResponseHealth


@dataclass(frozen=True)
class Lengths:
    """How long things are."""

    quantiles: dict[str, Number]  # min, p10, p50, p90, p99, max
    histogram: tuple[Bin, ...]

    @staticmethod
    def of(numbers: Distribution) -> "Lengths":
        """Of the numbers that were counted."""
        return Lengths(numbers.quantiles(), numbers.histogram())


@dataclass(frozen=True)
class ResponseGlance:
    """What the answers are like, in numbers."""

    answers: int
    kept_aside: dict[str, int]  # rows that are not ok, by status
    with_reasoning: int
    reasoning_share: float | None  # of all characters; None where there are none
    finish: dict[str, int]
    usage: dict[str, int]  # completion_tokens: ok, missing, null, zero, negative, text, wrong type
    completion_tokens: Lengths
    characters: Lengths  # of reasoning and content together
    scripts: dict[str, int]
    languages: dict[str, float] | None  # shares of a sample; None where nobody looked

    @staticmethod
    def of(health: ResponseHealth, languages: dict[str, float] | None) -> "ResponseGlance":
        """Of the counts of a pass."""
        characters = health.reasoning_characters + health.content_characters
        return ResponseGlance(
            answers=health.rows,
            kept_aside=dict(health.not_ok.most_common()),
            with_reasoning=health.with_reasoning,
            reasoning_share=health.reasoning_characters / characters if characters else None,
            finish=dict(health.finish.most_common()),
            usage=dict(health.usage.most_common()),
            completion_tokens=Lengths.of(health.tokens),
            characters=Lengths.of(health.characters),
            scripts=dict((+health.scripts).most_common()),
            languages=languages,
        )


@dataclass(frozen=True)
class TensorGlance:
    """One tensor of a safetensors file; `values` is the range of a sample, or what is wrong."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    values: str


@dataclass(frozen=True)
class SetGlance:
    """One file, or the files of one format in one folder."""

    name: str
    files: int
    files_read: int
    format: str
    kind: str  # responses, prompts, tensors, rows
    alive: Alive
    ends_in_half_line: bool
    rows: int | None  # None: nobody can say
    rows_exact: bool
    rows_read: int
    malformed: tuple[str, ...]  # the first few, by place
    malformed_count: int  # of what was read
    fields: tuple[FieldGlance, ...]
    field: FieldDrill | None  # the one that was asked for
    tensors: tuple[TensorGlance, ...]
    responses: ResponseGlance | None
    findings: tuple[Finding, ...]  # worst first
    samples: tuple[Mapping[str, Any], ...]

    @property
    def is_healthy(self) -> bool:
        """No finding is a fault."""
        return all(one.severity != "fault" for one in self.findings)


@dataclass(frozen=True)
class Difference:
    """One line of a comparison of two sets."""

    what: str
    first: str
    second: str


@dataclass(frozen=True)
class GlanceReport:
    """Everything that was looked at; beside each other where two paths were given."""

    sets: tuple[SetGlance, ...]
    comparison: tuple[Difference, ...] | None

    @property
    def is_healthy(self) -> bool:
        """No finding of any set is a fault."""
        return all(one.is_healthy for one in self.sets)

    def to_json(self) -> dict[str, Any]:
        """The same, as data."""
        sets = [{"is_healthy": one.is_healthy, **asdict(one)} for one in self.sets]
        beside = self.comparison
        return {
            "is_healthy": self.is_healthy,
            "sets": sets,
            "comparison": None if beside is None else [asdict(one) for one in beside],
        }
