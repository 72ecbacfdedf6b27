"""Golden prompts: text and ids of four kinds of target, and why they are right.

The texts of most cases are written here by hand, from what each kind of target does. The ids of
all are made here from those texts without transformers: the text is cut at the markers, a marker's
id is looked up or counted on from the vocabulary's end, and the pieces between are encoded alone by
the `tokenizers` library. `python -m tests.support.golden_templates` writes the files anew.
"""

import json
import re

import pytest
from tokenizers import Tokenizer

from pipelines.target import prepare_quickstart_target
from tests.support.chat_styles import TARGET_STYLES
from tests.support.golden_templates import FOLDER, NAMES, golden

pytestmark = pytest.mark.smollm

BIRD = '{"bird": "é🦅", "limit": 2, "where": {"near": null, "far": [1.5, true]}}'
LOOK_UP = (
    '{"name": "look_up", "description": "Look up a \\"bird\\".", "parameters": {"type": "object", '
    '"properties": {"bird": {"type": "string"}, "limit": {"type": "integer", "default": 1}}, '
    '"required": ["bird"]}}'
)
NOW = (
    '{"name": "now", "description": "", '
    '"parameters": {"type": "object", "properties": {}, "required": []}}'
)
TOOLS = [f'{{"type": "function", "function": {one}}}' for one in (LOOK_UP, NOW)]
HI = " Hi é🦅\r\n{{ x }} "
SMOL = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n"
)
ASSISTANT = "<|im_start|>assistant\n"
OWLS = "And owls?\nAt night?"
QWEN_CALLS = f"""<|im_start|>system
Be brief.

# Tools
<tools>
{TOOLS[0]}
{TOOLS[1]}
</tools><|im_end|>
<|im_start|>user
Look.<|im_end|>
<|im_start|>assistant
<think>
Two calls.
</think>

I look.
<tool_call>
{{"name": "look_up", "arguments": {BIRD}}}
</tool_call>
<tool_call>
{{"name": "now", "arguments": {{}}}}
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
{{"eats":["voles"]}}
</tool_response>
<tool_response>
noon

</tool_response><|im_end|>
<|im_start|>assistant
"""
CHATML_TURNS = (
    f"<|im_start|>user\nWhat do hawks eat?<|im_end|>\n{ASSISTANT}Voles.<|im_end|>\n"
    f"<|im_start|>user\n{OWLS}<|im_end|>\n{ASSISTANT}The same.<|im_end|>\n"
    f"<|im_start|>user\nWhy?<|im_end|>\n{ASSISTANT}"
)
DEEPSEEK_CALLS = f"""<｜begin▁of▁sentence｜>Be brief.

## Tools

### look_up
{LOOK_UP}

### now
{NOW}
<｜User｜>Look.<｜Assistant｜></think>I look.\
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>{BIRD}<｜tool▁call▁end｜>\
<｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜><｜tool▁calls▁end｜>\
<｜end▁of▁sentence｜><｜tool▁output▁begin｜>{{"eats":["voles"]}}<｜tool▁output▁end｜>\
<｜tool▁output▁begin｜>noon
<｜tool▁output▁end｜>"""
KIMI_OPENS = "<|im_assistant|>assistant<|im_middle|><think>"
KIMI_CALLS = f"""<|im_system|>tool_declare<|im_middle|>[{", ".join(TOOLS)}]<|im_end|>\
<|im_system|>system<|im_middle|>Be brief.<|im_end|><|im_user|>user<|im_middle|>Look.<|im_end|>\
{KIMI_OPENS}Two calls.</think>I look.<|tool_calls_section_begin|>\
<|tool_call_begin|>call_0<|tool_call_argument_begin|>{BIRD}<|tool_call_end|>\
<|tool_call_begin|>call_1<|tool_call_argument_begin|>{{}}<|tool_call_end|>\
<|tool_calls_section_end|><|im_end|>\
<|im_system|>tool<|im_middle|>## Return of call_0
{{"eats":["voles"]}}<|im_end|>\
<|im_system|>tool<|im_middle|>## Return of call_1
noon
<|im_end|>{KIMI_OPENS}"""
BY_HAND = {
    ("smollm2", "plain", True): f"{SMOL}<|im_start|>user\n{HI}<|im_end|>\n{ASSISTANT}",
    ("smollm2", "turns_with_reasoning", True): SMOL + CHATML_TURNS,
    ("qwen3_style", "plain", True): f"<|im_start|>user\n{HI}<|im_end|>\n{ASSISTANT}",
    ("qwen3_style", "plain", False): (
        f"<|im_start|>user\n{HI}<|im_end|>\n{ASSISTANT}<think>\n\n</think>\n\n"
    ),
    ("qwen3_style", "turns_with_reasoning", True): CHATML_TURNS,
    ("qwen3_style", "parallel_calls", True): QWEN_CALLS,
    ("qwen3_style", "parallel_calls", False): f"{QWEN_CALLS}<think>\n\n</think>\n\n",
    ("deepseek_style", "plain", True): (
        f"<｜begin▁of▁sentence｜><｜User｜>{HI}<｜Assistant｜><think>"
    ),
    ("deepseek_style", "plain", False): (
        f"<｜begin▁of▁sentence｜><｜User｜>{HI}<｜Assistant｜></think>"
    ),
    ("deepseek_style", "turns_with_reasoning", True): (
        "<｜begin▁of▁sentence｜><｜User｜>What do hawks eat?<｜Assistant｜></think>Voles."
        f"<｜end▁of▁sentence｜><｜User｜>{OWLS}<｜Assistant｜></think>The same."
        "<｜end▁of▁sentence｜><｜User｜>Why?<｜Assistant｜><think>"
    ),
    ("deepseek_style", "parallel_calls", True): DEEPSEEK_CALLS,
    ("kimi_style", "plain", True): f"<|im_user|>user<|im_middle|>{HI}<|im_end|>{KIMI_OPENS}",
    ("kimi_style", "plain", False): (
        f"<|im_user|>user<|im_middle|>{HI}<|im_end|>{KIMI_OPENS}</think>"
    ),
    ("kimi_style", "turns_with_reasoning", True): (
        f"<|im_user|>user<|im_middle|>What do hawks eat?<|im_end|>{KIMI_OPENS}</think>Voles."
        f"<|im_end|><|im_user|>user<|im_middle|>{OWLS}<|im_end|>{KIMI_OPENS}</think>The same."
        f"<|im_end|><|im_user|>user<|im_middle|>Why?<|im_end|>{KIMI_OPENS}"
    ),
    ("kimi_style", "parallel_calls", True): KIMI_CALLS,
    ("kimi_style", "parallel_calls", False): f"{KIMI_CALLS}</think>",
}


