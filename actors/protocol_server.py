"""SGLang's HTTP contract (0.5.23) as the embedded engine keeps it: bodies in, replies out.

It has SGLang's own defaults, and refuses what this engine does not do rather than leave it out.
Source of the shapes: sglang 0.5.23, `entrypoints/http_server.py`, `managers/tokenizer_manager.py`,
`sampling/sampling_params.py`, `managers/load_snapshot.py`.
"""

import json
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actors.protocol import NAN_HAPPENED, SpeculationCounters

_DEFAULT_MAX_NEW_TOKENS = 128
_TOP_K_OFF = 1 << 30
_GREEDY_BELOW = 1e-6  # SGLang's bound: 0 <= temperature < 1e-6 is greedy
_WEIGHT_VERSION = "default"  # as loaded: nothing here updates weights

# Known to SGLang, not done here. Each with the values that ask for nothing.
_ASKS_FOR_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "stop": (None, "", []),
    "stop_regex": (None, "", []),
    "min_new_tokens": (None, 0),
    "n": (None, 1),
    "json_schema": (None, ""),
    "regex": (None, ""),
    "ebnf": (None, ""),
    "structural_tag": (None, ""),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "beam_width": (None, 1),
    "watermark": (None,),
    "choice": (None, []),
    "stream_interval": (None,),
}
_UNSERVED_KEYS: Mapping[str, tuple[Any, ...]] = {
    "text": (None,),
    "input_embeds": (None,),
    "stream": (None, False),
    "return_logprob": (None, False),
    "top_logprobs_num": (None, 0),
    "return_hidden_states": (None, False),
    "return_routed_experts": (None, False),
    "image_data": (None,),
    "audio_data": (None,),
    "video_data": (None,),
    "lora_path": (None,),
    "session_params": (None,),
    "custom_logit_processor": (None,),
}


class RequestRefused(Exception):
    """The HTTP answer to a request that is not served."""

    def __init__(self, status: int, body: dict[str, Any]) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class ServerLimits:
    """What a request may ask of one server."""

    vocab_size: int
    context_length: int
    greedy_only: bool  # a server that verifies drafts by comparing greedy tokens
    allows_rid: Callable[[str], bool]


@dataclass(frozen=True)
class ServedSampling:
    """How one request draws its tokens. `temperature` None is greedy, `top_k` None is off."""

    temperature: float | None
    top_p: float
    top_k: int | None
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None

    @property
    def penalises(self) -> bool:
        """Whether earlier output changes the scores."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0)


@dataclass(frozen=True)
class ServedRequest:
    """One valid request, with every default filled in."""

    rid: str
    input_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: ServedSampling
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    no_stop_trim: bool
    echoes_prompt: bool


@dataclass(frozen=True)
class ServedFinish:
    """Why a request ended, as SGLang writes it."""

    reason: Mapping[str, Any]
    stops_at_token: bool = False  # the last id is the stop token

    @classmethod
    def stop(cls, token: int) -> "ServedFinish":
        """A stop token came; it is the last output id."""
        return cls({"type": "stop", "matched": token}, stops_at_token=True)

    @classmethod
    def length(cls, tokens: int) -> "ServedFinish":
        """`max_new_tokens` came out."""
        return cls({"type": "length", "length": tokens})

    @classmethod
    def nan(cls) -> "ServedFinish":
        """The scores held a NaN; a stop token is written over the id."""
        return cls({"type": "stop", "matched": NAN_HAPPENED})

    @classmethod
    def abort(cls, message: str) -> "ServedFinish":
        """Somebody took the request back."""
        return cls({"type": "abort", "message": message, "status_code": None, "err_type": None})


def parse_generate(body: bytes, limits: ServerLimits) -> ServedRequest:
    """Read the body of a POST to `/generate`. Raises `RequestRefused`, in SGLang's shapes."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, error_body(400, f"the body is not JSON: {error}")) from error
    if not isinstance(asked, dict):
        raise _contract("invalid type: expected a JSON object")
    _refuse_unserved(asked, _UNSERVED_KEYS)
    input_ids = _served_ids(asked, limits)
    params = asked.get("sampling_params")
    if params is None:
        params = {}
    if not isinstance(params, dict):
        raise _contract("sampling_params: expected one object (batches are not served here)")
    fields = _Fields(params)
    request = ServedRequest(
        rid=_served_rid(asked, limits),
        input_ids=input_ids,
        max_new_tokens=_served_length(fields, len(input_ids), limits),
        sampling=_served_sampling(fields, limits),
        stop_token_ids=fields.ids("stop_token_ids"),
        ignore_eos=fields.boolean("ignore_eos", False),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
        spaces_between_special_tokens=fields.boolean("spaces_between_special_tokens", True),
        no_stop_trim=fields.boolean("no_stop_trim", False),
        echoes_prompt=_Fields(asked).boolean("return_prompt_token_ids", False),
    )
    known = sorted(fields.read | _ASKS_FOR_NOTHING.keys())
    for key in params:
        if key not in known:
            listed = ", ".join(f"`{one}`" for one in known)
            raise _contract(f"unknown field `{key}`, expected one of {listed}")
    _refuse_unserved(params, _ASKS_FOR_NOTHING)
    return request


