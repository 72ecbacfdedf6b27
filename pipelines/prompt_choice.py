"""What is decided by looking at more than one prompt: copies, and what was held out.

Prompts come in the order of the recipe's sets and of their rows, whoever made them.
"""

import hashlib
import json
from array import array
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa

from pipelines.errors import BadRecipe
from pipelines.prepare_worker import Worked
from pipelines.recipe import PromptSet
from pipelines.selection.near_duplicates import NearDuplicates
from pipelines.selection.seen import Seen
from pipelines.sources.row import BadRow


class Places:
    """Where rows came from, by the number that they were taken in with: 12 bytes a row."""

    def __init__(self) -> None:
        self._files: dict[str, int] = {}
        self._which, self._lines = array("l"), array("q")

    def add(self, one: PromptSet, file: str, line: int) -> None:
        """Note the next row's place."""
        self._which.append(self._files.setdefault(_file_of(one, file), len(self._files)))
        self._lines.append(line)

    def __getitem__(self, number: int) -> str:
        file = list(self._files)[self._which[number]]
        return f"{file}:{self._lines[number]}"


def place_of(one: PromptSet, file: str, line: int) -> str:
    """Where a person finds a row."""
    return f"{_file_of(one, file)}:{line}"


def _file_of(one: PromptSet, file: str) -> str:
    return one.path if Path(one.path).name == file else f"{one.path} ({file})"


class HeldOut:
    """What the evaluation prompts say: no training prompt may say it too."""

    def __init__(self) -> None:
        self.said: dict[bytes, str] = {}  # -> place
        self._texts: dict[str, str] = {}  # sample id -> what it asks

    def add(self, worked: Worked, kept: list[int], one: PromptSet) -> None:
        """Take in the kept prompts of a chunk."""
        rows = worked.prompts.take(pa.array(kept, pa.int64())).to_pylist()
        for index, row in zip(kept, rows, strict=True):
            place = place_of(one, row["file"], row["line"])
            self.said.update(dict.fromkeys(worked.said[index], place))
            messages = json.loads(row["messages"])
            asked = [one["content"] for one in messages if one["role"] in ("user", "tool")]
            self._texts[row["sample_id"]] = "\n".join(asked)

    def write(self, folder: Path) -> Path:
        """Write what is asked as JSON, for processes that look for it in training prompts.

        The name says what is in it: a process reads it once.
        """
        content = json.dumps(self._texts).encode()
        path = folder / f".held-out-{hashlib.sha256(content).hexdigest()[:16]}.json"
        path.write_bytes(content)
        return path


class Chooser:
    """Takes the first of several copies; without `near`, of exact ones only."""

    def __init__(self, said: Mapping[bytes, str], near: NearDuplicates | None) -> None:
        self._said, self._near = said, near
        self._seen, self._places, self._near_places = Seen(), Places(), Places()

    def choose(self, worked: Worked, one: PromptSet) -> tuple[list[int], list[BadRow]]:
        """The prompts of a chunk that are no copies, by their index; and the others.

        Raises `BadRecipe` for a prompt that is held out.
        """
        files = worked.prompts["file"].to_pylist()
        lines = worked.prompts["line"].to_pylist()
        new: list[int] = []
        bad: list[BadRow] = []
        for index, (file, line) in enumerate(zip(files, lines, strict=True)):
            self._refuse_held_out(worked.said[index], one, file, line)
            earlier, is_same = self._seen.offer(worked.digests[index])
            if earlier is None:
                new.append(index)
                self._places.add(one, file, line)
            elif is_same:
                detail = f"the same prompt as {self._places[earlier]}"
                bad.append(BadRow(file, line, "duplicate", detail))
            else:
                detail = f"the same id as {self._places[earlier]}"
                bad.append(BadRow(file, line, "id_collision", detail))
        if self._near is None or not new:
            return new, bad
        assert worked.signatures is not None
        kept = []
        for index, near in zip(new, self._near.first_of(worked.signatures[new]), strict=True):
            if near is None:
                kept.append(index)
                self._near_places.add(one, files[index], lines[index])
            else:
                detail = f"{near[1]:.0%} like {self._near_places[near[0]]}"
                bad.append(BadRow(files[index], lines[index], "near_duplicate", detail))
        return kept, bad

    def _refuse_held_out(
        self, said: tuple[bytes, ...], one: PromptSet, file: str, line: int
    ) -> None:
        for turn in said:
            if turn in self._said:
                raise BadRecipe(
                    f"the evaluation prompt {self._said[turn]} is also a training prompt, "
                    f"{place_of(one, file, line)}",
                    expected="evaluation prompts that the draft never saw",
                    change="remove one of the two, or set prompts.selection.shared_words: such "
                    "training prompts are left out then",
                )
