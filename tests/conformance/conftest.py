"""One server of each kind for the whole session, and the prompts both are asked."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from pipelines.target import prepare_quickstart_target
from tests.support import sglang_rig
from tests.support.sglang_rig import Started

_READY_SECONDS = 240.0
QUESTIONS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Name three prime numbers and say why they are prime.",
    "def fibonacci(n):\n    # continue this function\n",
    "Translate 'good morning' into Spanish, German and French.",
    "Why is the sky blue? Answer in one sentence.",
    "Zähle fünf Früchte auf: 🍎 …",
    "List the days of the week, one per line.",
)


@pytest.fixture(scope="session")
def target() -> Path:
    """SmolLM2-135M-Instruct."""
    return prepare_quickstart_target()


@pytest.fixture(scope="session")
def tokenizer(target: Path):
    """The target's own."""
    return AutoTokenizer.from_pretrained(target)


@pytest.fixture(scope="session")
def prompts(tokenizer) -> tuple[tuple[int, ...], ...]:
    """The questions, rendered by the target's own template."""
    messages = [[{"role": "user", "content": one}] for one in QUESTIONS]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return tuple(tuple(ids) for ids in rendered["input_ids"])


@pytest.fixture(scope="session")
def engines(target: Path, tmp_path_factory: pytest.TempPathFactory):
    """Both servers, ready. They start at the same time."""
    folder = tmp_path_factory.mktemp("engines")
    with ExitStack() as stack:
        both: dict[str, Started] = {
            "stock": stack.enter_context(sglang_rig.stock(target, folder)),
            "embedded": stack.enter_context(sglang_rig.embedded(target, folder)),
        }
        for one in both.values():
            one.wait_until_ready(_READY_SECONDS)
        yield both


@pytest.fixture(scope="session", params=["embedded", "stock"])
def server(request: pytest.FixtureRequest, engines: dict[str, Started]) -> Started:
    """One of the two."""
    return engines[request.param]
