"""Where the files of a prompt set lie: on a disk, in a store, or behind a URI that fsspec knows."""

import fnmatch
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import fsspec
import pyarrow as pa
from pyarrow import fs

from pipelines.errors import BadRecipe
from pipelines.sources.row import Json, Refused, decode_json
from pipelines.sources.row_ends import BrokenFile
from pipelines.storage import Location, location_of

LINES = (".jsonl", ".ndjson")
COMPRESSIONS = (".gz", ".gzip", ".zst", ".zstd")
_DATA = (*LINES, ".json", ".parquet", ".arrow", ".arrows", ".ipc", ".feather")
_NO_ROWS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
_DOCUMENTS = (
    *(".md", ".rst", ".html", ".pdf", ".bib", ".cff", ".png", ".jpg", ".jpeg", ".gif", ".svg"),
    *(".py", ".ipynb", ".sh", ".yaml", ".yml", ".toml", ".lock", ".md5", ".sha256"),
)
_DOCUMENT_STEMS = frozenset(
    {"readme", "license", "licence", "notice", "copying", "citation", "changelog", "authors"}
)


@dataclass(frozen=True)
class SourceFile:
    """One file of a set."""

    name: str  # as reports show it: its path below the set's folder
    path: str  # in its filesystem
    size: int  # bytes, as they are stored
    filesystem: fs.FileSystem = field(repr=False, compare=False)

    @property
    def suffix(self) -> str:
        """The name's ending in lower case, without that of a compression."""
        return _suffix(self.name)

    def open(self) -> pa.NativeFile:
        """Open for reading at any place."""
        return self.filesystem.open_input_file(self.path)


@dataclass(frozen=True)
class _Place:
    text: str  # as the recipe names it
    filesystem: fs.FileSystem
    root: str  # a file or a folder
    pattern: str  # below the root; "" without one

    def file(self, info: fs.FileInfo) -> SourceFile:
        name = posixpath.relpath(info.path, self.root) if info.path != self.root else info.base_name
        if info.size is None:
            raise BrokenFile(f"nobody says how large {name} is")
        return SourceFile(name, info.path, info.size, self.filesystem)

    def files(self, *, recursive: bool) -> dict[str, SourceFile]:
        """The files below the root, by name, but for hidden ones and those that begin with `_`."""
        selector = fs.FileSelector(self.root, allow_not_found=True, recursive=recursive)
        infos = self.filesystem.get_file_info(selector)
        found = [self.file(info) for info in infos if info.type == fs.FileType.File]
        return {
            file.name: file
            for file in sorted(found, key=lambda file: file.name)
            if not any(part.startswith((".", "_")) for part in file.name.split("/"))
        }


def find_files(path: str) -> tuple[SourceFile, ...]:
    """The files of a set in the order of their names: a file, a folder, a pattern, or a URI of any.

    A folder is read at any depth, and `**` of a pattern stands for any depth. Names that begin with
    `.` or `_` are passed over, as are documents (README.md, LICENSE ...) and the descriptions that
    the library `datasets` writes; any other file that holds no known kind of data is refused, so
    that none is left out unseen. A file that is named itself may have any ending. A folder that
    `datasets` saved gives the files that its state names, in that order. Raises `BadRecipe`.
    """
    place = _place_of(path)
    try:
        return tuple(_found(place))
    except BadRecipe:
        raise
    except faults_of(place.filesystem) as error:
        raise _bad(
            place, f"cannot be read: {error}", "a file or a folder that can be read"
        ) from error


def faults_of(filesystem: fs.FileSystem) -> tuple[type[Exception], ...]:
    """What reading a file may raise. A driver of fsspec lets through what its library raises."""
    known = (OSError, pa.ArrowException, BrokenFile, Refused)
    return (Exception,) if isinstance(filesystem, fs.PyFileSystem) else known


def _found(place: _Place) -> list[SourceFile]:
    if place.pattern:
        wanted = place.pattern.split("/")
        below = place.files(recursive=len(wanted) > 1 or "**" in wanted)
        return _data_of(place, [one for one in below.values() if _matches(one.name, wanted)])
    info = place.filesystem.get_file_info([place.root])[0]
    if info.type == fs.FileType.File:
        return [place.file(info)]
    if info.type == fs.FileType.NotFound:
        raise _bad(place, "is not there", "a file, a folder, a pattern or a URI")
    below = place.files(recursive=True)
    saved = _saved(place, below)
    return _data_of(place, [*below.values()]) if saved is None else saved


def _data_of(place: _Place, found: list[SourceFile]) -> list[SourceFile]:
    data = []
    for file in found:
        base = posixpath.basename(file.name).lower()
        if base in _NO_ROWS:
            continue
        if file.suffix in _DATA:
            data.append(file)
        elif file.suffix not in _DOCUMENTS and base.partition(".")[0] not in _DOCUMENT_STEMS:
            known = ", ".join(_DATA)
            raise _bad(
                place, f"holds {file.name}", f"files that end in {known}, or .gz or .zst too"
            )
    if not data:
        raise _bad(
            place, "holds no data", f"files that end in {', '.join(_DATA)}, or .gz or .zst too"
        )
    return data


