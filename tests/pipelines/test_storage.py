"""Files and objects: whole or not at all, and a fault that says what to mend."""

import errno
import pickle
from pathlib import Path

import pyarrow as pa
import pytest

from pipelines.errors import BadRecipe, StorageFailed
from pipelines.storage import (
    RemotePath,
    atomic_file,
    contents,
    for_each,
    listed,
    location_of,
    newest,
    sha256_of,
    write_atomically,
)
from tests.support.small_disk import fill


@pytest.mark.parametrize(
    "text",
    [
        "s3://AKIA:hush@bucket/prefix",
        "s3://hush@bucket/prefix",
        "s3://bucket/prefix?secret_key=hush",
        "s3://bucket/prefix?region=us-east-1&access_key=hush",
        "gs://bucket/prefix?region=hush",
        "s3://bucket/prefix#hush",
        "https://bucket/hush",
        "file://hush/folder",
        "s3:///hush",
    ],
)
def test_a_uri_that_may_hold_a_secret_or_names_no_bucket_is_refused_and_not_shown(text):
    with pytest.raises(BadRecipe, match=r"generate\.store") as refused:
        location_of(text)
    assert "hush" not in str(refused.value)


def test_folders_and_file_uris_are_paths_and_others_are_not():
    assert location_of("/data/rows") == Path("/data/rows")
    assert location_of("file:///data/my%20rows") == Path("/data/my rows")
    remote = location_of("s3://bucket/a/b/?region=us-east-1&scheme=http")
    assert isinstance(remote, RemotePath)
    assert str(remote / "set") == "s3://bucket/a/b/set"


def test_an_object_has_the_verbs_of_a_path(object_store):
    root = location_of(object_store.uri)
    part = root / "chat" / "part-00000.parquet"
    write_atomically(part, b"rows")
    write_atomically(root / "_segments" / "chat" / "one.arrow", pa.py_buffer(b"more"))
    assert (part.name, part.stem, part.suffix) == ("part-00000.parquet", "part-00000", ".parquet")
    assert part.parent == root / "chat"
    assert part.is_file()
    assert part.exists()
    assert part.parent.exists()
    assert not part.parent.is_file()
    assert not (root / "none").exists()
    assert [one.name for one in listed(root, "*/*.parquet")] == ["part-00000.parquet"]
    assert [one.name for one in listed(root / "chat", "part-*.parquet")] == ["part-00000.parquet"]
    assert listed(root / "none", "*") == listed(root, "*") == []
    assert sorted(one.name for one in root.rglob("*")) == ["one.arrow", "part-00000.parquet"]
    assert part.stat().st_size == listed(root, "*/*.parquet")[0].stat().st_size == 4
    assert newest(root) is not None
    assert contents(part).to_pybytes() == part.read_bytes() == b"rows"
    assert sha256_of(part) == sha256_of(pickle.loads(pickle.dumps(part)))
    assert for_each(lambda one: one.name, listed(root, "*/*.parquet")) == ["part-00000.parquet"]
    part.unlink()
    part.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        part.unlink()
    with pytest.raises(FileNotFoundError):
        part.stat()
    assert (root / "_segments").exists()


def test_a_write_to_a_store_is_one_put(object_store):
    object_store.requests.clear()
    write_atomically(location_of(object_store.uri) / "one", b"x" * 100_000)
    assert [method for method, _ in object_store.requests] == ["PUT", "HEAD"]


def test_half_a_write_leaves_no_object_and_no_file(object_store, tmp_path):
    for place in (location_of(object_store.uri) / "one", tmp_path / "one"):
        with pytest.raises(TypeError), atomic_file(place) as handle:
            handle.writelines([b"half", None])
        assert not place.exists()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", ["AccessDenied", "QuotaExceeded"])
def test_a_store_that_refuses_stops_the_run(object_store, code):
    object_store.refuse = lambda method, _: code if method == "PUT" else None
    with pytest.raises(StorageFailed, match="runs/one/x cannot be used") as failed:
        write_atomically(location_of(object_store.uri) / "x", b"1")
    assert failed.value.exit_code == 3


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_what_a_person_has_to_mend_is_said_with_the_free_bytes(tmp_path, monkeypatch, number):
    def refuse(_):
        raise OSError(number, "no")

    monkeypatch.setattr("os.fsync", refuse)
    with pytest.raises(StorageFailed, match="bytes free"):
        write_atomically(tmp_path / "x", b"1")
    assert list(tmp_path.iterdir()) == []


def test_another_fault_is_not_taken_for_a_full_disk(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "file" / "x", b"1")


def test_a_full_disk_leaves_the_old_content_and_no_litter(small_disk):
    path = small_disk / "folder" / "file"
    write_atomically(path, b"old")
    filler = fill(small_disk)
    with pytest.raises(StorageFailed, match="the disk is full"):
        write_atomically(path, b"new" * 10_000)
    assert path.read_bytes() == b"old"
    assert [one.name for one in path.parent.iterdir()] == ["file"]
    filler.unlink()
    write_atomically(path, b"new" * 10_000)
    assert path.read_bytes() == b"new" * 10_000
