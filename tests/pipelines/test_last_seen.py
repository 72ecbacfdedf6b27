"""What the driver saw last is read back as it was written, or refused."""

import pytest

from pipelines.errors import BadRecipe
from pipelines.last_seen import (
    GpuSeen,
    LastSeen,
    RaySeen,
    ServerSeen,
    gpus_of,
    place_of,
    read_last_seen,
    write_last_seen,
)
from pipelines.store import RunFolder

SEEN = LastSeen(
    at=1000.5,
    host="here",
    pid=7,
    stage="generate",
    servers=(ServerSeen("generate-0", "http://a", "ready", 3, 0, 0.25, None, 1, ""),),
    gpus=(GpuSeen(0, "NVIDIA H200", 1024, 143_771, 0.93),),
    ray=RaySeen(2, 0, {"CPU": 16.0}, {"CPU": 3.5}),
)


def test_it_is_read_as_it_was_written(tmp_path):
    run = RunFolder(tmp_path)
    assert read_last_seen(run) is None
    write_last_seen(run, SEEN)
    assert read_last_seen(run) == SEEN
    assert list(tmp_path.iterdir()) == [place_of(run)]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"at": 1}', '{"servers": [{}], "gpus": []}'])
def test_what_no_driver_writes_is_refused(tmp_path, content):
    run = RunFolder(tmp_path)
    place_of(run).write_text(content)
    with pytest.raises(BadRecipe, match="is not what a driver writes"):
        read_last_seen(run)


def test_gpus_are_read_and_what_is_no_number_is_not_known():
    text = "0, NVIDIA H200, 1024, 143771, 93\n1, NVIDIA H200, [N/A], 143771, [N/A]\n"
    assert gpus_of(text) == (
        GpuSeen(0, "NVIDIA H200", 1024, 143_771, 0.93),
        GpuSeen(1, "NVIDIA H200", None, 143_771, None),
    )
    assert gpus_of("") == ()
    with pytest.raises(ValueError, match="unpack"):
        gpus_of("No devices were found\n")
