"""One YAML recipe is one run: composed from the configs of the three packages, strict and frozen.

No environment variable of ours changes a run. `EYAS_CACHE` moves the cache folder of `make target`.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from actors.config import LaunchedServers, PoolConfig, Sampling, Servers
from actors.launch_rules import refuse_for_capture
from pipelines.errors import BadRecipe
from pipelines.schema import Domain
from pipelines.sources.row import FormatName
from pipelines.storage import location_of
from training.config import DraftShape, Storage, TrainConfig

_Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]{0,62}$")]
_Share = Annotated[float, Field(ge=0.0, le=1.0)]


class Strict(BaseModel):
    """A part of a recipe: frozen, typed strictly, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ToolMarkers(Strict):
    """The ids that bound a target's tool calls, and how the text between them is written."""

    # kimi: functions.NAME:INDEX, arguments_id, JSON. hermes: one JSON object with name and
    # arguments. deepseek_v3: function, arguments_id, NAME, fenced JSON. deepseek_v31: NAME,
    # arguments_id, JSON.
    format: Literal["kimi", "hermes", "deepseek_v3", "deepseek_v31"]
    section_open_id: int | None  # around all calls of an answer; null where calls stand alone
    section_close_id: int | None
    call_open_id: int
    call_close_id: int
    arguments_id: int | None  # inside a call; null where JSON holds the name too

    @model_validator(mode="after")
    def _ids_are_those_of_the_format(self) -> "ToolMarkers":
        given = [self.section_open_id, self.section_close_id, self.arguments_id]
        if self.format == "hermes" and given != [None] * 3:
            raise ValueError("hermes has neither a section nor arguments_id; set these to null")
        if self.format != "hermes" and None in given:
            raise ValueError(
                f"{self.format} needs section_open_id, section_close_id and arguments_id"
            )
        return self

    @property
    def ids(self) -> dict[str, int]:
        """The ids that are there, by field."""
        return {name: one for name, one in self if isinstance(one, int)}


class ChannelMarkers(Strict):
    """The ids of the Harmony format (gpt-oss): an answer is a row of messages on channels."""

    start_id: int
    channel_id: int
    constrain_id: int
    message_id: int
    end_id: int

    @property
    def ids(self) -> dict[str, int]:
        """The ids by field."""
        return dict(self)


class TargetProfile(Strict):
    """What is special about a target. Ids are checked against the tokenizer, never trusted."""

    # Where the tool declarations go: the template's own branch, or, for a template without one,
    # JSON schemas in the system message.
    tools: Literal["template", "system_message"]
    think_open_id: int | None
    think_close_id: int | None
    tool_markers: ToolMarkers | None  # null: the target writes calls as plain text, or none
    channels: ChannelMarkers | None  # instead of think and tool markers
    template_arguments: dict[str, Any]
    stop_token_ids: tuple[int, ...] = Field(min_length=1)
    # Ids that a sane response never holds; a pair is a range, both ends included.
    reserved_ids: tuple[int | tuple[int, int], ...]
    # What the template does with the reasoning of earlier answers when the conversation goes on.
    history_reasoning: Literal["kept", "dropped"]
    aux_layer_ids: tuple[int, ...]  # "output of layer j", ascending

    @model_validator(mode="after")
    def _markers_fit_each_other(self) -> "TargetProfile":
        if (self.think_open_id is None) != (self.think_close_id is None):
            raise ValueError("give both think_open_id and think_close_id, or null for both")
        if self.channels and (self.think_open_id is not None or self.tool_markers):
            raise ValueError(
                "channels bound reasoning and tool calls themselves: set think_open_id, "
                "think_close_id and tool_markers to null, or channels"
            )
        for one in self.reserved_ids:
            if isinstance(one, tuple) and one[0] > one[1]:
                raise ValueError(f"reserved_ids: {list(one)} is no range, the first is the larger")
        return self

    @property
    def reserved(self) -> frozenset[int]:
        """Every reserved id, ranges written out."""
        return frozenset(
            each
            for one in self.reserved_ids
            for each in ((one,) if isinstance(one, int) else range(one[0], one[1] + 1))
        )

    @property
    def marker_ids(self) -> dict[str, int]:
        """Every id that bounds a part of a response, by the field that names it."""
        think = {"think_open_id": self.think_open_id, "think_close_id": self.think_close_id}
        return {
            **{name: one for name, one in think.items() if one is not None},
            **_prefixed("tool_markers", self.tool_markers),
            **_prefixed("channels", self.channels),
        }


def _prefixed(name: str, markers: ToolMarkers | ChannelMarkers | None) -> dict[str, int]:
    return {} if markers is None else {f"{name}.{key}": one for key, one in markers.ids.items()}


class Target(Strict):
    """The served model: a local Hugging Face causal LM folder."""

    path: str
    profile: TargetProfile
    trust_remote_code: bool


