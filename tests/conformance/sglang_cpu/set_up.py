"""Sets up the stock SGLang server for a machine without a GPU, once, in the cache folder.

`python -m tests.conformance.sglang_cpu.set_up` installs the published wheels (1.9 GB) and checks
that the server can be imported. `EYAS_SGLANG_PYTHON` names an interpreter to use instead. No file
of SGLang is changed: `absent/` stands in for three packages that need a GPU.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

from pipelines.recipe import cache_folder

logger = logging.getLogger(__name__)

VERSION = "0.5.23"
HERE = Path(__file__).parent
# What makes the stock server run on a CPU, and no slower than it must.
STOCK_VARIABLES = {
    "PYTHONPATH": str(HERE / "absent"),
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # torch's compiler would take the stand-in for triton
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # more threads than idle cores made it ten times slower
}
_REQUIREMENTS = HERE / "requirements.txt"
_TORCH = "torch==2.13.0+cpu"
_TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# Without their dependencies, which are GPU packages.
_ALONE = (f"sglang=={VERSION}", "xgrammar==0.2.9", "apache-tvm-ffi==0.1.11")
_CHECK = """
import sgl_kernel, sglang, torch
assert torch.version.cuda is None, "a CUDA build of torch was installed"
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import scheduler
from sglang.srt.models import llama
"""


class SetUpFailed(Exception):
    """The server could not be installed. Says what was seen, expected, and to change."""


def stock_python() -> Path:
    """The interpreter that has the stock server."""
    named = os.environ.get("EYAS_SGLANG_PYTHON")
    return Path(named) if named else _folder() / "bin" / "python"


def stock_environment() -> dict[str, str]:
    """The whole environment of the server's processes; all of them inherit it."""
    return {**os.environ, **STOCK_VARIABLES}


def set_up() -> Path:
    """Install what is not installed yet; return the interpreter. Raises `SetUpFailed`."""
    python = stock_python()
    if os.environ.get("EYAS_SGLANG_PYTHON"):
        _check(python)
        return python
    folder, wanted = _folder(), _wanted()
    mark = folder / "complete"
    if mark.exists() and mark.read_text() == wanted:
        return python
    logger.info("setting up SGLang %s in %s (once: 1.9 GB, some minutes)", VERSION, folder)
    started = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)  # a set-up that was interrupted, or of other versions
    venv.create(folder, with_pip=True)
    try:
        _pip(python, _TORCH)  # from wherever pip looks by itself
    except SetUpFailed:
        _pip(python, "--index-url", os.environ.get("TORCH_INDEX", _TORCH_INDEX), _TORCH)
    _pip(python, "-r", str(_REQUIREMENTS))
    _pip(python, "--no-deps", *_ALONE)
    _check(python)
    mark.write_text(wanted)
    logger.info("set up in %.0f s", time.monotonic() - started)
    return python


def _folder() -> Path:
    return cache_folder() / f"sglang-{VERSION}-cpu"


def _wanted() -> str:
    names = "\n".join((_TORCH, *_ALONE))
    return hashlib.sha256(names.encode() + _REQUIREMENTS.read_bytes()).hexdigest()


def _pip(python: Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    result = subprocess.run(
        [*command, *arguments], check=False, capture_output=True, text=True, cwd=HERE
    )
    if result.returncode != 0:
        raise SetUpFailed(
            f"pip could not install {' '.join(arguments)}: {result.stderr.strip()[-800:]}\n"
            "  expected: a package index with these wheels (PyPI, and PyTorch's CPU index)\n"
            "  change:   check the network or pip's settings; TORCH_INDEX names another index for "
            "torch, EYAS_SGLANG_PYTHON an interpreter that has SGLang already"
        )


def _check(python: Path) -> None:
    """Import what a server imports, so that a missing package is said here."""
    result = subprocess.run(
        [str(python), "-W", "ignore", "-c", _CHECK],
        check=False,
        capture_output=True,
        text=True,
        env=stock_environment(),
        cwd=HERE,
    )
    if result.returncode != 0:
        raise SetUpFailed(
            f"{python} cannot import the stock server: {result.stderr.strip()[-800:]}\n"
            f"  expected: sglang {VERSION} and what {_REQUIREMENTS.name} lists\n"
            f"  change:   remove {_folder()} and run `make conformance` again"
        )


def main() -> int:
    """Set up and print the interpreter; 1 with the reason if that cannot be."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        python = set_up()
    except SetUpFailed as failure:
        logger.error("no stock server: %s", failure)
        return 1
    logger.info("the stock server's interpreter: %s", python)
    return 0


if __name__ == "__main__":
    sys.exit(main())
