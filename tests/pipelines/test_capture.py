"""Capture: the states are the target's own, nothing is lost, nothing is left behind."""

import asyncio
import hashlib
import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from pipelines.capture import capture, commit, plan_capture
from pipelines.capture_plan import TokenBytes, drop_foreign_files, estimate_bytes
from pipelines.capture_servers import handover_folder
from pipelines.capture_session import CaptureSession
from pipelines.errors import BadRecipe, PreflightFailed, QualityStop
from pipelines.recipe import Recipe
from pipelines.state_reader import Handover
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog
from pipelines.witness import Witness
from tests.support.capture_server import CaptureServer, serving
from tests.support.tiny_draft import TINY_DRAFT
from tests.support.tiny_run import tiny_run, write_responses
from tests.support.tiny_target import AUX_LAYER_IDS
from training.features import FeatureStore

PATIENT = "capture.pool={attempts: 3, backoff_seconds: 0.01, rest_seconds: 0.05}"


def captured(recipe: Recipe, run: RunFolder, folder: Path, **server_settings) -> dict:
    """The stage with a server at the edge in place of the embedded one."""
    folder.mkdir(exist_ok=True)
    plan = plan_capture(recipe, run)
    run.features.mkdir(exist_ok=True)
    server = CaptureServer(recipe.target, folder, layer_ids=AUX_LAYER_IDS, **server_settings)
    with serving(server) as url:
        session = CaptureSession(
            recipe, run, EventLog(run), plan, Handover.of(plan.config, folder, "n")
        )
        made = asyncio.run(session.run([url]))
    assert not list(folder.iterdir()), "a captured file was left behind"
    return commit(run, [{**plan.done, **made}[shard.name] for shard in plan.shards])


def contents(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.iterdir()
        if not path.name.startswith(".")
    }


