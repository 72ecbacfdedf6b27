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
