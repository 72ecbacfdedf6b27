"""The `eyas` command. Exit codes: 0 done, 1 bug, 2 bad recipe or arguments, 3 preflight,
4 stopped by a quality gate, 5 verification failed, 130 interrupted.
"""

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from pipelines.errors import RunError, StorageFailed

INTERRUPTED = 130


def main() -> None:
    """Run the command and turn every end into an exit code."""
    _configure_logging()
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        code = _run(sys.argv[1:])
    except RunError as error:
        is_storage = isinstance(error, StorageFailed)
        logging.error("%s: %s", "stopped" if is_storage else _TITLES[error.exit_code], error)
        code = error.exit_code
    except SystemExit as end:  # typer ends so: its own usage errors are 2, Ctrl-C is 130
        code = end.code if isinstance(end.code, int) else 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # whoever read stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except Exception:
        traceback.print_exc()
        logging.error("this is a bug in Eyas; the lines above say where")
        code = 1
    if code == INTERRUPTED:
        logging.error("interrupted; what is finished is kept, the same command goes on")
    sys.exit(code)


def _run(arguments: Sequence[str]) -> int:
    """The exit code of a command that was carried out; the parser raises its own."""
    if arguments[:1] == ["glance"]:
        from pipelines.glance_command import asked_plainly, run_glance

        asked = asked_plainly(arguments[1:])
        if asked is not None:
            return run_glance(asked)
    from pipelines.commands import app

    app()
    return 0


_TITLES = {
    2: "bad recipe or arguments",
    3: "not ready to start",
    4: "stopped by a quality gate",
    5: "verification failed",
}


def _configure_logging() -> None:
    """Send log lines to stderr, plainly."""
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s", datefmt="%H:%M:%S"
    )
    for noisy in ("ray", "transformers", "httpx", "urllib3", "deepspeed", "aiohttp.access"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _interrupt(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
