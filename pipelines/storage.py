"""Files of this machine and objects behind a URI: read, listed, written whole or not at all.

A `Location` is a `Path` or a `RemotePath`, which has the few verbs of `Path` that Eyas needs.
"""

import contextlib
import errno
import fnmatch
import functools
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

import pyarrow as pa
from pyarrow import fs

from pipelines.errors import BadRecipe, StorageFailed

_OPTIONS = {
    "file": frozenset[str](),
    "s3": frozenset({"endpoint_override", "scheme", "region"}),
    "gs": frozenset({"endpoint_override", "scheme"}),
}
_CALLS_AT_ONCE = 16  # a store answers slowly and many at a time

# What a person has to mend: going on would lose nothing, and gain nothing either.
_LOCAL_FAULTS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the file would be larger than allowed",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
    errno.EROFS: "the disk is mounted read-only",
    errno.EIO: "the disk does not answer",
}
_REMOTE_FAULTS = (
    "ACCESS_DENIED",
    "AccessDenied",
    "EXPIRED_TOKEN",
    "INVALID_ACCESS_KEY",
    "NO_SUCH_BUCKET",
    "PermissionDenied",
    "QuotaExceeded",
    "SIGNATURE_DOES_NOT",
)

_Made = TypeVar("_Made")


@dataclass(frozen=True)
class RemoteStat:
    """What a listing says of an object."""

    st_size: int  # bytes
    st_mtime: float  # seconds since the epoch, by the store's clock


@dataclass(frozen=True, order=True)
class RemotePath:
    """An object, or a prefix of objects, in a store. Holds no connection: it may be pickled."""

    store: str  # the store's URI, without keys
    key: str = ""  # below the store; "" is the store itself
    listed: RemoteStat | None = field(default=None, compare=False)  # as it was when it was listed

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.store, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        root = urlsplit(self.store)
        return f"{root.scheme}://{root.netloc}{root.path}" + (f"/{self.key}" if self.key else "")

    @property
    def name(self) -> str:
        """The last part of the key."""
        return (self.key or urlsplit(self.store).path).rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return Path(self.name).stem

    @property
    def suffix(self) -> str:
        """The name's ending, with its dot."""
        return Path(self.name).suffix

    @property
    def parent(self) -> "RemotePath":
        """The prefix that this lies in."""
        return RemotePath(self.store, self.key.rpartition("/")[0])

    def is_file(self) -> bool:
        """Whether there is such an object."""
        return bool(self._info().type == fs.FileType.File)

    def exists(self) -> bool:
        """Whether there is such an object, or any below it."""
        return bool(self._info().type != fs.FileType.NotFound)

    def stat(self) -> RemoteStat:
        """Size and time. Raises `FileNotFoundError`."""
        if self.listed is not None:
            return self.listed
        info = self._info()
        if info.type != fs.FileType.File:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return _stat_of(info)

    def rglob(self, pattern: str) -> Iterator["RemotePath"]:
        """The objects at any depth below this whose name matches, in one listing."""
        for path in self._below(recursive=True):
            if fnmatch.fnmatchcase(path.name, pattern):
                yield path

    def glob(self, pattern: str) -> Iterator["RemotePath"]:
        """The objects below this that match, part by part: `*.arrow`, `*/*.parquet`."""
        wanted = pattern.split("/")
        start = len(self.key) + 1 if self.key else 0
        for path in self._below(recursive=len(wanted) > 1):
            parts = path.key[start:].split("/")
            if len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)):
                yield path

    def open(self) -> pa.NativeFile:
        """Open for reading at any place."""
        with storage_faults(self):
            return _connect(self.store).open_input_file(self.key)

    def read_bytes(self) -> bytes:
        """The whole content."""
        with self.open() as handle:
            content: bytes = handle.read()
            return content

    def write_bytes(self, content: bytes | memoryview) -> None:
        """Put the object in one piece, which appears whole or not at all; look that it is there."""
        with storage_faults(self), _connect(self.store).open_output_stream(self.key) as stream:
            stream.write(content)
        seen = RemotePath(self.store, self.key).stat().st_size
        if seen != len(content):
            raise OSError(errno.EIO, f"{seen} of {len(content)} bytes arrived", str(self))

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the object."""
        try:
            with storage_faults(self):
                _connect(self.store).delete_file(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def _info(self) -> fs.FileInfo:
        with storage_faults(self):
            return _connect(self.store).get_file_info([self.key])[0]

    def _below(self, *, recursive: bool) -> list["RemotePath"]:
        selector = fs.FileSelector(self.key, allow_not_found=True, recursive=recursive)
        with storage_faults(self):
            found = _connect(self.store).get_file_info(selector)
        return sorted(
            RemotePath(self.store, info.path.strip("/"), _stat_of(info))
            for info in found
            if info.type == fs.FileType.File
        )


Location = Path | RemotePath


def location_of(text: str) -> Location:
    """A folder or a URI (s3, gs, file) as a location. Asks nobody; keys come from the environment.

    Raises `BadRecipe`, which never shows the text: it may hold a secret.
    """
    if "://" not in text:
        return Path(text).expanduser()
    uri = urlsplit(text)
    options = {name for name, _ in parse_qsl(uri.query, keep_blank_values=True)}
    if uri.scheme not in _OPTIONS:
        raise _bad_store(f"a URI of the scheme {uri.scheme!r}", f"one of {sorted(_OPTIONS)}")
    if "@" in uri.netloc:
        raise _bad_store("a URI with a user or a password in it", "keys in the environment")
    if not options <= _OPTIONS[uri.scheme] or uri.fragment:
        allowed = ", ".join(sorted(_OPTIONS[uri.scheme])) or "none"
        raise _bad_store(
            f"a URI with options other than those allowed for {uri.scheme}", f"options: {allowed}"
        )
    if uri.scheme == "file":
        if uri.netloc not in ("", "localhost"):
            raise _bad_store("a file URI with a host", "file:///folder")
        return Path(unquote(uri.path))
    if not uri.netloc:
        raise _bad_store("a URI without a bucket", f"{uri.scheme}://bucket/prefix")
    path = uri.path.rstrip("/")
    return RemotePath(uri._replace(path=path).geturl())


def listed(folder: Location, pattern: str) -> list[Location]:
    """The files below a folder that match, in the order of their names."""
    found: list[Location] = [*folder.glob(pattern)]
    return sorted(found, key=str)


def readable(location: Location) -> str | pa.NativeFile:
    """What pyarrow's readers take for a location."""
    return str(location) if isinstance(location, Path) else location.open()


