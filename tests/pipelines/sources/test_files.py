"""Every container gives the same rows, and no row vanishes whatever a file holds."""

import gzip
import io
import json
import pickle
import random
import tracemalloc

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.errors import BadRecipe
from pipelines.sources import files
from pipelines.sources.files import Chunk, columns_of, find_files, read_chunks, rows_of
from pipelines.sources.row import BadRow
from pipelines.storage import location_of, write_atomically

ROWS = [
    {"id": index, "messages": [{"role": "user", "content": f'é "{index}" \\ [{{,\n' * (index % 9)}]}
    for index in range(700)
]
BOM = b"\xef\xbb\xbf"


def jsonl(rows=ROWS, end=b"\n") -> bytes:
    return b"".join(json.dumps(row).encode() + end for row in rows)


def array(rows=ROWS, indent=None) -> bytes:
    return json.dumps(rows, ensure_ascii=False, indent=indent).encode()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


def arrow(new) -> bytes:
    table, sink = pa.Table.from_pylist(ROWS), io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=300)
    return sink.getvalue()


def parquet(**more) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink, **more)
    return sink.getvalue()


TEXTS = {
    "a.jsonl": jsonl(),
    "a.ndjson": BOM + jsonl(end=b"\r\n"),
    "open.jsonl": jsonl()[:-1],
    "lines.json": b"\n \n" + jsonl(),
    "a.json": array(),
    "pretty.json": BOM + b"\r\n" + array(indent=2).replace(b"\n", b"\r\n") + b"\n\n",
}
COMPRESSED = {
    "": lambda content: content,
    ".gz": gzip.compress,
    ".gzip": lambda content: gzip.compress(content[:999]) + gzip.compress(content[999:]),
    ".zst": zstd,
    ".zstd": lambda content: zstd(content[:999]) + zstd(content[999:]),
}
ARROW = {
    "a.parquet": parquet(),
    "groups.parquet": parquet(row_group_size=50, compression="zstd"),
    "a.arrow": arrow(pa.ipc.new_stream),
    "file.arrow": arrow(pa.ipc.new_file),
    "a.feather": arrow(pa.ipc.new_file),
}


def read(path, chunk_bytes=4096, **more):
    """(line, value or BadRow) of every row; chunks go through a pickle, as they do for real."""
    found = find_files(str(path))
    line, read_bytes, rows = dict.fromkeys((file.name for file in found), 1), 0, []
    for chunk in read_chunks(found, chunk_bytes=chunk_bytes, **more):
        chunk = pickle.loads(pickle.dumps(chunk))
        assert chunk.first_line == line[chunk.file]
        line[chunk.file] += chunk.rows
        read_bytes += chunk.read_bytes
        rows += rows_of(chunk)
    assert read_bytes <= sum(file.size for file in found)
    return rows


def put(folder, content: bytes, name: str = "a.jsonl"):
    path = folder / name
    path.write_bytes(content)
    return path


def outcome(rows):
    """The reason of each row, or its value."""
    return [(line, one.reason if isinstance(one, BadRow) else one) for line, one in rows]


@pytest.mark.parametrize("chunk_bytes", [300, 50_000, 1 << 30])
@pytest.mark.parametrize("name", [*(f"{a}{b}" for a in TEXTS for b in COMPRESSED), *ARROW])
def test_every_container_gives_the_same_rows(tmp_path, name, chunk_bytes):
    stem = name if name in ARROW else next(one for one in TEXTS if name.startswith(one))
    content = ARROW[name] if name in ARROW else COMPRESSED[name[len(stem) :]](TEXTS[stem])
    first = 3 if name.startswith("lines.json") else 1
    expected = list(enumerate(ROWS, start=first))
    assert read(put(tmp_path, content, name), chunk_bytes) == expected
    # The bytes decide, not the name.
    assert read(put(tmp_path, content, "unnamed"), chunk_bytes) == expected


