"""A whole run in miniature: a recipe for the tiny target, and the command as a user calls it."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from pipelines import cli
from tests.support.tiny_target import AUX_LAYER_IDS, EOS_ID

ROOT = Path(__file__).parents[2]
TRAIN_PROMPTS = 40
EVALUATION_PROMPTS = 6

NO_SELECTION = {
    "seed": 1,
    "mix": None,
    "near_duplicates": None,
    "shared_words": None,
    "languages": None,
    "min_prompt_tokens": 1,
    "max_prompt_tokens": None,
}


def write_recipe(folder: Path, target: Path) -> Path:
    """Write prompts and a recipe into `folder`; its run folder is `folder/run`."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_prompts(folder / "train.jsonl", "Say something about", TRAIN_PROMPTS)
    _write_prompts(folder / "eval.jsonl", "Tell me more of", EVALUATION_PROMPTS)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(_recipe(folder, target), sort_keys=False))
    return path


def eyas(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "pipelines.cli", *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def ask_eyas(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has its imports already; a Ray that runs here is used."""
    words = ["eyas", *map(str, arguments)]
    out, err, root = io.StringIO(), io.StringIO(), logging.getLogger()
    handler, level = signal.getsignal(signal.SIGTERM), root.level
    try:
        with (
            patch.object(sys, "argv", words),
            patch.object(root, "handlers", []),
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            cli.main()
    except SystemExit as end:
        return subprocess.CompletedProcess(words, end.code, out.getvalue(), err.getvalue())
    finally:
        signal.signal(signal.SIGTERM, handler)
        root.setLevel(level)
    raise AssertionError("the command did not end")


def start_eyas(*arguments: str | Path) -> subprocess.Popen[bytes]:
    """Start the command and leave it running."""
    return subprocess.Popen(
        [sys.executable, "-m", "pipelines.cli", *map(str, arguments)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def _write_prompts(path: Path, opening: str, count: int) -> None:
    with path.open("w") as lines:
        for number in range(count):
            content = f"{opening} number {number}" + "." * (number % 7)
            record = {
                "messages": [{"role": "user", "content": content}],
                "source": "made for the tests",
                "license": "Apache-2.0",
            }
            lines.write(json.dumps(record) + "\n")


def _recipe(folder: Path, target: Path) -> dict[str, Any]:
    servers = {
        "kind": "embedded",
        "count": 1,
        "dtype": "float32",
        "device": "cpu",
        "threads_per_server": 1,
        "max_running_requests": 8,
    }
    return {
        "name": "road",
        "run_folder": str(folder / "run"),
        "ray": {"address": None, "num_cpus": 4, "object_store_bytes": 150_000_000},
        "target": {
            "path": str(target),
            "trust_remote_code": False,
            "profile": {
                "tools": "system_message",
                "think_open_id": None,
                "think_close_id": None,
                "tool_markers": None,
                "channels": None,
                "template_arguments": {},
                "stop_token_ids": [EOS_ID],
                "reserved_ids": [],
                "history_reasoning": "kept",
                "aux_layer_ids": list(AUX_LAYER_IDS),
            },
        },
        "prompts": {
            "train": [{"name": "chat", "path": str(folder / "train.jsonl"), "domain": "chat"}],
            "evaluation": [{"name": "eval", "path": str(folder / "eval.jsonl"), "domain": "chat"}],
            "context_tokens": 256,
            "min_response_tokens": 16,
            "turns": "last",
            "selection": dict(NO_SELECTION),
            "on_bad_prompt": "stop",
        },
        "generate": {
            "servers": servers,
            "sampling": {
                "temperature": 0.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "max_new_tokens": 32,
                "seed": 1,
            },
            "samples_per_prompt": 1,
            "gates": {
                "finish_reasons": ["stop", "length"],
                "min_content_tokens": 1,
                "max_one_token_share": 1.0,
                "max_repeated_share": 1.0,
                "broken_tool_calls": "reject",
                "languages": None,
                "canary_rows": 8,
                "max_rejected_share": 0.5,
                "min_reasoning_share": 0.0,
            },
        },
        "capture": {"servers": servers, "samples_per_shard": 8, "max_bytes": 100_000_000},
        "draft": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "draft_vocab_size": 128,
        },
        "train": {
            "seed": 1,
            "epochs": 4,
            "heldout_share": 0.1,
            "max_tokens_per_sample": 256,
            "batch_samples": 4,
            "micro_batch_tokens": 1024,
            "ttt_steps": 3,
            "step_decay": 0.8,
            "learning_rate": 0.002,
            "warmup_share": 0.05,
            "final_learning_rate_share": 0.1,
            "adam_betas": [0.9, 0.95],
            "weight_decay": 0.0,
            "gradient_clip": 0.5,
            "ema_decay": 0.9,
            "dtype": "float32",
            "zero_stage": 1,
            "workers": 1,
            "threads_per_worker": 1,
            "gpus_per_worker": 0,
            "checkpoint_every_steps": 5,
            "log_every_steps": 1,
        },
        "evaluate": {
            "servers": servers,
            "draft_steps": 3,
            "max_new_tokens": 24,
            "prompts_per_set": EVALUATION_PROMPTS,
        },
    }
