"""How an embedded server is started: its argument list and its environment. Starts nothing."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.config import EmbeddedServers


@dataclass(frozen=True)
class EngineOptions:
    """What one stage asks of its servers beyond serving: drafts, capture, a shorter context."""

    draft: Path | None = None
    draft_steps: int | None = None
    capture_folder: Path | None = None
    capture_layer_ids: tuple[int, ...] = ()
    context_length: int | None = None

    def __post_init__(self) -> None:
        assert (self.draft is None) == (self.draft_steps is None), "a draft needs draft_steps"
        assert (self.capture_folder is None) == (not self.capture_layer_ids), (
            "capture needs both a folder and layer ids"
        )


def embedded_command(
    config: EmbeddedServers, target: Path, options: EngineOptions, ready_file: Path
) -> list[str]:
    """The argument list of one embedded server, under its guard."""
    command = [
        *(sys.executable, "-m", "actors.guard", "--"),
        *(sys.executable, "-m", "actors.reference"),
        *("--target", str(target)),
        *("--host", "127.0.0.1"),
        *("--port", "0"),
        *("--ready-file", str(ready_file)),
        *("--dtype", config.dtype),
        *("--device", config.device),
        *("--threads", str(config.threads_per_server)),
        *("--max-running-requests", str(config.max_running_requests)),
    ]
    if options.context_length is not None:
        command += ["--context-length", str(options.context_length)]
    if options.draft is not None:
        command += ["--draft", str(options.draft)]
        command += ["--speculative-num-steps", str(options.draft_steps)]
    if options.capture_folder is not None:
        command += ["--capture-folder", str(options.capture_folder)]
        command += ["--capture-layer-ids", *map(str, options.capture_layer_ids)]
    return command


def embedded_environment(config: EmbeddedServers, inherited: Mapping[str, str]) -> dict[str, str]:
    """The environment of one embedded server: its threads, and where `actors` is found."""
    package_parent = str(Path(__file__).resolve().parent.parent)
    paths = [package_parent, *filter(None, inherited.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **inherited,
        "OMP_NUM_THREADS": str(config.threads_per_server),
        # Threads that spin while they wait take the cores from the other servers.
        "OMP_WAIT_POLICY": "PASSIVE",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)),
        "PYTHONUNBUFFERED": "1",
    }
