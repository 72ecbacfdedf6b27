"""SGLang's HTTP contract (0.5.23): the only place that knows its JSON keys.

Client half: a request becomes a body, a reply becomes a `Completion` or a typed fault.
Nothing here has a default for something that is missing: absent is not zero.
The embedded engine's half is `protocol_server.py`.
Source of the shapes: sglang 0.5.23, `managers/io_struct.py`, `managers/tokenizer_manager.py`,
`entrypoints/http_server.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timezone
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any, Literal

import orjson

from actors.config import Sampling
from actors.errors import BadReply, Overloaded, Refused, RequestFault, Unreachable, Unserved

GENERATE = "/generate"
HEALTH = "/health"
READY = "/ready"
MODELS = "/v1/models"
FLUSH = "/flush_cache"
MODEL_INFO = "/model_info"
SERVER_INFO = "/server_info"
LOADS = "/v1/loads"
ABORT = "/abort_request"
DETOKENIZE = "/detokenize"

# SGLang turns a NaN into this "stop", status 200, with the bad id overwritten (schedule_batch.py).
NAN_HAPPENED = "NaN happened"

# The most that a reply may weigh. A token id has at most 7 digits; a token's text is at most a few
# hundred bytes, written as JSON escapes. The first megabyte is for everything else.
_REPLY_BYTES = 2**20
_REPLY_BYTES_PER_PROMPT_TOKEN = 16
_REPLY_BYTES_PER_OUTPUT_TOKEN = 512
_LONGEST_RETRY_AFTER_SECONDS = 600.0
# What a JSON list of token ids holds between its brackets: no sign, no dot, no quote.
_ID_LIST = b"0123456789,"


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt, one sample. `sampling_params` holds every field that is sent, and is stored."""

    rid: str
    input_ids: tuple[int, ...]
    sampling_params: Mapping[str, Any]

    @property
    def max_new_tokens(self) -> int:
        """The cap that was sent."""
        return int(self.sampling_params["max_new_tokens"])

    @property
    def max_reply_bytes(self) -> int:
        """What a reply may weigh; more is no reply to this request."""
        return (
            _REPLY_BYTES
            + _REPLY_BYTES_PER_PROMPT_TOKEN * len(self.input_ids)
            + _REPLY_BYTES_PER_OUTPUT_TOKEN * self.max_new_tokens
        )

    @cached_property
    def written_ids(self) -> bytes:
        """The prompt's ids as JSON: as they are sent, and as they must come back."""
        return orjson.dumps(self.input_ids)

    def body(self) -> bytes:
        """The JSON that goes over the wire."""
        return orjson.dumps(
            {
                "rid": self.rid,
                "input_ids": orjson.Fragment(self.written_ids),
                "sampling_params": dict(self.sampling_params),
                "stream": False,
                "return_prompt_token_ids": True,
            }
        )


@dataclass(frozen=True)
class Finish:
    """Why generation ended. `matched` is the stop token id, or the stop string."""

    kind: Literal["stop", "length"]
    matched: int | str | None
    length: int | None

    def __post_init__(self) -> None:
        assert (self.kind == "length") == (self.length is not None)


@dataclass(frozen=True)
class SpeculationCounters:
    """What the server counted while it verified drafts for one request.

    AL is `1 + correct_drafts / verifications`; SGLang's own `spec_accept_length` also counts the
    token of the prefill.
    """

    verifications: int
    correct_drafts: int
    correct_drafts_histogram: tuple[int, ...]  # index k: verifications with k accepted drafts


@dataclass(frozen=True)
class Completion:
    """A reply that kept the contract. `output_ids` are the server's own, stop token included."""

    rid: str
    output_ids: tuple[int, ...]
    text: str
    finish: Finish
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    speculation: SpeculationCounters | None
    retractions: int | None = None  # how often the scheduler took it out of its batch, if it says


@dataclass(frozen=True)
class ModelInfo:
    """What `/model_info` says."""

    model_path: str
    tokenizer_path: str
    weight_version: str
    reasoning_parser: str | None
    preferred_sampling_params: Any


@dataclass(frozen=True)
class ServerInfo:
    """What `/server_info` says, as far as a run depends on it. `raw` is kept for the manifest."""

    version: str
    context_length: int | None
    max_total_num_tokens: int | None
    max_running_requests: int | None
    allow_auto_truncate: bool
    speculative_algorithm: str | None
    raw: Mapping[str, Any]


@dataclass(frozen=True)
class Load:
    """What `/v1/loads` says of one server, summed over its data-parallel ranks.

    The last four are None where a rank does not say them. `token_usage` is the fullest rank's.
    """

    running: int
    waiting: int
    used_tokens: int
    max_total_num_tokens: int | None = None
    max_running_requests: int | None = None
    token_usage: float | None = None  # share of the KV pool, 0 to 1
    gen_throughput: float | None = None  # tokens per second