def contents(location: Location) -> pa.Buffer:
    """All of a file: mapped, so that what nobody asks for is not read; fetched from a store."""
    if isinstance(location, Path):
        with pa.memory_map(str(location)) as source:
            return source.read_buffer()
    return pa.py_buffer(location.read_bytes())


@contextlib.contextmanager
def atomic_file(location: Location) -> Iterator[BinaryIO]:
    """A handle whose content is at `location` when the block ends, whole or not at all.

    On a disk: temp file, fsync, rename, and fsync of the folder. In a store: one put. Raises
    `StorageFailed` where there is no room or no permission.
    """
    with storage_faults(location):
        if isinstance(location, RemotePath):
            buffer = io.BytesIO()
            yield buffer
            location.write_bytes(buffer.getbuffer())
            return
        _make_folder(location.parent)
        temporary = location.with_name(f".{location.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as handle:
                yield handle
                handle.flush()
                os.fsync(handle.fileno())
            temporary.replace(location)
            _sync_folder(location.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomically(location: Location, content: bytes | pa.Buffer) -> None:
    """Put `content` at `location` whole or not at all."""
    with atomic_file(location) as handle:
        handle.write(content)


def sha256_of(location: Location) -> str:
    """Checksum of a file, read in pieces."""
    digest = hashlib.sha256()
    with location.open("rb") if isinstance(location, Path) else location.open() as handle:
        while piece := handle.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def for_each(work: Callable[[Location], _Made], given: Sequence[Location]) -> list[_Made]:
    """`work` of each, in order: one after the other on a disk, many at once in a store."""
    if not any(isinstance(one, RemotePath) for one in given):
        return [work(one) for one in given]
    with ThreadPoolExecutor(_CALLS_AT_ONCE) as pool:
        return list(pool.map(work, given))


def newest(location: Location) -> float | None:
    """When something was last written right below `location` or one folder deeper, or None."""
    if isinstance(location, RemotePath):
        return max((one.stat().st_mtime for one in location.rglob("*")), default=None)
    if not location.exists():
        return None
    folders = [location, *(one for one in location.iterdir() if one.is_dir())]
    return max(one.stat().st_mtime for one in folders)


@contextlib.contextmanager
def storage_faults(location: Location) -> Iterator[None]:
    """Turn a full disk, a lost permission and the like into `StorageFailed`; let others pass."""
    try:
        yield
    except OSError as error:
        failed = storage_failed(error, location)
        if failed is None:
            raise
        raise failed from error


def storage_failed(
    error: OSError, location: Location, *, patient: bool = True
) -> StorageFailed | None:
    """What a person has to mend before anything can be written at `location`, if that is it.

    A store that does not answer may do so in a moment: `patient` says that somebody tries again.
    """
    if isinstance(location, RemotePath):
        if patient and not any(word in str(error) for word in _REMOTE_FAULTS):
            return None
        return StorageFailed(
            f"{location} cannot be used: {error}",
            expected="a store that answers, with a bucket that exists, and keys in the environment "
            "that may read, list, write and delete there",
            change="mend the keys, the quota, the bucket or the way there; what is stored is "
            "whole, and the same command goes on",
        )
    if error.errno not in _LOCAL_FAULTS:
        return None
    return StorageFailed(
        f"{location} cannot be written: {_LOCAL_FAULTS[error.errno]} ({_free_bytes(location)})",
        expected="room and permission to write there",
        change="free space or mend the permission; what is stored is whole, and the same command "
        "goes on",
    )


def _free_bytes(path: Path) -> str:
    there = next((one for one in (path, *path.parents) if os.path.lexists(one)), Path("/"))
    try:
        return f"{shutil.disk_usage(there).free:,} bytes free"
    except OSError as error:
        return f"free space unknown: {error.strerror}"


def _bad_store(seen: str, expected: str) -> BadRecipe:
    return BadRecipe(
        f"generate.store is {seen}",
        expected=f"a folder, or a URI such as s3://bucket/prefix ({expected})",
        change="mend generate.store in the recipe",
    )


def _stat_of(info: fs.FileInfo) -> RemoteStat:
    changed: datetime = info.mtime
    return RemoteStat(info.size, changed.timestamp())


@functools.lru_cache(maxsize=8)
def _connect(store: str) -> fs.FileSystem:
    """The store's filesystem, one for each process; its paths are keys."""
    if store.startswith("s3://"):  # one put for an object, rather than three calls
        store += ("&" if "?" in store else "?") + "allow_delayed_open=true"
    filesystem, root = fs.FileSystem.from_uri(store)
    return fs.SubTreeFileSystem(root, filesystem)


def _make_folder(folder: Path) -> None:
    """Make a folder whose existence outlives a power cut, as its files' does."""
    missing: Iterable[Path] = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        _sync_folder(made.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
