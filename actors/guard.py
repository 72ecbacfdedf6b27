"""Runs a command in its own process group and ends the group when its owner dies.

`python -m actors.guard -- argv...`: the owner holds the other end of stdin. When that end closes,
even because the owner was killed, or on SIGTERM, the whole group is ended. Returns the command's
exit code.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType

_GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: Sequence[str]) -> int:
    """Run the command after `--`; return its exit code, 128 + n if signal n ended it."""
    if len(arguments) < 2 or arguments[0] != "--":
        raise SystemExit("usage: python -m actors.guard -- command [argument...]")
    child = subprocess.Popen(
        arguments[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard
    )

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        _end_in_background(child)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    threading.Thread(target=_watch_owner, args=(child,), daemon=True).start()
    code = child.wait()
    _signal_group(child.pid, signal.SIGKILL)  # whatever the command itself left behind
    return code if code >= 0 else 128 - code


def _watch_owner(child: "subprocess.Popen[bytes]") -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    _end(child)


def _end_in_background(child: "subprocess.Popen[bytes]") -> None:
    # Not in the handler itself: it runs inside `child.wait()`, which holds the lock that a second
    # wait would need.
    threading.Thread(target=_end, args=(child,), daemon=True).start()


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ask the group to end; after the grace, end it. `main` reaps the child and returns."""
    _signal_group(child.pid, signal.SIGTERM)
    timer = threading.Timer(_GRACE_SECONDS, _signal_group, (child.pid, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # the group has ended by itself


def _die_with_guard() -> None:
    """In the child, before exec: die even if the guard itself is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
