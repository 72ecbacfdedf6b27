"""Golden prompts of four kinds of target: conversations, and their text and ids.

    .venv/bin/python -m tests.support.golden_templates   # writes tests/pipelines/golden/*.json

Only a change of a template or of a conversation here changes them. The ids need the tokenizer of
the quick start's target (`make target`).
"""

import json
from pathlib import Path
from typing import Any

from pipelines.recipe import Target, TargetProfile
from pipelines.sources.messages import parse_row
from pipelines.sources.row import SourceRow
from pipelines.split import Splitter
from pipelines.target import prepare_quickstart_target
from pipelines.template import ChatTemplate, Rendered, Tokenizer, load_tokenizer
from tests.support.chat_styles import TARGET_STYLES, as_target

FOLDER = Path(__file__).parents[1] / "pipelines" / "golden"
NAMES = ("smollm2", *TARGET_STYLES)

_SYSTEM = {"role": "system", "content": "Be brief."}
_CALLS = [
    {
        "name": "look_up",
        "arguments": '{"bird": "é🦅", "limit": 2, "where": {"near": null, "far": [1.5, true]}}',
    },
    {"name": "now", "arguments": {}},
]
_TOOLS = [
    {
        "name": "look_up",
        "description": 'Look up a "bird".',
        "parameters": {
            "type": "dict",
            "properties": {"bird": {"type": "str"}, "limit": {"type": "int", "default": 1}},
            "required": ["bird"],
        },
    },
    {"name": "now"},
]
_CONVERSATIONS: dict[str, dict[str, Any]] = {
    "plain": {"messages": [{"role": "user", "content": " Hi é🦅\r\n{{ x }} "}]},
    "system": {"messages": [_SYSTEM, {"role": "user", "content": "What do hawks eat?"}]},
    "turns_with_reasoning": {
        "messages": [
            {"role": "user", "content": "What do hawks eat?"},
            {"role": "assistant", "content": "Voles.", "reasoning_content": "Their prey."},
            {"role": "user", "content": "And owls?\nAt night?"},
            {"role": "assistant", "content": "The same."},
            {"role": "user", "content": "Why?"},
        ]
    },
    "parallel_calls": {
        "tools": _TOOLS,
        "messages": [
            _SYSTEM,
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": "I look.",
                "reasoning_content": "Two calls.",
                "tool_calls": _CALLS,
            },
            {"role": "tool", "content": {"eats": ["voles"]}},
            {"role": "tool", "content": "noon\n"},
        ],
    },
    "results_then_question": {
        "tools": _TOOLS,
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": _CALLS[1:]},
            {"role": "tool", "content": "noon"},
            {"role": "assistant", "content": "It is noon.", "reasoning_content": "Simple."},
            {"role": "user", "content": "Thanks. And now?"},
        ],
    },
}


def golden(name: str) -> list[dict[str, Any]]:
    """The cases of one kind of target as they are rendered now."""
    style = TARGET_STYLES.get(name)
    profile = TargetProfile(
        tools="system_message" if style is None else "template",
        think_open_id=None,
        think_close_id=None,
        tool_markers=None,
        channels=None,
        template_arguments={},
        stop_token_ids=(2,),
        history_reasoning="kept" if style is None else "dropped",
        reserved_ids=(0,),
        aux_layer_ids=(1, 2, 3),
    )
    target = Target(path=str(prepare_quickstart_target()), profile=profile, trust_remote_code=False)
    tokenizer = load_tokenizer(target)
    cases = [(case, dict[str, bool]()) for case in _CONVERSATIONS]
    if style is not None:
        ids = as_target(tokenizer, style).get_vocab()
        named = {"think_open_id": ids["<think>"], "think_close_id": ids["</think>"]}
        profile = profile.model_copy(update={**named, "stop_token_ids": (ids[style.stop],)})
        cases += [(case, {style.thinking: False}) for case in ("plain", "parallel_calls")]
    return [
        _case(case, tokenizer, profile.model_copy(update={"template_arguments": arguments}))
        for case, arguments in cases
    ]


def _case(name: str, tokenizer: Tokenizer, profile: TargetProfile) -> dict[str, Any]:
    row = parse_row(_CONVERSATIONS[name], file=name, line=1)
    assert isinstance(row, SourceRow), row
    rendered = ChatTemplate(tokenizer, profile).render(row.messages, row.tools)
    assert isinstance(rendered, Rendered), rendered
    return {
        "case": name,
        "template_arguments": profile.template_arguments,
        "conversation": _CONVERSATIONS[name],
        "repairs": list(row.repairs),
        "text": rendered.text,
        "prompt_ids": rendered.prompt_ids,
        "thinking_is_open": Splitter(profile, tokenizer.decode).is_open_at_start(
            rendered.prompt_ids
        ),
    }


def main() -> None:
    """Write the golden files."""
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        lines = [json.dumps(one, ensure_ascii=False) for one in golden(name)]
        (FOLDER / f"{name}.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")


if __name__ == "__main__":
    main()