def test_a_folder_gives_its_files_in_order_and_lines_start_anew(tmp_path):
    put(tmp_path, jsonl(ROWS[:2]), "b.jsonl")
    put(tmp_path, array(ROWS[2:5]), "a.json")
    put(tmp_path, ARROW["a.parquet"], "c.parquet")
    rows = read(tmp_path)
    assert [line for line, _ in rows] == [1, 2, 3, 1, 2, *range(1, 701)]
    assert [value for _, value in rows] == [*ROWS[2:5], *ROWS[:2], *ROWS]


def test_a_store_and_fsspec_give_the_same_rows(object_store):
    names = ["a.jsonl", "pretty.json", "a.parquet", "file.arrow", "a.arrow"]
    contents = {**TEXTS, **ARROW, "a.jsonl": gzip.compress(TEXTS["a.jsonl"])}
    memory = fsspec.filesystem("memory")
    root, _, options = object_store.uri.partition("?")
    try:
        for name in names:
            write_atomically(location_of(object_store.uri) / name, contents[name])
            memory.pipe_file(f"/eyas-test/{name}", contents[name])
            expected = list(enumerate(ROWS, start=1))
            assert (
                read(f"{root}/{name}?{options}") == read(f"memory://eyas-test/{name}") == expected
            )
    finally:
        memory.rm("/eyas-test", recursive=True)


def test_faults_of_lines_have_names_and_blank_lines_are_no_rows(tmp_path):
    lines = [
        BOM + b'{"a": 1}',
        b"",
        b"{",
        b'{"a": "\xff"}',
        b" \t\r",
        b"[1]",
        b"null",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": "\\ud800"}',
        b'{"a": "\0"}',
        b"\0\0",
        b'"half',
    ]
    for name in ("a.jsonl", "a.json"):
        assert outcome(read(put(tmp_path, b"\n".join(lines), name), 1)) == [
            (1, {"a": 1}),
            (3, "malformed_json"),
            (4, "invalid_utf8"),
            (6, "not_an_object"),
            (7, "not_an_object"),
            (8, "malformed_json"),
            (9, "malformed_json"),
            (10, {"a": "\ud800"}),
            (11, "malformed_json"),
            (12, "malformed_json"),
            (13, "malformed_json"),
        ]


def test_an_element_that_does_not_parse_is_one_bad_row(tmp_path):
    content = b'[{"a": 1}, {"a": 1,, 2}, null, ,\n{"a": "\xff"}, {"a": 1]\n, "x", {"a": [{}, 2]},]'
    assert outcome(read(put(tmp_path, content, "a.json"), 1)) == [
        (1, {"a": 1}),
        (2, "malformed_json"),
        (3, "not_an_object"),
        (4, "malformed_json"),
        (5, "invalid_utf8"),
        (6, "malformed_json"),
        (7, "not_an_object"),
        (8, {"a": [{}, 2]}),
        (9, "malformed_json"),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b""),
        ("a.jsonl", BOM + b"\n \r\n"),
        ("a.json", b" \n"),
        ("a.json", b"[ \n ]\n"),
        ("a.json.gz", gzip.compress(b"[]", mtime=0)),
        ("a.jsonl.gz", gzip.compress(b"", mtime=0)),
    ],
)
def test_a_file_without_rows_has_none(tmp_path, name, content):
    path = put(tmp_path, content, name)
    assert read(path) == []
    assert columns_of(*find_files(str(path))) == ()