def generate_reply(
    request: ServedRequest,
    output_ids: Sequence[int],
    text: str,
    finish: ServedFinish,
    *,
    seconds: float,
    speculation: SpeculationCounters | None,
    draft_steps: int,
) -> dict[str, Any]:
    """The body of a 200 from `/generate`. Counters appear once something was verified."""
    meta: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": dict(finish.reason),
        "prompt_tokens": len(request.input_ids),
        "weight_version": _WEIGHT_VERSION,
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": len(output_ids),
        "cached_tokens": 0,
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": seconds,
    }
    if speculation is not None and speculation.verifications > 0:
        proposed = speculation.verifications * draft_steps
        meta |= {
            "spec_accept_rate": speculation.correct_drafts / proposed,
            # SGLang's own figure, which counts the prefill's token.
            "spec_accept_length": len(output_ids) / speculation.verifications,
            "spec_num_correct_drafts": speculation.correct_drafts,
            "spec_num_proposed_drafts": proposed,
            "spec_verify_ct": speculation.verifications,
            "spec_correct_drafts_histogram": list(speculation.correct_drafts_histogram),
        }
    return _with_echo(request, {"text": text, "output_ids": list(output_ids), "meta_info": meta})


def waiting_abort_reply(request: ServedRequest, finish: ServedFinish) -> dict[str, Any]:
    """The 200 for a request that was taken back before it ran: SGLang counts no prompt there."""
    meta = {
        "id": request.rid,
        "finish_reason": dict(finish.reason),
        "weight_version": _WEIGHT_VERSION,
        "completion_tokens": 0,
        "e2e_latency": 0.0,
    }
    return _with_echo(request, {"text": "", "output_ids": [], "meta_info": meta})


def parse_abort(body: bytes) -> tuple[str, bool]:
    """Read the body of `/abort_request`: a rid, and whether everything is meant."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, error_body(400, f"the body is not JSON: {error}")) from error
    match asked:
        case {"abort_all": True}:
            return "", True
        case {"rid": str(rid)} if rid:
            return rid, False
        case _:
            raise _contract("abort_request: expected `rid` (a prefix) or `abort_all`: true")


def error_body(status: int, message: str) -> dict[str, Any]:
    """SGLang's shape for what it did not expect, and for what it cannot do now."""
    return {
        "object": "error",
        "message": message,
        "type": str(status),
        "param": None,
        "code": status,
    }


def value_error_body(message: str) -> dict[str, Any]:
    """SGLang's shape for a valid body that asks for something impossible."""
    return {"error": {"message": message}}


def model_info_body(
    *, model_path: str, tokenizer_path: str, model_type: str, architectures: Sequence[str]
) -> dict[str, Any]:
    """`/model_info`."""
    return {
        "model_path": model_path,
        "served_model_name": model_path,
        "tokenizer_path": tokenizer_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": _WEIGHT_VERSION,
        "load_format": "safetensors",
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": model_type,
        "architectures": list(architectures),
    }


