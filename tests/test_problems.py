"""The runbook's table of known problems names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FROM_THE_FIELD = 32
_ROW = re.compile(r"^\| (\d+) \| .* \| (.*) \|$")
_TEST = re.compile(r"`(tests/\S+\.py)::(test_\w+)`")


def rows() -> dict[int, list[tuple[str, str]]]:
    """The tests that each numbered row names, as (file, function)."""
    text = (ROOT / "RUNBOOK.md").read_text()
    section = text.split("## Known problems", 1)[1].split("\n## ", 1)[0]
    found = (_ROW.match(line) for line in section.splitlines())
    return {int(one[1]): _TEST.findall(one[2]) for one in found if one is not None}


def test_every_problem_has_its_row_and_every_row_a_test():
    numbers = list(rows())
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= FROM_THE_FIELD
    assert [number for number, tests in rows().items() if not tests] == []


def test_every_test_that_the_table_names_exists():
    named = {one for tests in rows().values() for one in tests}
    functions = {
        file: {
            node.name
            for node in ast.walk(ast.parse((ROOT / file).read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        for file in {file for file, _ in named}
        if (ROOT / file).is_file()
    }
    missing = sorted(
        f"{file}::{name}"
        for file, name in named
        if file not in functions or name not in functions[file]
    )
    assert missing == []
