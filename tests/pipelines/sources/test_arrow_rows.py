"""Cells of Parquet and Arrow are what JSON would have said."""

import datetime as dt
import decimal
import io
import uuid

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.arrow_rows import pack, read_batches, unpack
from pipelines.sources.row import Refused
from pipelines.sources.row_ends import BrokenFile


def as_file(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def as_stream(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def as_parquet(table: pa.Table, **more) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, **more)
    return sink.getvalue()


CONTAINERS = [as_file, as_stream, as_parquet]


def read(content: bytes, *, columns=None, limit=1 << 20):
    found = read_batches(pa.BufferReader(content), content[:8], columns=columns, limit=limit)
    return [row for batch, _ in found for row in unpack(pack(batch))]


def cells(array: pa.Array, container=as_stream):
    return [row.get("a", "absent") for row in read(container(pa.table({"a": array})))]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array(["a", None, ""], pa.large_string()), ["a", "absent", ""]),
        (pa.array(["a", None, "a"]).dictionary_encode(), ["a", "absent", "a"]),
        (pa.array([b"\xc3\xa9", b"", None]), ["é", "", "absent"]),
        (pa.array([b"\xff\0"]), [b"\xff\0"]),
        (pa.array([b"ab"], pa.binary(2)), ["ab"]),
        (pa.array([1, None, -1], pa.int8()), [1, "absent", -1]),
        (pa.array([True, 0.5 > 1]), [True, False]),
        (pa.array([0.5, 1e300]), [0.5, 1e300]),
        (pa.array([None, None]), ["absent", "absent"]),
        (pa.array([[], None, ["a", None]]), [[], "absent", ["a", None]]),
        (pa.array([[1, 2], None], pa.list_(pa.int64(), 2)), [[1, 2], "absent"]),
        (pa.array([[1.5]], pa.large_list(pa.float32())), [[1.5]]),
        (
            pa.array([[{"r": "user", "c": None}, None, {"c": "b"}], None, []]),
            [[{"r": "user"}, None, {"c": "b"}], "absent", []],
        ),
        (pa.array([{"a": {"b": None}}, {"a": None}, None]), [{"a": {}}, {}, "absent"]),
        (
            pa.array([[("k", 1), ("n", None)], [], None], pa.map_(pa.string(), pa.int64())),
            [{"k": 1, "n": None}, {}, "absent"],
        ),
        (pa.array([[(1, "a")]], pa.map_(pa.int32(), pa.string())), [{"1": "a"}]),
        (pa.array([decimal.Decimal("1.50")]), ["1.50"]),
        (pa.array([dt.date(2024, 5, 1)]), ["2024-05-01"]),
        (pa.array([dt.datetime(2024, 5, 1, 12)], pa.timestamp("ms")), ["2024-05-01 12:00:00.000"]),
        (pa.array([0], pa.timestamp("us", tz="UTC")), ["1970-01-01 00:00:00.000000Z"]),
        (
            pa.array([[{"at": dt.datetime(2024, 5, 1), "c": "a"}]]),
            [[{"at": "2024-05-01 00:00:00.000000", "c": "a"}]],
        ),
        (pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{}"])), ["{}"]),
    ],
)
def test_a_cell_is_what_json_would_have_said(array, expected, container):
    assert cells(array, container) == expected


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array(["a", "b"], pa.string_view()), ["a", "b"]),
        (pa.array([b"a", b"\xff"], pa.binary_view()), ["a", b"\xff"]),
        (pa.array([{"a": "x"}], pa.struct([("a", pa.string_view())])), [{"a": "x"}]),
        (
            pa.StructArray.from_arrays([pa.array(["x", "y"]).dictionary_encode()], ["k"]),
            [{"k": "x"}, {"k": "y"}],
        ),
        (
            pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(16)], pa.binary(16))),
            ["\0" * 16],
        ),
        (pa.array([90], pa.duration("s")), ["90"]),
        (pa.array([2**62], pa.timestamp("s")), ["<value out of range: 4611686018427387904>"]),
    ],
)
def test_types_that_only_arrow_has_are_read_too(array, expected):
    assert cells(array) == expected


@pytest.mark.parametrize(
    "array",
    [
        pa.array([["x"], ["y"]], pa.list_view(pa.string())),
        pa.array([(1, 2, 3)], pa.month_day_nano_interval()),
        pa.RunEndEncodedArray.from_arrays([2], ["a"]),
        pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]),
        pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["k", "k"]),
    ],
)
def test_a_type_without_a_certain_reading_is_refused(array):
    with pytest.raises(BrokenFile, match="its column a"):
        cells(array)
    table = pa.table({"a": array, "b": pa.array([7] * len(array))})
    assert read(as_stream(table), columns=["b"]) == [{"b": 7}] * len(array)


