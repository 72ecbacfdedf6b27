"""Which options and variables a recipe may give to the servers that Eyas starts."""

import pytest
from pydantic import ValidationError

from actors.config import AttachedServers, LaunchedServers
from actors.launch_rules import refuse_for_capture


def launched(arguments=None, environment=None, **changes):
    return LaunchedServers.model_validate(
        {
            "kind": "launch",
            "count": 1,
            "python": "/opt/sglang/bin/python",
            "tensor_parallel_size": 2,
            "device": "cuda",
            "arguments": arguments or {},
            "environment": environment or {},
            **changes,
        }
    )


def test_what_only_makes_a_server_faster_is_the_recipes_to_choose():
    given = {
        "mem-fraction-static": 0.85,
        "max-running-requests": 64,
        "attention-backend": "fa3",
        "trust-remote-code": True,
        "cuda-graph-bs-decode": (1, 2, 4),
        "context-length": 32768,
        "quantization": "fp8",
        "speculative-token-map": "/maps/hot",
    }
    assert launched(given).arguments == given


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model-path", "/other", "Eyas sets it"),
        ("model", "/other", "Eyas sets it"),
        ("tokenizer-path", "/other", "own tokenizer"),
        ("host", "0.0.0.0", "Eyas sets it"),
        ("port", 30000, "Eyas sets it"),
        ("tp-size", 4, "tensor_parallel_size"),
        ("nnodes", 2, "one node"),
        ("base-gpu-id", 4, "GPUs"),
        ("allow-auto-truncate", True, "without a word"),
        ("allow-auto", True, "without a word"),  # argparse takes the start of a name
        ("preferred-sampling-params", "{}", "without a word"),
        ("skip-tokenizer-init", True, "no text"),
        ("delete-ckpt-after-loading", True, "not the server's"),
        ("config", "more.yaml", "second file"),
        ("api-key", "x", "no secret"),
        ("admin-api-key", "x", "no secret"),
        ("ssl-keyfile-password", "x", "no secret"),
        ("--mem-fraction-static", 0.8, "without the leading dashes"),
        ("mem_fraction_static", 0.8, "without the leading dashes"),
        ("a=b", 1, "without the leading dashes"),
        ("sleep-on-idle", False, "leave the option out"),
        ("dp-size", 2, "raise count"),
        ("load-format", "dummy", "random weights"),
    ],
)
def test_what_is_not_the_recipes_to_say_is_refused_with_its_reason(name, value, words):
    with pytest.raises(ValidationError, match=words):
        launched({name: value})


def test_data_parallel_attention_needs_no_more_gpus():
    launched({"dp-size": 2, "enable-dp-attention": True})


@pytest.mark.parametrize("name", ["HF_TOKEN", "MY_API_KEY", "aws_secret_access_key", "DB_PASSWORD"])
def test_a_variable_that_looks_like_a_secret_is_refused_without_its_value(name):
    with pytest.raises(ValidationError, match="looks like a secret") as refused:
        launched(environment={name: "hunter2"})
    assert "hunter2" not in refused.value.errors()[0]["msg"]


def test_other_variables_pass_and_gpus_are_rays_to_give():
    launched(environment={"TOKENIZERS_PARALLELISM": "false", "SGLANG_USE_CPU_ENGINE": "1"})
    with pytest.raises(ValidationError, match="Ray places"):
        launched(environment={"CUDA_VISIBLE_DEVICES": "0"})


@pytest.mark.parametrize(
    ("urls", "words"),
    [
        (("localhost:1",), "no URL"),
        (("http://me:secret@a:1",), "EYAS_API_KEY"),
        (("http://a:1", "http://a:1/"), "comes twice"),
    ],
)
def test_urls_are_checked(urls, words):
    with pytest.raises(ValidationError, match=words):
        AttachedServers(kind="attach", urls=urls)


def test_a_gateway_is_one_url():
    AttachedServers(kind="attach", urls=("http://a:1",), gateway=True)
    with pytest.raises(ValidationError, match="gateway is true with 2"):
        AttachedServers(kind="attach", urls=("http://a:1", "http://b:1"), gateway=True)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("enable-return-aux-hidden-states", True, "sets it itself"),
        ("return-aux-hidden-state-layer-ids", (1, 2), "aux_layer_ids"),
        ("forward-hooks", "[]", "sets it itself"),
        ("forward-ho", "[]", "sets it itself"),
        ("speculative-algorithm", "EAGLE3", "without a draft"),
        ("speculative-draft-model-path", "/d", "without a draft"),
        ("speculative", "EAGLE3", "without a draft"),
        ("dp-size", 2, "every row"),
        ("enable-dp-attention", True, "every row"),
        ("attn-cp-size", 2, "every row"),
        ("enable-two-batch-overlap", True, "capture nothing"),
        ("enable-hierarchical-cache", True, "not computed"),
        ("cuda-graph-backend-prefill", "full", "calls no hook"),
        ("dtype", "float16", "float32 or bfloat16"),
        ("dtype", "auto", "float32 or bfloat16"),
    ],
)
def test_what_would_lose_or_change_states_is_refused_where_they_are_captured(name, value, words):
    with pytest.raises(ValueError, match=words):
        refuse_for_capture({"dtype": "bfloat16", name: value})


def test_a_capturing_server_is_told_its_dtype_and_may_be_told_how_to_be_fast():
    with pytest.raises(ValueError, match="decides about the states"):
        refuse_for_capture({})
    refuse_for_capture(
        {
            "dtype": "bfloat16",
            "chunked-prefill-size": 4096,
            "disable-radix-cache": True,
            "cuda-graph-backend-prefill": "disabled",
            "mem-fraction-static": 0.8,
            "attention-backend": "fa3",
        }
    )