def sampling_params(
    sampling: Sampling, *, max_new_tokens: int, seed: int, stop_token_ids: Sequence[int]
) -> dict[str, Any]:
    """Every sampling field, explicitly. `max_new_tokens` is the row's own, at most the cap.

    The last four fields make `text` a faithful review copy: no stop trimmed, no special token
    hidden. Token stops only, no stop strings.
    """
    assert 0 <= max_new_tokens <= sampling.max_new_tokens
    return {
        "max_new_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "sampling_seed": seed,
        "stop_token_ids": list(stop_token_ids),
        "ignore_eos": False,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "no_stop_trim": True,
    }


def check_prompt(request: GenerateRequest, *, vocab_size: int) -> None:
    """Raise `Refused` for a prompt with an id that the target lacks: one such id does not fail the
    request, it ends a stock server and all that runs there."""
    ids = request.input_ids
    if ids and (b"-" in request.written_ids or max(ids) >= vocab_size):
        odd = next(one for one in ids if not 0 <= one < vocab_size)
        raise Refused(
            "prompt_id_out_of_vocabulary", f"the prompt holds id {odd}, the target has {vocab_size}"
        )


def parse_completion(
    request: GenerateRequest, status: int, body: bytes, *, vocab_size: int
) -> Completion:
    """Read one reply to `/generate`. Raises the `RequestFault` that says how it broke."""
    if status != 200:
        raise fault_of(status, body)
    reply = _json_object(body)
    if "error" in reply:
        raise BadReply("error_in_200", _shorten(reply["error"]))
    meta = _field(reply, "meta_info", dict)
    rid = _field(meta, "id", str)
    if rid != request.rid:
        raise BadReply("foreign_rid", f"asked for {request.rid!r}, got {rid!r}")
    finish = _finish(meta)  # an abort is known before its missing counts are missed
    output_ids = _ids(reply, "output_ids", vocab_size)
    if "prompt_token_ids" in reply:
        _check_echo(request, _field(reply, "prompt_token_ids", list))
    prompt_tokens = _count(meta, "prompt_tokens")
    if prompt_tokens != len(request.input_ids):
        raise BadReply("prompt_tokens", f"sent {len(request.input_ids)}, counted {prompt_tokens}")
    completion_tokens = _count(meta, "completion_tokens")
    if completion_tokens != len(output_ids):
        raise BadReply("completion_tokens", f"{len(output_ids)} ids, counted {completion_tokens}")
    cached_tokens = _count(meta, "cached_tokens")
    if cached_tokens > prompt_tokens:
        raise BadReply("cached_tokens", f"{cached_tokens} of a prompt of {prompt_tokens}")
    _check_finish(request, finish, output_ids)
    return Completion(
        rid=rid,
        output_ids=output_ids,
        text=_field(reply, "text", str),
        finish=finish,
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        cached_tokens=cached_tokens,
        weight_version=_field(meta, "weight_version", str),
        speculation=_speculation(meta),
        retractions=_count(meta, "num_retractions") if "num_retractions" in meta else None,
    )


def fault_of(status: int, body: bytes, *, retry_after_seconds: float | None = None) -> RequestFault:
    """Turn an HTTP status that is not 200 into its fault. Understands SGLang's error shapes."""
    name, detail = f"http_{status}", f"HTTP {status}: {_error_message(body)}"
    match status:
        case 429 | 503:
            return Overloaded(name, detail, retry_after_seconds=retry_after_seconds)
        case 401 | 403:
            return Unserved(name, f"{detail} (the key is read from EYAS_API_KEY)")
        case 404:
            return Unserved(name, detail)
        case 400 | 413 | 422:
            return Refused(name, detail)
        case _ if status == 408 or status >= 500:
            return Unreachable(name, detail)
        case _:
            return BadReply(name, detail)


def http_date_seconds(text: str) -> float | None:
    """An HTTP date in seconds since the epoch; None if it is no date."""
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    # A date that says "-0000" comes without a zone; HTTP knows only UTC.
    return (date if date.tzinfo else date.replace(tzinfo=timezone.utc)).timestamp()


def retry_after_seconds(header: str, now: float) -> float | None:
    """How long a Retry-After header, in seconds or as a date, asks to wait; at most 10 minutes.

    `now` is in seconds since the epoch. None if the header says nothing that can be understood.
    """
    text = header.strip()
    if text.isascii() and text.isdigit():
        wait: float | None = float(text)
    else:
        until = http_date_seconds(text)
        wait = None if until is None else max(0.0, until - now)
    return None if wait is None else min(_LONGEST_RETRY_AFTER_SECONDS, wait)


