"""One undisturbed run, for all flows that only look at it."""

import subprocess
from pathlib import Path

import pytest

from tests.support.road import eyas, write_recipe


@pytest.fixture(scope="session")
def finished(tmp_path_factory, tiny_target) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A recipe and the outcome of its one run, all stages."""
    recipe = write_recipe(tmp_path_factory.mktemp("road"), tiny_target)
    return recipe, eyas("run", recipe)
