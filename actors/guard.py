"""Runs a command in its own process group and ends all of it when its owner dies.

`python -I guard.py -- argv...`: the owner holds the other end of stdin. When that end closes,
even because the owner was killed, or on SIGTERM, the whole group is ended, and what had left the
group too. Returns the command's exit code.

Two processes: the guard proper, and before it one that only waits. Ray kills the children of an
actor that ends, and with a single process nobody would be left to end the command's family.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

_GRACE_SECONDS = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: Sequence[str]) -> int:
    """Run the command after `--`; return its exit code, 128 + n if signal n ended it."""
    if len(arguments) < 2 or arguments[0] != "--":
        raise SystemExit("usage: python -I guard.py -- command [argument...]")
    mine, its = os.pipe()
    guard = os.fork()
    if guard:
        os.close(mine)
        return _wait_before(guard)
    os.close(its)
    return _guard(arguments[1:], mine)


def _wait_before(guard: int) -> int:
    """Hand signals on to the guard; return its exit code."""
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: os.kill(guard, number))
    code = os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    return code if code >= 0 else 128 - code


def _guard(command: Sequence[str], before: int) -> int:
    """Run the command; end it when stdin or `before`, the pipe to the one before, closes."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the command's orphans become this process's children
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_guard
    )

    def on_signal(number: int, frame: FrameType | None) -> None:
        del number, frame
        _end_in_background(child)

    for number in _SIGNALS:
        signal.signal(number, on_signal)
    for pipe in (sys.stdin.fileno(), before):
        threading.Thread(target=_watch, args=(pipe, child), daemon=True).start()
    code = child.wait()
    _signal_group(child.pid, signal.SIGKILL)  # whatever the command itself left behind
    _end_orphans()
    return code if code >= 0 else 128 - code


def _watch(pipe: int, child: "subprocess.Popen[bytes]") -> None:
    while os.read(pipe, 4096):
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


def _end_orphans() -> None:
    """Kill what left the group, and whatever that leaves in turn (Linux only)."""
    while orphans := _children_of(os.getpid()):
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        for pid in orphans:
            os.waitpid(pid, 0)


def _children_of(parent: int) -> list[int]:
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state ppid ...; the name may hold blanks and brackets.
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        if int(fields[1]) == parent:
            children.append(int(stat.parent.name))
    return children


def _signal_group(group: int, number: signal.Signals) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return  # the group has ended by itself


def _die_with_guard() -> None:
    """In the child, before exec: die even if the guard itself is killed (Linux only)."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