def identity_of(model: ModelInfo, server: ServerInfo) -> str:
    """What distinguishes this process with this model from any other behind the same URL.

    SGLang draws a `random_seed` at each start unless it is told one, so a restart shows. Where it
    was told one, or does not say, a restart with the same model looks the same.
    """
    seed = server.raw.get("random_seed")
    facts = (model.model_path, model.tokenizer_path, model.weight_version, server.version, seed)
    return orjson.dumps(facts, default=str).decode()


def parse_model_info(status: int, body: bytes) -> ModelInfo:
    """Read `/model_info`."""
    if status != 200:
        raise fault_of(status, body)
    reply = _json_object(body)
    return ModelInfo(
        model_path=_field(reply, "model_path", str),
        tokenizer_path=_field(reply, "tokenizer_path", str),
        weight_version=_field(reply, "weight_version", str),
        reasoning_parser=_optional(reply, "reasoning_parser", str),
        preferred_sampling_params=_present(reply, "preferred_sampling_params"),
    )


def parse_server_info(status: int, body: bytes) -> ServerInfo:
    """Read `/server_info`."""
    if status != 200:
        raise fault_of(status, body)
    reply = _json_object(body)
    return ServerInfo(
        version=_field(reply, "version", str),
        context_length=_optional(reply, "context_length", int),
        max_total_num_tokens=_optional(reply, "max_total_num_tokens", int),
        max_running_requests=_optional(reply, "max_running_requests", int),
        allow_auto_truncate=_field(reply, "allow_auto_truncate", bool),
        speculative_algorithm=_optional(reply, "speculative_algorithm", str),
        raw=reply,
    )


def detokenize_body(ids: Sequence[int]) -> bytes:
    """The body of a POST to `/detokenize`: each id by itself."""
    return orjson.dumps({"tokens": [[one] for one in ids], "skip_special_tokens": False})


def parse_texts(status: int, body: bytes, *, count: int) -> tuple[str, ...]:
    """Read the reply of `/detokenize`: `count` texts."""
    if status != 200:
        raise fault_of(status, body)
    texts = _field(_json_object(body), "text", list)
    if len(texts) != count or not all(isinstance(one, str) for one in texts):
        raise BadReply("texts", f"asked for {count} texts, got {_shorten(texts)}")
    return tuple(texts)


def parse_loads(status: int, body: bytes) -> Load:
    """Read `/v1/loads?include=core`: sums over the data-parallel ranks."""
    if status != 200:
        raise fault_of(status, body)
    ranks = _field(_json_object(body), "loads", list)
    if not ranks or not all(isinstance(rank, dict) for rank in ranks):
        raise BadReply("loads", f"no rank in {_shorten(ranks)}")
    return Load(
        running=sum(_count(rank, "num_running_reqs") for rank in ranks),
        waiting=sum(_count(rank, "num_waiting_reqs") for rank in ranks),
        used_tokens=sum(_count(rank, "num_used_tokens") for rank in ranks),
        max_total_num_tokens=_total(ranks, "max_total_num_tokens"),
        max_running_requests=_total(ranks, "max_running_requests"),
        token_usage=max(shares) if (shares := _measures(ranks, "token_usage")) else None,
        gen_throughput=sum(rates) if (rates := _measures(ranks, "gen_throughput")) else None,
    )


def _total(ranks: Sequence[Mapping[str, Any]], key: str) -> int | None:
    """A count over all ranks; None unless every rank says it."""
    return sum(_count(one, key) for one in ranks) if all(key in one for one in ranks) else None