class PromptSet(Strict):
    """One source of prompts: a file, a folder, a glob or a URI of any form that `sources` reads."""

    name: _Name
    path: str
    domain: Domain
    format: FormatName | None = None  # null: recognised from the columns, and named in the log
    cap: PositiveInt | None = None  # of the usable rows, so many at most, drawn by the seed


class Mix(Strict):
    """How many training prompts, of all sets together, and each set's share of them."""

    rows: PositiveInt
    weights: dict[_Name, Annotated[float, Field(gt=0.0)]] = Field(min_length=1)


class Selection(Strict):
    """Which of the usable training prompts are asked. Null switches a rule off."""

    seed: NonNegativeInt  # of the draw: by caps, and by the mix
    mix: Mix | None
    # Similarity (Jaccard, of runs of five words) from which a prompt is a copy of an earlier one.
    near_duplicates: Annotated[float, Field(ge=0.5, le=1.0)] | None
    # So many words in a row, shared with an evaluation prompt: the draft would be taught the test.
    shared_words: Annotated[int, Field(ge=5, le=50)] | None
    languages: tuple[Annotated[str, Field(pattern="^[a-z]{2}$")], ...] | None  # ISO 639-1
    min_prompt_tokens: PositiveInt
    max_prompt_tokens: PositiveInt | None


