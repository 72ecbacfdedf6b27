"""The capture file: whole or absent, proved before use, gone after reading, never outside."""

import os
import pickle
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from actors.capture_file import (
    _CHECKED_AT_ONCE,
    CaptureFault,
    StatesFile,
    _is_finite,
    can_name_a_file,
    discard,
    publish,
    publish_fault,
    rid_of,
    sweep,
    sweep_dead,
    take,
    tokens_of,
)
from tests.support.small_disk import fill, mounted

IDS = [5, 6, 7, 8]
LAYERS = (1, 2, 3)


def states(rows=4, width=8):
    generator = torch.Generator().manual_seed(rows * 100 + width)
    aux = torch.randn(rows, 3 * width, generator=generator)
    return aux, torch.randn(rows, width, generator=generator)


def take_it(folder, rid="row-1", ids=IDS, aux_width=24, width=8, layers=LAYERS, late_seconds=0.0):
    return take(
        folder,
        rid,
        expected_ids=ids,
        aux_width=aux_width,
        width=width,
        aux_layer_ids=layers,
        late_seconds=late_seconds,
    )


def fault_of(folder, **changes):
    with pytest.raises(CaptureFault) as caught:
        take_it(folder, **changes)
    return caught.value.name


def test_what_was_published_is_taken_bit_for_bit_and_once(tmp_path):
    aux, last = states()
    publish(tmp_path, "row-1", IDS, aux, last, LAYERS)
    taken = take_it(tmp_path)
    assert taken.input_ids.tolist() == IDS
    assert torch.equal(taken.aux, aux.bfloat16())
    assert torch.equal(taken.last, last.bfloat16())
    assert taken.aux_layer_ids == LAYERS
    assert list(tmp_path.iterdir()) == []
    assert fault_of(tmp_path) == "missing"


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"ids": [5, 6, 7]}, "rows"),
        ({"ids": [5, 6, 7, 9]}, "foreign_ids"),
        ({"aux_width": 16}, "width"),
        ({"width": 4}, "width"),
        ({"layers": (1, 2, 4)}, "layer_ids"),
    ],
)
def test_states_of_something_else_are_refused_and_removed(tmp_path, changes, fault):
    publish(tmp_path, "row-1", IDS, *states(), LAYERS)
    assert fault_of(tmp_path, **changes) == fault
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", [0, 1])
def test_one_value_that_is_not_finite_condemns_the_file(tmp_path, bad, where):
    tensors = states()
    tensors[where][2, 3] = bad
    publish(tmp_path, "row-1", IDS, *tensors, LAYERS)
    assert fault_of(tmp_path) == "not_finite"


def test_of_all_bf16_values_the_infinities_and_the_nan_are_not_finite():
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    assert [_is_finite(one) for one in values.split(1)] == torch.isfinite(values).tolist()


@pytest.mark.parametrize("where", [0, _CHECKED_AT_ONCE - 1, _CHECKED_AT_ONCE, -1])
@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
def test_one_value_among_many_is_found_wherever_it_is(where, bad):
    values = torch.zeros(_CHECKED_AT_ONCE + 7, 1, dtype=torch.bfloat16)
    assert _is_finite(values)
    values[where] = bad
    assert not _is_finite(values)


def test_states_are_the_file_itself_until_they_are_copied(tmp_path):
    aux, last = states(rows=4096, width=64)
    publish(tmp_path, "row-1", range(4096), aux, last, LAYERS)
    taken = take_it(tmp_path, ids=list(range(4096)), aux_width=192, width=64)
    assert is_mapped(taken.aux, "row-1.safetensors")
    assert is_mapped(taken.last, "row-1.safetensors")
    copied = taken.copied()
    del taken
    assert "row-1.safetensors" not in Path("/proc/self/maps").read_text(), "room is still taken"
    assert copied.input_ids.tolist() == list(range(4096))
    assert torch.equal(copied.aux, aux.bfloat16())
    assert torch.equal(copied.last, last.bfloat16())


