"""Chat templates in the styles of known targets, and how such a target speaks: text by segment."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import AddedToken

Segments = list[tuple[str, str]]  # kind and text, in order, the stop token last

_OTHERS = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_CUT_OFF = (
    "{% set content = m.content %}{% set thought = m.reasoning_content | default('', true) %}"
    "{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
)


def _template(assistant: str, opening: str, before: str = "") -> str:
    return (
        before + "{% for m in messages %}{% if m.role == 'assistant' %}" + assistant + "{% else %}"
        f"{_OTHERS}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    )


@dataclass(frozen=True)
class Style:
    """A template, what it does with earlier reasoning, and an answer in the target's own form."""

    template: str
    history_reasoning: str
    thinks: bool
    speak: Callable[[str, str], Segments]  # reasoning and content


def _opens(reasoning: str, content: str) -> Segments:
    head = [("marker", "<think>"), ("reasoning", f"\n{reasoning}\n"), ("marker", "</think>")]
    return [*head, ("content", f"\n\n{content}"), ("stop", "<|im_end|>")]


def _opened(reasoning: str, content: str) -> Segments:
    head = [("reasoning", f"{reasoning}\n"), ("marker", "</think>")]
    return [*head, ("content", f"\n\n{content}"), ("stop", "<|im_end|>")]


def _closes(reasoning: str, content: str) -> Segments:
    head = [("reasoning", reasoning), ("marker", "</think>")]
    return [*head, ("content", content), ("stop", "<|im_end|>")]


def _plain(reasoning: str, content: str) -> Segments:
    del reasoning
    return [("content", content), ("stop", "<|im_end|>")]


_THINKS_AFTER_THE_LAST_QUESTION = (
    "{% set last = namespace(at=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' and not m.content.startswith('<tool_response>') %}"
    "{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
)
_KEPT = (
    "{% set thought = m.reasoning_content | default('', true) %}<|im_start|>assistant\n"
    "{% if thought %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n"
    "{{ m.content.lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
)
_HEADER = "<|im_start|>assistant\n"

STYLES = {
    # Drops the reasoning before the last question; the target opens its thinking itself.
    "qwen3": Style(
        _template(
            _CUT_OFF + "<|im_start|>assistant\n{% if loop.index0 > last.at and thought %}<think>\n"
            "{{ thought }}\n</think>\n\n{% endif %}{{ content }}<|im_end|>\n",
            _HEADER,
            _THINKS_AFTER_THE_LAST_QUESTION,
        ),
        "dropped",
        True,
        _opens,
    ),
    # Leaves an empty block where the reasoning was; the prompt opens the thinking.
    "kimi": Style(
        _template(
            "<|im_start|>assistant<think></think>{{ m.content }}<|im_end|>",
            "<|im_start|>assistant<think>",
        ),
        "dropped",
        True,
        _closes,
    ),
    # Knows no reasoning field; cuts everything up to the end of the thinking, blanks stay.
    "deepseek": Style(
        _template(
            "<|im_start|>assistant{{ m.content.split('</think>')[-1] }}<|im_end|>",
            "<|im_start|>assistant<think>\n",
        ),
        "dropped",
        True,
        _opened,
    ),
    "keeps": Style(_template(_KEPT, _HEADER), "kept", True, _opens),
    "keeps_opened": Style(_template(_KEPT, _HEADER + "<think>\n"), "kept", True, _opened),
    # Writes an empty block where there was no reasoning.
    "keeps_always": Style(
        _template(_KEPT.replace("if thought", "if true"), _HEADER), "kept", True, _opens
    ),
    "trims": Style(
        _template("<|im_start|>assistant\n{{ m.content | trim }}<|im_end|>\n", _HEADER),
        "kept",
        False,
        _plain,
    ),
    "plain": Style(
        _template("<|im_start|>assistant\n{{ m.content }}<|im_end|>\n", _HEADER),
        "kept",
        False,
        _plain,
    ),
}


def with_style(tokenizer, style: Style):
    """The tokenizer with the style's template, and thinking markers as tokens of their own."""
    tokenizer.add_tokens([AddedToken(one, special=False) for one in ("<think>", "</think>")])
    tokenizer.chat_template = style.template
    return tokenizer


def think_ids(tokenizer, style: Style) -> dict[str, int | None]:
    """The profile's two marker ids."""
    names = {"think_open_id": "<think>", "think_close_id": "</think>"}
    vocabulary = tokenizer.get_vocab()
    return {key: vocabulary[text] if style.thinks else None for key, text in names.items()}


# Whole targets: tools, thinking that a template argument turns off, and markers of their own.


@dataclass(frozen=True)
class TargetStyle:
    """A template in the style of a target, with the tokens and the profile that go with it."""

    template: str
    markers: tuple[str, ...]  # added to the tokenizer, as tokens that a message may not hold
    plain_markers: tuple[str, ...]  # added too, but a message may hold their text
    stop: str
    open_prompt: bool  # the generation prompt opens the thinking
    thinking: str  # the template argument that turns it off
    bos: str | None = None


_CHATML = "<|im_start|>{}\n{}<|im_end|>\n"
_LAST_ASK = (
    "{% set last = namespace(at=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}{% endfor %}"
)