@pytest.mark.parametrize(
    ("name", "content", "seen"),
    [
        ("a.json", b'{\n "rows": [\n  {"a": 1}\n ]\n}', "one object over several lines"),
        ("a.json", b'"text"', "begins with"),
        ("a.json", b"[{}] {}", "followed by"),
        ("a.json", b"[]" + b" " * (1 << 17) + b"{}", "followed by"),
        ("a.json", b"[" + b" " * (1 << 17), "not closed"),
        ("a.json", b'[{"a": 1}, {"a": 2', r"not closed \(0 rows"),
        ("a.json", b"[{}}, {}]", "closed by a brace"),
        ("a.parquet", b"", "is empty"),
        ("a.parquet", b"PAR1 but no", "cannot be read"),
        ("a.arrow", b"ARROW1 but no", "cannot be read"),
        ("a.feather", b"FEA1....", "begins with b'FEA1"),
        ("a.dat", b"PK\x03\x04", "begins with"),
        ("a.json", '{"a": 1}'.encode("utf-16"), "begins with"),
        ("a.parquet.gz", gzip.compress(ARROW["a.parquet"], mtime=0), "begins with b'PAR1"),
        ("a.jsonl.gz", b"", "shorter than any compressed file"),
        ("a.jsonl.zst", b"\x28\xb5", "shorter than any compressed file"),
    ],
)
def test_a_file_that_holds_no_rows_is_a_bad_recipe(tmp_path, name, content, seen):
    path = put(tmp_path, content, name)
    with pytest.raises(BadRecipe, match=seen) as refused:
        read(path)
    assert str(path) in str(refused.value)


