"""What a recipe will ask of a machine, estimated before anything is started. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from actors.config import AttachedServers, EmbeddedServers, LaunchedServers, PoolConfig, Servers
from pipelines.recipe import Recipe

_ID_BYTES = 4
# A token's text, a few bytes, is stored in `text` and once more in its part.
_TEXT_BYTES_PER_TOKEN = 2 * 4
_STATE_BYTES = 2  # bf16
_WORDS = {"float32": 4, "bfloat16": 2}  # bytes of a number
_MOMENTS = 2  # of Adam, fp32 as the masters are
_DRIVER_FILES = 1024  # libraries, logs, and the sockets between Ray's own processes


@dataclass(frozen=True)
class Sizes:
    """What the estimates rest on, read from the target folder and the prompt files."""

    target_numbers: int  # in all weights
    target_bytes: int  # of the weights as they are stored
    target_hidden_size: int
    draft_numbers: int  # that are trained
    frozen_numbers: int  # the target's embedding, which the draft carries
    prompts: int | None  # of the training sets; None: not known before they are prepared


@dataclass(frozen=True)
class Disk:
    """Bytes that a run writes into its folder."""

    responses: int | None  # at most; None: not known before the prompts are prepared
    states: int  # `capture.max_bytes`, or less where fewer tokens than that can come
    checkpoints: int  # with the one that is being written, the trained weights and the export

    @property
    def certain(self) -> int:
        """Without what is not known or only an upper bound."""
        return self.states + self.checkpoints

    @property
    def whole(self) -> int:
        """All that is known of."""
        return self.certain + (self.responses or 0)


def stage_servers(recipe: Recipe) -> dict[str, tuple[Servers, PoolConfig]]:
    """The servers of each stage that has any; stages come one after the other."""
    return {
        "generate": (recipe.generate.servers, recipe.generate.pool),
        "capture": (recipe.capture.servers, recipe.capture.pool),
        "evaluate": (recipe.evaluate.servers, recipe.evaluate.pool),
    }


def gpus_needed(recipe: Recipe) -> dict[str, tuple[int, int]]:
    """Of each stage that needs GPUs: how many processes, and how many GPUs each on one node."""
    needed = {stage: (count, each) for stage, count, each in _server_gpus(recipe)}
    if recipe.train.gpus_per_worker:
        needed["train"] = (recipe.train.workers, recipe.train.gpus_per_worker)
    return needed


def threads_needed(recipe: Recipe) -> dict[str, int]:
    """Busy CPU threads of each stage that computes on CPUs here."""
    needed = {
        stage: servers.count * servers.threads_per_server
        for stage, (servers, _) in stage_servers(recipe).items()
        if isinstance(servers, EmbeddedServers) and servers.device == "cpu"
    }
    return {**needed, "train": recipe.train.workers * recipe.train.threads_per_worker}


def open_files_needed(recipe: Recipe) -> int:
    """File handles of one process in the stage with the most requests in flight."""
    in_flight = (
        (len(servers.urls) if isinstance(servers, AttachedServers) else servers.count)
        * pool.max_in_flight_per_server
        for servers, pool in stage_servers(recipe).values()
    )
    return _DRIVER_FILES + max(in_flight)


def memory_needed(recipe: Recipe, sizes: Sizes) -> dict[str, int]:
    """Bytes of weights and optimiser states in this machine's memory, by stage.

    Activations, KV caches and the interpreters themselves come on top.
    """
    needed = {
        stage: servers.count * sizes.target_numbers * _WORDS[servers.dtype]
        for stage, (servers, _) in stage_servers(recipe).items()
        if isinstance(servers, EmbeddedServers) and servers.device == "cpu"
    }
    if not recipe.train.gpus_per_worker:
        needed["train"] = _training_bytes(recipe, sizes)
    return needed


def disk_needed(recipe: Recipe, sizes: Sizes) -> Disk:
    """Bytes that the whole run writes."""
    layers = len(recipe.target.profile.aux_layer_ids) + 1
    per_token = layers * sizes.target_hidden_size * _STATE_BYTES + _ID_BYTES + 1  # and a mask byte
    rows = rows_wanted(recipe, sizes.prompts)
    tokens = None if rows is None else rows * recipe.prompts.context_tokens
    quota = recipe.capture.max_bytes
    return Disk(
        responses=None if tokens is None else tokens * (_ID_BYTES + _TEXT_BYTES_PER_TOKEN),
        states=quota if tokens is None else min(quota, tokens * per_token),
        checkpoints=_checkpoint_bytes(recipe, sizes),
    )


def rows_wanted(recipe: Recipe, prompts: int | None) -> int | None:
    """Responses that are asked for, where each prompt has one turn."""
    mix = recipe.prompts.selection.mix
    if mix is not None:
        prompts = mix.rows if prompts is None else min(mix.rows, prompts)
    return None if prompts is None else prompts * recipe.generate.samples_per_prompt


def gpu_bytes_needed(recipe: Recipe, sizes: Sizes) -> Mapping[str, int]:
    """Bytes of weights that one GPU must hold, by stage. KV pool and activations come on top."""
    needed = {}
    for stage, (servers, _) in stage_servers(recipe).items():
        match servers:
            case LaunchedServers(device="cuda"):
                needed[stage] = sizes.target_bytes // servers.tensor_parallel_size
            case EmbeddedServers(device="cuda"):
                needed[stage] = sizes.target_numbers * _WORDS[servers.dtype]
            case _:
                continue
    return needed


def _server_gpus(recipe: Recipe) -> Iterator[tuple[str, int, int]]:
    for stage, (servers, _) in stage_servers(recipe).items():
        match servers:
            case LaunchedServers(device="cuda"):
                yield stage, servers.count, servers.tensor_parallel_size
            case EmbeddedServers(device="cuda"):
                yield stage, servers.count, 1
            case _:
                continue


def _training_bytes(recipe: Recipe, sizes: Sizes) -> int:
    """Weights and gradients in each worker; masters, moments and averages once or in each."""
    word = _WORDS[recipe.train.dtype]
    workers = recipe.train.workers
    own = workers * (2 * sizes.draft_numbers + sizes.frozen_numbers) * word
    copies = 1 if recipe.train.zero_stage else workers  # ZeRO shares the optimiser's states out
    return own + copies * _optimiser_parts(recipe) * 4 * sizes.draft_numbers


def _checkpoint_bytes(recipe: Recipe, sizes: Sizes) -> int:
    checkpoint = _optimiser_parts(recipe) * 4 * sizes.draft_numbers
    trained = 4 * sizes.draft_numbers
    export = _WORDS[recipe.train.dtype] * (sizes.draft_numbers + sizes.frozen_numbers)
    return (recipe.train.checkpoints_kept + 1) * checkpoint + trained + export


def _optimiser_parts(recipe: Recipe) -> int:
    """Full fp32 copies of the weights: the masters, the moments, and the averages if there are."""
    return 1 + _MOMENTS + (1 if recipe.train.ema_decay else 0)
