"""A run folder with prompts for the tiny target, and a script that answers them by their number."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from actors.dispatch import ServerReport
from pipelines.generate_worker import WorkerPlan
from pipelines.recipe import Recipe, load_recipe
from pipelines.row_report import RowReport
from pipelines.schema import PROMPT_SCHEMA
from pipelines.store import RunFolder, write_parquet
from tests.support.fake_server import STOP_ID, Answer, Reply, Script, good_reply
from tests.support.road import write_recipe

NO_CONTENT, REFUSED = 3, 9  # the last digit of a prompt's number
ANSWER, ANSWER_TEXT = (40, 41, 42), "FGH<|im_end|>"  # by the tiny target's tokenizer


def recipe_for(folder: Path, target: Path, url: str, *overrides: str) -> Recipe:
    """The miniature recipe with a server that is already there."""
    attach = f"generate.servers={{kind: attach, urls: ['{url}']}}"
    return load_recipe(write_recipe(folder, target), [attach, *overrides])


@dataclass
class Box:
    """A mailbox without Ray."""

    reports: list[RowReport] = field(default_factory=list)
    is_open: bool = True

    def put(self, items: Sequence[RowReport]) -> bool:
        """Take the reports."""
        self.reports += items
        return self.is_open


@dataclass(frozen=True)
class Always:
    """A directory that says that its servers are ready."""

    urls: tuple[str, ...]

    def __call__(self) -> tuple[ServerReport, ...]:
        now = time.time()
        return tuple(ServerReport(url, True, None, now, None, None) for url in self.urls)


def plan_of(recipe: Recipe, run: RunFolder, *urls: str, **changes: Any) -> WorkerPlan:
    """The plan of a worker that is used without Ray."""
    given = {"servers": Always(urls), "report": Box(), **changes}
    return WorkerPlan.of(recipe, run, **given)


def prompt_row(number: int, set_name: str = "chat") -> dict[str, Any]:
    """A prompt whose second id is its number."""
    return {
        "sample_id": f"{set_name}-{number:012x}",
        "dataset": set_name,
        "domain": "chat",
        "messages": '[{"role": "user", "content": "hello"}]',
        "tools": "[]",
        "tools_given": "null",
        "repairs": "[]",
        "format": "messages",
        "prompt_ids": [1, number, 5],
        "history": [],
        "continuations": [],
        "source": "made for the tests",
        "license": "Apache-2.0",
    }


def write_prompts(run: RunFolder, count: int, set_name: str = "chat") -> list[str]:
    """Write prompt rows as prepare does; return their sample ids."""
    rows = [prompt_row(number, set_name) for number in range(count)]
    table = pa.Table.from_pylist(rows, schema=PROMPT_SCHEMA)
    write_parquet(run.prompts / set_name / "part-00000.parquet", table)
    return [row["sample_id"] for row in rows]


def by_number(request: dict[str, Any], nth: int) -> Answer:
    """Most prompts get an answer; some none at all, some an empty one."""
    del nth
    match request["input_ids"][1] % 10:
        case digit if digit == REFUSED:
            return Reply({"error": {"message": "no"}}, 400)
        case digit if digit == NO_CONTENT:
            return Reply(good_reply(request, [STOP_ID]))
        case _:
            return Reply(good_reply(request, [*ANSWER, STOP_ID], text=ANSWER_TEXT))


def refuse_all(request: dict[str, Any], nth: int) -> Answer:
    """A server that says no."""
    del request, nth
    return Reply({"error": {"message": "no"}}, 400)


def after_the_probe(script: Script) -> Script:
    """A server that is well while it is looked at, and answers rows by the script."""

    def answer(request: dict[str, Any], nth: int) -> Answer:
        is_row = request["sampling_params"]["max_new_tokens"] == 32  # the recipe's
        return script(request, nth) if is_row else by_number(request, nth)

    return answer
