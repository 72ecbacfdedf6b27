"""The files of a set, wherever they lie: all of them, in one order, and none that is none."""

import http.server
import json
import pickle
import threading
from functools import partial
from pathlib import Path

import fsspec
import pytest
from fsspec.registry import known_implementations

from pipelines.errors import BadRecipe
from pipelines.sources.places import find_files
from pipelines.storage import location_of, write_atomically


def names(path) -> list[str]:
    return [file.name for file in find_files(str(path))]


def put(folder: Path, *files: str) -> Path:
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}\n")
    return folder


def saved(folder: Path, *files: str, **state) -> Path:
    """A folder as `datasets` saves it."""
    put(folder, "dataset_info.json", *files)
    state = {"_data_files": [{"filename": one} for one in files], "_split": "train", **state}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


def test_a_file_is_named_by_its_last_part_and_may_end_as_it_likes(tmp_path):
    put(tmp_path, "a.jsonl", "b.prompts", "c[1]*.jsonl", "README")
    (file,) = find_files(str(tmp_path / "a.jsonl"))
    assert (file.name, file.path, file.size) == ("a.jsonl", str(tmp_path / "a.jsonl"), 3)
    assert pickle.loads(pickle.dumps(file)) == file
    assert names(tmp_path / "b.prompts") == ["b.prompts"]
    assert names(tmp_path / "c[1]*.jsonl") == ["c[1]*.jsonl"]
    assert names(tmp_path / "README") == ["README"]


def test_a_folder_is_read_at_any_depth_in_the_order_of_names(tmp_path):
    put(tmp_path, "b.json.gz", "a/2.parquet", "a/10.jsonl.ZST", "c.arrow", "d.feather", "e.ndjson")
    put(tmp_path, "README.md", "LICENSE", "NOTICE.txt", "dataset_infos.json", "a/load.py")
    put(tmp_path, ".hidden.jsonl", "_SUCCESS", "_old/a.jsonl", ".cache/x.json", "a/_b.jsonl")
    expected = ["a/10.jsonl.ZST", "a/2.parquet", "b.json.gz", "c.arrow", "d.feather", "e.ndjson"]
    assert names(tmp_path) == names(f"{tmp_path}/") == names(f"file://{tmp_path}") == expected


def test_a_link_to_a_file_is_that_file(tmp_path):
    put(tmp_path, "blobs/123")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jsonl").symlink_to(tmp_path / "blobs" / "123")
    assert names(tmp_path / "set") == ["a.jsonl"]


def test_a_relative_path_and_the_home_folder_are_found(tmp_path, monkeypatch):
    put(tmp_path, "set/a.jsonl", "set/b.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        names("set") == names("./set") == names("~/set") == names("set/*") == ["a.jsonl", "b.jsonl"]
    )


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["a1.jsonl", "a2.jsonl", "b1.jsonl"]),
        ("a?.jsonl", ["a1.jsonl", "a2.jsonl"]),
        ("[b-z]*.jsonl", ["b1.jsonl"]),
        ("**/*.jsonl", ["a1.jsonl", "a2.jsonl", "b1.jsonl", "x/a3.jsonl", "x/y/a4.jsonl"]),
        ("*/*.jsonl", ["x/a3.jsonl"]),
        ("**/y/*", ["x/y/a4.jsonl"]),
        ("x/**", ["a3.jsonl", "y/a4.jsonl"]),
        ("**", ["a1.jsonl", "a2.jsonl", "b1.jsonl", "x/a3.jsonl", "x/y/a4.jsonl"]),
    ],
)
def test_a_pattern_finds_what_a_shell_would_find(tmp_path, pattern, expected):
    put(tmp_path, "a1.jsonl", "a2.jsonl", "b1.jsonl", "x/a3.jsonl", "x/y/a4.jsonl", "LICENSE")
    assert names(tmp_path / pattern) == names(f"file://{tmp_path}/{pattern}") == expected


