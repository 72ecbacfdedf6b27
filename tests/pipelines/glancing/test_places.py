"""What a path means, here and in stores."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.errors import BadRecipe, StorageFailed
from pipelines.glance import glance
from pipelines.glancing.places import sets_of, suffix_of
from pipelines.storage import location_of
from tests.support.faulty_files import HEALTHY, answer, lines
from tests.support.object_store import KEYS, serve_store


@pytest.fixture
def store(monkeypatch):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with serve_store() as served:
        yield served


def at(uri: str, name: str) -> str:
    """A key below the store's prefix; the options stay at the end."""
    root, _, options = uri.partition("?")
    return f"{root}/{name}?{options}"


def put(uri: str, name: str, content: bytes) -> None:
    (location_of(uri) / name).write_bytes(content)


def test_objects_folders_and_patterns_of_a_store_are_looked_at(store):
    table = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(HEALTHY), table)
    put(store.uri, "set/a.jsonl", lines(HEALTHY))
    put(store.uri, "set/b.jsonl", lines([answer(n) for n in range(100, 109)]))
    put(store.uri, "set/c.parquet", table.getvalue().to_pybytes())
    (one,) = glance([at(store.uri, "set/a.jsonl")]).sets
    assert (one.rows, one.kind, one.findings) == (len(HEALTHY), "responses", ())
    assert one.alive.age_seconds is not None
    assert one.alive.writers is None
    folder = glance([at(store.uri, "set")]).sets
    assert [(each.files, each.rows) for each in folder] == [(2, 49), (1, 40)]
    (both,) = glance([at(store.uri, "set/*.jsonl")]).sets
    assert both.rows == 49


def test_nothing_in_a_store_and_a_store_that_refuses_are_told_apart(store):
    with pytest.raises(BadRecipe, match="nothing at"):
        glance([at(store.uri, "none/*.jsonl")])
    store.refuse = lambda *_: "AccessDenied"
    with pytest.raises(StorageFailed):
        glance([at(store.uri, "set")])


def test_other_stores_are_reached_by_fsspec():
    import fsspec

    system = fsspec.filesystem("memory")
    for name in ("a", "b"):
        system.pipe(f"/glance/{name}.jsonl", lines(HEALTHY))
    (one,) = glance(["memory://glance/a.jsonl"]).sets
    assert (one.rows, one.findings) == (len(HEALTHY), ())
    assert glance(["memory://glance"]).sets[0].rows == 80
    assert glance(["memory://glance/*.jsonl"]).sets[0].files == 2
    with pytest.raises(BadRecipe, match="nothing at"):
        glance(["memory://glance/c.jsonl"])


@pytest.mark.parametrize("uri", ["nowhere://a/b", "s3://user:word@bucket/key", "s3://"])
def test_a_uri_that_cannot_be_used_is_refused_and_shows_no_secret(uri):
    with pytest.raises(BadRecipe) as caught:
        sets_of([uri])
    assert "word" not in str(caught.value).replace("password", "")
    assert "generate.store" not in str(caught.value)


def test_a_folder_is_one_set_for_each_format_and_folder_and_hides_what_is_hidden(tmp_path):
    for name in ("a/1.jsonl", "a/2.jsonl.gz", "b/1.jsonl", "b/.tmp.jsonl", ".hidden/1.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(lines(HEALTHY))
    (tmp_path / "a" / "back").symlink_to(tmp_path)  # a circle of folders
    assert [len(one.places) for one in sets_of([str(tmp_path)])] == [2, 1]


def test_of_very_many_large_files_some_are_opened_and_the_rows_are_estimated(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.glance.SAMPLE_BYTES", 10_000)
    for part in range(100):
        rows = [answer(100 * part + n) for n in range(10)]
        (tmp_path / f"{part:03}.jsonl").write_bytes(lines(rows))
    (one,) = glance([str(tmp_path)]).sets
    assert (one.files, one.files_read, one.rows_exact) == (100, 64, False)
    assert one.rows == pytest.approx(1_000, rel=0.05)


def test_the_ending_of_a_compression_is_looked_through():
    assert [suffix_of(name) for name in ("a.JSONL.gz", "a.json.zst", "a.parquet", "a")] == [
        ".jsonl",
        ".json",
        ".parquet",
        "",
    ]
