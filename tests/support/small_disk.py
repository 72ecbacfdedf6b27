"""A disk of a few hundred kilobytes that really is full, where this user may mount one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

DISK_BYTES = 512 << 10


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """A file system of `DISK_BYTES` at `folder`. Skips the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room; return the file that takes it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as handle:
        try:
            while handle.write(b"\0" * 4096):
                continue
        except OSError:
            return filler
    raise AssertionError("the disk has no end")
