"""From counts over responses to findings: what was seen, in words, and how bad it is."""

from collections.abc import Iterable

from pipelines.glancing.findings import Finding, Severity, found
from pipelines.glancing.health import Repeats, ResponseHealth, Tally

_USUAL_ENDS = ("stop", "length", "tool_calls", "eos", "stop_sequence")
_SERVER_DEFAULT_TOKENS = 128  # SGLang's max_new_tokens where a request does not set it

# Tallies that any row makes a finding: what is said of them, and the share above which it is a
# fault (None: the finding's own severity, whatever the share).
_OF_ROWS: dict[str, tuple[str, float | None]] = {
    "think_markers_in_content": ("contents hold think markers", 0.005),
    "reserved_tokens": ("rows hold reserved tokens", None),
    "special_tokens_in_content": ("contents hold special tokens", None),
    "broken_characters": ("contents hold U+FFFD", 0.05),
    "content_empty": ("answers stopped with empty content", 0.05),
    "cut_inside_reasoning": ("answers were cut before any content", 0.2),
    "repetition": ("answers repeat one token or phrase", 0.1),
    "nan_in_server": ('rows finished with matched "NaN happened"', None),
    "usage_differs_from_ids": ("counts differ from len(output_ids)", None),
    "ids_out_of_range": ("rows hold negative or impossible ids", None),
}
_FOREIGN_SCRIPT = 0.05  # translations and quotations are no drift


def verdict(health: ResponseHealth, *, is_responses: bool) -> Iterable[Finding]:
    """All findings of the answers; of other rows, ids that come twice."""
    yield from _same_ids(health)
    if not health.rows or not is_responses:
        return
    story = list(_lost_parts(health))
    yield from story
    told = {one.name for one in story}
    for name, (said, limit) in _OF_ROWS.items():
        if name == "think_markers_in_content" and told & {
            "reasoning_inside_content",
            "reasoning_and_usage_lost",
        }:
            continue
        if tally := health.tally(name).count:
            yield found(name, _share(health, name, said), _severity(health, tally, limit))
    yield from _bad_counts(health)
    yield from _ends(health)
    yield from _same_texts(health)
    drifted = health.tally("answer_in_another_script").count
    if drifted > _FOREIGN_SCRIPT * health.rows:
        said = "answers are in another script than their question"
        yield found("answer_in_another_script", _share(health, "answer_in_another_script", said))


def _lost_parts(health: ResponseHealth) -> Iterable[Finding]:
    """The story this project was born from, and its single parts."""
    absent = health.usage["missing"] + health.usage["null"]
    markers = health.tally("think_markers_in_content")
    if not health.with_reasoning and absent == health.rows:
        hidden = f"; {markers.count:,} contents still hold think markers" if markers.count else ""
        yield found(
            "reasoning_and_usage_lost",
            f"reasoning is empty and usage.completion_tokens is absent in all {health.rows:,} "
            f"rows read{hidden}",
        )
        return
    if absent:
        yield found(
            "usage_absent",
            f"usage.completion_tokens is missing in {health.usage['missing']:,} and null in "
            f"{health.usage['null']:,} of {health.rows:,} rows; first: "
            f"{health.tally('usage').first}",
        )
    if health.with_reasoning:
        return
    if markers.count:
        yield found(
            "reasoning_inside_content",
            f"reasoning is empty in all {health.rows:,} rows read, and {markers.count:,} contents "
            f"hold think markers; first: {markers.first}",
        )
    elif health.with_segments:
        said = "no row has reasoning; the segments, made from token ids, agree"
        yield found("reasoning_empty", said, "note")
    else:
        yield found("reasoning_empty", f"reasoning is empty in all {health.rows:,} rows read")


def _bad_counts(health: ResponseHealth) -> Iterable[Finding]:
    kinds = ("zero", "negative", "wrong type")
    if any(health.usage[kind] for kind in kinds):
        shown = ", ".join(f"{kind} in {health.usage[kind]:,}" for kind in kinds)
        said = f"completion_tokens is {shown} of {health.rows:,} rows"
        yield found("usage_not_a_count", f"{said}; first: {health.tally('usage').first}")
    if count := health.usage["text"]:
        said = f"completion_tokens is text in {count:,} of {health.rows:,} rows"
        yield found("number_as_text", f"{said}; first: {health.tally('usage').first}")


def _ends(health: ResponseHealth) -> Iterable[Finding]:
    cut = health.finish["length"]
    common, times = health.tokens.most_common() if health.tokens.count else (0, 0)
    at_one_length = times > 0.8 * health.tokens.count and health.rows >= 8
    if cut > 0.5 * health.rows and at_one_length:
        default = ", SGLang's own default" if common == _SERVER_DEFAULT_TOKENS else ""
        said = f"{cut:,} of {health.rows:,} answers were cut, nearly all at {common:,} tokens"
        yield found("cut_at_one_length", said + default)
    elif cut > 0.3 * health.rows:
        share = f"{cut:,} of {health.rows:,} answers ({cut / health.rows:.0%})"
        yield found("many_cut", f"{share} ended by length")
    odd = {kind: count for kind, count in health.finish.items() if kind not in _USUAL_ENDS}
    if odd:
        shown = ", ".join(f"{kind} {count:,}" for kind, count in sorted(odd.items()))
        aborted = any("abort" in kind or "error" in kind for kind in odd)
        yield found(
            "finish_reason",
            f"finish_reason is neither stop nor length: {shown}",
            "fault" if aborted else "warning",
        )


def _same_ids(health: ResponseHealth) -> Iterable[Finding]:
    twice = health.same_id.twice()
    if twice.count:
        seen = f"{twice.count:,} rows carry an id that came before"
        yield found("duplicate_id", _about(health.same_id, seen, twice))


def _same_texts(health: ResponseHealth) -> Iterable[Finding]:
    twice = health.same_text.twice()
    if twice.count:
        seen = f"{twice.count:,} of {health.rows:,} answers equal an earlier one"
        is_fault = health.rows > 20 and twice.count > 0.5 * health.rows
        severity: Severity = "fault" if is_fault else "warning"
        yield found("duplicate_text", _about(health.same_text, seen, twice), severity)


def _about(repeats: Repeats, seen: str, twice: Tally) -> str:
    estimate = "about " if repeats.halvings else ""
    return f"{estimate}{seen}" + (f"; first: {twice.first}" if twice.first else "")


def _severity(health: ResponseHealth, count: int, fault_above: float | None) -> Severity | None:
    if fault_above is None:
        return None
    return "fault" if count > fault_above * health.rows else "warning"


def _share(health: ResponseHealth, name: str, said: str) -> str:
    tally = health.tally(name)
    share = f"{tally.count:,} of {health.rows:,} ({tally.count / health.rows:.1%})"
    return f"{share} {said}; first: {tally.first}"