def _measures(ranks: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    """What every rank says; empty unless all do."""
    return [_measure(one, key) for one in ranks] if all(key in one for one in ranks) else []


def _finish(meta: Mapping[str, Any]) -> Finish:
    reason = _field(meta, "finish_reason", dict)
    kind = _field(reason, "type", str)
    match kind:
        case "abort":
            raise Overloaded("abort", _shorten(reason.get("message")))
        case "length":
            return Finish("length", None, _count(reason, "length"))
        case "stop":
            matched = _present(reason, "matched")
            if matched == NAN_HAPPENED:
                raise BadReply("nan", "the server met a NaN and wrote a stop over it")
            if isinstance(matched, bool) or not isinstance(matched, int | str):
                raise BadReply("finish_reason", f"matched is {_shorten(matched)}")
            return Finish("stop", matched, None)
        case _:
            raise BadReply("finish_reason", f"unknown type {kind!r}")


def _check_echo(request: GenerateRequest, echoed: list[Any]) -> None:
    # Equal values are not enough: 5.0 and True equal ids too, but are written otherwise.
    if _written(echoed) != request.written_ids:
        raise BadReply("foreign_prompt", f"{len(echoed)} prompt ids came back, not ours")


def _check_finish(request: GenerateRequest, finish: Finish, output_ids: tuple[int, ...]) -> None:
    """The finish must agree with the ids and with what was asked."""
    asked = request.max_new_tokens
    if len(output_ids) > asked:
        raise BadReply("too_many_tokens", f"asked for at most {asked}, got {len(output_ids)}")
    match finish.kind:
        case "length":
            if finish.length != asked or len(output_ids) != asked:
                # The scheduler clips max_new_tokens in silence when the KV pool is small.
                raise BadReply(
                    "clipped", f"asked {asked}, finish says {finish.length}, {len(output_ids)} ids"
                )
        case "stop":
            if not output_ids:
                raise BadReply("empty_stop", "stopped without a token")
            if isinstance(finish.matched, int) and output_ids[-1] != finish.matched:
                raise BadReply(
                    "stop_mismatch", f"matched {finish.matched}, last id {output_ids[-1]}"
                )


def _speculation(meta: Mapping[str, Any]) -> SpeculationCounters | None:
    if "spec_verify_ct" not in meta:
        return None
    histogram = _field(meta, "spec_correct_drafts_histogram", list)
    if not all(isinstance(n, int) and not isinstance(n, bool) for n in histogram):
        raise BadReply("spec_counters", f"histogram {_shorten(histogram)}")
    return SpeculationCounters(
        verifications=_count(meta, "spec_verify_ct"),
        correct_drafts=_count(meta, "spec_num_correct_drafts"),
        correct_drafts_histogram=tuple(histogram),
    )


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        # Stricter than the standard library's: no NaN, no lone surrogate, and an integer beyond
        # 64 bits becomes a float, which no count and no id is.
        reply = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadReply("not_json", f"{error}: {_shorten(body[:200])}") from error
    if not isinstance(reply, dict):
        raise BadReply("not_an_object", _shorten(reply))
    return reply


def _present(holder: Mapping[str, Any], key: str) -> Any:
    if key not in holder:
        raise BadReply(f"missing_{key}", f"the reply has {sorted(holder)}")
    return holder[key]


def _field(holder: Mapping[str, Any], key: str, kind: type) -> Any:
    value = _present(holder, key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise BadReply(f"type_{key}", f"expected {kind.__name__}, got {_shorten(value)}")
    return value


def _optional(holder: Mapping[str, Any], key: str, kind: type) -> Any:
    return None if _present(holder, key) is None else _field(holder, key, kind)


def _count(holder: Mapping[str, Any], key: str) -> int:
    value: int = _field(holder, key, int)
    if value < 0:
        raise BadReply(f"type_{key}", f"negative count {value}")
    return value


def _measure(holder: Mapping[str, Any], key: str) -> float:
    value = _present(holder, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise BadReply(f"type_{key}", f"expected a number of at least 0, got {_shorten(value)}")
    return float(value)


def _ids(reply: Mapping[str, Any], key: str, vocab_size: int) -> tuple[int, ...]:
    ids = _field(reply, key, list)
    if not ids:
        return ()
    # No loop over ids in Python: a reply has thousands. Written once more they are read by C alone.
    if _written(ids).translate(None, _ID_LIST) != b"[]" or max(ids) >= vocab_size:
        raise _odd_id(ids, key, vocab_size)
    return tuple(ids)


def _odd_id(ids: Sequence[Any], key: str, vocab_size: int) -> BadReply:
    for token in ids:
        if type(token) is not int:
            return BadReply(f"type_{key}", f"{_shorten(token)} is no token id")
    odd = next(token for token in ids if not 0 <= token < vocab_size)
    return BadReply("id_out_of_vocabulary", f"{odd} of {vocab_size}")


def _written(values: list[Any]) -> bytes:
    """A list of a reply as JSON; nothing if it is nested more deeply than can be written."""
    try:
        return orjson.dumps(values)
    except orjson.JSONEncodeError:
        return b""


def _error_message(body: bytes) -> str:
    """The message in any of SGLang's error shapes, or the start of whatever came instead."""
    try:
        reply = orjson.loads(body)
    except orjson.JSONDecodeError:
        return _shorten(body.decode(errors="replace"))
    match reply:
        case {"error": {"message": str(message)}} | {"message": str(message)}:
            return message
        case {"error": str(message)}:
            return message
        case _:
            return _shorten(reply)


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 300 else text[:300] + "..."
