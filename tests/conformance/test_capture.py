"""Hidden states out of both engines: every row the target's own, in its place, and none left."""

import asyncio
import json
import random
import subprocess
from pathlib import Path

import pytest
import torch

from actors import capture_file
from actors.config import EmbeddedServers, LaunchedServers, PoolConfig
from actors.launch import (
    EngineOptions,
    embedded_command,
    embedded_environment,
    launched_command,
    launched_environment,
)
from actors.launch_capture import (
    ARCHITECTURES,
    CaptureOptions,
    hook_home,
    place_hook,
    served_layer_ids,
)
from actors.pool import Completed, Pool
from actors.protocol import GenerateRequest
from pipelines.capture_plan import read_responses
from pipelines.capture_probe import TOLERANCE, relative_error
from pipelines.recipe import load_recipe
from pipelines.store import RunFolder
from pipelines.witness import Witness
from tests.conformance.sglang_cpu.set_up import STOCK_VARIABLES, stock_environment, stock_python
from tests.support.conformance_requests import with_client
from tests.support.road import eyas, write_recipe
from tests.support.sglang_rig import STOCK_ON_A_CPU, Started, free_port, started
from tests.support.tiny_target import AUX_LAYER_IDS, LAYERS, make_tiny_target
from training.features import FeatureStore

NONCE = "run1"
PART_TOKENS = 16  # a prefill's part: most sequences take several, and parts of several share one
WIDTH, VOCABULARY = 64, 259
SECONDS = 240.0
# The servers compute in fp32: what is left is bf16's half a unit in the last place, and a little
# for the order of the sums.
SAME = {"rtol": 2**-8, "atol": 1e-4}


def stock_servers(**arguments) -> LaunchedServers:
    given = {name: value for name, value in STOCK_ON_A_CPU.items() if name != "device"}
    return LaunchedServers(
        kind="launch",
        count=1,
        python=str(stock_python()),
        tensor_parallel_size=1,
        device="cpu",
        arguments={**given, "chunked-prefill-size": PART_TOKENS, **arguments},
        environment=STOCK_VARIABLES,
        ready_seconds=SECONDS,
        restart_seconds=1.0,
    )