# Folders that `datasets` saved


def _saved(place: _Place, below: dict[str, SourceFile]) -> list[SourceFile] | None:
    """The files of a saved data set; None where the folder is none."""
    folders = [
        posixpath.dirname(name)
        for name, file in below.items()
        if posixpath.basename(name) == "state.json" and "_data_files" in _object(file)
    ]
    if not folders:
        return None
    if folders != [""]:
        splits = ", ".join(folders)
        raise _bad(place, f"holds saved data sets: {splits}", "the folder of one of them")
    state = _object(below["state.json"])
    if any(value for key, value in state.items() if key.startswith("_indices")):
        raise _bad(
            place,
            "is a selection of rows from saved files",
            "rows in their own order: call flatten_indices() before save_to_disk()",
        )
    names = [one["filename"] for one in state["_data_files"]]
    missing = [name for name in names if name not in below]
    if missing or not names:
        seen = f"lacks {missing[0]}, which its state.json names" if missing else "names no data"
        raise _bad(place, seen, "a folder as save_to_disk() leaves it")
    return [below[name] for name in names]


def _object(file: SourceFile) -> Json:
    with file.open() as handle:
        value = decode_json(handle.read())
    return value if isinstance(value, dict) else {}


# Paths, patterns and URIs


def _place_of(text: str) -> _Place:
    return _uri(text) if "://" in text else _local(text, Path(text).expanduser())


def _local(text: str, path: Path) -> _Place:
    filesystem = fs.LocalFileSystem()
    if path.exists():  # a name may hold what stands for a pattern elsewhere
        return _Place(text, filesystem, str(path.absolute()), "")
    root, pattern = _split(str(path.absolute()))
    return _Place(text, filesystem, root, pattern)


def _uri(text: str) -> _Place:
    head, _, options = text.rpartition("?")
    if "=" not in options:  # then it is a pattern's
        head, options = text, ""
    scheme = head.partition("://")[0]
    root, pattern = _split(head)
    if scheme in ("s3", "gs", "file"):
        location = _location(root + (f"?{options}" if options else ""))
        if isinstance(location, Path):
            return _local(head, location / pattern)
        filesystem, path = fs.FileSystem.from_uri(location.store)
        return _Place(head, filesystem, path, pattern)
    if options or "@" in urlsplit(root).netloc or "::" in head:
        raise BadRecipe(
            f"a prompt set is a URI of the scheme {scheme!r} that holds more than a path",
            expected="no user, password, options or second URI: keys come from the environment",
            change="correct the path in the recipe, or fetch the files first",
        )
    try:
        driver, path = fsspec.core.url_to_fs(root)
    except (ImportError, ValueError) as error:
        raise BadRecipe(
            f"the prompt set {head} cannot be reached: {error}",
            expected="a URI whose fsspec driver is installed",
            change="install the package that is named, or fetch the files first",
        ) from error
    return _Place(head, fs.PyFileSystem(fs.FSSpecHandler(driver)), path.rstrip("/") or "/", pattern)


def _location(uri: str) -> Location:
    try:
        return location_of(uri)
    except BadRecipe as refused:
        raise BadRecipe(
            refused.seen.replace("generate.store", "the path of a prompt set"),
            expected=refused.expected,
            change="correct the path in the recipe",
        ) from refused


def _split(path: str) -> tuple[str, str]:
    """A path up to its first part with a wildcard, and the pattern from there on."""
    parts = path.split("/")
    wild = (index for index, part in enumerate(parts) if set(part) & set("*?["))
    first = next(wild, len(parts))
    if "://" in path and first < 3:
        raise BadRecipe(
            f"the prompt set {path} has a pattern where its store is named",
            expected="patterns behind the store, such as s3://bucket/*.jsonl",
            change="correct the path in the recipe",
        )
    return "/".join(parts[:first]), "/".join(parts[first:])


def _matches(name: str, wanted: Sequence[str]) -> bool:
    """Whether a relative path has the parts of a pattern, where `**` is any number of them."""
    if not wanted:
        return not name
    if wanted[0] == "**":
        behind = name.partition("/")[2]
        return _matches(name, wanted[1:]) or (bool(name) and _matches(behind, wanted))
    part, _, behind = name.partition("/")
    return fnmatch.fnmatchcase(part, wanted[0]) and bool(part) and _matches(behind, wanted[1:])


def _suffix(name: str) -> str:
    stem, suffix = posixpath.splitext(name.lower())
    return posixpath.splitext(stem)[1] if suffix in COMPRESSIONS else suffix


def _bad(place: _Place, seen: str, expected: str) -> BadRecipe:
    return BadRecipe(
        f"the prompt set {place.text} {seen}",
        expected=expected,
        change="correct the path in the recipe, or what lies there",
    )
