"""What one pass over rows collects. Several passes over parts of a file make one."""

import heapq
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.glancing.drill import Drill
from pipelines.glancing.fields import Profile
from pipelines.glancing.health import ResponseHealth
from pipelines.glancing.reading import At, Row

_CONTENTS = 300  # whose language is told
_READ = 2_000  # characters of each


@dataclass(frozen=True)
class Wish:
    """What is to be collected beside the usual."""

    show: int = 0  # whole rows
    field: str | None = None  # to be looked at in depth
    full: bool = False


class Draw:
    """A uniform sample of some size; parts merge. The same rows for the same file."""

    def __init__(self, size: int, part: int) -> None:
        self._size = size
        self._kept: list[tuple[float, int, Any]] = []  # a heap: the highest draws are kept
        self._chooser = random.Random(part)

    def add(self, number: int, value: Any) -> None:
        """Take part in the draw. `number` is the value's place among all."""
        self._keep((self._chooser.random(), number, value))

    def _keep(self, one: tuple[float, int, Any]) -> None:
        if len(self._kept) < self._size:
            heapq.heappush(self._kept, one)
        elif one[:2] > self._kept[0][:2]:
            heapq.heapreplace(self._kept, one)

    def merge(self, later: "Draw", before: int) -> None:
        """Add a later part's, before which so many values came."""
        for draw, number, value in later._kept:
            self._keep((draw, before + number, value))

    def values(self) -> list[Any]:
        """What was drawn, in its order."""
        return [value for _, _, value in sorted(self._kept, key=lambda one: one[1])]


class Look:
    """Fields, health, and what was wished for."""

    def __init__(self, wish: Wish, part: int = 0) -> None:
        self.wish = wish
        self.profile = Profile(examples=wish.show > 0)
        self.health = ResponseHealth()
        self.drill = None if wish.field is None else Drill(wish.field)
        self._rows = Draw(wish.show, part)
        self._contents = Draw(_CONTENTS, part)

    def add(self, rows: Iterable[tuple[At, Row]]) -> None:
        """Look at rows."""
        for at, row in rows:
            self.profile.add(row)
            self.health.add(row, at)
            if self.drill is not None:
                self.drill.add(row, at)
            if self.wish.show:
                self._rows.add(self.profile.rows, row)
            if self.wish.full and isinstance(content := row.get("content"), str):
                self._contents.add(self.profile.rows, content[:_READ])

    def merge(self, later: "Look") -> None:
        """Add what was seen in a later part."""
        before = self.profile.rows
        self.profile.merge(later.profile)
        self.health.merge(later.health)
        if self.drill is not None and later.drill is not None:
            self.drill.merge(later.drill)
        self._rows.merge(later._rows, before)
        self._contents.merge(later._contents, before)

    def samples(self) -> tuple[Mapping[str, Any], ...]:
        """The rows that were drawn, as JSON can say them."""
        return tuple(_plain(row) for row in self._rows.values())

    def languages(self) -> dict[str, float] | None:
        """Shares of languages among some contents, the most frequent first.

        None where nobody asked for a full look: the model alone takes longer than any other.
        """
        contents = self._contents.values()
        if not contents:
            return None
        from pipelines.selection.language import LanguageProfile, language_of

        profile = LanguageProfile()
        profile.add(map(language_of, contents))
        return profile.shares(top=6)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if type(value).__module__ == "numpy":
        return value.tolist()
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else str(value)
    return value if isinstance(value, str | int | None) else str(value)
