"""How a server is started: its argument list and its environment. Starts nothing."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from actors.config import ArgumentValue, EmbeddedServers, LaunchedServers
from actors.launch_capture import CaptureOptions, capture_arguments, hook_home

_GUARD = Path(__file__).resolve().with_name("guard.py")
# What this process's interpreter and Ray put into the environment is not for a server that has
# an environment of its own, and neither is our key.
_NOT_INHERITED = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS"}
_PREFIXES_NOT_INHERITED = ("RAY_", "EYAS_")


@dataclass(frozen=True)
class EngineOptions:
    """What one stage asks of its servers beyond serving: drafts, capture, a shorter context."""

    draft: Path | None = None
    draft_steps: int | None = None
    capture: CaptureOptions | None = None
    context_length: int | None = None

    def __post_init__(self) -> None:
        assert (self.draft is None) == (self.draft_steps is None), "a draft needs draft_steps"


_NOTHING_MORE = EngineOptions()


@dataclass(frozen=True)
class StartPlan:
    """Everything that starting one server needs, but the port."""

    name: str
    config: EmbeddedServers | LaunchedServers
    target: Path
    options: EngineOptions
    logs: Path

    @property
    def log(self) -> Path:
        """What the server writes."""
        return self.logs / f"{self.name}.log"

    @property
    def ready_file(self) -> Path | None:
        """Where the embedded engine says its URL; None for SGLang, which gets its port from us."""
        is_embedded = isinstance(self.config, EmbeddedServers)
        return self.logs / f".{self.name}.ready" if is_embedded else None

    def command(self, host: str, port: int) -> list[str]:
        """The argument list under the guard. Port 0 lets the embedded engine choose."""
        match self.config:
            case EmbeddedServers():
                assert self.ready_file is not None
                server = embedded_command(
                    self.config, self.target, self.options, self.ready_file, port
                )
            case LaunchedServers():
                server = launched_command(self.config, self.target, self.options, host, port)
        # Isolated: the guard is a file of its own, and the server's PYTHONPATH is not for it.
        return [sys.executable, "-I", str(_GUARD), "--", *server]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """What the server finds in its environment."""
        match self.config:
            case EmbeddedServers():
                return embedded_environment(self.config, inherited)
            case LaunchedServers():
                return launched_environment(self.config, inherited, self.options)


def embedded_command(
    config: EmbeddedServers, target: Path, options: EngineOptions, ready_file: Path, port: int
) -> list[str]:
    """The argument list of one embedded server."""
    command = [
        *(sys.executable, "-m", "actors.reference"),
        *("--target", str(target)),
        *("--host", "127.0.0.1"),
        *("--port", str(port)),
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
    if options.capture is not None:
        command += ["--capture-folder", str(options.capture.folder)]
        command += ["--capture-layer-ids", *map(str, options.capture.layer_ids)]
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


def launched_command(
    config: LaunchedServers, target: Path, options: EngineOptions, host: str, port: int
) -> list[str]:
    """The argument list of one SGLang server. The recipe's arguments follow ours."""
    if options.draft is not None:
        raise ValueError("drafts are for embedded servers")
    command = [
        *(config.python, "-m", "sglang.launch_server"),
        *("--model-path", str(target)),
        *("--host", host),
        *("--port", str(port)),
        *("--tp-size", str(config.tensor_parallel_size)),
        *("--device", config.device),
    ]
    if options.context_length is not None:
        command += ["--context-length", str(options.context_length)]
    if options.capture is not None:
        command += capture_arguments(options.capture)
    for name, value in config.arguments.items():
        command += [f"--{name}", *_words(value)]
    return command


def launched_environment(
    config: LaunchedServers, inherited: Mapping[str, str], options: EngineOptions = _NOTHING_MORE
) -> dict[str, str]:
    """The environment of one SGLang server: ours without what belongs to us, then the recipe's."""
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _NOT_INHERITED and not name.startswith(_PREFIXES_NOT_INHERITED)
    }
    variables = {**kept, "PYTHONUNBUFFERED": "1", **config.environment}
    if options.capture is not None:
        paths = [str(hook_home(options.capture.folder))]
        if "PYTHONPATH" in config.environment:
            paths.append(config.environment["PYTHONPATH"])
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    if options.context_length is not None:
        # A server keeps some of its context to itself; a prompt that fills the target's is fine.
        variables["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    return variables


def _words(value: ArgumentValue) -> list[str]:
    match value:
        case True:
            return []
        case tuple():
            return [str(one) for one in value]
        case _:
            return [str(value)]
