"""The training row on disk: what may teach is kept whole, and nothing else can be taken for it."""

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.support.tiny_training import DRAFT, random_rows, write_features
from training.features import (
    STORED,
    FeatureFault,
    FeatureRow,
    FeatureStore,
    from_eight_bits,
    read_aux,
    teaches_from,
    to_eight_bits,
    write_shard,
)
from training.packing import pack

LAYERS, SIZE = DRAFT.aux_layer_ids, DRAFT.target_hidden_size
SHARD = "shard-00000.safetensors"


def store_of(folder: Path) -> FeatureStore:
    return FeatureStore(folder, aux_layer_ids=LAYERS)


def with_mask(row: FeatureRow, spans: list[tuple[int, int]]) -> FeatureRow:
    mask = torch.zeros(len(row.input_ids), dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    return replace(row, loss_mask=mask)


def odd_rows() -> list[FeatureRow]:
    """Two turns, one token at the end, everything, and nothing may teach."""
    rows = [replace(row, sample_id=f"chat-{at}") for at, row in enumerate(random_rows(4, seed=1))]
    tokens = [len(row.input_ids) for row in rows]
    spans = [[(2, 4), (6, 8)], [(tokens[1] - 1, tokens[1])], [(0, tokens[2])], []]
    return [with_mask(row, some) for row, some in zip(rows, spans, strict=True)]


@pytest.mark.parametrize("rows", [random_rows(7), odd_rows()], ids=["answers", "odd masks"])
def test_every_teacher_is_what_was_captured_and_no_other_last_state_is_kept(tmp_path, rows):
    write_features(tmp_path, rows)
    store = store_of(tmp_path)
    for number, row in enumerate(rows):
        seen, first = store.row(number), teaches_from(row.loss_mask)
        assert torch.equal(seen.aux, row.aux)
        assert torch.equal(seen.last[first:], row.last[first:])
        assert seen.last[:first].isnan().all()
        given, read = (
            pack([one], steps=4, aux_size=3 * SIZE, last_size=SIZE) for one in (row, seen)
        )
        assert torch.equal(given.labels, read.labels)
        assert torch.equal(given.last[given.labels], read.last[read.labels])
    kept = sum(len(load_file(path)["last"]) for path in tmp_path.glob("*.safetensors"))
    assert kept == sum(len(row.input_ids) - teaches_from(row.loss_mask) for row in rows)


def test_rows_read_and_written_again_have_the_same_bytes(tmp_path):
    write_features(tmp_path / "one", random_rows(6))
    store = store_of(tmp_path / "one")
    write_features(tmp_path / "two", [store.row(number) for number in range(6)])
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()


@pytest.mark.parametrize(("name", "place"), [("aux", 0), ("last", -1)])
def test_a_state_that_is_not_finite_is_refused_by_name(tmp_path, name, place):
    row = random_rows(1)[0]
    getattr(row, name)[place, 3] = torch.nan
    with pytest.raises(FeatureFault, match="chat-0000: a hidden state is not finite"):
        write_shard(tmp_path, SHARD, [row], aux_layer_ids=LAYERS)
    assert not list(tmp_path.glob("*"))


def changed(folder: Path, change) -> None:
    path = folder / "index.parquet"
    pq.write_table(change(pq.read_table(path)), path)


def test_features_of_an_earlier_version_are_refused_with_their_cure(tmp_path):
    write_features(tmp_path, random_rows(4))

    def version_one(table: pa.Table) -> pa.Table:
        metadata = {"eyas.schema": "features", "eyas.schema_version": "1"}
        return table.drop_columns(["teaches_from", "last_start"]).replace_schema_metadata(metadata)

    changed(tmp_path, version_one)
    with pytest.raises(FeatureFault, match=r"version 1, expected version 2 .* --from capture"):
        store_of(tmp_path)


@pytest.mark.parametrize("by", [-1, 1])
def test_an_index_that_shifts_what_teaches_is_refused_before_it_does(tmp_path, by):
    write_features(tmp_path, random_rows(4))

    def shift(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index("teaches_from")
        firsts = [one + by for one in table["teaches_from"].to_pylist()]
        return table.set_column(at, table.schema.field(at), pa.array(firsts, pa.int32()))

    changed(tmp_path, shift)
    with pytest.raises(FeatureFault, match="the index has it teach from token"):
        store_of(tmp_path).row(0)


def test_a_shard_without_the_end_of_its_last_states_is_refused(tmp_path):
    write_features(tmp_path, random_rows(4))

    def beyond(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index("last_start")
        starts = [one + 3 for one in table["last_start"].to_pylist()]
        return table.set_column(at, table.schema.field(at), pa.array(starts, pa.int64()))

    changed(tmp_path, beyond)
    with pytest.raises(FeatureFault, match=r"last has .* rows for"):
        store_of(tmp_path).row(1)


# In 8 bits


def outliers(tokens: int = 20) -> torch.Tensor:
    """[T, A*H]: layers of very different size, a channel far above the others, a token of zeros."""
    states = torch.randn(tokens, 3, SIZE, generator=torch.Generator().manual_seed(2))
    states *= torch.tensor([1e-4, 1.0, 1e4])[None, :, None]
    states[:, :, 5] *= 300
    states[4] = 0
    return states.flatten(1).bfloat16()


@pytest.mark.parametrize("storage", ["float8_e4m3", "int8"])
def test_a_state_in_eight_bits_is_off_by_no_more_than_a_step_of_its_own_layers_scale(storage):
    states = outliers()
    values, scale = to_eight_bits(states, 3, storage)
    assert (values.dtype, values.element_size()) == (STORED[storage][0], 1)
    assert scale.shape == (20, 3)
    seen = from_eight_bits(values, scale).float().unflatten(1, (3, -1))
    given = states.float().unflatten(1, (3, -1))
    # int8 has steps of one scale; of e4m3 a step is an eighth of a power of two, at least 2^-9.
    step = (
        scale[..., None].expand_as(given)
        if storage == "int8"
        else torch.maximum(given.abs() / 8, scale[..., None] * 2**-9)
    )
    assert ((seen - given).abs() <= step / 2 + given.abs() * 2**-8).all()
    assert not seen[4].any()


@pytest.mark.parametrize("storage", ["float8_e4m3", "int8"])
def test_a_shard_in_eight_bits_gives_the_rounded_aux_states_and_the_very_last_ones(
    tmp_path, storage
):
    rows = random_rows(5)
    part = write_shard(tmp_path, SHARD, rows, aux_layer_ids=LAYERS, storage=storage)
    pq.write_table(part, tmp_path / "index.parquet")
    store = store_of(tmp_path)
    for number, row in enumerate(rows):
        seen, first = store.row(number), teaches_from(row.loss_mask)
        assert torch.equal(seen.aux, from_eight_bits(*to_eight_bits(row.aux, 3, storage)))
        assert torch.equal(seen.last[first:], row.last[first:])
    tensors = load_file(tmp_path / SHARD)
    assert {tensors["aux"].element_size(), tensors["aux_scale"].element_size()} == {1, 4}


@pytest.mark.parametrize("storage", ["float8_e4m3", "int8"])
def test_no_infinite_state_is_rounded_to_a_finite_one(tmp_path, storage):
    row = random_rows(1)[0]
    row.aux[1, 2] = torch.inf
    with pytest.raises(FeatureFault, match="chat-0000: a hidden state is not finite"):
        write_shard(tmp_path, SHARD, [row], aux_layer_ids=LAYERS, storage=storage)


def test_a_scale_that_is_missing_is_not_taken_from_another_token(tmp_path):
    path = tmp_path / SHARD
    row = random_rows(1)[0]
    write_shard(tmp_path, SHARD, [row], aux_layer_ids=LAYERS, storage="int8")
    tensors = load_file(path)
    save_file(tensors | {"aux_scale": tensors["aux_scale"][:1].clone()}, path)
    with safe_open(path, framework="pt") as shard, pytest.raises(FeatureFault, match="aux_scale 1"):
        read_aux(shard, slice(0, 5))
