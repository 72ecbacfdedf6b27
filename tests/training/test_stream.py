"""Rows from a stream: equal to those on disk, and never those of another place."""

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from tests.support.one_rank import one_rank
from tests.support.tiny_training import DRAFT, random_rows, tiny_job, train_config
from training import checkpoint
from training.engine import TrainingFault
from training.features import FeatureFault, FeatureRow, FeatureStore
from training.loop import STOP_FILE, TrainJob, train_rows
from training.reader import RowPlan
from training.stream import (
    TOKENS_FILE,
    TOKENS_SCHEMA,
    StreamedRows,
    StreamedStates,
    TokenStore,
    write_tokens,
)

SIZE = DRAFT.target_hidden_size
AUX_SIZE = len(DRAFT.aux_layer_ids) * SIZE


def tokens_of(rows: list[FeatureRow]) -> pa.Table:
    return pa.table(
        {
            "sample_id": [row.sample_id for row in rows],
            "dataset": [row.dataset for row in rows],
            "domain": [row.domain for row in rows],
            "input_ids": [row.input_ids.tolist() for row in rows],
            "loss_mask": [row.loss_mask.tolist() for row in rows],
        },
        schema=TOKENS_SCHEMA,
    )


def token_store(folder: Path, rows: list[FeatureRow]) -> TokenStore:
    write_tokens(folder / TOKENS_FILE, [tokens_of(rows[:2]), tokens_of(rows[2:])])
    return TokenStore(folder / TOKENS_FILE)


def states_of(row: FeatureRow, end: int | None = None) -> StreamedStates:
    return StreamedStates(row.sample_id, row.aux[:end], row.last[:end])


def streamed(store: TokenStore, tables: list[pa.Table], max_tokens: int = 99) -> StreamedRows:
    return StreamedRows(store, tables, aux_size=AUX_SIZE, last_size=SIZE, max_tokens=max_tokens)


def equal(one: FeatureRow, other: FeatureRow) -> bool:
    names = ("input_ids", "loss_mask", "aux", "last")
    return one.sample_id == other.sample_id and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in names
    )


def test_the_token_file_knows_what_the_features_know(tmp_path: Path):
    rows = random_rows(7)
    store = token_store(tmp_path, rows)
    assert store.sample_ids == [row.sample_id for row in rows]
    assert store.domains == [row.domain for row in rows]
    assert store.lengths == [len(row.input_ids) for row in rows]
    assert store.loss_tokens == [int(row.loss_mask.sum()) for row in rows]
    for number, row in enumerate(rows):
        ids, mask = store.tokens(number)
        assert torch.equal(ids, row.input_ids)
        assert torch.equal(mask, row.loss_mask)


def test_no_token_file_and_one_of_another_version_are_named(tmp_path: Path):
    with pytest.raises(FeatureFault, match=r"tokens\.arrow is missing: run the capture stage"):
        TokenStore(tmp_path / TOKENS_FILE)
    other = TOKENS_SCHEMA.with_metadata({"eyas.schema": "tokens", "eyas.schema_version": "0"})
    with pa.OSFile(str(tmp_path / TOKENS_FILE), "wb") as file, pa.ipc.new_file(file, other) as to:
        to.write_table(tokens_of(random_rows(2)).cast(other))
    with pytest.raises(FeatureFault, match="another schema"):
        TokenStore(tmp_path / TOKENS_FILE)


def test_streamed_rows_are_the_rows_however_tables_are_cut(tmp_path: Path):
    rows = random_rows(6)
    store = token_store(tmp_path, rows)
    tables = [states_of(row).table() for row in rows]
    for cut in (tables, [pa.concat_tables(tables)], [pa.concat_tables(tables[:4]), *tables[4:]]):
        source = streamed(store, cut)
        assert all(equal(source.row(number), row) for number, row in enumerate(rows))
        assert not source.set_aside


def test_long_samples_are_streamed_to_their_cut_alone(tmp_path: Path):
    rows = random_rows(3)
    store = token_store(tmp_path, rows)
    row = streamed(store, [states_of(rows[0], 5).table()], max_tokens=5).row(0)
    assert len(row.input_ids) == len(row.aux) == 5
    with pytest.raises(FeatureFault, match=f"{rows[1].sample_id}: aux has 4 rows for 5 tokens"):
        streamed(store, [states_of(rows[1], 4).table()], max_tokens=5).row(1)


def test_a_stream_of_another_place_or_that_ends_is_refused(tmp_path: Path):
    rows = random_rows(3)
    store = token_store(tmp_path, rows)
    with pytest.raises(FeatureFault, match="brought chat-0001 where chat-0000 is next"):
        streamed(store, [states_of(rows[1]).table()]).row(0)
    with pytest.raises(FeatureFault, match="brought the end where chat-0000 is next"):
        streamed(store, []).row(0)


def test_states_of_another_width_are_refused(tmp_path: Path):
    rows = random_rows(1)
    store = token_store(tmp_path, rows)
    narrow = StreamedStates(rows[0].sample_id, rows[0].aux[:, :-1], rows[0].last)
    with pytest.raises(FeatureFault, match=r"no multiple of|aux has"):
        streamed(store, [narrow.table()]).row(0)


