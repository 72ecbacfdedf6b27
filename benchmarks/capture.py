"""What it costs to hand hidden states over: `python benchmarks/capture.py [--short]`.

All on the CPU. Peers are measured in the same run and by turns; of several turns the best one
counts, since only other work on the machine makes one slower.

* hook_vs_memcpy: bytes of states per second from the hook's call in a process of its own, through
  its thread, the files and the reader's checks, to a packed batch, over one thread's plain copy of
  that batch into new memory. hook_vs_memory_file: the same over writing those bytes to a new file
  in that folder, which the hook's thread has to do at least.
* prefill_slowdown: seconds of a prefill whose states the hook takes, until the last of them has
  been read, over those without; a random Llama of SmolLM2-135M's shape in fp32 on one thread.
* offline_vs_mmap: bytes per second of the planned, packed rows of a features folder that the page
  cache holds, over copying its files out of memory maps.
* memory_growth: most private memory (USS) of the driver of `eyas capture` with ten times as many
  rows over the same with few. The servers are the embedded ones, of a tiny target.
"""

import logging
import multiprocessing
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script

from actors.capture_file import StatesFile, rid_of, take  # noqa: E402
from actors.capture_hook import CaptureHook, Settings  # noqa: E402
from benchmarks import harness  # noqa: E402
from benchmarks.harness import Bar, Options, run_measured  # noqa: E402
from benchmarks.train_case import DRAFT  # noqa: E402
from pipelines.recipe import fingerprint, load_recipe  # noqa: E402
from pipelines.schema import RESPONSE_SCHEMA  # noqa: E402
from pipelines.store import RunFolder, record_stage  # noqa: E402
from tests.support import response_rows  # noqa: E402
from tests.support.road import write_recipe  # noqa: E402
from tests.support.tiny_target import make_tiny_target  # noqa: E402
from tests.support.tiny_training import train_config  # noqa: E402
from training.features import FeatureRow, FeatureStore, write_shard  # noqa: E402
from training.packing import PackedBatch, pack  # noqa: E402
from training.reader import PlannedRows, RowPlan  # noqa: E402

logger = logging.getLogger(__name__)

BARS: dict[str, Bar | None] = {
    "hook_vs_memcpy": Bar("at least", 0.5),
    "hook_vs_memory_file": None,
    "prefill_slowdown": Bar("at most", 1.15),
    "offline_vs_mmap": Bar("at least", 0.8),
    "memory_growth": Bar("at most", 1.1),
}
GROUPS = ("hook", "prefill", "offline", "growth")
LENGTHS = (500, 1000, 2000, 4000)  # tokens of the prompts of one batch
LAYERS = (1, 14, 26)
_NONCE = "benchmark"
_MEMORY = Path("/dev/shm")
_BATCHES_AHEAD = 2  # that are asked for while one is read
_PATIENCE_SECONDS = 60.0
_STEPS = 7


def measure(options: Options) -> dict[str, float]:
    """All figures that are asked for."""
    torch.set_num_threads(1)
    turns = 2 if options.short else 5
    figures: dict[str, float] = {}
    if options.wants("hook"):
        figures |= hook(width=2048 if options.short else 4096, batches=8, turns=turns)
    if options.wants("prefill"):
        figures["prefill_slowdown"] = prefill_slowdown(tokens=256, turns=turns)
    with tempfile.TemporaryDirectory(prefix="eyas-capture-") as name:
        if options.wants("offline"):
            shards = 2 if options.short else 16
            figures["offline_vs_mmap"] = offline_vs_mmap(Path(name, "features"), shards, turns)
        if options.wants("growth"):
            few = 50 if options.short else 300
            figures["memory_growth"] = memory_growth(Path(name, "growth"), few)
    return figures


