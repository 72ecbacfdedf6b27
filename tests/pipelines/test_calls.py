"""Calls name places in prompt files, and every prompt is in one."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.calls import PromptReader, RowGroup, call_shape, calls_for, row_groups

FILES = ((40, 16), (7, 16), (16, 16))  # rows of a file, rows of its groups


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> list[Path]:
    folder, first, paths = tmp_path_factory.mktemp("prompts"), 0, []
    for number, (rows, group) in enumerate(FILES):
        paths.append(folder / f"part-{number}.parquet")
        table = pa.table({"place": range(first, first + rows)})
        pq.write_table(table, paths[-1], row_group_size=group)
        first += rows
    return paths


@given(places=st.sets(st.integers(0, 62)), rows=st.integers(1, 20))
def test_what_a_worker_reads_is_what_is_wanted_in_order(files, places, rows):
    wanted = np.array(sorted(places), np.int64)
    calls = list(calls_for(row_groups(files), wanted, rows))
    read = [PromptReader().prompts(one)["place"].to_pylist() for one in calls]
    assert [one for some in read for one in some] == sorted(places)
    assert all(0 < len(some) <= rows for some in read)


def test_calls_of_several_groups_may_come_together_and_in_any_order(files):
    calls = list(calls_for(row_groups(files), np.arange(63), 10))[::-1]
    places = PromptReader().prompts(pa.concat_tables(calls))["place"].to_pylist()
    assert places != sorted(places)
    assert sorted(places) == list(range(63))


def test_a_group_is_read_once_for_the_calls_that_follow_each_other(files, monkeypatch):
    reads = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda self, group, **rest: (reads.append(group), read(self, group, **rest))[1],
    )
    reader = PromptReader()
    for one in calls_for(row_groups(files), np.arange(63), 4):
        reader.prompts(one)
    assert reads == [0, 1, 2, 0, 0]


def test_the_rows_of_a_group_are_shared_out_evenly():
    calls = calls_for([RowGroup(Path("a.parquet"), 0, 0, 9)], np.arange(9), 8)
    assert [len(one["rows"][0]) for one in calls] == [5, 4]


def test_a_worker_admits_several_times_the_rows_it_has_permits_for():
    small, large = call_shape(100, 1, 16), call_shape(1_000_000, 4, 256)
    assert (small.rows, large.rows) == (8, 512)
    assert small.rows * small.calls >= 4 * 16
    assert large.rows * large.calls >= 4 * 256