@pytest.mark.parametrize("name", ["a.csv", "more.txt", "x/data", "a.jsonl.bz2", "a.zip"])
def test_a_file_of_no_known_kind_is_named_rather_than_left_out(tmp_path, name):
    put(tmp_path, "a.jsonl", name)
    for path in (tmp_path, tmp_path / "**"):
        with pytest.raises(BadRecipe, match=f"holds {name}"):
            find_files(str(path))


def test_nothing_found_is_a_bad_recipe(tmp_path):
    put(tmp_path, "set/README.md", "set/_a.jsonl")
    for path, seen in [
        (tmp_path / "set", "holds no data"),
        (tmp_path / "set/*.parquet", "holds no data"),
        (tmp_path / "none/*.parquet", "holds no data"),
        (tmp_path / "none", "is not there"),
        (tmp_path / "none.jsonl", "is not there"),
    ]:
        with pytest.raises(BadRecipe, match=seen) as refused:
            find_files(str(path))
        assert str(path) in str(refused.value)


def test_a_saved_data_set_is_the_files_of_its_state_in_that_order(tmp_path):
    folder = saved(tmp_path, "data-00001.arrow", "data-00000.arrow", _indices_files=None)
    put(tmp_path, "cache-1234.arrow")
    assert names(folder) == ["data-00001.arrow", "data-00000.arrow"]


@pytest.mark.parametrize("key", ["_indices_files", "_indices_data_files"])
def test_a_saved_selection_is_refused(tmp_path, key):
    saved(tmp_path, "a.arrow", **{key: [{"filename": "indices.arrow"}]})
    with pytest.raises(BadRecipe, match="flatten_indices"):
        find_files(str(tmp_path))


def test_a_saved_data_set_without_its_files_is_refused(tmp_path):
    saved(tmp_path / "a", "1.arrow", "2.arrow")
    (tmp_path / "a" / "2.arrow").unlink()
    with pytest.raises(BadRecipe, match=r"lacks 2\.arrow"):
        find_files(str(tmp_path / "a"))
    saved(tmp_path / "b")
    with pytest.raises(BadRecipe, match="names no data"):
        find_files(str(tmp_path / "b"))
    (tmp_path / "b" / "state.json").write_text("{")
    with pytest.raises(BadRecipe, match="cannot be read"):
        find_files(str(tmp_path / "b"))


def test_saved_splits_have_to_be_named_one_by_one(tmp_path):
    saved(tmp_path / "train", "1.arrow")
    saved(tmp_path / "test", "1.arrow")
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(BadRecipe, match="test, train"):
        find_files(str(tmp_path))
    assert names(tmp_path / "train") == ["1.arrow"]


def test_a_state_that_is_no_data_sets_is_passed_over(tmp_path):
    put(tmp_path, "state.json", "a.jsonl")
    assert names(tmp_path) == ["a.jsonl"]


def test_objects_in_a_store_are_found_as_files_are(object_store):
    root, _, options = object_store.uri.partition("?")
    location = location_of(object_store.uri)
    for name in ("a.jsonl", "x/b.jsonl", "README.md", "_old/c.jsonl"):
        write_atomically(location / name, b"{}\n")
    assert names(object_store.uri) == ["a.jsonl", "x/b.jsonl"]
    assert names(f"{root}/x/b.jsonl?{options}") == ["b.jsonl"]
    assert names(f"{root}/*.jsonl?{options}") == ["a.jsonl"]
    assert names(f"{root}/**/?.jsonl?{options}") == ["a.jsonl", "x/b.jsonl"]
    with pytest.raises(BadRecipe, match="is not there"):
        find_files(f"{root}/none?{options}")
    (file,) = find_files(f"{root}/a.jsonl?{options}")
    with pickle.loads(pickle.dumps(file)).open() as handle:
        assert handle.read() == b"{}\n"


def test_a_store_that_refuses_is_a_bad_recipe(object_store):
    object_store.refuse = lambda *_: "AccessDenied"
    with pytest.raises(BadRecipe, match="cannot be read"):
        find_files(object_store.uri)