def test_two_columns_of_one_name_are_refused():
    table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    for container in CONTAINERS:
        with pytest.raises(BrokenFile, match="two columns are named 'a'"):
            read(container(table))


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_row_that_is_not_utf8_spoils_no_other(container):
    raw = [b"good", b"\xff", b"better", b"\xed\xa0\x80"]
    table = pa.table({"a": [1, 2, 3, 4], "m": pa.array(raw).view(pa.string())})
    rows = read(container(table))
    assert [rows[0], rows[2]] == [{"a": 1, "m": "good"}, {"a": 3, "m": "better"}]
    assert [rows[1].reason, rows[3].reason] == ["invalid_utf8", "invalid_utf8"]


def test_a_map_that_has_a_key_twice_is_refused_alone():
    array = pa.array([[("k", 1), ("k", 2)], [("k", 3)]], pa.map_(pa.string(), pa.int64()))
    bad, good = read(as_stream(pa.table({"a": array})))
    assert isinstance(bad, Refused)
    assert bad.reason == "malformed_json"
    assert good == {"a": {"k": 3}}


@pytest.mark.parametrize("container", CONTAINERS)
def test_columns_choose_and_a_row_without_any_is_still_a_row(container):
    table = pa.table({"a": [1, 2], "b": ["x", None], "a.c": ["p", "q"]})
    assert read(container(table), columns={"b", "none"}) == [{"b": "x"}, {}]
    assert read(container(table), columns={"a"}) == [{"a": 1}, {"a": 2}]
    assert read(container(table), columns=()) == [{}, {}]


@pytest.mark.parametrize("container", CONTAINERS)
def test_batches_are_cut_to_size_and_every_row_is_in_one(container):
    texts = [str(index) * (index % 50) for index in range(2000)]
    nested = [[{"c": one, "d": index}] for index, one in enumerate(texts)]
    table = pa.table({"a": nested, "s": pa.array(["same" * 30] * 2000).dictionary_encode()})
    content = container(table)
    batches = [
        (batch, done)
        for batch, done in read_batches(
            pa.BufferReader(content), content[:8], columns=None, limit=10_000
        )
    ]
    assert max(batch.nbytes for batch, _ in batches) <= 10_000
    assert max(len(pack(batch)) for batch, _ in batches) <= 15_000
    assert [done for _, done in batches] == sorted(done for _, done in batches)
    assert batches[-1][1] == pytest.approx(1, abs=0.05)
    rows = [row for batch, _ in batches for row in unpack(pack(batch))]
    assert rows == [{"a": one, "s": "same" * 30} for one in nested]


def test_a_large_row_group_is_not_read_whole(tmp_path):
    path = tmp_path / "a.parquet"
    texts = [uuid.UUID(int=index * 7919**5 % 2**128).hex * 64 for index in range(20_000)]  # 40 MB
    path.write_bytes(as_parquet(pa.table({"a": texts}), use_dictionary=False, compression="none"))
    del texts
    before, most, rows = pa.total_allocated_bytes(), 0, 0
    with pa.OSFile(str(path)) as reader:
        for batch, _ in read_batches(reader, b"PAR1", columns=None, limit=1 << 19):
            rows += batch.num_rows
            most = max(most, pa.total_allocated_bytes() - before)
    assert rows == 20_000
    assert most < 12 << 20


@pytest.mark.parametrize("cut", [8, 4, 20, 300, -9])
def test_a_stream_that_does_not_end_with_its_file_is_broken(cut):
    content = as_stream(pa.table({"a": list(range(100))}))
    content = content[:-cut] if cut > 0 else content + bytes(-cut)
    with pytest.raises((BrokenFile, pa.ArrowException, OSError)):
        read(content)


def test_two_streams_in_one_file_are_not_taken_for_one():
    content = as_stream(pa.table({"a": [1]}))
    with pytest.raises(BrokenFile, match="does not end where the file does"):
        read(content + content)


@pytest.mark.parametrize("container", [as_file, as_parquet])
@pytest.mark.parametrize("cut", [1, 8, 100])
def test_a_file_that_breaks_off_is_broken(container, cut):
    with pytest.raises((BrokenFile, pa.ArrowException, OSError)):
        read(container(pa.table({"a": list(range(100))}))[:-cut])


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PART = st.fixed_dictionaries(
    {
        "r": st.none() | st.sampled_from("ab"),
        "p": st.none() | st.lists(st.none() | st.integers(0, 9), max_size=3),
    }
)
ROW = st.fixed_dictionaries({"t": TEXT, "m": st.none() | st.lists(PART, max_size=4)})


def without_nulls(value):
    if isinstance(value, dict):
        return {key: without_nulls(one) for key, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


@settings(deadline=None)
@given(st.lists(ROW, max_size=20), st.integers(1, 400), st.sampled_from(CONTAINERS))
def test_rows_come_back_as_they_were_however_they_are_cut(rows, limit, container):
    part = pa.struct([("r", pa.string()), ("p", pa.list_(pa.int64()))])
    schema = pa.schema([("t", pa.string()), ("m", pa.list_(part))])
    table = pa.Table.from_pylist(rows, schema)
    assert read(container(table), limit=limit) == [without_nulls(row) for row in rows]
