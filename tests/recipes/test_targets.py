"""The profiles that come with the project read what their targets write."""

import json
import re
from pathlib import Path

import pytest
import yaml

from pipelines.recipe import TargetProfile
from pipelines.response_row import Reader

FOLDER = Path(__file__).parents[2] / "recipes" / "targets"
LOOK = '{"bird": "kite"}'
ORDINARY = 1000  # no target has a marker below; here, ids from there on are characters

KIMI = {
    163586: "<|im_end|>",
    163595: "<|tool_calls_section_begin|>",
    163596: "<|tool_calls_section_end|>",
    163597: "<|tool_call_begin|>",
    163598: "<|tool_call_argument_begin|>",
    163599: "<|tool_call_end|>",
    163606: "<think>",
    163607: "</think>",
}
QWEN = {
    151645: "<|im_end|>",
    151657: "<tool_call>",
    151658: "</tool_call>",
    151667: "<think>",
    151668: "</think>",
}
DEEPSEEK = {
    1: "<｜end▁of▁sentence｜>",
    128798: "<think>",
    128799: "</think>",
    128806: "<｜tool▁calls▁begin｜>",
    128807: "<｜tool▁calls▁end｜>",
    128808: "<｜tool▁call▁begin｜>",
    128809: "<｜tool▁call▁end｜>",
    128814: "<｜tool▁sep｜>",
}
OSS = {
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
}

KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
    f"{LOOK}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
)
QWEN_CALL = f'<tool_call>\n{{"name": "look", "arguments": {LOOK}}}\n</tool_call><|im_end|>'
V3_CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n"
    f"{LOOK}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
V31_CALL = (
    f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{LOOK}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
)
OSS_CALL = (
    "<|channel|>analysis<|message|>Why.<|end|><|start|>assistant<|channel|>commentary"
    f" to=functions.look <|constrain|>json<|message|>{LOOK}<|call|>"
)
OSS_ANSWER = (
    "<|channel|>analysis<|message|>Why.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>A kite.<|return|>"
)
# For each profile its markers, and what a prompt ends with, and replies that it makes.
TARGETS = {
    "kimi-k2.5": (KIMI, "<think>", "Why.</think>A kite.<|im_end|>", f"Why.</think>{KIMI_CALL}"),
    "kimi-k2-thinking": (
        KIMI,
        "assistant",
        "<think>Why.</think>A kite.<|im_end|>",
        f"<think>Why.{KIMI_CALL}",
    ),
    "kimi-k2-instruct": (KIMI, "assistant", "A kite.<|im_end|>", KIMI_CALL),
    "qwen3-8b": (
        QWEN,
        "assistant\n",
        "<think>\nWhy.\n</think>\n\nA kite.<|im_end|>",
        f"<think>Why.{QWEN_CALL}",
    ),
    "qwen3-30b-a3b-thinking-2507": (
        QWEN,
        "<think>\n",
        "Why.\n</think>\n\nA kite.<|im_end|>",
        f"Why.</think>\n\n{QWEN_CALL}",
    ),
    "deepseek-r1": (
        DEEPSEEK,
        "<think>\n",
        "<think>Why.</think>A kite.<｜end▁of▁sentence｜>",
        f"Why.</think>{V3_CALL}",
    ),
    "deepseek-v3": (DEEPSEEK, "assistant", "A kite.<｜end▁of▁sentence｜>", V3_CALL),
    "deepseek-v3.1": (
        DEEPSEEK,
        "<think>",
        "Why.</think>A kite.<｜end▁of▁sentence｜>",
        f"Why.</think>{V31_CALL}",
    ),
    "gpt-oss-20b": (OSS, "assistant", OSS_ANSWER, OSS_CALL),
    "smollm2-135m-instruct": (
        {2: "<|im_end|>"},
        "assistant\n",
        "A kite.<|im_end|>",
        None,
    ),
}


def load(name: str) -> TargetProfile:
    mapping = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return TargetProfile.model_validate_json(json.dumps(mapping))


def encode(text: str, markers: dict[int, str]) -> list[int]:
    ids = []
    while text:
        found = next((one for one, marker in markers.items() if text.startswith(marker)), None)
        ids.append(ORDINARY + ord(text[0]) if found is None else found)
        text = text[1 if found is None else len(markers[found]) :]
    return ids


def read(name: str, prompt: str, text: str):
    markers = TARGETS[name][0]

    def decode(ids):
        return "".join(markers[one] if one in markers else chr(one - ORDINARY) for one in ids)

    output = encode(text, markers)
    reading = Reader(load(name), decode).read(
        encode(prompt, markers), output, stop_id=output[-1], declared=["look"]
    )
    assert "".join(reading.texts) == text
    assert reading.cut.residual is None
    return reading


def test_every_profile_is_tried_here():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(TARGETS)


@pytest.mark.parametrize("name", TARGETS)
def test_an_answer_is_read(name: str):
    _, prompt, answer, _ = TARGETS[name]
    reading = read(name, prompt, answer)
    assert reading.text("reasoning").strip() == ("Why." if "Why." in answer else "")
    assert reading.text("content").strip() == "A kite."
    assert reading.calls.calls == ()


@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target[3]])
def test_a_tool_call_is_read(name: str):
    _, prompt, _, call = TARGETS[name]
    reading = read(name, prompt, call)
    assert reading.text("reasoning").strip() == ("Why." if "Why." in call else "")
    assert reading.text("content").strip() == ""
    assert [(one.name, one.arguments) for one in reading.calls.calls] == [("look", LOOK)]
    assert reading.calls.fault is None


@pytest.mark.parametrize("name", TARGETS)
def test_every_id_of_a_profile_has_one_meaning_and_its_comment_says_which(name: str):
    profile, markers = load(name), TARGETS[name][0]
    named = [*profile.marker_ids.values(), *profile.stop_token_ids]
    assert len(set(named)) == len(named)
    assert profile.reserved.isdisjoint(named)
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    for one in {*profile.marker_ids.values(), profile.stop_token_ids[0]}:
        line = next(line for line in lines if re.search(rf"_ids?: \[?{one}\b", line))
        assert markers[one] in line