def assert_states_are_the_targets(recipe: Recipe, run: RunFolder, rows: list[dict]) -> None:
    witness = Witness(recipe.target, torch.float32)
    store = FeatureStore(run.features, aux_layer_ids=AUX_LAYER_IDS)
    assert store.sample_ids == [row["sample_id"] for row in rows]
    for number, row in enumerate(rows):
        seen, ids = store.row(number), row["prompt_ids"] + row["output_ids"]
        assert seen.input_ids.tolist() == ids
        assert seen.loss_mask.tolist() == [
            place >= len(row["prompt_ids"]) for place in range(len(ids))
        ]
        states = witness.states(ids)
        aux = torch.cat([states[layer + 1] for layer in AUX_LAYER_IDS], -1)
        first = len(row["prompt_ids"])
        assert seen.last[:first].isnan().all(), "nobody is taught by these, and none is kept"
        for stored, expected in ((seen.aux, aux), (seen.last[first:], states[-1][first:])):
            # bf16 keeps 8 bits: half a unit in the last place, and a little for the sums' order.
            torch.testing.assert_close(stored.float(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.usefixtures("local_ray")
def test_the_embedded_engine_hands_over_the_targets_states_and_leaves_no_memory_behind(
    tmp_path, tiny_target
):
    recipe, run = tiny_run(tmp_path, tiny_target)
    rows = write_responses(run, 20)
    before = set(Path("/dev/shm").glob("eyas-capture-*"))
    counts = capture(recipe, run, EventLog(run))
    assert set(Path("/dev/shm").glob("eyas-capture-*")) == before
    assert (counts["samples"], counts["failed"], counts["shards"]) == (20, {}, 3)
    assert counts["tokens"] == sum(len(row["prompt_ids"] + row["output_ids"]) for row in rows)
    assert counts["loss_tokens"] == sum(len(row["output_ids"]) for row in rows)
    assert_states_are_the_targets(recipe, run, rows)

    made = contents(run.features)
    (run.features / "shard-00001.safetensors").unlink()
    capture(recipe, run, EventLog(run))
    assert contents(run.features) == made, "a shard made again has other bytes"


def test_a_run_cut_short_goes_on_and_ends_with_the_same_bytes(tmp_path, tiny_target):
    calm_recipe, calm = tiny_run(tmp_path / "calm", tiny_target, PATIENT)
    recipe, run = tiny_run(tmp_path / "cut", tiny_target, PATIENT)
    for one in (calm, run):
        write_responses(one, 24)
    captured(calm_recipe, calm, tmp_path / "states")
    with pytest.raises(PreflightFailed, match="was not captured after 3 attempts: http_500"):
        captured(recipe, run, tmp_path / "states", dies_after=16)
    assert not (run.features / "index.parquet").exists()
    there = contents(run.features)
    assert there, "no shard was finished before the server died"
    for path in (tmp_path / "states").iterdir():
        path.unlink()
    captured(recipe, run, tmp_path / "states")
    assert contents(run.features) == contents(calm.features)
    assert there.items() <= contents(run.features).items()


def test_a_finished_capture_asks_nothing_again(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target)
    write_responses(run, 9)
    captured(recipe, run, tmp_path / "states")
    made = contents(run.features)
    assert plan_capture(recipe, run).missing == []
    capture(recipe, run, EventLog(run))  # no server is started: there is no Ray here
    assert contents(run.features) == made


@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_a_shard_that_is_not_what_was_written_is_made_again(tmp_path, tiny_target, harm):
    recipe, run = tiny_run(tmp_path, tiny_target)
    write_responses(run, 9)
    captured(recipe, run, tmp_path / "states")
    made, shard = contents(run.features), run.features / "shard-00001.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    {
        "flip": lambda: shard.write_bytes(content),
        "cut": lambda: shard.write_bytes(content[:-4]),
        "remove": shard.unlink,
    }[harm]()
    assert [one.name for one in plan_capture(recipe, run).missing] == [shard.name]
    captured(recipe, run, tmp_path / "states")
    assert contents(run.features) == made


def test_shards_of_other_responses_are_not_taken_for_these(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target)
    write_responses(run, 20)
    captured(recipe, run, tmp_path / "states")
    for path in (run.responses / "chat").iterdir():
        path.unlink()
    (run.responses / "chat").rmdir()
    rows = write_responses(run, 10, seed=1)
    assert len(plan_capture(recipe, run).missing) == 2
    drop_foreign_files(run.features, plan_capture(recipe, run).shards)
    captured(recipe, run, tmp_path / "states")
    assert sorted(contents(run.features)) == [
        "index.parquet",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    ]
    assert_states_are_the_targets(recipe, run, rows)


@pytest.mark.parametrize("fault", ["nan", "lost", "foreign_ids"])
def test_states_that_break_the_contract_once_are_asked_again(tmp_path, tiny_target, fault):
    recipe, run = tiny_run(tmp_path, tiny_target, PATIENT)
    rows = write_responses(run, 9)
    counts = captured(recipe, run, tmp_path / "states", faults={6: fault, 9: fault})
    assert counts["failed"] == {}
    assert_states_are_the_targets(recipe, run, rows)


def test_a_sample_that_is_never_finite_is_set_aside_by_name_and_counted(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target, PATIENT)
    rows = write_responses(run, 101)
    bad = rows[37]
    poisoned = frozenset({tuple(bad["prompt_ids"] + bad["output_ids"])})
    counts = captured(recipe, run, tmp_path / "states", poisoned=poisoned)
    assert counts["failed"] == {"capture_not_finite": 1}
    assert (counts["responses"], counts["samples"]) == (101, 100)
    assert bad["sample_id"] in (run.features / "failed.json").read_text()
    assert bad["sample_id"] not in pq.read_table(run.features / "index.parquet")["sample_id"]


def test_too_many_samples_that_are_not_finite_stop_the_run(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target, PATIENT)
    rows = write_responses(run, 9)
    poisoned = frozenset({tuple(rows[5]["prompt_ids"] + rows[5]["output_ids"])})
    with pytest.raises(QualityStop, match="capture_not_finite"):
        captured(recipe, run, tmp_path / "states", poisoned=poisoned)


def test_a_server_that_captures_one_layer_off_is_found_before_the_first_shard(
    tmp_path, tiny_target
):
    recipe, run = tiny_run(tmp_path, tiny_target)
    write_responses(run, 9)
    plan = plan_capture(recipe, run)
    folder = tmp_path / "states"
    folder.mkdir()
    server = CaptureServer(recipe.target, folder, layer_ids=(2, 3, 4))
    # The file says the layers that were asked for, as a server with another convention would.
    server.says(AUX_LAYER_IDS)
    session = CaptureSession(
        recipe, run, EventLog(run), plan, Handover.of(plan.config, folder, "n")
    )
    with serving(server) as url, pytest.raises(PreflightFailed, match=r"shifted by \+1"):
        asyncio.run(session.run([url]))
    assert not run.features.exists()


def test_the_quota_refuses_before_anything_is_written(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target, "capture.max_bytes=10000")
    write_responses(run, 9)
    with pytest.raises(PreflightFailed, match="tokens x 384 bytes of aux states"):
        capture(recipe, run, EventLog(run))
    assert not run.features.exists()


@pytest.mark.parametrize("storage", ["bfloat16", "float8_e4m3", "int8"])
def test_the_estimate_is_what_the_files_take(tmp_path, tiny_target, storage):
    recipe, run = tiny_run(tmp_path, tiny_target, f"capture.storage={storage}")
    write_responses(run, 30)
    counts = captured(recipe, run, tmp_path / "states")
    plan = plan_capture(recipe, run)
    estimate = estimate_bytes(plan.shards, TokenBytes.of(plan.config, storage))
    stored = sum(path.stat().st_size for path in run.features.iterdir())
    assert counts["bytes"] < estimate
    assert stored < 1.1 * estimate


def test_states_in_another_storage_are_made_again(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target)
    write_responses(run, 9)
    captured(recipe, run, tmp_path / "states")
    recipe, run = tiny_run(tmp_path, tiny_target, "capture.storage=int8")
    assert plan_capture(recipe, run).done == {}


def test_a_token_of_kimi_k25_takes_what_its_config_says():
    kimi = TINY_DRAFT.model_copy(update={"target_hidden_size": 7168, "aux_layer_ids": (1, 29, 57)})
    whole, half = (TokenBytes.of(kimi, one) for one in ("bfloat16", "float8_e4m3"))
    assert whole.aux + whole.last == 57_344
    assert half.aux == whole.aux / 2 + 3 * 4  # a scale for each layer
    assert whole.total(100, 30) == 100 * (3 * 7168 * 2 + 5) + 30 * 7168 * 2


def test_no_response_that_passed_is_a_clear_refusal(tmp_path, tiny_target):
    recipe, run = tiny_run(tmp_path, tiny_target)
    with pytest.raises(PreflightFailed, match="no response that passed"):
        capture(recipe, run, EventLog(run))


def test_attached_servers_are_refused_because_memory_is_not_shared_with_them(tmp_path, tiny_target):
    servers = "capture.servers={kind: attach, urls: ['http://127.0.0.1:1']}"
    recipe, run = tiny_run(tmp_path, tiny_target, servers)
    with pytest.raises(PreflightFailed, match="attach"):
        capture(recipe, run, EventLog(run))


def launched(**changes) -> str:
    servers = {
        "kind": "launch",
        "count": 1,
        "python": "/opt/sglang/bin/python",
        "tensor_parallel_size": 1,
        "device": "cpu",
        "arguments": {"dtype": "bfloat16"},
        **changes,
    }
    return f"capture.servers={json.dumps(servers)}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arguments": {}}, "dtype has to be given"),
        ({"arguments": {"dtype": "bfloat16", "forward-hooks": "[]"}}, "Eyas sets it itself"),
        ({"arguments": {"dtype": "bfloat16", "speculative-num-steps": 3}}, "without a draft"),
        ({"listen": "network"}, "this machine's memory"),
    ],
)
def test_a_launched_server_that_could_not_capture_is_no_recipe(
    tmp_path, tiny_target, changes, words
):
    with pytest.raises(BadRecipe, match=words):
        tiny_run(tmp_path, tiny_target, launched(**changes))


