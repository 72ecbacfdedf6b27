"""How servers are had, and how hard they may be leaned on. What changes data has no default."""

from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from actors.launch_rules import refuse_argument, refuse_variable

_Probability = Annotated[float, Field(gt=0.0, le=1.0)]


class Sampling(BaseModel, frozen=True, extra="forbid", strict=True):
    """Every field is sent with every request: a server's own defaults (128 tokens) never apply."""

    temperature: Annotated[float, Field(ge=0.0)]  # 0 is greedy
    top_p: _Probability
    top_k: int  # -1 is off
    min_p: Annotated[float, Field(ge=0.0, le=1.0)]
    repetition_penalty: PositiveFloat  # 1 is off
    presence_penalty: float  # 0 is off
    frequency_penalty: float  # 0 is off
    max_new_tokens: PositiveInt  # the cap; a row near the context's end gets less
    seed: NonNegativeInt  # each row's own seed is derived from this and its sample id

    @staticmethod
    def greedy(max_new_tokens: int) -> "Sampling":
        """The most likely token, always."""
        return Sampling(
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            min_p=0.0,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            max_new_tokens=max_new_tokens,
            seed=0,
        )

    @model_validator(mode="after")
    def _top_k_is_off_or_positive(self) -> "Sampling":
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; write -1 for off, or a positive count")
        return self


class Supervised(BaseModel, frozen=True, extra="forbid", strict=True):
    """How a server that we start is kept alive. Comfort only: nothing here changes a row."""

    count: PositiveInt
    ready_seconds: PositiveFloat = 180.0  # from its start to its first healthy answer
    restarts_per_hour: NonNegativeInt = 6  # one more death within an hour, and it is given up
    restart_seconds: PositiveFloat = 5.0  # before the first restart; doubles, capped at 5 minutes
    # Without one healthy answer for so long, a running server counts as dead. SGLang's own watchdog
    # ends a stuck one after 300 s.
    unhealthy_seconds: PositiveFloat = 420.0


class EmbeddedServers(Supervised, frozen=True, extra="forbid", strict=True):
    """Start the embedded engine, one process per server, on this machine's CPU or one GPU each."""

    kind: Literal["embedded"]
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    threads_per_server: PositiveInt
    max_running_requests: PositiveInt


ArgumentValue = bool | int | float | str | tuple[int | float | str, ...]


class LaunchedServers(Supervised, frozen=True, extra="forbid", strict=True):
    """Start stock SGLang servers, each with `tensor_parallel_size` GPUs of one node."""

    kind: Literal["launch"]
    python: str  # the interpreter of the environment that SGLang is installed in
    tensor_parallel_size: PositiveInt
    device: Literal["cpu", "cuda"]
    # loopback: the servers live on the driver's node and so must the workers. network: on any node,
    # listening on that node's address, without a password: for a closed network only.
    listen: Literal["loopback", "network"] = "loopback"
    # SGLang's options without their dashes; `true` is a flag, a list is several values.
    arguments: dict[str, ArgumentValue] = Field(default_factory=dict)
    environment: dict[str, str] = Field(default_factory=dict)  # kept in the recipe: no secrets
    ready_seconds: PositiveFloat = 1800.0  # a large target takes long to load

    @field_validator("arguments")
    @classmethod
    def _arguments_are_the_recipes_to_give(
        cls, given: dict[str, ArgumentValue]
    ) -> dict[str, ArgumentValue]:
        for name, value in given.items():
            refuse_argument(name, value, others=given)
        return given

    @field_validator("environment")
    @classmethod
    def _variables_are_no_secrets(cls, given: dict[str, str]) -> dict[str, str]:
        for name in given:
            refuse_variable(name)
        return given


class AttachedServers(BaseModel, frozen=True, extra="forbid", strict=True):
    """Use servers that somebody else runs. They are checked, and never killed."""

    kind: Literal["attach"]
    urls: tuple[str, ...] = Field(min_length=1)
    # One URL that stands for several servers: their loads and identities are then not known.
    gateway: bool = False
    ready_seconds: NonNegativeFloat = 0.0  # how long to wait for the first that answers

    @field_validator("urls")
    @classmethod
    def _urls_are_distinct_and_carry_no_secret(cls, given: tuple[str, ...]) -> tuple[str, ...]:
        for url in given:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no URL; write http://host:port")
            if "@" in url or "?" in url:
                raise ValueError(
                    "a URL holds a user, a password or a query; the recipe is stored with the run: "
                    "write http://host:port, and give a key in the variable EYAS_API_KEY"
                )
        if len({url.rstrip("/") for url in given}) != len(given):
            raise ValueError(f"a URL comes twice in {list(given)}; give each server once")
        return given

    @model_validator(mode="after")
    def _a_gateway_is_one_url(self) -> "AttachedServers":
        if self.gateway and len(self.urls) != 1:
            raise ValueError(f"gateway is true with {len(self.urls)} urls; give the gateway's only")
        return self


Servers = Annotated[
    EmbeddedServers | LaunchedServers | AttachedServers, Field(discriminator="kind")
]


class PoolConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """How hard the pool may lean on its servers. Comfort only: nothing here changes a row."""

    max_in_flight_per_server: PositiveInt = 64
    attempts: PositiveInt = 5  # per row, over all servers
    overload_attempts: PositiveInt = 200  # per row: "I am full" is no fault, but no answer either
    trip_after: PositiveInt = 5  # consecutive faults that blame a server, before it rests
    rest_seconds: PositiveFloat = 5.0
    backoff_seconds: PositiveFloat = 0.5  # before the second attempt; doubles, capped at 30 s
    connect_seconds: PositiveFloat = 10.0
    # A request is lost when its server twice says that it does nothing, this long after it left.
    hung_after_seconds: PositiveFloat = 20.0
    # The deadline of one attempt: base + max_new_tokens x per_token.
    deadline_base_seconds: PositiveFloat = 300.0
    deadline_per_token_seconds: PositiveFloat = 1.0