TARGET_STYLES = {
    # Tools in the system message, calls as JSON, results in a user's turn; reasoning only after
    # the last question; an empty block where thinking is off.
    "qwen3_style": TargetStyle(
        template=(
            "{% set ask = messages[0].content if messages[0].role == 'system' else '' %}"
            "{% if tools %}<|im_start|>system\n{{ ask ~ '\n\n' if ask }}# Tools\n<tools>"
            "{% for tool in tools %}{{ '\n' ~ tool | tojson }}{% endfor %}"
            "{{ '\n' }}</tools><|im_end|>\n"
            "{% elif ask %}"
            + _CHATML.format("system", "{{ ask }}")
            + "{% endif %}"
            + _LAST_ASK
            + "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
            "{% if m.reasoning_content and loop.index0 > last.at %}<think>\n"
            "{{ m.reasoning_content.strip('\n') }}\n</think>\n\n{% endif %}{{ m.content }}"
            "{% for call in m.tool_calls %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
            '{"name": "{{ call.function.name }}", "arguments": '
            "{{ call.function.arguments if call.function.arguments is string"
            " else call.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n"
            "{% elif m.role == 'tool' %}"
            "{% if loop.previtem.role != 'tool' %}<|im_start|>user{% endif %}"
            "{{ '\n' }}<tool_response>\n"
            "{{ m.content }}\n</tool_response>"
            "{% if loop.last or loop.nextitem.role != 'tool' %}<|im_end|>\n{% endif %}"
            "{% elif m.role == 'user' or not loop.first %}"
            + _CHATML.format("{{ m.role }}", "{{ m.content }}")
            + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
            "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
            "{% endif %}{% endif %}"
        ),
        markers=(),
        plain_markers=(
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<tool_response>",
            "</tool_response>",
        ),
        stop="<|im_end|>",
        open_prompt=False,
        thinking="enable_thinking",
    ),
    # Writes its first token itself; a system message is the bare beginning; arguments are pasted as
    # a string; an earlier answer is cut at the end of its thinking; the prompt opens or closes it.
    "deepseek_style": TargetStyle(
        template=(
            "{% set calm = '' if thinking is defined and not thinking else none %}"
            "{% set head = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}"
            "{% set head.text = head.text ~ ('\n\n' if head.text) ~ m.content %}{% endif %}"
            "{% endfor %}{{ bos_token }}{{ head.text }}{% if tools %}{{ '\n\n' }}## Tools\n"
            "{% for tool in tools %}{{ '\n' }}### {{ tool.function.name }}\n"
            "{{ tool.function | tojson }}\n{% endfor %}{% endif %}"
            "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
            "{% elif m.role == 'tool' %}"
            "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
            "{% elif m.role == 'assistant' %}"
            "{% if loop.previtem.role == 'user' %}<｜Assistant｜></think>{% endif %}"
            "{{ m.content.split('</think>')[-1] }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
            "{% for call in m.tool_calls %}<｜tool▁call▁begin｜>"
            "{{ call.function.name + '<｜tool▁sep｜>' + call.function.arguments }}"
            "<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>{% endif %}"
            "<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
            "{% if add_generation_prompt and messages[-1].role == 'user' %}<｜Assistant｜>"
            "{{ '<think>' if calm is none else '</think>' }}{% endif %}"
        ),
        markers=(
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
        ),
        plain_markers=(
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
        stop="<｜end▁of▁sentence｜>",
        open_prompt=True,
        thinking="thinking",
        bos="<｜begin▁of▁sentence｜>",
    ),
    # Names a call by its id, in the call and above its result; tools as one JSON list; an empty
    # block of thinking in every earlier answer.
    "kimi_style": TargetStyle(
        template=(
            "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>"
            "{% endif %}" + _LAST_ASK + "{% for m in messages %}"
            "{% if m.role == 'assistant' %}<|im_assistant|>assistant<|im_middle|><think>"
            "{{ m.reasoning_content if loop.index0 > last.at and m.reasoning_content }}</think>"
            "{{ m.content }}{% if m.tool_calls %}<|tool_calls_section_begin|>"
            "{% for call in m.tool_calls %}<|tool_call_begin|>{{ call.id }}"
            "<|tool_call_argument_begin|>{% if call.function.arguments is string %}"
            "{{ call.function.arguments }}{% else %}{{ call.function.arguments | tojson }}"
            "{% endif %}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
            "{% elif m.role == 'tool' %}<|im_system|>tool<|im_middle|>"
            "## Return of {{ m.tool_call_id }}\n{{ m.content }}"
            "{% else %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}{% endif %}"
            "<|im_end|>{% endfor %}{% if add_generation_prompt %}"
            "<|im_assistant|>assistant<|im_middle|>"
            "{{ '<think></think>' if thinking is defined and not thinking else '<think>' }}"
            "{% endif %}"
        ),
        markers=("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
        plain_markers=(
            "<think>",
            "</think>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ),
        stop="<|im_end|>",
        open_prompt=True,
        thinking="thinking",
    ),
}


def as_target(tokenizer, style: TargetStyle):
    """The tokenizer with the target style's tokens and template."""
    tokenizer.add_tokens([AddedToken(one, special=True) for one in style.markers])
    tokenizer.add_tokens([AddedToken(one, special=False) for one in style.plain_markers])
    if style.bos is not None:
        tokenizer.bos_token = style.bos
    tokenizer.chat_template = style.template
    return tokenizer
