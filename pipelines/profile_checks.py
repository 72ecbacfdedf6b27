"""A target's profile against its tokenizer, template and configuration: ids are never trusted."""

import logging
from collections.abc import Mapping

from pipelines.errors import PreflightFailed
from pipelines.recipe import TargetProfile
from pipelines.sources.row import Json
from pipelines.template import (
    PROBE,
    TEMPLATE_ERRORS,
    ChatTemplate,
    NotRendered,
    Tokenizer,
    special_tokens,
    text_config,
)

logger = logging.getLogger(__name__)

_PROBE_TOOL: Json = {
    "type": "function",
    "function": {
        "name": "probe_hawks",
        "description": "Look up a hawk.",
        "parameters": {
            "type": "object",
            "properties": {"name": {"type": "string", "description": "Its name."}},
            "required": ["name"],
        },
    },
}
_RESERVED_ARGUMENTS = {
    "conversation",
    "tools",
    "tokenize",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
}


def check_profile(tokenizer: Tokenizer, profile: TargetProfile, target_config: Json) -> None:
    """Compare a profile with the tokenizer and the configuration. Raises `PreflightFailed`.

    Every id is looked up, and the template is tried on a small conversation: ids are never trusted.
    """
    config = text_config(target_config)
    _check_vocabulary(tokenizer, config["vocab_size"])
    _check_ids(tokenizer, profile, config["vocab_size"])
    _check_aux_layers(profile, config["num_hidden_layers"])
    _check_template_arguments(tokenizer, profile)
    template = ChatTemplate(tokenizer, profile)
    _check_question(template)
    _check_end_of_turn(template, tokenizer, profile)
    if profile.tools == "template":
        _check_tools_branch(template)


def _check_vocabulary(tokenizer: Tokenizer, vocab_size: int) -> None:
    largest = max(tokenizer.get_vocab().values())
    if largest >= vocab_size:
        raise PreflightFailed(
            f"the tokenizer has the id {largest}, the target's vocabulary ends at {vocab_size - 1}",
            expected="a tokenizer whose ids the target can embed",
            change="take tokenizer and weights from the same model",
        )


def _check_ids(tokenizer: Tokenizer, profile: TargetProfile, vocab_size: int) -> None:
    named = {
        "stop_token_ids": profile.stop_token_ids,
        "reserved_ids": sorted(profile.reserved),
        **{field: (one,) for field, one in profile.marker_ids.items()},
    }
    owner: dict[int, str] = {}
    for field, ids in named.items():
        for one in ids:
            if not 0 <= one < vocab_size:
                raise _wrong_profile(
                    field, f"{one}, outside the vocabulary", f"an id below {vocab_size}"
                )
            if one in owner:
                raise _wrong_profile(
                    field, f"{one}, which {owner[one]} names too", "one meaning for an id"
                )
            owner[one] = field
    special = special_tokens(tokenizer)
    for one in profile.stop_token_ids:
        if one not in special.values():
            raise _wrong_profile(
                "stop_token_ids",
                f"{one}, the ordinary token {tokenizer.decode([one])!r}",
                f"special tokens; this tokenizer has {_shown(special)}",
            )
    for field, one in profile.marker_ids.items():
        _check_marker(tokenizer, field, one)


# What the text of a marker has to hold: another token of the vocabulary is one token of its own
# too, and a profile that names it would find no reasoning and no call, without a word.
_MARKER_WORDS = {
    "think_open_id": "think",
    "think_close_id": "think",
    "tool_markers.section_open_id": "calls",
    "tool_markers.section_close_id": "calls",
    "tool_markers.call_open_id": "call",
    "tool_markers.call_close_id": "call",
    "channels.start_id": "start",
    "channels.channel_id": "channel",
    "channels.constrain_id": "constrain",
    "channels.message_id": "message",
    "channels.end_id": "end",
}