def server_info_body(
    *,
    version: str,
    model_path: str,
    tokenizer_path: str,
    dtype: str,
    device: str,
    context_length: int,
    max_running_requests: int,
    draft_path: str | None,
    draft_steps: int,
    capture_layer_ids: Sequence[int],
    random_seed: int,
) -> dict[str, Any]:
    """`/server_info`: the resolved options under SGLang's names."""
    drafts = draft_path is not None
    return {
        "version": version,
        "frontend": "python",
        "model_path": model_path,
        "served_model_name": model_path,
        "tokenizer_path": tokenizer_path,
        "skip_tokenizer_init": False,
        "dtype": dtype,
        "device": device,
        "random_seed": random_seed,
        "context_length": context_length,
        "max_req_input_len": context_length - 1,
        "max_running_requests": max_running_requests,
        "max_total_num_tokens": max_running_requests * context_length,
        "allow_auto_truncate": False,
        "disable_radix_cache": True,
        # False: sums depend on the batch in bf16. A request's sampling_seed is honoured all the
        # same, by a generator of its own.
        "enable_deterministic_inference": False,
        "reasoning_parser": None,
        "tool_call_parser": None,
        "preferred_sampling_params": None,
        "weight_version": _WEIGHT_VERSION,
        "speculative_algorithm": "EAGLE3" if drafts else None,
        "speculative_draft_model_path": draft_path,
        "speculative_num_steps": draft_steps if drafts else None,
        "speculative_eagle_topk": 1 if drafts else None,
        "speculative_num_draft_tokens": draft_steps + 1 if drafts else None,
        "return_aux_hidden_state_layer_ids": list(capture_layer_ids) or None,
        "internal_states": [{}],
    }


def loads_body(
    *,
    now: str,
    version: str,
    running: int,
    waiting: int,
    used_tokens: int,
    total_tokens: int,
    max_running: int,
    tokens_per_second: float,
) -> dict[str, Any]:
    """`/v1/loads?include=core`: one data-parallel rank."""
    return {
        "timestamp": now,
        "version": version,
        "accelerator": None,
        "num_accelerators": 1,
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": running,
                "num_waiting_reqs": waiting,
                "num_used_tokens": used_tokens,
                "num_total_tokens": used_tokens,
                "max_total_num_tokens": total_tokens,
                "max_running_requests": max_running,
                "token_usage": used_tokens / total_tokens,
                "gen_throughput": tokens_per_second,
                "cache_hit_rate": 0.0,
                "utilization": running / max_running,
            }
        ],
    }


def models_body(model_path: str, context_length: int) -> dict[str, Any]:
    """`/v1/models`."""
    card = {
        "id": model_path,
        "object": "model",
        "owned_by": "sglang",
        "root": model_path,
        "max_model_len": context_length,
    }
    return {"object": "list", "data": [card]}