def is_mapped(tensor, name):
    """Whether the tensor's memory is that of the file of this name, which may be gone."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return name in line
    raise AssertionError("the tensor is in no memory of this process")


def test_a_file_renamed_to_another_request_is_found_out(tmp_path):
    publish(tmp_path, "row-2", IDS, *states(), LAYERS).rename(tmp_path / "row-1.safetensors")
    assert fault_of(tmp_path) == "foreign_rid"


def test_a_cut_file_is_unreadable_and_removed(tmp_path):
    path = publish(tmp_path, "row-1", IDS, *states(), LAYERS)
    path.write_bytes(path.read_bytes()[:-5])
    assert fault_of(tmp_path) == "unreadable"
    assert not path.exists()


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"last": None}, "tensors"),
        ({"extra": torch.zeros(1)}, "tensors"),
        ({"aux": torch.zeros(4, 24)}, "dtype"),
        ({"input_ids": torch.tensor(IDS)}, "dtype"),
    ],
)
def test_a_file_of_another_shape_of_contract_is_refused(tmp_path, change, fault):
    aux, last = states()
    tensors = {
        "input_ids": torch.tensor(IDS, dtype=torch.int32),
        "aux": aux.bfloat16(),
        "last": last.bfloat16(),
        **change,
    }
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        tmp_path / "row-1.safetensors",
        metadata={"rid": "row-1", "aux_layer_ids": "[1, 2, 3]"},
    )
    assert fault_of(tmp_path) == fault


@pytest.mark.parametrize(
    "rid", ["../x", "a/b", "a\\b", ".part-1", "", "a\0", "x" * 201, "ä", "a\n"]
)
def test_a_rid_that_could_leave_the_folder_is_refused_on_both_sides(tmp_path, rid):
    assert not can_name_a_file(rid)
    with pytest.raises(CaptureFault, match="bad_rid"):
        publish(tmp_path, rid, IDS, *states(), LAYERS)
    assert fault_of(tmp_path, rid=rid) == "bad_rid"
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=30))
def test_every_rid_that_may_name_a_file_names_one_inside(rid):
    if can_name_a_file(rid):
        assert "/" not in rid
        assert "\\" not in rid
        assert not rid.startswith(".")


def test_a_sweep_takes_captures_and_halves_and_nothing_else(tmp_path):
    publish(tmp_path, "row-1", IDS, *states(), LAYERS)
    (tmp_path / ".part-1-row-2.safetensors").write_bytes(b"half")
    (tmp_path / "note.txt").write_text("mine")
    assert sweep(tmp_path) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["note.txt"]


def test_a_fault_survives_pickling():
    fault = pickle.loads(pickle.dumps(CaptureFault("rows", "detail")))
    assert (fault.name, fault.detail) == ("rows", "detail")


def test_parts_in_any_order_give_the_bytes_of_one_writing(tmp_path):
    aux, last = (one.bfloat16() for one in states())
    ids = torch.tensor(IDS, dtype=torch.int32)
    at_once = publish(tmp_path, "row-1", IDS, aux, last, LAYERS).read_bytes()
    file = StatesFile(tmp_path, "row-1", tokens=4, aux_width=24, width=8, aux_layer_ids=LAYERS)
    for rows in (slice(3, 4), slice(0, 2), slice(2, 3)):
        file.write(rows.start, ids[rows], aux[rows], last[rows])
    assert file.finish().read_bytes() == at_once


def test_a_file_that_comes_after_the_answer_is_waited_for(tmp_path):
    later = threading.Timer(0.2, publish, (tmp_path, "row-1", IDS, *states(), LAYERS))
    later.start()
    assert take_it(tmp_path, late_seconds=30.0).input_ids.tolist() == IDS
    later.join()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_never_comes_is_missing_once_its_time_is_over(tmp_path):
    began = time.monotonic()
    assert fault_of(tmp_path, late_seconds=0.2) == "missing"
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("whose", ["row-1", None])
def test_a_fault_file_is_raised_at_once_by_its_name_and_only_once(tmp_path, whose):
    publish_fault(tmp_path, whose, CaptureFault("no_room", "words"))
    assert fault_of(tmp_path, late_seconds=30.0) == "no_room"
    assert fault_of(tmp_path) == "missing"
    assert list(tmp_path.iterdir()) == []


def test_a_fault_of_one_request_is_not_anothers(tmp_path):
    publish_fault(tmp_path, "row-2", CaptureFault("no_room", "words"))
    assert fault_of(tmp_path) == "missing"
    discard(tmp_path, "row-2")
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_was_given_up_leaves_nothing(tmp_path):
    publish(tmp_path, "row-1", IDS, *states(), LAYERS)
    discard(tmp_path, "row-1")
    discard(tmp_path, "row-1")
    assert list(tmp_path.iterdir()) == []


def test_a_full_folder_is_waited_for_and_then_an_error_that_leaves_nothing(tmp_path):
    with mounted(tmp_path / "small") as folder:
        filler = fill(folder)
        with pytest.raises(OSError, match="No space left"):
            publish(folder, "row-1", IDS, *states(), LAYERS, room_seconds=0.1)
        publish_fault(folder, "row-1", CaptureFault("no_room", "words"))
        assert fault_of(folder) == "no_room"
        assert list(folder.iterdir()) == [filler]
        freed = threading.Timer(0.2, filler.unlink)
        freed.start()
        publish(folder, "row-1", IDS, *states(), LAYERS, room_seconds=30.0)
        freed.join()
        assert take_it(folder).rid == "row-1"


def test_half_files_of_the_dead_are_swept_and_those_of_the_living_stay(tmp_path):
    publish(tmp_path, "row-1", IDS, *states(), LAYERS)
    living = tmp_path / f".part-{os.getpid()}-row-2.safetensors"
    for path in (living, tmp_path / ".part-4194305-row-3.safetensors"):  # above any pid
        path.write_bytes(b"half")
    assert sweep_dead(tmp_path) == 1
    assert {path.name for path in tmp_path.iterdir()} == {living.name, "row-1.safetensors"}


@given(st.integers(1, 10**7), st.from_regex("[0-9a-f]{32}", fullmatch=True))
def test_a_rid_says_whose_it_is_and_how_many_rows_it_has(tokens, digest):
    rid = rid_of("run1", digest, tokens)
    assert can_name_a_file(rid)
    assert tokens_of(rid, "run1") == tokens
    assert tokens_of(rid, "run2") is None
    assert tokens_of(digest, "run1") is None