@pytest.fixture(scope="module")
def small_target(tmp_path_factory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def witness(small_target, tmp_path_factory) -> Witness:
    recipe = load_recipe(write_recipe(tmp_path_factory.mktemp("recipe"), small_target))
    return Witness(recipe.target, torch.float32)


@pytest.fixture(
    scope="module", params=["embedded", pytest.param("stock", marks=pytest.mark.conformance)]
)
def capturing(request, small_target, tmp_path_factory):
    """A server that captures, and the folder that it captures into."""
    logs, states = tmp_path_factory.mktemp("logs"), tmp_path_factory.mktemp("states")
    served = served_layer_ids("LlamaForCausalLM", LAYERS, AUX_LAYER_IDS)
    options = EngineOptions(capture=CaptureOptions(states, AUX_LAYER_IDS, served, NONCE))
    port = free_port()
    if request.param == "stock":
        place_hook(states)
        config = stock_servers()
        command = launched_command(config, small_target, options, "127.0.0.1", port)
        environment = launched_environment(config, {"PATH": "/usr/bin:/bin"}, options)
    else:
        servers = EmbeddedServers(
            kind="embedded",
            count=1,
            dtype="float32",
            device="cpu",
            threads_per_server=1,
            max_running_requests=8,
        )
        command = embedded_command(servers, small_target, options, logs / "ready", port)
        environment = embedded_environment(servers, {"PATH": "/usr/bin:/bin"})
    with started(request.param, command, environment, port, logs) as server:
        server.wait_until_ready(SECONDS)
        yield server, states


def left_in(states: Path) -> list[str]:
    return sorted(path.name for path in states.iterdir() if path != hook_home(states))


def sequences(count: int) -> list[tuple[int, ...]]:
    """Of 1 to 120 ids: also one id, one part exactly, and one more."""
    dice = random.Random(7)
    lengths = [1, PART_TOKENS, PART_TOKENS + 1, 2 * PART_TOKENS]
    lengths += [dice.randint(1, 120) for _ in range(count - len(lengths))]
    return [tuple(dice.randrange(3, VOCABULARY) for _ in range(one)) for one in lengths]


def captured(server: Started, states: Path, asked, *, others=()):
    """The states of every sequence, all asked at once, beside requests that are not the run's."""

    def take(_, request):
        return capture_file.take(
            states,
            request.rid,
            expected_ids=request.input_ids,
            aux_width=len(AUX_LAYER_IDS) * WIDTH,
            width=WIDTH,
            aux_layer_ids=AUX_LAYER_IDS,
            late_seconds=capture_file.LATE_SECONDS,
        )

    def rid(digest, request):
        return capture_file.rid_of(NONCE, digest, len(request.input_ids))

    async def all_of_them():
        pool_config = PoolConfig(max_in_flight_per_server=32)
        url, vocabulary = [server.url], VOCABULARY
        async with (
            Pool(url, pool_config, vocab_size=vocabulary, naming=rid) as pool,
            Pool(url, pool_config, vocab_size=vocabulary) as of_others,
        ):
            greedy = {"temperature": 0.0}
            wanted = [
                pool.generate(
                    GenerateRequest(f"row-{i}", ids, {**greedy, "max_new_tokens": 0}), take
                )
                for i, ids in enumerate(asked)
            ]
            foreign = [
                of_others.generate(
                    GenerateRequest(f"other-{i}", ids, {**greedy, "max_new_tokens": 4})
                )
                for i, ids in enumerate(others)
            ]
            ended = await asyncio.gather(*wanted, *foreign)
        return ended[: len(wanted)]

    ended = asyncio.run(all_of_them())
    assert [one for one in ended if not isinstance(one, Completed)] == []
    assert {one.attempt for one in ended} == {1}
    return [one.value for one in ended]


def test_every_state_of_many_concurrent_requests_is_the_targets_own(capturing, witness):
    server, states = capturing
    asked = sequences(200 if server.name == "stock" else 60)
    others = sequences(8) if server.name == "stock" else ()  # the embedded engine captures for all
    for ids, seen in zip(asked, captured(server, states, asked, others=others), strict=True):
        assert seen.input_ids.tolist() == list(ids)
        own = witness.states(ids)
        aux = torch.cat([own[layer + 1] for layer in AUX_LAYER_IDS], -1)
        torch.testing.assert_close(seen.aux.float(), aux, **SAME)
        torch.testing.assert_close(seen.last.float(), own[-1], **SAME)
    assert left_in(states) == []


def test_a_prompt_that_is_not_whole_never_has_a_file(capturing):
    """As of a request that was cut off between two parts. What comes next is captured."""
    server, states = capturing
    if server.name != "stock":
        pytest.skip("the embedded engine reads a prompt at once")
    ids = sequences(6)[-1]
    rid = capture_file.rid_of(NONCE, "a" * 32, len(ids) + 1)

    async def ask(client):
        request = GenerateRequest(rid, ids, {"temperature": 0.0, "max_new_tokens": 0})
        return await client.generate(request, deadline_seconds=SECONDS)

    assert with_client(server.url, ask).output_ids == ()
    (seen,) = captured(server, states, [ids])
    assert seen.input_ids.tolist() == list(ids)
    (left,) = left_in(states)
    assert left.startswith(".part-")
    assert left.endswith(f"{rid}.safetensors")
    assert capture_file.sweep(states) == 1


# Asks every model's own method which layers' inputs it would capture.
ASK_THE_MODELS = """
import json, sys
from unittest.mock import MagicMock, patch
from sglang.srt.models.registry import ModelRegistry

told, kimi = {}, "KimiK25ForConditionalGeneration"
for name, layers, ids in json.loads(sys.argv[1]):
    model = MagicMock()
    model.config.num_hidden_layers = layers
    inner = model.model
    inner.set_eagle3_layers_to_capture = lambda some: setattr(inner, "layers_to_capture", some)
    method = ModelRegistry.models[name].set_eagle3_layers_to_capture
    deepseek = ModelRegistry.models["DeepseekV3ForCausalLM"].set_eagle3_layers_to_capture
    model.language_model.set_eagle3_layers_to_capture = lambda some: deepseek(model, some)
    with patch.dict(method.__globals__, {"get_parallel": MagicMock()}):
        method(model, ids)
    told.setdefault(name, []).append(inner.layers_to_capture)
print(json.dumps(told))
"""


@pytest.mark.conformance
def test_every_architecture_of_the_table_captures_the_layers_that_were_asked_for():
    """A layer's output is the next one's input."""
    outputs, layers = ((1, 29, 57), (2, 30, 59)), 61
    asked = [
        (name, layers, served_layer_ids(name, layers, some))
        for name in sorted(ARCHITECTURES)
        for some in outputs
    ]
    done = subprocess.run(
        [str(stock_python()), "-W", "ignore", "-c", ASK_THE_MODELS, json.dumps(asked)],
        env=stock_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    inputs = [[layer + 1 for layer in some] for some in outputs]
    assert told == dict.fromkeys(sorted(ARCHITECTURES), inputs)


@pytest.mark.conformance
def test_eyas_capture_runs_through_a_launched_stock_server(small_target, tmp_path):
    servers = json.loads(stock_servers(dtype="bfloat16").model_dump_json())
    change = f"capture.servers={json.dumps(servers)}"
    before = set(Path("/dev/shm").glob("eyas-capture-*"))
    path = write_recipe(tmp_path, small_target)
    done = eyas("run", path, "--until", "capture", "--json", "--set", change)
    assert done.returncode == 0, done.stderr[-3000:]
    recipe = load_recipe(path)
    run = RunFolder(Path(recipe.run_folder))
    rows = sorted(
        read_responses(run, [one.name for one in recipe.prompts.train]).to_pylist(),
        key=lambda row: row["sample_id"],
    )
    assert len(rows) > 20
    assert set(Path("/dev/shm").glob("eyas-capture-*")) == before
    store = FeatureStore(run.features, aux_layer_ids=AUX_LAYER_IDS)
    assert store.sample_ids == [row["sample_id"] for row in rows]
    witness = Witness(recipe.target, torch.bfloat16)
    for number, row in enumerate(rows):
        seen, ids = store.row(number), row["prompt_ids"] + row["output_ids"]
        assert seen.input_ids.tolist() == ids
        own = witness.states(ids)
        first = len(row["prompt_ids"])
        for stored, expected in zip(
            (*seen.aux.chunk(len(AUX_LAYER_IDS), -1), seen.last[first:]),
            (*(own[layer + 1] for layer in AUX_LAYER_IDS), own[-1][first:]),
            strict=True,
        ):
            assert relative_error(stored, expected) < TOLERANCE["bfloat16"]