class _Fields:
    """Typed reads of one JSON object; null is absent, as in SGLang. Remembers what was read."""

    def __init__(self, holder: Mapping[str, Any]) -> None:
        self._holder = holder
        self.read: set[str] = set()

    def boolean(self, key: str, default: bool) -> bool:
        value = self._value(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _contract(f"{key}: invalid type: {_seen(value)}, expected a boolean")
        return value

    def integer(self, key: str) -> int | None:
        value = self._value(key)
        if value is None:
            return None
        if type(value) is not int:
            raise _contract(f"{key}: invalid type: {_seen(value)}, expected an integer")
        return value

    def number(self, key: str, default: float, allows: Callable[[float], bool], rule: str) -> float:
        value = self._value(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _contract(f"{key}: invalid type: {_seen(value)}, expected a number")
        if not allows(float(value)):
            raise _impossible(f"{key} must be {rule}, got {value}.")
        return float(value)

    def ids(self, key: str) -> frozenset[int]:
        value = self._value(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise _contract(f"{key}: invalid type: {_seen(value)}, expected a list of integers")
        return frozenset(value)

    def holds(self, key: str) -> bool:
        """Whether the key is there at all, be it null."""
        return key in self._holder

    def _value(self, key: str) -> Any:
        self.read.add(key)
        return self._holder.get(key)


def _with_echo(request: ServedRequest, reply: dict[str, Any]) -> dict[str, Any]:
    if request.echoes_prompt:
        reply["prompt_token_ids"] = list(request.input_ids)
    return reply


def _served_rid(asked: Mapping[str, Any], limits: ServerLimits) -> str:
    rid = asked.get("rid")
    if rid is None:
        return uuid.uuid4().hex
    if not isinstance(rid, str):
        raise _contract("rid: expected one string (batches are not served here)")
    if not limits.allows_rid(rid):
        raise _impossible(f"the rid {_seen(rid)} cannot name a capture file")
    return rid


def _served_ids(asked: Mapping[str, Any], limits: ServerLimits) -> tuple[int, ...]:
    ids = asked.get("input_ids")
    if ids is None:
        raise _impossible("input_ids must be given.")
    if not isinstance(ids, list):
        raise _contract(f"input_ids: invalid type: {_seen(ids)}, expected a list of integers")
    if not ids:
        raise _impossible("input_ids cannot be empty.")
    for token in ids:
        if isinstance(token, list):
            raise _contract("input_ids: expected one list of ids (batches are not served here)")
        if type(token) is not int:
            raise _contract(f"input_ids: invalid type: {_seen(token)}, expected an integer")
        if not 0 <= token < limits.vocab_size:
            raise _impossible(
                f"The input_ids hold {token}; valid range is [0, {limits.vocab_size})."
            )
    if len(ids) >= limits.context_length:
        raise _impossible(
            f"The input ({len(ids)} tokens) is longer than the model's context length "
            f"({limits.context_length} tokens)."
        )
    return tuple(ids)


def _served_length(fields: _Fields, prompt_tokens: int, limits: ServerLimits) -> int:
    asked = fields.integer("max_new_tokens")
    if asked is None and fields.holds("max_new_tokens"):
        return limits.context_length - prompt_tokens - 1  # null: as far as the context goes
    tokens = _DEFAULT_MAX_NEW_TOKENS if asked is None else asked
    if tokens < 0:
        raise _impossible(f"max_new_tokens must be at least 0, got {tokens}.")
    if prompt_tokens + tokens > limits.context_length and asked is not None:
        raise _impossible(
            "Requested token count exceeds the model's maximum context length of "
            f"{limits.context_length} tokens. You requested a total of {prompt_tokens + tokens} "
            f"tokens: {prompt_tokens} tokens from the input messages and {tokens} tokens for the "
            "completion."
        )
    return min(tokens, limits.context_length - prompt_tokens)


def _served_sampling(fields: _Fields, limits: ServerLimits) -> ServedSampling:
    temperature = fields.number(
        "temperature",
        1.0,
        lambda value: math.isfinite(value) and value >= 0,
        "a non-negative finite number",
    )
    top_k, seed = fields.integer("top_k"), fields.integer("sampling_seed")
    if top_k is not None and top_k != -1 and top_k < 1:
        raise _impossible(f"top_k must be -1 (disable) or at least 1, got {top_k}.")
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise _impossible(f"sampling_seed must be in [-2**63, 2**63 - 1], got {seed}.")
    sampling = ServedSampling(
        temperature=None if temperature < _GREEDY_BELOW or top_k == 1 else temperature,
        top_p=fields.number("top_p", 1.0, lambda value: 0 < value <= 1, "in (0, 1]"),
        top_k=None if top_k is None or top_k == -1 or top_k >= _TOP_K_OFF else top_k,
        min_p=fields.number("min_p", 0.0, lambda value: 0 <= value <= 1, "in [0, 1]"),
        repetition_penalty=fields.number(
            "repetition_penalty", 1.0, lambda value: 0 < value <= 2, "in (0, 2]"
        ),
        presence_penalty=fields.number(
            "presence_penalty", 0.0, lambda value: -2 <= value <= 2, "in [-2, 2]"
        ),
        frequency_penalty=fields.number(
            "frequency_penalty", 0.0, lambda value: -2 <= value <= 2, "in [-2, 2]"
        ),
        seed=seed,
    )
    if limits.greedy_only and (sampling.temperature is not None or sampling.penalises):
        raise _impossible(
            "this server verifies drafts greedily: send temperature 0 and no penalties, or start "
            "it without a draft"
        )
    return sampling


def _refuse_unserved(
    holder: Mapping[str, Any], neutral_values: Mapping[str, tuple[Any, ...]]
) -> None:
    for key, neutral in neutral_values.items():
        if key in holder and not any(
            type(holder[key]) is type(value) and holder[key] == value for value in neutral
        ):
            raise _contract(f"{key} is not served here (seen: {_seen(holder[key])})")


def _contract(message: str) -> RequestRefused:
    return RequestRefused(400, {"error": message})


def _impossible(message: str) -> RequestRefused:
    return RequestRefused(400, value_error_body(message))


def _seen(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
