"""What stops a run, each with the exit code and the sentence that mends it."""

from typing import ClassVar


class RunError(Exception):
    """A run cannot go on. The message says what was seen, what was expected, what to change."""

    exit_code: ClassVar[int] = 1

    def __init__(self, seen: str, *, expected: str, change: str) -> None:
        super().__init__(f"{seen}\n  expected: {expected}\n  change:   {change}")
        self.seen = seen
        self.expected = expected
        self.change = change

    def __reduce__(self) -> tuple:  # keyword-only arguments do not survive the default pickling
        return (_rebuild, (type(self), self.seen, self.expected, self.change))


class BadRecipe(RunError):
    """The recipe, an argument or a source file named by it is wrong."""

    exit_code = 2


class PreflightFailed(RunError):
    """The machine, the target or a server cannot do what the recipe asks."""

    exit_code = 3


class StorageFailed(RunError):
    """Nothing more can be written: no room, no permission, or somebody else holds the store."""

    exit_code = 3


class QualityStop(RunError):
    """A quality gate saw data that must not be trained on."""

    exit_code = 4


class VerificationFailed(RunError):
    """An artefact does not keep its promise."""

    exit_code = 5


def _rebuild(kind: type[RunError], seen: str, expected: str, change: str) -> RunError:
    return kind(seen, expected=expected, change=change)
