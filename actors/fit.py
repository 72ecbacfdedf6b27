"""Whether a server that answers is what the run needs. Pure: values in, `ServerUnfit` or nothing.

Verified against sglang 0.5.23.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.errors import ServerUnfit
from actors.protocol import Completion, ModelInfo, ServerInfo

_VERIFIED = (0, 5, 23)
_LONGEST_SKEW_SECONDS = 120.0
# SGLang keeps `max_req_input_len` = context - 6, or what the KV pool leaves, and cuts prompt and
# response together at four more, in silence (managers/scheduler.py, init_req_max_new_tokens).
_ROOM_BEYOND_INPUT = 4
_LEAST_REPEATS = 8
# Of /server_info, worth keeping with the run. What a server does not say is not written down.
_RECORDED = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "tp_size",
    "dp_size",
    "enable_deterministic_inference",
    "disable_radix_cache",
    "speculative_num_steps",
    "speculative_draft_model_path",
    "random_seed",
)


@dataclass(frozen=True)
class Expectation:
    """What the recipe needs of every server."""

    target: Path
    context_tokens: int  # the longest prompt and its response together
    # The target's own length, for a server that states none.
    model_context_tokens: int | None = None


def check_fit(url: str, model: ModelInfo, server: ServerInfo, expectation: Expectation) -> None:
    """Raise `ServerUnfit` unless the server, as it describes itself, fits the run."""
    _check_version(url, server)
    _check_model(url, model, expectation)
    _check_options(url, model, server)
    _check_room(url, server, expectation)


def check_clock(url: str, server_seconds: float, now: float) -> None:
    """Raise `ServerUnfit` if the server's clock, in seconds since the epoch, is far from ours."""
    skew = server_seconds - now
    if abs(skew) > _LONGEST_SKEW_SECONDS:
        raise ServerUnfit(
            f"the clock of the server {url} is {skew:+.0f} s from this machine's",
            expected=f"at most {_LONGEST_SKEW_SECONDS:.0f} s: what happened when could not be told",
            change="have both machines' clocks set by NTP",
        )


def check_text(url: str, completion: Completion, decode: Callable[[Sequence[int]], str]) -> None:
    """Raise `ServerUnfit` unless the text of a reply is what the target's tokenizer makes of it.

    A server decodes after the prompt and in steps: the leading blank that some tokenizers drop, and
    a last character that is not complete, are no difference.
    """
    ours, theirs = (
        text.lstrip().rstrip("\ufffd") for text in (decode(completion.output_ids), completion.text)
    )
    if ours != theirs:
        raise ServerUnfit(
            f"the server {url} writes {list(completion.output_ids)} as {theirs[:200]!r}",
            expected=f"{ours[:200]!r}, as the target's tokenizer does",
            change="start the server with the target's own tokenizer files",
        )


def check_not_stuck(url: str, completions: Sequence[Completion]) -> None:
    """Raise `ServerUnfit` if every answer is one and the same token, which NaN scores look like."""
    seen = {token for one in completions for token in one.output_ids}
    longest = max((len(one.output_ids) for one in completions), default=0)
    if len(seen) == 1 and longest >= _LEAST_REPEATS:
        raise ServerUnfit(
            f"the server {url} answers {len(completions)} prompt(s) with token {seen.pop()} only",
            expected="greedy answers of several tokens",
            change="look for NaN in its log; check dtype, quantization and the target's files",
        )


def check_markers(url: str, markers: Mapping[str, int], texts: Mapping[str, str]) -> None:
    """Raise `ServerUnfit` for a marker whose id the server writes as another text.

    `markers` maps each marker's text to its id, `texts` to what the server wrote for the id.
    """
    for marker, token in markers.items():
        if texts[marker] != marker:
            raise ServerUnfit(
                f"the server {url} writes token {token} as {texts[marker]!r}",
                expected=f"{marker!r}, as the target's profile says",
                change="start the server with the target's own tokenizer, or correct the profile",
            )


def record_of(model: ModelInfo, server: ServerInfo) -> dict[str, Any]:
    """What of a server is kept with the run: nothing that could hold a key."""
    return {
        "version": server.version,
        "model_path": model.model_path,
        "weight_version": model.weight_version,
        "reasoning_parser": model.reasoning_parser,
        "speculative_algorithm": server.speculative_algorithm,
        "context_length": server.context_length,
        "max_total_num_tokens": server.max_total_num_tokens,
        "max_running_requests": server.max_running_requests,
        **{name: server.raw[name] for name in _RECORDED if name in server.raw},
    }


def _check_version(url: str, server: ServerInfo) -> None:
    # An older server answers with the same keys and other meanings, so it is not merely warned of.
    # A version that is no number is a build of someone's own: what it says is checked all the same.
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", server.version)
    if numbers is not None and tuple(map(int, numbers.groups())) < _VERIFIED:
        raise ServerUnfit(
            f"the server {url} runs version {server.version}",
            expected=f"{'.'.join(map(str, _VERIFIED))} or later, whose replies were verified",
            change="update SGLang on that server",
        )


def _check_model(url: str, model: ModelInfo, expectation: Expectation) -> None:
    target = expectation.target
    # Elsewhere the same target may lie in another folder; its name is then all there is to compare.
    for what, served in (("model", model.model_path), ("tokenizer", model.tokenizer_path)):
        if Path(served) != target and Path(served).name != target.name:
            raise ServerUnfit(
                f"the server {url} serves {served}"
                if what == "model"
                else f"the server {url} uses the tokenizer {served}",
                expected=f"the recipe's target, {target}",
                change="start the server with that target, or set target.path to what it serves",
            )


def _check_options(url: str, model: ModelInfo, server: ServerInfo) -> None:
    if server.allow_auto_truncate:
        raise ServerUnfit(
            f"the server {url} runs with --allow-auto-truncate",
            expected="a server that refuses what is too long; this one cuts prompts in silence",
            change="restart it without that option",
        )
    if server.raw.get("skip_tokenizer_init"):
        raise ServerUnfit(
            f"the server {url} runs with --skip-tokenizer-init",
            expected="a server that decodes: the text of a reply is compared with its ids",
            change="restart it without that option",
        )
    if model.preferred_sampling_params:
        raise ServerUnfit(
            f"the server {url} has preferred sampling parameters {model.preferred_sampling_params}",
            expected="none: every parameter is the recipe's",
            change="restart it without --preferred-sampling-params",
        )


def _check_room(url: str, server: ServerInfo, expectation: Expectation) -> None:
    need = expectation.context_tokens
    limits = {
        "context_length": server.context_length,
        "max_total_num_tokens": server.max_total_num_tokens,
    }
    longest_input = server.raw.get("max_req_input_len")
    if isinstance(longest_input, int):
        limits[f"max_req_input_len + {_ROOM_BEYOND_INPUT}"] = longest_input + _ROOM_BEYOND_INPUT
    elif server.context_length is None:
        limits["context_length"] = expectation.model_context_tokens
    for name, tokens in limits.items():
        if tokens is not None and tokens < need:
            raise ServerUnfit(
                f"the server {url} has {name} {tokens}",
                expected=f"at least {need} tokens for a prompt and its response together",
                change=f"restart it with room for {need}, or lower prompts.context_tokens to "
                f"{tokens}",
            )