@pytest.fixture
def memory():
    """fsspec's filesystem in memory, which is one for the process."""
    filesystem = fsspec.filesystem("memory")
    yield filesystem
    filesystem.rm("/eyas-test", recursive=True)


def test_any_scheme_that_fsspec_knows_is_read(memory):
    for name in ("b.jsonl", "a.jsonl", "x/c.jsonl", "LICENSE", ".h.jsonl"):
        memory.pipe_file(f"/eyas-test/{name}", b"{}\n")
    assert names("memory://eyas-test") == ["a.jsonl", "b.jsonl", "x/c.jsonl"]
    assert names("memory://eyas-test/**/c*") == ["x/c.jsonl"]
    (file,) = find_files("memory://eyas-test/b.jsonl")
    assert (file.name, file.size) == ("b.jsonl", 3)
    with file.open() as handle:
        assert handle.read() == b"{}\n"
    with pytest.raises(BadRecipe, match="is not there"):
        find_files("memory://eyas-test/none.jsonl")


def test_a_file_behind_a_web_address_is_read(tmp_path):
    put(tmp_path, "a.jsonl")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            """No line for a request."""

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))
    )
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        root = f"http://127.0.0.1:{server.server_port}"
        (file,) = find_files(f"{root}/a.jsonl")
        assert (file.name, file.size) == ("a.jsonl", 3)
        with file.open() as handle:
            assert handle.read() == b"{}\n"
        with pytest.raises(BadRecipe, match="is not there"):
            find_files(f"{root}/none.jsonl")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_hub_uri_asks_the_hubs_filesystem(monkeypatch):
    from huggingface_hub import HfFileSystem

    asked = []

    def info(_, path, **__):
        asked.append(path)
        return {"name": path, "size": 3, "type": "file"}

    monkeypatch.setattr(HfFileSystem, "info", info)
    (file,) = find_files("hf://datasets/org/set@main/data/a.parquet")
    assert {*asked} == {"datasets/org/set@main/data/a.parquet"}
    assert file.name == "a.parquet"


def test_a_driver_that_fails_in_its_own_way_is_a_bad_recipe(monkeypatch):
    from huggingface_hub import HfFileSystem

    def info(*_, **__):
        raise RuntimeError("no way to the hub")

    monkeypatch.setattr(HfFileSystem, "info", info)
    with pytest.raises(BadRecipe, match="cannot be read: no way to the hub"):
        find_files("hf://datasets/org/set")


def test_a_driver_that_is_not_here_is_named(monkeypatch):
    known = {"class": "no_such_driver.Files", "err": "Install no_such_driver to read rows"}
    monkeypatch.setitem(known_implementations, "rows", known)
    with pytest.raises(BadRecipe, match="Install no_such_driver"):
        find_files("rows://a/b.jsonl")
    with pytest.raises(BadRecipe, match="nobody"):
        find_files("nobody://a/b.jsonl")


@pytest.mark.parametrize(
    "uri",
    [
        "s3://AKIA:hush@bucket/set",
        "s3://bucket/set?secret_key=hush",
        "s3://bucket/*.jsonl?secret_key=hush",
        "https://user:hush@host/a.jsonl",
        "https://hush@host/a.jsonl",
        "https://host/a.jsonl?token=hush",
        "hf://datasets/org/set/a.jsonl?token=hush",
        "simplecache::https://user:hush@host/a.jsonl",
        "simplecache::s3://AKIA:hush@bucket/a.jsonl",
    ],
)
def test_a_uri_that_may_hold_a_secret_is_refused_and_not_shown(uri):
    with pytest.raises(BadRecipe, match="prompt set") as refused:
        find_files(uri)
    assert "hush" not in str(refused.value)
    assert "generate.store" not in str(refused.value)


def test_a_pattern_cannot_name_a_store():
    with pytest.raises(BadRecipe, match="where its store is named"):
        find_files("s3://*/a.jsonl")
