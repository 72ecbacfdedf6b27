"""Target profiles and gates for tests: small ids, one for each way of marking parts."""

from typing import Any

from pipelines.recipe import ChannelMarkers, Gates, TargetProfile, ToolMarkers

OPEN, CLOSE, STOP, RESERVED = 90, 91, 2, 0
SECTION, SECTION_END, CALL, CALL_END, ARGUMENTS = 92, 93, 94, 95, 96
START, CHANNEL, CONSTRAIN, MESSAGE, END = 80, 81, 82, 83, 84

HERMES = ToolMarkers(
    format="hermes",
    section_open_id=None,
    section_close_id=None,
    call_open_id=CALL,
    call_close_id=CALL_END,
    arguments_id=None,
)
HARMONY = ChannelMarkers(
    start_id=START, channel_id=CHANNEL, constrain_id=CONSTRAIN, message_id=MESSAGE, end_id=END
)


def sectioned(kind: Any) -> ToolMarkers:
    """The markers of a format with sections: kimi, deepseek_v3, deepseek_v31."""
    return ToolMarkers(
        format=kind,
        section_open_id=SECTION,
        section_close_id=SECTION_END,
        call_open_id=CALL,
        call_close_id=CALL_END,
        arguments_id=ARGUMENTS,
    )


def profile(**changes: Any) -> TargetProfile:
    """A target that thinks and calls no tools, but for the changes."""
    values: dict[str, Any] = {
        "tools": "template",
        "think_open_id": OPEN,
        "think_close_id": CLOSE,
        "tool_markers": None,
        "channels": None,
        "template_arguments": {},
        "stop_token_ids": (STOP,),
        "reserved_ids": (RESERVED,),
        "history_reasoning": "kept",
        "aux_layer_ids": (1, 2, 3),
    }
    return TargetProfile(**{**values, **changes})


PLAIN = profile(think_open_id=None, think_close_id=None)
THINKS = profile()
KIMI = profile(tool_markers=sectioned("kimi"))
QWEN = profile(tool_markers=HERMES)
OSS = profile(think_open_id=None, think_close_id=None, channels=HARMONY)


def gates(**changes: Any) -> Gates:
    """Gates that let sane rows pass; a canary of four rows."""
    values: dict[str, Any] = {
        "finish_reasons": ("stop", "length"),
        "min_content_tokens": 1,
        "max_one_token_share": 0.5,
        "max_repeated_share": 0.5,
        "broken_tool_calls": "reject",
        "languages": None,
        "canary_rows": 4,
        "max_rejected_share": 0.5,
        "min_reasoning_share": 0.0,
    }
    return Gates(**{**values, **changes})