def test_one_object_that_opens_its_list_in_the_first_line_is_no_file_of_rows(tmp_path):
    path = put(tmp_path, b'{"rows": [\n  "a",\n  "b"]}', "a.json")
    with pytest.raises(BadRecipe, match="one object over several lines"):
        read(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.jsonl.zst", "a.json.zst"])
def test_a_compressed_file_that_breaks_off_anywhere_is_never_fewer_rows(tmp_path, name):
    """At the end of a member a file is whole, for all that anybody can see; there is one member."""
    text = jsonl(ROWS[:40]) if "jsonl" in name else array(ROWS[:40])
    content = COMPRESSED[name[name.rindex(".") :]](text)
    for end in range(len(content)):
        with pytest.raises(BadRecipe, match=name):
            read(put(tmp_path, content[:end], name))
    for more in (b"\0", b"more", content[:20]):
        with pytest.raises(BadRecipe, match=name):
            read(put(tmp_path, content + more, name))


def test_how_many_rows_were_read_before_a_file_broke_off_is_said(tmp_path):
    noise = [{"a": random.Random(index).randbytes(500).hex()} for index in range(2000)]
    path = put(tmp_path, gzip.compress(jsonl(noise))[:-9], "a.jsonl.gz")
    chunks = read_chunks(find_files(str(path)), chunk_bytes=4096)
    found = []
    with pytest.raises(BadRecipe, match="Truncated") as refused:
        found.extend(chunk.rows for chunk in chunks)
    assert f"({sum(found):,} rows were read before that)" in str(refused.value)
    assert 1000 < sum(found) < 2000


@pytest.mark.parametrize("chunk_bytes", [10, 300, 1 << 20])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.arrow"])
def test_a_row_above_the_limit_is_named_and_its_neighbours_are_kept(
    tmp_path, monkeypatch, name, chunk_bytes
):
    monkeypatch.setattr(files, "ROW_LIMIT", 1000)
    rows = [{"a": "x" * size} for size in (1, 900, 1100, 2, 200_000, 3)]
    table, sink = pa.Table.from_pylist(rows), io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    as_parquet = io.BytesIO()
    pq.write_table(table, as_parquet)
    content = {
        "a.jsonl": jsonl(rows),
        "a.json": array(rows),
        "a.parquet": as_parquet.getvalue(),
        "a.arrow": sink.getvalue(),
    }[name]
    large = "row_too_large"
    assert outcome(read(put(tmp_path, content, name), chunk_bytes)) == list(
        enumerate([rows[0], rows[1], large, rows[3], large, rows[5]], start=1)
    )


def test_a_turn_of_two_megabytes_is_a_row(tmp_path):
    row = {"messages": [{"role": "user", "content": 'a"\\\n' * 500_000}]}
    for name, content in [("a.jsonl", jsonl([row, row])), ("a.json", array([row, row]))]:
        assert read(put(tmp_path, content, name)) == [(1, row), (2, row)]


OBJECT = st.dictionaries(
    st.text(max_size=5),
    st.recursive(
        st.text(max_size=20) | st.integers() | st.none(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
    max_size=4,
)
BROKEN_LINE = st.binary(max_size=30).map(lambda one: one.replace(b"\n", b"")) | st.sampled_from(
    [
        b"",
        b"{",
        b'{"a": "\\ud800"}',
        b'{"a": "\0"}',
        b"\0",
        BOM,
        b"\xed\xa0\x80",
        b"[",
        b"]",
        b'"\\',
    ]
)
LINE = OBJECT.map(lambda one: json.dumps(one).encode()) | BROKEN_LINE


def any_folder(factory):
    folder = factory.getbasetemp() / "any"
    folder.mkdir(exist_ok=True)
    return folder


@settings(deadline=None, max_examples=60)
@given(
    st.lists(LINE, max_size=30),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(list(COMPRESSED.values())),
    st.integers(1, 200),
)
def test_rows_of_any_lines_are_values_and_bad_rows(
    tmp_path_factory, lines, end, has_bom, is_open, compress, chunk_bytes
):
    content = (BOM if has_bom else b"") + end.join(lines) + (b"" if is_open else end)
    path = put(any_folder(tmp_path_factory), compress(content))
    if content.startswith((b"\x1f\x8b", b"\x28\xb5\x2f\xfd")):
        return
    rows = read(path, chunk_bytes)
    plain = content.removeprefix(BOM).split(b"\n")
    assert [line for line, _ in rows] == [
        line for line, one in enumerate(plain, start=1) if one.strip()
    ]
    for line, value in rows:
        try:
            expected = json.loads(plain[line - 1])
        except ValueError:
            expected = None
        assert isinstance(value, BadRow) or value == expected


@settings(deadline=None, max_examples=60)
@given(
    st.lists(OBJECT, min_size=1, max_size=20),
    st.lists(st.sampled_from([b"tru", b"", b'{"a" 1}', b'"\xff\0"', b"{]", b"[1, 2]"]), max_size=5),
    st.randoms(use_true_random=False),
    st.sampled_from([None, 1, "\t"]),
    st.sampled_from(list(COMPRESSED.values())),
    st.integers(1, 200),
)
def test_rows_of_any_array_are_values_and_bad_rows(
    tmp_path_factory, objects, broken, order, indent, compress, chunk_bytes
):
    elements = [(one, json.dumps(one, indent=indent).encode()) for one in objects]
    elements += [(None, one) for one in broken]
    order.shuffle(elements)
    content = compress(b"[" + b" ,\n".join(one for _, one in elements) + b"]")
    rows = read(put(any_folder(tmp_path_factory), content, "a.json"), chunk_bytes)
    if [one for _, one in elements] == [b""]:
        assert rows == []
        return
    assert [line for line, _ in rows] == list(range(1, len(elements) + 1))
    for (_, value), (expected, _) in zip(rows, elements, strict=True):
        assert isinstance(value, BadRow) if expected is None else value == expected


@pytest.mark.parametrize("compression", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "row", "times"),
    [
        ("a.jsonl", {"text": 'A hawk eats voles, says "she"\n' * 30}, 60),
        ("a.json", {"text": 'A hawk eats voles, says "she"\n' * 30}, 60),
        ("dense.json", [], 500),
        ("dense.jsonl", "", 500),
    ],
)
def test_memory_does_not_grow_with_the_file(tmp_path, name, row, times, compression):
    end = b"\n" if name.endswith(".jsonl") else b","
    block = (json.dumps(row).encode() + end) * 1000
    path = tmp_path / f"{name}{compression}"
    with gzip.open(path, "wb", 1) if compression else path.open("wb") as handle:
        handle.write(b"" if end == b"\n" else b"[")
        for _ in range(times):
            handle.write(block)
        handle.write(b"" if end == b"\n" else b"{}]")
    found = find_files(str(path))
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        count = sum(chunk.rows for chunk in read_chunks(found, chunk_bytes=1 << 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == times * 1000 + (end == b",")
    assert peak < 16 << 20
    assert pa.total_allocated_bytes() - before < 1 << 20


def test_a_huge_row_is_skipped_without_being_held(tmp_path):
    path = tmp_path / "a.json"
    with path.open("wb") as handle:
        handle.write(b'[{"a": 1}, "')
        for _ in range(100):
            handle.write(b"x" * (1 << 20))
        handle.write(b'", {"a": 2}]')
    tracemalloc.start()
    try:
        chunks = list(read_chunks(find_files(str(path)), chunk_bytes=1 << 20))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    rows = [row for chunk in chunks for row in rows_of(chunk)]
    assert outcome(rows) == [(1, {"a": 1}), (2, "row_too_large"), (3, {"a": 2})]
    assert peak < 70 << 20


@pytest.mark.parametrize("name", ["a.jsonl", "a.json.gz", "a.parquet", "a.arrow", "file.arrow"])
def test_a_reader_that_is_closed_early_closes_its_file(tmp_path, monkeypatch, name):
    content = {**TEXTS, **ARROW, "a.json.gz": gzip.compress(TEXTS["a.json"])}[name]
    (file,) = find_files(str(put(tmp_path, content, name)))
    opened = []
    plain = type(file).open
    monkeypatch.setattr(type(file), "open", lambda one: opened.append(plain(one)) or opened[-1])
    chunks = read_chunks([file], chunk_bytes=300)
    next(chunks)
    assert not opened[0].closed
    chunks.close()
    assert opened[0].closed
    assert len(columns_of(file)) == 16
    assert [one.closed for one in opened] == [True, True]


def test_the_head_of_a_file_is_its_first_rows_that_can_be_decoded(tmp_path):
    path = put(tmp_path, b"[1]\n{\n" + jsonl())
    assert columns_of(*find_files(str(path))) == tuple(ROWS[:16])
    path = put(tmp_path, jsonl(ROWS[:3]))
    assert columns_of(*find_files(str(path))) == tuple(ROWS[:3])
    path = put(tmp_path, b"[1]\n" * 40_000 + jsonl())
    assert columns_of(*find_files(str(path))) == ()


def test_the_head_of_a_file_is_all_that_is_read_for_it(tmp_path):
    path = put(tmp_path, gzip.compress(jsonl(ROWS * 20))[:-9], "a.jsonl.gz")
    assert columns_of(*find_files(str(path))) == tuple(ROWS[:16])


def test_columns_are_chosen_where_a_file_has_columns(tmp_path):
    path = put(tmp_path, ARROW["a.parquet"], "a.parquet")
    assert read(path, columns={"id"}) == list(enumerate(({"id": one["id"]} for one in ROWS), 1))


def test_a_fault_behind_good_rows_is_a_bad_recipe_that_names_the_file(object_store):
    root, _, options = object_store.uri.partition("?")
    write_atomically(location_of(object_store.uri) / "a.jsonl", jsonl())
    found = find_files(f"{root}/a.jsonl?{options}")
    object_store.refuse = lambda *_: "AccessDenied"
    with pytest.raises(BadRecipe, match=r"a\.jsonl cannot be read"):
        list(read_chunks(found, chunk_bytes=1 << 20))


def test_a_chunk_is_small_and_plain(tmp_path):
    (chunk,) = read_chunks(find_files(str(put(tmp_path, jsonl(ROWS[:2])))), chunk_bytes=1 << 20)
    payload = jsonl(ROWS[:2])[:-1]
    ends = (payload.index(b"\n"), len(payload))
    assert chunk == Chunk("a.jsonl", 1, 2, "lines", payload, ends, len(payload) + 1)
