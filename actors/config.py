"""How servers are had, and how hard they may be leaned on. What changes data has no default."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

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

    @model_validator(mode="after")
    def _top_k_is_off_or_positive(self) -> "Sampling":
        if self.top_k != -1 and self.top_k < 1:
            raise ValueError(f"top_k is {self.top_k}; write -1 for off, or a positive count")
        return self


class EmbeddedServers(BaseModel, frozen=True, extra="forbid", strict=True):
    """Start the embedded engine, one process per server, on this machine's CPU or one GPU each."""

    kind: Literal["embedded"]
    count: PositiveInt
    dtype: Literal["float32", "bfloat16"]
    device: Literal["cpu", "cuda"]
    threads_per_server: PositiveInt
    max_running_requests: PositiveInt
    ready_seconds: PositiveFloat = 180.0


class AttachedServers(BaseModel, frozen=True, extra="forbid", strict=True):
    """Use servers that somebody else runs. They are checked, and never killed."""

    kind: Literal["attach"]
    urls: tuple[str, ...] = Field(min_length=1)


Servers = Annotated[EmbeddedServers | AttachedServers, Field(discriminator="kind")]


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
