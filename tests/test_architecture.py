"""The folder rules of ARCHITECTURE.md, read from the source."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("actors", "pipelines", "training")
ALLOWED = {"actors": {"actors"}, "training": {"training"}, "pipelines": set(PACKAGES)}
# Only these may know Ray or DeepSpeed; everything else runs in a plain interpreter.
SHELLS = {
    "actors/mailbox.py",
    "actors/fleet.py",
    "pipelines/evaluate.py",
    "pipelines/feature_stream.py",
    "pipelines/generate.py",
    "pipelines/publish.py",
    "pipelines/run.py",
    "pipelines/train.py",
    "training/engine.py",
    "training/loop.py",
}
# Loaded inside a server's process, or started as a program of their own.
STANDALONE = {
    "actors/capture_file.py": {"numpy", "torch", "safetensors"},
    "actors/capture_hook.py": {"torch", "actors"},  # of actors only the one above
    "actors/guard.py": set(),
}
REFUSED_NAMES = {"utils", "helpers", "common", "misc", "manager", "base"}

SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> set[str]:
    """Every dotted module that a file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)} imports relatively"
            assert node.module is not None
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_arrows_between_packages_go_one_way(path: Path):
    package = path.relative_to(ROOT).parts[0]
    used = {name.split(".")[0] for name in imports_of(path)} & set(PACKAGES)
    assert used <= ALLOWED[package], f"{name_of(path)} imports {sorted(used - ALLOWED[package])}"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_ray_and_deepspeed_are_known_by_the_shells_only(path: Path):
    used = {name.split(".")[0] for name in imports_of(path)} & {"ray", "deepspeed"}
    assert not used or name_of(path) in SHELLS, f"{name_of(path)} imports {sorted(used)}"


def test_no_module_imports_itself_through_another():
    modules = {name_of(path)[:-3].replace("/", "."): path for path in SOURCES}
    graph = {name: imports_of(path) & modules.keys() for name, path in modules.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("name", sorted(STANDALONE))
def test_what_runs_inside_another_process_brings_nothing_along(name: str):
    used = {one.split(".")[0] for one in imports_of(ROOT / name)}
    assert used <= set(sys.stdlib_module_names) | STANDALONE[name]


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_file_says_what_it_is(path: Path):
    assert ast.get_docstring(ast.parse(path.read_text())), name_of(path)
    assert path.stem not in REFUSED_NAMES


@pytest.mark.parametrize("path", [one for one in SOURCES if one.name == "__init__.py"], ids=name_of)
def test_a_package_file_holds_a_docstring_only(path: Path):
    assert len(ast.parse(path.read_text()).body) == 1


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_exception_is_swallowed(path: Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{name_of(path)}:{node.lineno} catches everything"
            assert not all(isinstance(line, ast.Pass) for line in node.body), (
                f"{name_of(path)}:{node.lineno} swallows"
            )


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_only_the_command_ends_the_process(path: Path):
    if name_of(path) == "pipelines/cli.py":
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            called = f"{node.value.id}.{node.attr}"
            assert called not in {"os._exit", "sys.exit"}, f"{name_of(path)}:{node.lineno}"


def test_every_test_file_mirrors_a_source_file():
    sources = {name_of(path) for path in SOURCES}
    for package in PACKAGES:
        for test in (ROOT / "tests" / package).rglob("test_*.py"):
            place = test.parent.relative_to(ROOT / "tests").as_posix()
            stem = test.stem.removeprefix("test_")
            assert any(
                f"{place}/{name}.py" in sources for name in (stem, stem.rsplit("_", 1)[0])
            ), f"{name_of(test)} mirrors nothing"


def test_importing_the_packages_has_no_side_effect():
    program = (
        "import sys; before = set(sys.modules); import actors, pipelines, training\n"
        "extra = {n.split('.')[0] for n in set(sys.modules) - before}\n"
        "assert extra <= {'actors', 'pipelines', 'training'}, extra"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_pure_core_of_training_needs_neither_ray_nor_deepspeed():
    names = [
        name_of(path)[:-3].replace("/", ".")
        for path in SOURCES
        if path.parts[-2] == "training" and name_of(path) not in SHELLS
    ]
    program = (
        "import sys; sys.modules['ray'] = sys.modules['deepspeed'] = None\n"
        f"import importlib; [importlib.import_module(n) for n in {names!r}]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_command_answers_help_without_ray_or_torch():
    program = (
        "import sys; sys.modules['ray'] = sys.modules['torch'] = None\n"
        "import pipelines.cli as cli; sys.argv = ['eyas', 'run', '--help']; cli.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=ROOT, capture_output=True, text=True
    )
    assert "--from" in result.stdout
