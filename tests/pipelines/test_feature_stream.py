"""The workers of a stream: the target's own states, in the order that was asked for."""

import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from actors.dispatch import ServerReport
from pipelines.capture import note_tokens
from pipelines.feature_stream import StreamPlan, StreamWorker, rows_between
from pipelines.state_reader import Handover
from pipelines.witness import Witness
from tests.support.capture_server import CaptureServer, serving
from tests.support.tiny_draft import TINY_DRAFT
from tests.support.tiny_run import tiny_run, write_responses
from tests.support.tiny_target import AUX_LAYER_IDS
from tests.support.tiny_training import train_config
from training.reader import RowPlan
from training.stream import TOKENS_FILE, StreamFault, TokenStore

MAX_TOKENS = 30


@pytest.fixture
def noted(tmp_path, tiny_target):
    """A recipe, its run with a token file, and the rows in the file's order."""
    recipe, run = tiny_run(tmp_path, tiny_target, "capture.mode=streaming")
    rows = sorted(write_responses(run, 12), key=lambda row: row["sample_id"])
    return recipe, run, rows, note_tokens(recipe, run)


def stream(recipe, run, folder: Path, asked: list[int], **faults) -> list[dict]:
    """What a worker gives for the rows that are asked for, in blocks of five."""
    folder.mkdir()
    server = CaptureServer(recipe.target, folder, layer_ids=AUX_LAYER_IDS, **faults)
    with serving(server) as url:
        worker = StreamWorker(
            StreamPlan(
                tokens=run.features / TOKENS_FILE,
                max_tokens=MAX_TOKENS,
                vocab_size=TINY_DRAFT.vocab_size,
                handover=Handover.of(TINY_DRAFT, folder, "n"),
                pool=recipe.capture.pool.model_copy(
                    update={"attempts": 2, "backoff_seconds": 0.01}
                ),
                share=1.0,
                servers=lambda: (ServerReport(url, True, None, time.time(), None, None),),
            )
        )
        try:
            blocks = [asked[at : at + 5] for at in range(0, len(asked), 5)]
            made = [one for block in blocks for one in worker(pa.table({"row": block}))]
        finally:
            worker.close()
    assert not list(folder.iterdir()), "a captured file was left behind"
    return [row for table in made for row in table.to_pylist()]


def test_the_token_file_has_every_ok_response_and_its_span(noted):
    _, run, rows, counts = noted
    store = TokenStore(run.features / TOKENS_FILE)
    assert store.sample_ids == [row["sample_id"] for row in rows]
    for number, row in enumerate(rows):
        ids, mask = store.tokens(number)
        assert ids.tolist() == row["prompt_ids"] + row["output_ids"]
        assert mask.tolist() == [at >= len(row["prompt_ids"]) for at in range(len(ids))]
    tokens = sum(store.lengths)
    assert (counts["samples"], counts["tokens"]) == (12, tokens)
    assert counts["state_bytes"] == tokens * (2 * 4 * 64 + 5)


def test_shards_of_an_earlier_mode_are_gone(noted):
    recipe, run, *_ = noted
    for name in ("shard-00000.safetensors", ".shard-00000.parquet", "index.parquet"):
        (run.features / name).touch()
    note_tokens(recipe, run)
    assert [path.name for path in run.features.iterdir()] == [TOKENS_FILE]


def test_states_are_the_targets_in_the_order_asked_and_cut(noted, tmp_path):
    recipe, run, rows, _ = noted
    asked = [7, 0, 3, 3, 11, 2, 5]
    got = stream(recipe, run, tmp_path / "states", asked)
    assert [one["sample_id"] for one in got] == [rows[row]["sample_id"] for row in asked]
    witness = Witness(recipe.target, torch.float32)
    for row, one in zip(asked, got, strict=True):
        ids = (rows[row]["prompt_ids"] + rows[row]["output_ids"])[:MAX_TOKENS]
        states = witness.states(ids)
        aux = torch.cat([states[layer + 1] for layer in AUX_LAYER_IDS], -1)
        for name, wanted in (("aux", aux), ("last", states[-1])):
            seen = torch.frombuffer(bytearray(one[name]), dtype=torch.bfloat16)
            torch.testing.assert_close(
                seen.view(wanted.shape).float(), wanted, rtol=2**-8, atol=1e-4
            )
        assert one["fault"] == ""


def test_a_lost_file_is_asked_for_again(noted, tmp_path):
    recipe, run, rows, _ = noted
    got = stream(recipe, run, tmp_path / "states", [1, 2, 4], faults={1: "lost"})
    assert [one["sample_id"] for one in got] == [rows[row]["sample_id"] for row in (1, 2, 4)]
    assert all(one["aux"] for one in got)


def test_a_sample_that_never_is_finite_comes_without_states(noted, tmp_path):
    recipe, run, rows, _ = noted
    ids = tuple((rows[4]["prompt_ids"] + rows[4]["output_ids"])[:MAX_TOKENS])
    got = stream(recipe, run, tmp_path / "states", [2, 4, 6], poisoned=frozenset({ids}))
    assert [bool(one["aux"]) for one in got] == [True, False, True]
    assert got[1]["fault"].startswith("capture_not_finite: aux of")


def test_a_server_that_answers_nothing_ends_the_stream(noted, tmp_path):
    recipe, run, rows, _ = noted
    with pytest.raises(StreamFault, match=rf"{rows[0]['sample_id']} after .* attempts: http_500"):
        stream(recipe, run, tmp_path / "states", [0], dies_after=0)


def test_the_ranks_share_what_one_alone_would_read(noted):
    _, run, *_ = noted
    tokens, config = TokenStore(run.features / TOKENS_FILE), train_config()
    alone = RowPlan(tokens, config, rank=0, world=1)
    pair = [RowPlan(tokens, config, rank=rank, world=2) for rank in range(2)]
    whole = rows_between(alone, 1, alone.total_steps)
    parts = [rows_between(plan, 1, plan.total_steps) for plan in pair]
    assert sorted(np.concatenate(parts)) == sorted(whole)
    assert len(rows_between(alone, 0, alone.total_steps)) > len(whole)