class Prompts(Strict):
    """What is asked: sets to train on, and held-out sets to measure acceptance on."""

    train: tuple[PromptSet, ...] = Field(min_length=1)
    evaluation: tuple[PromptSet, ...] = Field(min_length=1)
    context_tokens: PositiveInt  # prompt and response together
    min_response_tokens: PositiveInt  # a prompt that leaves less room than this is rejected
    # Of a conversation with several user messages: answer the first one; or the last one, with the
    # set's own answers before it; or every one, with the target's own answers before it. Held-out
    # sets are always asked their last one.
    turns: Literal["first", "last", "every"]
    selection: Selection
    # What happens to prompts that cannot be used: stop says which; reject keeps them aside, named.
    on_bad_prompt: Literal["stop", "reject"]

    @model_validator(mode="after")
    def _names_are_distinct(self) -> "Prompts":
        names = [one.name for one in (*self.train, *self.evaluation)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two prompt sets are named {twice[0]!r}; give each its own name")
        return self

    @model_validator(mode="after")
    def _mix_names_every_training_set(self) -> "Prompts":
        if self.selection.mix is not None:
            sets, weighed = {one.name for one in self.train}, set(self.selection.mix.weights)
            if sets != weighed:
                raise ValueError(
                    f"selection.mix.weights names {sorted(weighed)}, the training sets are "
                    f"{sorted(sets)}"
                )
        return self


class Gates(Strict):
    """When a response is rejected, and when the run stops.

    What rejects a row changes data and has no default; of what only stops the run, the last part
    has. Reserved ids, left-over markers and reasoning that nothing closed are always rejected.
    """

    finish_reasons: tuple[Literal["stop", "length"], ...] = Field(min_length=1)
    min_content_tokens: NonNegativeInt  # of an answer without tool calls
    max_one_token_share: _Share  # one token making up more than this of a response: a loop
    max_repeated_share: _Share  # more than this made of 16 tokens that came before: a loop
    broken_tool_calls: Literal["reject", "flag"]  # cut short, not JSON, or without a name
    # same_script: an answer in another script than the last question (or its code) is rejected;
    # not for sets that ask for translations.
    languages: Literal["same_script"] | None

    canary_rows: PositiveInt  # the first rows of each set and server; the tap opens after them
    max_rejected_share: _Share  # of the canary, and of every later window
    min_reasoning_share: _Share  # of replies; 0 for a target that does not reason

    min_closed_share: _Share = 0.5  # of replies with reasoning: an end of it was seen
    max_length_share: _Share = 1.0  # of replies: cut at max_new_tokens; 1 is off
    max_failed_share: _Share = 0.5  # of a window's rows: no reply at all
    max_fault_share: _Share = 0.1  # of a window's rows: a reply that breaks the contract (NaN, ...)
    max_duplicate_share: _Share = 0.5  # of a window's prompts: the same reply as another prompt's
    # How many times longer or shorter than the canary's the answers of the last
    # 16 * canary_rows rows may be. Wide, since short answers come first and long ones last.
    max_length_drift: Annotated[float, Field(gt=1.0)] = 16.0
    # Output tokens per second of the last 16 * canary_rows rows, as a share of the canary's. Low,
    # since a set ends with few requests in flight; 0 is off.
    min_speed_share: _Share = 0.01
    max_silent_seconds: Annotated[float, Field(gt=0.0)] = 3600.0  # no row at all for this long


class Generate(Strict):
    """How responses are made."""

    servers: Servers
    sampling: Sampling
    samples_per_prompt: PositiveInt  # each with a seed of its own
    gates: Gates
    pool: PoolConfig = PoolConfig()
    workers: PositiveInt = 1
    # Where rows are kept: null is the run folder; or a folder or URI (s3://bucket/path) that every
    # worker reaches.
    store: str | None = None


class Capture(Strict):
    """How hidden states are made, and how they reach training.

    offline: all are on disk before training begins. streaming: none ever is; the servers run beside
    training. chunked: as many as `max_bytes` allows are made, trained on and removed, in turns.
    """

    mode: Literal["offline", "streaming", "chunked"] = "offline"
    servers: Servers
    # Of the aux states on disk; with 8 bits, each token and layer has its own scale. See README.
    storage: Storage = "bfloat16"
    samples_per_shard: PositiveInt = 64
    max_bytes: PositiveInt  # the quota, compared with an estimate before the first byte
    pool: PoolConfig = PoolConfig()

    @model_validator(mode="after")
    def _what_is_stored_lies_on_disk(self) -> "Capture":
        if self.mode == "streaming" and self.storage != "bfloat16":
            raise ValueError(
                f"storage {self.storage} is of states on disk, and streaming keeps none there; "
                "set storage to bfloat16, or mode to offline or chunked"
            )
        return self

    @model_validator(mode="after")
    def _launched_servers_can_capture(self) -> "Capture":
        if isinstance(self.servers, LaunchedServers):
            refuse_for_capture(self.servers.arguments)
            if self.servers.listen != "loopback":
                raise ValueError(
                    "listen is network: states are handed over in this machine's memory; set "
                    "listen to loopback"
                )
        return self


class Evaluate(Strict):
    """How acceptance is measured: chain speculation, greedy, through the chat template."""

    servers: Servers
    draft_steps: PositiveInt  # tokens drafted for one verification
    max_new_tokens: PositiveInt
    prompts_per_set: PositiveInt
    pool: PoolConfig = PoolConfig()


class RayConfig(Strict):
    """The Ray cluster: `address` null starts one on this machine for the length of the run."""

    address: str | None
    num_cpus: PositiveInt | None = None  # logical CPUs of a local Ray; null: as many as there are
    dashboard: bool = False
    object_store_bytes: PositiveInt | None = None


class Recipe(Strict):
    """One run."""

    name: _Name
    run_folder: str
    ray: RayConfig
    target: Target
    prompts: Prompts
    generate: Generate
    capture: Capture
    draft: DraftShape
    train: TrainConfig
    evaluate: Evaluate


def cache_folder() -> Path:
    """Where converted targets are kept: `EYAS_CACHE`, or `eyas` in the user's cache folder."""
    if "EYAS_CACHE" in os.environ:
        return Path(os.environ["EYAS_CACHE"]).expanduser().resolve()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eyas"


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe, apply `key.path=value` overrides, check everything. Raises `BadRecipe`.

    Relative paths in a recipe are taken from the recipe's own folder, except `run_folder`, which
    is taken from the working folder. `{cache}` stands for the cache folder.
    """
    try:
        mapping = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise BadRecipe(
            f"there is no recipe at {path}", expected="a YAML file", change="check the path"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecipe(
            f"{path} cannot be read: {error}", expected="a YAML file", change="check the file"
        ) from error
    except yaml.YAMLError as error:
        raise BadRecipe(
            f"{path} is not YAML: {error}",
            expected="one mapping of keys to values",
            change="mend the line that the message names",
        ) from error
    if not isinstance(mapping, dict):
        raise BadRecipe(
            f"{path} holds a {type(mapping).__name__}",
            expected="one mapping of keys to values",
            change="compare it with recipes/quickstart.yaml",
        )
    _read_profile(mapping, path)
    for override in overrides:
        _apply(mapping, override)
    recipe = parse_recipe(mapping, str(path))
    return _with_absolute_paths(recipe, path.resolve().parent)


def parse_recipe(mapping: dict[str, Any], origin: str) -> Recipe:
    """Check a mapping. JSON mode: lists become tuples, yet "10" is still refused for an int."""
    try:
        return Recipe.model_validate_json(json.dumps(mapping))
    except (ValidationError, TypeError) as error:
        raise BadRecipe(
            f"{origin} is not a recipe:\n{_explain(error)}",
            expected="the keys and types of pipelines/recipe.py; recipes/quickstart.yaml is one",
            change="mend the keys named above",
        ) from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML. No field of a recipe holds a secret; those stay outside."""
    return yaml.safe_dump(json.loads(recipe.model_dump_json()), sort_keys=False)


def fingerprint(recipe: Recipe, stage: str) -> str:
    """What a stage's artefact depends on, as a hash: its own part and everything upstream.

    Comfort (pool, ports, log intervals, where the run and its sources lie) is left out: it changes
    no row.
    """
    parts = _dependencies(json.loads(recipe.model_dump_json()))
    chain = {key: parts[key] for key in _UPSTREAM[stage]}
    return hashlib.sha256(json.dumps(chain, sort_keys=True).encode()).hexdigest()[:16]


_UPSTREAM: dict[str, tuple[str, ...]] = {
    "prepare": ("prepare",),
    "generate": ("prepare", "generate"),
    "capture": ("prepare", "generate", "capture"),
    "train": ("prepare", "generate", "capture", "train"),
    "export": ("prepare", "generate", "capture", "train"),
    "evaluate": ("prepare", "generate", "capture", "train", "evaluate"),
}


# The gates that decide about rows; the others only stop a run, and may be changed to go on.
ROW_GATES = (
    "finish_reasons",
    "min_content_tokens",
    "max_one_token_share",
    "max_repeated_share",
    "broken_tool_calls",
    "languages",
)


def _dependencies(recipe: dict[str, Any]) -> dict[str, Any]:
    train = dict(recipe["train"])
    for comfort in ("checkpoint_every_steps", "checkpoints_kept", "log_every_steps"):
        del train[comfort]
    target = {**recipe["target"], "path": Path(recipe["target"]["path"]).name}
    prompts = dict(recipe["prompts"])
    for kind in ("train", "evaluation"):
        prompts[kind] = [{**one, "path": Path(one["path"]).name} for one in prompts[kind]]
    return {
        "prepare": [target, prompts],
        "generate": [
            recipe["generate"]["sampling"],
            recipe["generate"]["samples_per_prompt"],
            {key: recipe["generate"]["gates"][key] for key in ROW_GATES},
        ],
        # bfloat16 is what there was before there was a choice.
        "capture": [one for one in [recipe["capture"]["storage"]] if one != "bfloat16"],
        "train": [recipe["draft"], train],
        "evaluate": [
            recipe["evaluate"][key] for key in ("draft_steps", "max_new_tokens", "prompts_per_set")
        ],
    }


def _read_profile(mapping: dict[str, Any], path: Path) -> None:
    """`target.profile` may name a YAML file beside the recipe instead of holding the keys."""
    target = mapping.get("target")
    if not isinstance(target, dict) or not isinstance(target.get("profile"), str):
        return
    profile = path.resolve().parent / target["profile"]
    try:
        target["profile"] = yaml.safe_load(profile.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadRecipe(
            f"target.profile: {profile} cannot be read: {error}",
            expected="a YAML file with the keys of a target profile",
            change="see recipes/targets for examples",
        ) from error


def _apply(mapping: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise BadRecipe(
            f"--set {override!r}",
            expected="key.path=value",
            change="for example --set train.epochs=2",
        )
    *parents, leaf = key.split(".")
    place = mapping
    for depth, parent in enumerate(parents, start=1):
        place = place.setdefault(parent, {})  # a name that no recipe knows is refused later
        if not isinstance(place, dict):
            raise BadRecipe(
                f"--set {override!r}: {'.'.join(parents[:depth])} holds a value, not keys",
                expected="a key below keys",
                change="see recipes/quickstart.yaml for the names",
            )
    place[leaf] = yaml.safe_load(text)


def _with_absolute_paths(recipe: Recipe, beside: Path) -> Recipe:
    def absolute(text: str) -> str:
        return str((beside / Path(text.format(cache=cache_folder())).expanduser()).resolve())

    def sets(given: tuple[PromptSet, ...]) -> tuple[PromptSet, ...]:
        return tuple(
            one if "://" in one.path else one.model_copy(update={"path": absolute(one.path)})
            for one in given
        )

    store = recipe.generate.store
    if store is not None:
        location_of(store)  # refuses what may hold a secret, before anything shows the recipe
        store = store if "://" in store else absolute(store)
    return recipe.model_copy(
        update={
            "generate": recipe.generate.model_copy(update={"store": store}),
            "run_folder": str(Path(recipe.run_folder).expanduser().resolve()),
            "target": recipe.target.model_copy(update={"path": absolute(recipe.target.path)}),
            "prompts": recipe.prompts.model_copy(
                update={
                    "train": sets(recipe.prompts.train),
                    "evaluation": sets(recipe.prompts.evaluation),
                }
            ),
        }
    )


def _explain(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return f"  {error}"
    lines = []
    for one in error.errors(include_url=False, include_context=False):
        where = ".".join(str(part) for part in one["loc"]) or "(top)"
        seen = "" if one["type"] in ("missing", "extra_forbidden") else f" (seen: {one['input']!r})"
        lines.append(f"  {where}: {one['msg']}{seen}")
    return "\n".join(lines)