def _check_marker(tokenizer: Tokenizer, field: str, one: int) -> None:
    marker = tokenizer.decode([one], skip_special_tokens=False)
    back = tokenizer.encode(marker, add_special_tokens=False)
    if back != [one]:
        raise _wrong_profile(
            field,
            f"{one}, which decodes to {marker!r}, which encodes to {back}",
            "a marker that is one token of its own",
        )
    if one not in tokenizer.added_tokens_decoder:
        raise _wrong_profile(
            field,
            f"{one}, the ordinary token {marker!r}",
            f"an added token; this tokenizer has {_shown(_added_tokens(tokenizer))}",
        )
    if field in _MARKER_WORDS and _MARKER_WORDS[field] not in marker.lower():
        logger.warning(
            "target.profile.%s is %d, the token %r: a marker of another kind?", field, one, marker
        )


def _added_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    return {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}


def _shown(special: Mapping[str, int]) -> str:
    few = sorted(special.items(), key=lambda item: item[1])[:8]
    return ", ".join(f"{token} = {index}" for token, index in few)


def _wrong_profile(field: str, seen: str, expected: str) -> PreflightFailed:
    return PreflightFailed(
        f"target.profile.{field} holds {seen}",
        expected=expected,
        change=f"correct {field} in the target's profile",
    )


def _check_aux_layers(profile: TargetProfile, layers: int) -> None:
    ids = profile.aux_layer_ids
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0 or ids[-1] > layers - 2:
        raise _wrong_profile(
            "aux_layer_ids",
            f"{list(ids)}, the target has {layers} layers",
            f"distinct ids from 0 to {layers - 2}, ascending",
        )


def _check_template_arguments(tokenizer: Tokenizer, profile: TargetProfile) -> None:
    taken = sorted(_RESERVED_ARGUMENTS & set(profile.template_arguments))
    if taken:
        raise _wrong_profile("template_arguments", f"{taken[0]!r}", "arguments of the template")
    if "strftime_now" in str(tokenizer.chat_template):
        logger.warning(
            "the target's chat template can write today's date; prompts prepared on another day "
            "may differ (see template_arguments)"
        )


def _check_question(template: ChatTemplate) -> None:
    rendered = template.render([{"role": "user", "content": PROBE}], ())
    if isinstance(rendered, NotRendered):
        raise PreflightFailed(
            f"the target's template fails on a plain question: {rendered.reason}: "
            f"{rendered.detail}",
            expected="one user message rendered and tokenised without loss",
            change="check the tokenizer's files and template_arguments in the target's profile",
        )


def _check_end_of_turn(
    template: ChatTemplate, tokenizer: Tokenizer, profile: TargetProfile
) -> None:
    """The token that the template puts after an answer is the one that has to end it."""
    answer = "Voles and hares"
    turn = [{"role": "user", "content": PROBE}, {"role": "assistant", "content": answer}]
    try:
        text = template.apply(turn, (), add_generation_prompt=False)
    except TEMPLATE_ERRORS as error:
        raise PreflightFailed(
            f"the target's template fails on a question with its answer: {error}",
            expected="a conversation rendered",
            change="check template_arguments in the target's profile",
        ) from error
    after = tokenizer.encode(text.rpartition(answer)[2], add_special_tokens=False)
    special = set(special_tokens(tokenizer).values())
    end = next((one for one in after if one in special), None)
    if end is not None and end not in profile.stop_token_ids:
        raise _wrong_profile(
            "stop_token_ids",
            f"{list(profile.stop_token_ids)}, but the template ends an answer with {end} "
            f"({tokenizer.decode([end])!r})",
            f"a list with {end} in it",
        )


def _check_tools_branch(template: ChatTemplate) -> None:
    question = [{"role": "user", "content": PROBE}]
    try:
        without = template.apply(question, ())
        with_tools = template.apply(question, (_PROBE_TOOL,))
    except TEMPLATE_ERRORS as error:
        raise _wrong_profile(
            "tools", f"'template', which fails on a tool: {error}", "a template that takes tools"
        ) from error
    if without == with_tools:
        raise PreflightFailed(
            "the target's template writes the same text with tools and without",
            expected="a template with a tools branch, since target.profile.tools is 'template'",
            change="set tools: system_message in the target's profile",
        )