def hook(*, width: int, batches: int, turns: int) -> dict[str, float]:
    """Seconds of a copy, and of a file, over those of the whole way, for the same batches."""
    with memory_folder() as folder, hooked_server(folder, width) as server:
        numbers = iter(range(10**6))
        packed = list(read_batches(server, folder, width, [next(numbers)]))[0]  # noqa: RUF015
        states = [one.view(torch.int16).numpy() for one in (packed.aux, packed.last)]
        best = best_of(
            {
                "hook": lambda: consume(
                    read_batches(server, folder, width, [next(numbers) for _ in range(batches)])
                ),
                "copy": lambda: consume([one.copy() for one in states] for _ in range(batches)),
                "file": lambda: consume(write_file(folder, packed) for _ in range(batches)),
            },
            turns,
        )
    size = batches * sum(one.nbytes for one in states)
    logger.info("MB/s: %s", {name: round(size / one / 1e6) for name, one in best.items()})
    return {
        "hook_vs_memcpy": best["copy"] / best["hook"],
        "hook_vs_memory_file": best["file"] / best["hook"],
    }


def best_of(works: dict[str, Callable[[], Any]], turns: int) -> dict[str, float]:
    """The fewest seconds of each work, taken by turns after one of each that warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(1 + turns):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - started)
    logger.info("seconds: %s", {name: np.round(some, 3) for name, some in seconds.items()})
    return {name: min(some[1:]) for name, some in seconds.items()}


def consume(things: Iterator[Any]) -> None:
    """Have everything made, and keep none of it."""
    for _ in things:
        continue


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A folder in the machine's memory, gone on every path."""
    folder = Path(tempfile.mkdtemp(prefix="eyas-benchmark-", dir=_MEMORY))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@contextmanager
def hooked_server(folder: Path, width: int) -> Iterator[Connection]:
    """A process that shows its hook the batch of each number that is sent to it."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs, folder, width), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


def serve(numbers: Connection, folder: Path, width: int) -> None:
    """Call the hook until nobody sends a number any more."""
    torch.set_num_threads(1)
    ids, (*aux, last) = batch_ids(), batch_states(width)
    hook = new_hook(folder)
    while True:
        try:
            number = numbers.recv()
        except EOFError:
            return hook.close()
        hook(torch.nn.Identity(), prefill_arguments(rids(number), LENGTHS, ids, aux, last), None)


def new_hook(folder: Path) -> CaptureHook:
    """With the room in host memory that a server gives it."""
    return CaptureHook(Settings(str(folder), _NONCE, LAYERS, max_bytes_in_flight=2 << 30))


def prefill_arguments(
    names: Sequence[str],
    lengths: Sequence[int],
    ids: torch.Tensor,
    aux: Sequence[torch.Tensor],
    last: torch.Tensor,
    head: torch.Tensor | None = None,
) -> tuple[Any, ...]:
    """What the module that makes logits is given with the whole prompts of one batch."""
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        rids=list(names),
        extend_seq_lens_cpu=list(lengths),
        extend_prefix_lens_cpu=[0] * len(names),
    )
    return ids, last, head, batch, list(aux)


def rids(number: int) -> list[str]:
    """The requests of one batch."""
    return [rid_of(_NONCE, f"{number}-{tokens}", tokens) for tokens in LENGTHS]


def batch_ids() -> torch.Tensor:
    """The ids of one batch, [sum of LENGTHS]."""
    return torch.arange(sum(LENGTHS)) % DRAFT.vocab_size


def batch_states(width: int) -> list[torch.Tensor]:
    """Aux states of each layer, then the last ones: [sum of LENGTHS, width] bf16 each."""
    dice = torch.Generator().manual_seed(0)
    some = torch.randn(sum(LENGTHS), width, generator=dice).bfloat16()
    return [some * (1 + place) for place in range(len(LAYERS) + 1)]


def read_batches(
    server: Connection, folder: Path, width: int, numbers: Sequence[int]
) -> Iterator[PackedBatch]:
    """Ask for batches, and take and pack each as training does."""
    expected = [ids.tolist() for ids in batch_ids().split(LENGTHS)]
    for place in range(len(numbers) + _BATCHES_AHEAD):
        if place < len(numbers):
            server.send(numbers[place])
        if place < _BATCHES_AHEAD:
            continue
        rows = [
            read_row(folder, rid, ids, width)
            for rid, ids in zip(rids(numbers[place - _BATCHES_AHEAD]), expected, strict=True)
        ]
        yield pack(rows, steps=_STEPS, aux_size=len(LAYERS) * width, last_size=width)


def read_row(folder: Path, rid: str, ids: Sequence[int], width: int) -> FeatureRow:
    """One prompt's states, proved. The second half of the tokens teaches."""
    states = take(
        folder,
        rid,
        expected_ids=ids,
        aux_width=len(LAYERS) * width,
        width=width,
        aux_layer_ids=LAYERS,
        late_seconds=_PATIENCE_SECONDS,
    )
    return feature_row(rid, states.input_ids.long(), states.aux, states.last)