def test_a_sample_without_states_teaches_nothing_and_is_named(tmp_path: Path):
    rows = random_rows(2)
    store = token_store(tmp_path, rows)
    none = StreamedStates.none(rows[0].sample_id, "capture_not_finite: aux holds a NaN")
    source = streamed(store, [none.table(), states_of(rows[1]).table()])
    assert len(source.row(0).input_ids) == 0
    assert equal(source.row(1), rows[1])
    assert source.set_aside == {"chat-0000": "capture_not_finite: aux holds a NaN"}


# Through the loop


def stream_of(job: TrainJob, rows: list[FeatureRow], step: int, faults=()) -> Iterator[pa.Table]:
    """What one worker's stream brings from a step on."""
    by_id = {row.sample_id: row for row in rows}
    store = FeatureStore(Path(job.features), aux_layer_ids=DRAFT.aux_layer_ids)
    plan = RowPlan(store, job.train, rank=0, world=1)
    for turn in plan.turns(step, plan.total_steps):
        for batch in plan.micro_batches(turn):
            for number in batch:
                name = store.sample_ids[number]
                whole = states_of(by_id[name], job.train.max_tokens_per_sample)
                yield (StreamedStates.none(name, "nan") if name in faults else whole).table()


def train(job: TrainJob, stream=None, **more) -> None:
    with one_rank():
        train_rows(job, rank=0, world=1, device=torch.device("cpu"), stream=stream, **more)


def streamed_job(folder: Path, target: Path) -> TrainJob:
    job = tiny_job(folder, target)  # leaves features too, which a streamed job does not read
    write_tokens(folder / "features" / TOKENS_FILE, [tokens_of(random_rows(18))])
    return job.model_copy(update={"states": "streaming"})


def test_disk_and_stream_give_the_same_weights_and_lines(tmp_path: Path, tiny_target: Path):
    disk, stream = (
        tiny_job(tmp_path / "disk", tiny_target),
        streamed_job(tmp_path / "s", tiny_target),
    )
    train(disk)
    train(stream, stream_of(stream, random_rows(18), 0))
    lines = [(Path(job.output) / "metrics.jsonl").read_text() for job in (disk, stream)]
    timeless = [
        [
            {k: v for k, v in json.loads(line).items() if k not in CLOCK}
            for line in text.splitlines()
        ]
        for text in lines
    ]
    assert timeless[0] == timeless[1]
    made = [(Path(job.output) / "weights.safetensors").read_bytes() for job in (disk, stream)]
    assert made[0] == made[1]


CLOCK = {"seconds", "rows_per_second", "tokens_per_second", "data_wait_share"}


def test_a_stopped_stream_goes_on_from_its_checkpoint_and_from_nowhere_else(
    tmp_path: Path, tiny_target: Path
):
    job, whole = streamed_job(tmp_path / "job", tiny_target), tiny_job(tmp_path / "w", tiny_target)
    rows = random_rows(18)
    train(whole)

    def stop(step: int) -> None:
        if step == 3:
            (Path(job.output) / STOP_FILE).touch()

    train(job, stream_of(job, rows, 0), on_step=stop)
    (Path(job.output) / STOP_FILE).unlink()
    made = checkpoint.newest_step(Path(job.checkpoints))
    assert 0 < made < 8
    with pytest.raises(FeatureFault, match=r"where .* is next"):
        train(job, stream_of(job, rows, made + 1))
    train(job, stream_of(job, rows, made))
    one, other = ((Path(j.output) / "weights.safetensors").read_bytes() for j in (job, whole))
    assert one == other


def test_too_many_samples_without_states_end_the_run(tmp_path: Path, tiny_target: Path):
    job = streamed_job(tmp_path, tiny_target)
    with pytest.raises(TrainingFault, match=r"1 of 18 samples came without states.*nan"):
        train(job, stream_of(job, random_rows(18), 0, faults={"chat-0002"}))


def test_the_newest_step_of_no_checkpoint_is_zero(tmp_path: Path):
    assert checkpoint.newest_step(tmp_path / "none") == 0


def test_a_plan_asks_for_the_held_out_rows_after_every_epoch(tmp_path: Path):
    plan = RowPlan(token_store(tmp_path, random_rows(18)), train_config(), rank=0, world=1)
    each = plan.steps_per_epoch
    turns = list(plan.turns(0, 2 * each))
    assert [turn.step for turn in turns if turn.part is None] == list(range(2 * each))
    held = [turn for turn in turns if turn.part is not None]
    assert {turn.step for turn in held} == {each, 2 * each}
    for step in (each, 2 * each):
        asked = [n for turn in held if turn.step == step for n in plan.micro_batches(turn)[0]]
        assert sorted(asked) == list(plan.split.heldout)
    assert list(plan.turns(each, 2 * each)) == turns[turns.index(held[0]) :]
    assert [turn.part for turn in plan.turns(2 * each, 2 * each)] == list(range(held[0].parts))
