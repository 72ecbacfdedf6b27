"""PROMPTS.md names every format, every repair and every rejection that there is."""

import re
from pathlib import Path
from typing import get_args

import yaml

from pipelines.recipe import Prompts
from pipelines.sources import repairs
from pipelines.sources.row import FORMAT_NAMES, Reason

PAGE = (Path(__file__).parent.parent / "PROMPTS.md").read_text()


def named(heading: str) -> set[str]:
    """The names in the first column of the table under a heading."""
    table = PAGE.split(f"| {heading} |")[1].split("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_format_is_named_and_no_other():
    assert named("format") == set(FORMAT_NAMES)


def test_every_rejection_is_named_and_no_other():
    assert named("rejected") == set(get_args(Reason))


def test_every_repair_is_a_rule():
    rules = Path(repairs.__file__).with_name("messages.py").read_text()
    assert named("mended") == set(re.findall(r"^\| `(\w+)`", rules, re.MULTILINE))
    assert named("mended") <= vars(repairs).keys()


def test_the_example_is_a_recipes_part():
    example = yaml.safe_load(PAGE.split("```yaml")[1].split("```")[0])["prompts"]
    assert Prompts.model_validate(
        {
            **example,
            "train": tuple(example["train"]),
            "evaluation": tuple(example["evaluation"]),
        }
    )