def stored(name):
    return json.loads((FOLDER / f"{name}.json").read_text("utf-8"))


def key(name, case):
    return name, case["case"], not case["template_arguments"]


@pytest.fixture(scope="module")
def raw():
    return Tokenizer.from_file(str(prepare_quickstart_target() / "tokenizer.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_is_rendered_as_it_always_was(name):
    assert golden(name) == stored(name)


def test_the_golden_texts_are_those_written_by_hand():
    texts = {key(name, one): one["text"] for name in NAMES for one in stored(name)}
    assert {one: texts[one] for one in BY_HAND} == BY_HAND


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_ids_are_those_of_markers_and_of_the_pieces_between(raw, name):
    style = TARGET_STYLES.get(name)
    added = (*style.markers, *style.plain_markers) if style else ()
    ids = {one: raw.token_to_id(one) for one in ("<|im_start|>", "<|im_end|>")}
    ids |= {one: raw.get_vocab_size() + at for at, one in enumerate(added)}
    cut = re.compile("({})".format("|".join(map(re.escape, ids))))
    for case in stored(name):
        pieces = [one for one in cut.split(case["text"]) if one]
        expected = [
            token for one in pieces for token in ([ids[one]] if one in ids else raw.encode(one).ids)
        ]
        assert case["prompt_ids"] == expected


@pytest.mark.parametrize("name", NAMES)
def test_the_last_ids_tell_whether_the_thinking_is_open(name):
    for case in stored(name):
        assert case["thinking_is_open"] is case["text"].rstrip().endswith("<think>")
    if name in TARGET_STYLES:
        first, *_ = stored(name)
        assert first["thinking_is_open"] is TARGET_STYLES[name].open_prompt


def test_one_text_begins_with_its_first_token_once():
    for case in stored("deepseek_style"):
        assert case["prompt_ids"].count(case["prompt_ids"][0]) == 1


@pytest.mark.parametrize("name", NAMES)
def test_parallel_calls_without_ids_get_them(name):
    (case,) = (one for one in stored(name) if key(name, one)[1:] == ("parallel_calls", True))
    assert case["repairs"] == ["result_as_json", "call_wrapped", "call_ids_given"]