def feature_row(name: str, ids: torch.Tensor, aux: torch.Tensor, last: torch.Tensor) -> FeatureRow:
    """A row whose second half teaches."""
    teaches = torch.arange(len(ids)) >= len(ids) // 2
    return FeatureRow(name, "made", "chat", ids, teaches, aux, last)


def write_file(folder: Path, packed: PackedBatch) -> None:
    """Write a batch's states as one file, and remove it."""
    file = StatesFile(
        folder,
        "file",
        tokens=len(packed.input_ids),
        aux_width=packed.aux.shape[1],
        width=packed.last.shape[1],
        aux_layer_ids=LAYERS,
    )
    file.write(0, packed.input_ids.to(torch.int32), packed.aux, packed.last)
    file.finish().unlink()


class Prefill(torch.nn.Module):
    """A random target, and beside it the module that a server hooks."""

    def __init__(self) -> None:
        from transformers import LlamaConfig, LlamaModel

        super().__init__()
        config = LlamaConfig(
            vocab_size=DRAFT.vocab_size,
            hidden_size=DRAFT.target_hidden_size,
            intermediate_size=DRAFT.intermediate_size,
            num_hidden_layers=DRAFT.target_num_layers,
            num_attention_heads=DRAFT.num_attention_heads,
            num_key_value_heads=DRAFT.num_key_value_heads,
        )
        self.body = LlamaModel(config).eval()
        self.logits = Logits()

    @torch.inference_mode()
    def forward(self, rid: str, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the token after [T] ids."""
        states = self.body(ids[None], output_hidden_states=True, use_cache=False).hidden_states
        aux = [states[layer + 1][0] for layer in LAYERS]
        head = self.body.embed_tokens.weight
        logits: torch.Tensor = self.logits(
            *prefill_arguments([rid], [len(ids)], ids, aux, states[-1][0], head)
        )
        return logits


class Logits(torch.nn.Module):
    """Called as a server's module that makes logits is."""

    def forward(
        self, _ids: object, last: torch.Tensor, head: torch.Tensor, _batch: object, _aux: object
    ) -> torch.Tensor:
        """[V] fp32."""
        return last[-1] @ head.T


def prefill_slowdown(*, tokens: int, turns: int, prompts: int = 4) -> float:
    """Seconds of prefills whose states are taken and read, over seconds of prefills."""
    torch.manual_seed(0)
    target, ids = Prefill(), torch.arange(tokens)
    width, expected = DRAFT.target_hidden_size, ids.tolist()
    names = [rid_of(_NONCE, str(number), tokens) for number in range(prompts)]
    with memory_folder() as folder, ThreadPoolExecutor(1) as reader:
        hook = new_hook(folder)

        def captured() -> None:
            handle = target.logits.register_forward_hook(hook)
            reading = [reader.submit(read_row, folder, one, expected, width) for one in names]
            plain()
            for one in reading:
                one.result()
            handle.remove()

        def plain() -> None:
            for one in names:
                target(one, ids)

        best = best_of({"captured": captured, "plain": plain}, turns)
        hook.close()
    return best["captured"] / best["plain"]


def offline_vs_mmap(folder: Path, shards: int, turns: int, *, width: int = 2048) -> float:
    """Seconds of copies out of maps over seconds of planned batches, for the same stored bytes."""
    layers = DRAFT.aux_layer_ids
    write_features(folder, shards, width)
    store = FeatureStore(folder, aux_layer_ids=layers)
    config = train_config(
        epochs=1,
        heldout_share=0.0,
        max_tokens_per_sample=max(LENGTHS),
        batch_samples=8,
        micro_batch_tokens=2 * max(LENGTHS),
        ttt_steps=_STEPS,
    )
    draft = DRAFT.model_copy(update={"target_hidden_size": width})

    def planned() -> None:
        rows = FeatureStore(folder, aux_layer_ids=layers)
        plan = RowPlan(rows, config, rank=0, world=1)
        reader = PlannedRows(plan, rows, draft, config)
        consume(iter(reader.batches(turn)) for turn in plan.turns(0, plan.total_steps))

    piece = 2 * max(LENGTHS) * 2 * (len(layers) + 1) * width  # bytes of a batch

    def mapped() -> None:
        for path in sorted(folder.glob("*.safetensors")):
            content = np.memmap(path, mode="r")
            consume(content[at : at + piece].copy() for at in range(0, len(content), piece))

    best = best_of({"planned": planned, "mapped": mapped}, turns)
    logger.info("%d rows, %d MB", len(store), sum(p.stat().st_size for p in folder.iterdir()) / 1e6)
    return best["mapped"] / best["planned"]


def write_features(folder: Path, shards: int, width: int) -> None:
    """Shards of two batches each, and their index."""
    ids, (*aux, last) = batch_ids(), batch_states(width)
    pieces = [one.split(LENGTHS) for one in (ids, torch.cat(aux, -1), last)]
    parts = []
    for number in range(shards):
        rows = [
            feature_row(f"row-{number}-{copy}-{len(some[0])}", *some)
            for copy in range(2)
            for some in zip(*pieces, strict=True)
        ]
        name = f"shard-{number:05d}.safetensors"
        parts.append(write_shard(folder, name, rows, aux_layer_ids=DRAFT.aux_layer_ids))
    pq.write_table(pa.concat_tables(parts), folder / "index.parquet")


def memory_growth(folder: Path, few: int) -> float:
    """The driver's peak with ten times as many rows over the one with few."""
    target = make_tiny_target(folder / "target", context_tokens=2048)
    peaks = {}
    for rows in (few, 10 * few):
        recipe = write_run(folder / f"{rows}", target, rows)
        log = folder / f"{rows}.log"
        command = [sys.executable, "-m", "pipelines.cli", "capture", str(recipe), "--json"]
        environment = {"PYTHONPATH": str(ROOT)}
        cost = run_measured(
            command,
            log=log,
            role_of=role_of,
            memory_every_seconds=0.25,
            environment=environment,
        )
        if cost.code != 0:
            raise RuntimeError(f"eyas capture ended with {cost.code}:\n{log.read_text()[-3000:]}")
        peaks[rows] = cost.peak_bytes["driver"]
        logger.info("%d rows: %.1f s, driver %.1f MiB", rows, cost.seconds, peaks[rows] / 2**20)
    return peaks[10 * few] / peaks[few]


def role_of(command_line: Sequence[str]) -> str | None:
    """Whether a command line is the driver's."""
    line = " ".join(command_line)
    return "driver" if "pipelines.cli capture" in line and "ray::" not in line else None


def write_run(folder: Path, target: Path, rows: int) -> Path:
    """A run folder whose responses are there, and the recipe beside it; its path."""
    path = write_recipe(folder, target)
    mapping = yaml.safe_load(path.read_text())
    mapping["capture"] |= {"samples_per_shard": 32, "max_bytes": 10**11}
    path.write_text(yaml.safe_dump(mapping, sort_keys=False))
    recipe = load_recipe(path)
    run = RunFolder(Path(recipe.run_folder))
    run.create()
    (run.responses / "chat").mkdir(parents=True)
    table = pa.Table.from_pylist([response(one) for one in range(rows)], schema=RESPONSE_SCHEMA)
    pq.write_table(table, run.responses / "chat" / "part-00000.parquet")
    for stage in ("prepare", "generate"):
        mark = fingerprint(recipe, stage)
        record_stage(run, stage, fingerprint=mark, counts={"headline": "made here"}, seconds=0.0)
    return path


def response(number: int) -> dict[str, Any]:
    """A healthy row of 300 to 900 tokens, a fifth of which are the prompt's."""
    tokens = 300 + 37 * number % 601
    ids = [3 + (number + place) % 250 for place in range(tokens)]
    name = f"chat-{number:012x}"
    return response_rows.row(number) | {
        "sample_id": name,
        "prompt_id": name,
        "dataset": "chat",
        "prompt_ids": ids[: tokens // 5],
        "output_ids": ids[tokens // 5 :],
    }


if __name__ == "__main__":
    raise SystemExit(harness.main("capture", BARS, measure, groups=GROUPS))
