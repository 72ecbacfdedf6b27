"""Which options of SGLang a recipe may set for the servers that Eyas starts. Pure."""

from collections.abc import Mapping
from typing import Any

_OURS = "Eyas sets it itself"
_PLACED = "Ray places the server and gives it its GPUs"
_ONE_NODE = "a launched server is one process group on one node"
_DATA = "it would change the data without a word"
_PLAIN = "Eyas speaks plain HTTP to the server's own port"
_SECRET = "the recipe is stored with the run and the command line is public; put no secret there"

# Option names of sglang 0.5.23 (arg_groups/fields), each with the reason.
_REFUSED: Mapping[str, str] = {
    "model": _OURS,
    "model-path": _OURS,
    "tokenizer-path": f"{_OURS}: prompts are tokenised with the target's own tokenizer",
    "revision": _OURS,
    "host": _OURS,
    "port": _OURS,
    "device": "set generate.servers.device",
    "tp": "set tensor_parallel_size",
    "tp-size": "set tensor_parallel_size",
    "tensor-parallel-size": "set tensor_parallel_size",
    "pp-size": _ONE_NODE,
    "pipeline-parallel-size": _ONE_NODE,
    "nnodes": _ONE_NODE,
    "node-rank": _ONE_NODE,
    "dist-init-addr": _ONE_NODE,
    "nccl-init-addr": _ONE_NODE,
    "use-ray": _PLACED,
    "base-gpu-id": _PLACED,
    "gpu-id-step": _PLACED,
    "config": "a second file of options would not be checked; write them here",
    "allow-auto-truncate": _DATA,
    "preferred-sampling-params": _DATA,
    "enable-watermark": _DATA,
    "watermark-config": _DATA,
    "watermark-default-enabled": _DATA,
    "watermark-enforce-all": _DATA,
    "speculative-accept-threshold-single": _DATA,
    "speculative-accept-threshold-acc": _DATA,
    "dllm-algorithm": _DATA,
    "skip-tokenizer-init": "replies would have no text to compare with their ids",
    "is-embedding": "it would not generate",
    "disaggregation-mode": "a prefill or decode server alone does not answer; attach its gateway",
    "encoder-only": "it would not generate",
    "delete-ckpt-after-loading": "the target's files are not the server's to delete",
    "sidecar": "it would run a program that is not the server",
    "fastapi-root-path": _PLAIN,
    "grpc-mode": _PLAIN,
    "smg-grpc-mode": _PLAIN,
    "ssl-keyfile": _PLAIN,
    "ssl-certfile": _PLAIN,
    "api-key": _SECRET,
    "admin-api-key": _SECRET,
}
_SECRET_WORDS = {"key", "token", "secret", "password", "passwd", "credential", "credentials"}
# Hold one of the words, and no secret.
_HARMLESS = {"extra-key", "speculative-token-map"}


def refuse_argument(name: str, value: Any, *, others: Mapping[str, Any]) -> None:
    """Raise ValueError if a recipe may not set this option of SGLang.

    Its command line takes the start of an option's name for the option, so a start of a refused
    name is refused too.
    """
    if name != name.strip("-").lower() or "_" in name or not name.isascii() or "=" in name:
        raise ValueError(f"{name!r}: write the option as SGLang does, without the leading dashes")
    for refused, reason in _REFUSED.items():
        if refused.startswith(name):
            raise ValueError(f"{name} may not be set: {reason}")
    if name not in _HARMLESS and _SECRET_WORDS & set(name.split("-")):
        raise ValueError(f"{name} may not be set: {_SECRET}")
    if value is False:
        raise ValueError(f"{name}: false says nothing to SGLang; leave the option out")
    if name in {"dp-size", "data-parallel-size"} and "enable-dp-attention" not in others:
        raise ValueError(
            f"{name} without enable-dp-attention needs more GPUs than tensor_parallel_size; "
            "raise count instead"
        )
    if name == "load-format" and value == "dummy":
        raise ValueError("load-format dummy gives random weights")


def refuse_variable(name: str) -> None:
    """Raise ValueError if an environment variable looks like a secret, or is not the recipe's."""
    if _SECRET_WORDS & set(name.lower().replace("-", "_").split("_")):
        raise ValueError(
            f"{name} looks like a secret; the recipe is stored with the run: set it in the "
            "environment that Ray is started from, which the server inherits"
        )
    if name == "CUDA_VISIBLE_DEVICES":
        raise ValueError(f"{name} may not be set: {_PLACED}")


_CAPTURE = "Eyas sets it itself where states are captured"
_ONE_RANK = "one process must hold every row of a batch"
_COMPUTED = "rows that come from a cache are not computed"
_REFUSED_IN_CAPTURE: Mapping[str, str] = {
    "enable-return-aux-hidden-states": _CAPTURE,
    "return-aux-hidden-state-layer-ids": f"{_CAPTURE}, from target.profile.aux_layer_ids",
    "forward-hooks": _CAPTURE,
    "speculative-": "states are captured without a draft",
    "dp-size": f"{_ONE_RANK}; raise count instead",
    "data-parallel-size": f"{_ONE_RANK}; raise count instead",
    "attn-dp-size": _ONE_RANK,
    "attn-cp-size": _ONE_RANK,
    "dcp-size": _ONE_RANK,
    "enable-dp-attention": _ONE_RANK,
    "enable-layernorm-sp": _ONE_RANK,
    "enable-two-batch-overlap": "two halves of a batch at a time capture nothing",
    "enable-pdmux": "two kinds of batches at a time capture nothing",
    "enable-hierarchical-cache": _COMPUTED,
    "enable-hicache": _COMPUTED,
    "enable-lmcache": _COMPUTED,
}
_PREFILL_GRAPH = "cuda-graph-backend-prefill"


def refuse_for_capture(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError if a server with these options could not hand over every row's states.

    The dtype decides about the states, so the recipe says it.
    """
    for name, value in arguments.items():
        for refused, reason in _REFUSED_IN_CAPTURE.items():
            if refused.startswith(name) or (refused[-1] == "-" and name.startswith(refused)):
                raise ValueError(f"{name} may not be set: {reason}")
        if _PREFILL_GRAPH.startswith(name) and value != "disabled":
            raise ValueError(f"{name} may not be set: a prefill that is replayed calls no hook")
    if "dtype" not in arguments or arguments["dtype"] not in ("float32", "bfloat16"):
        raise ValueError("dtype has to be given, float32 or bfloat16: it decides about the states")
