"""What a path means: files, folders, globs, links, and objects behind a URI. Lists, never reads."""

import fnmatch
import glob
import io
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol
from urllib.parse import urlsplit

from pipelines.errors import BadRecipe, StorageFailed
from pipelines.glancing.findings import Finding, found

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow", ".ipc", ".feather", ".safetensors")
PACKED = (".gz", ".zst", ".bz2", ".xz")
_BUFFER = 1 << 18  # bytes: long lines come in few pieces
_WILD = frozenset("*?[")


class Remote(Protocol):
    """An object behind a URI: `pipelines.storage.RemotePath`, or `Foreign`."""

    @property
    def name(self) -> str: ...
    def stat(self) -> Any: ...
    def open(self) -> Any: ...


@dataclass(frozen=True)
class Stat:
    """What is known of a file without reading it."""

    st_size: int  # bytes
    st_mtime: float | None  # seconds since the epoch; None where a store does not say


@dataclass(frozen=True)
class Foreign:
    """An object of any store that fsspec knows."""

    system: Any  # fsspec.AbstractFileSystem
    path: str

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.rstrip("/").rpartition("/")[2]

    def __str__(self) -> str:
        return str(self.system.unstrip_protocol(self.path))

    def stat(self) -> Stat:
        """Size and time. Raises `OSError` if the store does not tell the size."""
        size = self.system.info(self.path)["size"]
        if size is None:
            raise OSError(f"{self.name}: the store does not say how large it is")
        try:
            changed = self.system.modified(self.path).timestamp()
        except NotImplementedError:  # fsspec: not every store tells when a file changed
            changed = None
        return Stat(size, changed)

    def open(self) -> Any:
        """Open for reading at any place."""
        return self.system.open(self.path, "rb")


Place = Path | Remote


@dataclass(frozen=True)
class FileSet:
    """One file, or the files of one format in one folder; or why there is none."""

    name: str
    places: Sequence[Place]
    findings: tuple[Finding, ...] = field(default=())


def opened(place: Place) -> IO[bytes]:
    """A buffered handle for reading at any place. Raises `OSError`."""
    if isinstance(place, Path):
        return place.open("rb", buffering=_BUFFER)
    stream: Any = place.open()
    return io.BufferedReader(stream, _BUFFER)


def suffix_of(name: str) -> str:
    """The ending that tells the format, without the one of a compression."""
    path = Path(name.lower())
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def sets_of(paths: Sequence[str]) -> list[FileSet]:
    """The sets of files that these paths mean. Raises `BadRecipe` where there is nothing."""
    return [one for path in paths for one in (_remote(path) if "://" in path else _local(path))]


def _local(text: str) -> list[FileSet]:
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            return _grouped(str(path), _files_below(path))
        if path.exists():
            return [FileSet(str(path), [path])]
    except PermissionError as error:
        return [FileSet(text, [], (found("not_permitted", f"{error.strerror}: {text}"),))]
    if path.is_symlink():
        seen = f"{path.name} points to {path.readlink()}, where there is nothing"
        return [FileSet(str(path), [], (found("broken_link", seen),))]
    matches = sorted(glob.glob(str(path), recursive=True))  # noqa: PTH207 - may be absolute
    files = [one for one in map(Path, matches) if one.is_file()]
    if not files:
        raise _nothing_at(text)
    return [_named(text, files)]


def _files_below(folder: Path) -> list[Path]:
    files = []
    for here, below, names in os.walk(folder):  # follows no link to a folder: no circles
        below[:] = sorted(name for name in below if not name.startswith("."))
        files += [Path(here, name) for name in sorted(names) if not name.startswith(".")]
    return files


def _grouped(name: str, files: Iterable[Place]) -> list[FileSet]:
    groups: dict[str, list[Place]] = {}
    others = 0
    for file in files:
        suffix = suffix_of(file.name)
        if suffix in SUFFIXES:
            groups.setdefault(f"{_folder(file)}/*{suffix}", []).append(file)
        else:
            others += 1
    if not groups:
        seen = f"{others} files, none named {', '.join(SUFFIXES)}" if others else "an empty folder"
        return [FileSet(name, [], (found("no_files", seen),))]
    return [_named(pattern, found_there) for pattern, found_there in groups.items()]


def _folder(file: Place) -> str:
    return str(file).rpartition("/")[0]


def _named(pattern: str, files: Sequence[Place]) -> FileSet:
    return FileSet(str(files[0]) if len(files) == 1 else f"{pattern} ({len(files)} files)", files)


def _remote(uri: str) -> list[FileSet]:
    try:
        if urlsplit(uri).scheme in ("s3", "gs", "file"):
            return _stored(uri)
        return _foreign(uri)
    except (BadRecipe, StorageFailed):
        raise
    except OSError as error:
        raise StorageFailed(
            f"{uri} cannot be listed: {error}",
            expected="a store that answers, and keys in the environment that may list and read",
            change="mend the address, the keys or the way there",
        ) from error


def _stored(uri: str) -> list[FileSet]:
    """What lies in a store that `pipelines.storage` knows."""
    from pipelines.storage import RemotePath, location_of

    parts = urlsplit(uri)
    try:
        root = location_of(parts._replace(path="").geturl() if parts.netloc else uri)
    except BadRecipe as error:
        raise BadRecipe(
            "a path is " + error.seen.removeprefix("generate.store is "),
            expected=error.expected,
            change="mend the path",
        ) from error
    if not isinstance(root, RemotePath):
        return _local(str(root))
    key = parts.path.strip("/")
    place = root / key if key else root
    if _WILD & set(key):
        base = _still(root, key)
        files = [one for one in base.rglob("*") if fnmatch.fnmatchcase(one.key, key)]
        if not files:
            raise _nothing_at(uri)
        return [_named(uri, files)]
    if key and place.is_file():
        return [FileSet(str(place), [place])]
    files = list(place.rglob("*"))
    if not files:
        raise _nothing_at(uri)
    return _grouped(str(place), files)


def _still(root: Any, key: str) -> Any:
    """The prefix above the first part of a key that has a wildcard."""
    for part in key.split("/"):
        if _WILD & set(part):
            break
        root = root / part
    return root


def _foreign(uri: str) -> list[FileSet]:
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(uri)
    except (ImportError, ValueError) as error:
        raise BadRecipe(
            f"{uri}: {error}",
            expected="a scheme that fsspec can open",
            change="install what it names, or copy the file here",
        ) from error
    if system.isfile(path):
        return [FileSet(uri, [Foreign(system, path)])]
    if system.isdir(path):
        return _grouped(uri, [Foreign(system, one) for one in sorted(system.find(path))])
    matches = sorted(system.glob(path)) if _WILD & set(path) else []
    if not matches:
        raise _nothing_at(uri)
    return [_named(uri, [Foreign(system, one) for one in matches])]


def _nothing_at(path: str) -> BadRecipe:
    return BadRecipe(
        f"there is nothing at {path}",
        expected="a file, a folder, a URI, or a pattern that matches files",
        change="check the path",
    )
