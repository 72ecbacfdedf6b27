"""What a draft is and how it learns. No default for anything that changes weights."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

# How aux states lie on disk; the two with 8 bits have a scale for each token and layer.
Storage = Literal["bfloat16", "float8_e4m3", "int8"]

_Share = Annotated[float, Field(ge=0.0, lt=1.0)]


class DraftShape(BaseModel, frozen=True, extra="forbid", strict=True):
    """The draft's own dimensions, as the recipe gives them. The rest comes from the target."""

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    draft_vocab_size: PositiveInt


class DraftConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """Everything that decides a draft's weights' shapes and its arithmetic.

    `aux_layer_ids` means "output of target layer j", ascending: SGLang treats the list as a set and
    concatenates in ascending order whatever the file says.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    vocab_size: PositiveInt
    draft_vocab_size: PositiveInt
    target_hidden_size: PositiveInt
    target_num_layers: PositiveInt
    aux_layer_ids: tuple[int, ...]
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat
    rope_scaling: dict[str, Any] | None
    max_position_embeddings: PositiveInt
    bos_token_id: int | None
    eos_token_id: int

    @model_validator(mode="after")
    def _fits_together(self) -> "DraftConfig":
        ids = self.aux_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise ValueError(f"aux_layer_ids is {list(ids)}; write distinct ids in ascending order")
        if ids[-1] > self.target_num_layers - 2:
            raise ValueError(
                f"aux layer {ids[-1]} of a target with {self.target_num_layers} layers: SGLang "
                f"reads the next layer's input, so the last id is {self.target_num_layers - 2}"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} exceeds the target's {self.vocab_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"{self.num_attention_heads} heads cannot share {self.num_key_value_heads} KV heads"
            )
        return self


class TrainConfig(BaseModel, frozen=True, extra="forbid", strict=True):
    """How the draft is trained."""

    seed: NonNegativeInt
    epochs: PositiveInt
    heldout_share: _Share  # of the responses, chosen by a hash of the sample id
    max_tokens_per_sample: PositiveInt  # longer rows are cut, and counted as cut
    batch_samples: PositiveInt  # per optimiser step, over all workers and micro-batches
    micro_batch_tokens: PositiveInt  # tokens that one forward may hold, per worker
    ttt_steps: PositiveInt
    step_decay: Annotated[float, Field(gt=0.0, le=1.0)]  # the weight of TTT step k is decay^k
    learning_rate: PositiveFloat
    warmup_share: _Share
    final_learning_rate_share: Annotated[float, Field(ge=0.0, le=1.0)]  # of the peak, by cosine
    adam_betas: tuple[float, float]
    weight_decay: NonNegativeFloat
    gradient_clip: PositiveFloat
    ema_decay: _Share  # 0 keeps no averaged weights; otherwise those are exported
    dtype: Literal["float32", "bfloat16"]
    zero_stage: Literal[0, 1, 2, 3]
    workers: PositiveInt
    threads_per_worker: PositiveInt
    gpus_per_worker: NonNegativeInt
    checkpoint_every_steps: PositiveInt
    checkpoints_kept: PositiveInt = 2
    log_every_steps: PositiveInt = 10

    @model_validator(mode="after")
    def _sample_fits_a_micro_batch(self) -> "TrainConfig":
        if self.max_tokens_per_sample > self.micro_batch_tokens:
            raise ValueError(
                f"max_tokens_per_sample {self.max_tokens_per_sample} is longer than a micro-batch "
                f"of {self.micro_batch_tokens} tokens; raise micro_batch_tokens or cut samples"
            )
        return self