def test_a_target_that_nobody_has_seen_sglang_capture_is_refused_before_a_server_starts(
    tmp_path, tiny_target
):
    target = tmp_path / "target"
    shutil.copytree(tiny_target, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "architectures": ["NewForCausalLM"]}))
    recipe, run = tiny_run(tmp_path, target, launched())
    write_responses(run, 9)
    with pytest.raises(PreflightFailed, match="not known for NewForCausalLM"):
        capture(recipe, run, EventLog(run))


def test_what_decides_about_a_launched_servers_states_decides_about_its_shards(
    tmp_path, tiny_target
):
    marks = []
    for number, arguments in enumerate(
        [
            {"dtype": "bfloat16"},
            {"dtype": "bfloat16", "mem-fraction-static": 0.5},
            {"dtype": "float32"},
            {"dtype": "bfloat16", "quantization": "fp8"},
        ]
    ):
        recipe, run = tiny_run(tmp_path / str(number), tiny_target, launched(arguments=arguments))
        write_responses(run, 9)
        marks.append([shard.mark for shard in plan_capture(recipe, run).shards])
    assert marks[0] == marks[1]
    assert marks[2] != marks[0] != marks[3] != marks[2]


def test_the_handover_folder_is_gone_after_a_fault_and_after_a_kill(tmp_path):
    run = RunFolder(tmp_path / "run")
    used: list[Path] = []

    def fail_in_the_middle() -> None:
        with handover_folder(run, need_bytes=1) as folder:
            used.append(folder)
            (folder / "x.safetensors").write_bytes(b"x")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_in_the_middle()
    (folder,) = used
    assert not folder.exists()
    folder.mkdir()  # what a killed process leaves
    (folder / "old.safetensors").write_bytes(b"x")
    with handover_folder(run, need_bytes=1) as again:
        assert again == folder
        assert list(again.iterdir()) == []


def test_memory_that_is_too_small_is_not_used(tmp_path):
    run = RunFolder(tmp_path / "run")
    with handover_folder(run, need_bytes=1 << 60) as folder:
        assert Path("/dev/shm") not in folder.parents
