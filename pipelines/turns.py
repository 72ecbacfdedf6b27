"""Every user turn of a conversation becomes a turn of its own, with the target's answers between.

The template renders the conversation whole, with placeholders for the answers, and the text is cut
at them. What cannot be proved exact is refused by name, never approximated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

from pipelines.conversation import HistoryRule
from pipelines.errors import PreflightFailed
from pipelines.recipe import TargetProfile
from pipelines.sources.row import Json, SourceRow, dump_json
from pipelines.template import TEMPLATE_ERRORS, ChatTemplate, NotRendered, Rendered

_ASK = ("What do hawks eat?", "And what do owls eat?", "Which of them hunts at night?")
_REASON, _CONTENT = "Recall their prey first", "Voles and hares"
_BLANKS = "\n \t\r"
_EXCERPT_CHARACTERS = 160


@dataclass(frozen=True)
class Turns:
    """A conversation as `PROMPT_SCHEMA` holds it: what its turns are asked with."""

    prompt_ids: list[int]
    history: list[list[int]]
    continuations: list[list[int]]


def asked(row: SourceRow) -> tuple[SourceRow, bool]:
    """The row with only what the target is to answer, and whether it was cut at a tool's result.

    The set's own answers are removed: after each user message comes one of the target's. What an
    assistant says before the first user message stays. A tool's result answers a call that the
    target never made, so the conversation ends before the first one, at its last user message;
    a row without a user message before that is returned as it is.
    """
    before = list(row.messages)
    tool = next((i for i, one in enumerate(before) if one["role"] == "tool"), None)
    users = [i for i, one in enumerate(before[:tool]) if one["role"] == "user"]
    if not users:
        return row, False
    kept = [
        message
        for index, message in enumerate(before[: users[-1] + 1])
        if index < users[0] or message["role"] != "assistant"
    ]
    return replace(row, messages=tuple(kept)), tool is not None


def first_question(row: SourceRow) -> SourceRow:
    """The row up to its first user message; as it is where it has none."""
    users = [i for i, one in enumerate(row.messages) if one["role"] == "user"]
    return replace(row, messages=row.messages[: users[0] + 1]) if users else row


def render_turns(
    template: ChatTemplate, rule: HistoryRule, messages: Sequence[Json], tools: Sequence[Json]
) -> Turns | NotRendered:
    """Render and tokenise a conversation of `asked`.

    Proved for it, with placeholders in the answers' places: neither the text of an answer nor its
    reasoning changes what stands around it; every turn has the same text before an answer; a text
    that follows an answer begins with a token of its own, so that no answer can grow into it; the
    parts' ids, joined, are the ids of the whole, and decode to its text.
    """
    if not any(one["role"] == "user" for one in messages):
        return NotRendered("turns_not_separable", "a tool's result, and no user message before it")
    try:
        return _render(template, rule, messages, tools)
    except _Refused as refused:
        return refused.why


def history_rule(template: ChatTemplate, profile: TargetProfile) -> HistoryRule:
    """Find what the template makes of an earlier answer. Raises `PreflightFailed`.

    The profile's `history_reasoning` must hold, and a plain conversation must be separable.
    """
    check_history_reasoning(template, profile)
    probe = _Probe(template, profile)
    bare = HistoryRule(
        reasoning=profile.history_reasoning,
        writes_reasoning=False,
        may_be_bare=True,
        off_start=probe.off_start(),
        off_start_after_reasoning=probe.off_start_after_reasoning(),
        off_end=probe.off_end(),
        reasoning_ids=frozenset(_reasoning_ids(profile)),
    )
    conversation = [{"role": "user", "content": one} for one in _ASK]
    rule, tried = bare, render_turns(template, bare, conversation, ())
    if probe.keeps_reasoning_apart():
        rule = replace(bare, writes_reasoning=True, may_be_bare=isinstance(tried, Turns))
        tried = render_turns(template, rule, conversation, ())
    if isinstance(tried, NotRendered):
        raise PreflightFailed(
            f"a conversation's turns cannot be told apart in the target's template: {tried.detail}",
            expected="a template that writes earlier answers as they are, between control tokens, "
            f"and whose history fits history_reasoning, which is {rule.reasoning}",
            change="set prompts.turns to last, or correct history_reasoning in the profile",
        )
    return rule


def check_history_reasoning(template: ChatTemplate, profile: TargetProfile) -> None:
    """Compare the profile's `history_reasoning` with the template. Raises `PreflightFailed`.

    A target without thinking markers has no reasoning to keep or to drop.
    """
    if not _think_ids(profile):
        return
    probe = _Probe(template, profile)
    apart = probe.history({"content": _CONTENT, "reasoning_content": _REASON})
    inside = probe.history({"content": probe.thought() + _CONTENT})
    bare = probe.history({"content": _CONTENT})
    # A template that writes an empty block of its own has dropped what was in it.
    writes_empty_block = probe.close in bare.partition(_CONTENT)[0]
    kept = _REASON in apart or (_REASON in inside and not writes_empty_block)
    said = profile.history_reasoning
    # A template that knows nothing of reasoning writes what the message holds: both may be meant.
    right = kept if said == "kept" else _REASON not in apart
    if not right:
        seen = apart if said == "dropped" or _REASON not in inside else inside
        raise PreflightFailed(
            f"target.profile.history_reasoning holds {said!r}, but the template writes an earlier "
            f"answer with reasoning as {_excerpt(seen)}",
            expected=f"{'kept' if said == 'dropped' else 'dropped'!r} for this template",
            change="correct history_reasoning in the target's profile",
        )


# Rendering


class _Refused(ValueError):
    """Carries the reason from where it is found to `render_turns`."""

    def __init__(self, why: NotRendered) -> None:
        super().__init__(why.detail)
        self.why = why


def _not_separable(detail: str) -> _Refused:
    return _Refused(NotRendered("turns_not_separable", detail))


@dataclass(frozen=True)
class _Placeholder:
    """An answer's stand-in: words that the conversation does not hold."""

    content: str
    reasoning: str

    def message(self, *, with_reasoning: bool) -> Json:
        more = {"reasoning_content": self.reasoning} if with_reasoning else {}
        return {"role": "assistant", "content": self.content, **more}


@dataclass(frozen=True)
class _Cut:
    """One turn's text: parts[0], body 1, parts[1], body 2, ... parts[-1]."""

    parts: list[str]
    bodies: list[str]


def _render(
    template: ChatTemplate, rule: HistoryRule, messages: Sequence[Json], tools: Sequence[Json]
) -> Turns:
    turns = sum(one["role"] == "user" for one in messages)
    said = dump_json([messages, tools])
    first, second = (_placeholders(word, turns - 1, said) for word in ("Falcon", "Kestrel"))

    texts = []
    for turn in range(1, turns + 1):
        one = _up_to(messages, turn, first, with_reasoning=rule.writes_reasoning)
        text = template.render_text(one, tools)
        if isinstance(text, NotRendered):
            raise _Refused(text)
        texts.append(text)
    cuts = _cuts(rule, template, texts, first)

    # Other words in the answers, and reasoning that the template drops, must change nothing.
    reasons = rule.writes_reasoning or (rule.reasoning == "dropped" and bool(rule.reasoning_ids))
    others = [
        _applied(template, _up_to(messages, turn, second, with_reasoning=reasons), tools)
        for turn in range(1, turns + 1)
    ]
    if [one.parts for one in _cuts(rule, template, others, second)] != [one.parts for one in cuts]:
        raise _not_separable("the template writes other text around other answers")
    return _tokenised(template, texts, cuts)


def _placeholders(word: str, turns: int, said: str) -> list[_Placeholder]:
    free = next(f"{word}{n}" for n in count() if f"{word}{n}" not in said)
    return [
        _Placeholder(f"{free} circles {n} hours and dives", f"{free} wonders {n} hours and waits")
        for n in range(1, turns + 1)
    ]


def _up_to(
    messages: Sequence[Json], turn: int, answers: Sequence[_Placeholder], *, with_reasoning: bool
) -> list[Json]:
    """The conversation up to the user message of a turn, with an answer after each earlier one."""
    found: list[Json] = []
    users = 0
    for message in messages:
        found.append(message)
        if message["role"] == "user":
            users += 1
            if users == turn:
                break
            found.append(answers[users - 1].message(with_reasoning=with_reasoning))
    return found


def _applied(template: ChatTemplate, messages: Sequence[Json], tools: Sequence[Json]) -> str:
    try:
        return template.apply(messages, tools)
    except TEMPLATE_ERRORS as error:
        raise _Refused(NotRendered("template_error", f"{type(error).__name__}: {error}")) from error


def _cuts(
    rule: HistoryRule, template: ChatTemplate, texts: list[str], answers: list[_Placeholder]
) -> list[_Cut]:
    """Each turn's text, cut at its answers; all turns agree on what stands before an answer."""
    cuts = [_cut(rule, template, texts, answers, turn) for turn in range(len(texts))]
    for turn, cut in enumerate(cuts):
        if cut.parts[:-1] != cuts[-1].parts[:turn]:
            raise _not_separable(f"turn {turn + 1} has another history than the turns after it")
    return cuts


def _cut(
    rule: HistoryRule,
    template: ChatTemplate,
    texts: list[str],
    answers: list[_Placeholder],
    turn: int,
) -> _Cut:
    text, at = texts[turn], 0
    parts, bodies = [], []
    for earlier, answer in enumerate(answers[:turn]):
        if text.count(answer.content) != 1:
            raise _not_separable(f"the template does not write answer {earlier + 1} as it is, once")
        start = text.index(answer.content)
        end = start + len(answer.content)
        if rule.reasoning == "kept":
            # History goes on from what the target read and wrote, its own thinking included.
            lead = texts[earlier]
            if not text.startswith(lead) or start < len(lead):
                raise _not_separable(
                    f"turn {turn + 1} does not begin with what turn {earlier + 1} was asked with"
                )
            _check_lead(rule, template, text[len(lead) : start], answer)
            start = len(lead)
        if start < at:
            raise _not_separable("the template writes the answers in another order")
        parts.append(text[at:start])
        bodies.append(text[start:end])
        at = end
    return _Cut([*parts, text[at:]], bodies)


def _check_lead(rule: HistoryRule, template: ChatTemplate, lead: str, answer: _Placeholder) -> None:
    """What the template writes of an answer before its content: its reasoning, or nothing."""
    if not rule.writes_reasoning:
        if lead:
            raise _not_separable(f"the template writes {lead!r} before an answer")
        return
    thought, found, rest = lead.partition(answer.reasoning)
    marks = {template.tokenizer.decode([one]) for one in rule.reasoning_ids}
    if not found or thought.strip() not in marks | {""} or rest.strip() not in marks:
        raise _not_separable(f"the template writes an answer's reasoning as {lead!r}")


def _tokenised(template: ChatTemplate, texts: list[str], cuts: list[_Cut]) -> Turns:
    first, last = texts[0], cuts[-1]
    history, bodies = last.parts[:-1], last.bodies
    continuations = [cut.parts[-1] for cut in cuts[1:]]
    # What comes before a turn's last answer is in the last turn's text too.
    ends = [body + part for body, part in zip(bodies, continuations, strict=True)]
    groups = [[first], [texts[-1]], history, bodies, continuations, ends]
    found = iter(template.tokenise([text for group in groups for text in group]))
    start, whole, before, answers, after, joints = (
        [_ids(next(found)) for _ in one] for one in groups
    )

    for part in (*before[1:], *after):
        if part[0] not in template.own_tokens:
            raise _not_separable(
                f"an answer is followed by {template.tokenizer.decode(part[:4])!r}, "
                "which no control token begins"
            )
    joined = [[*one, *two] for one, two in zip(answers, after, strict=True)]
    pairs = zip(before, answers, strict=True)
    told = [token for pair in pairs for part in pair for token in part]
    if answers and (joined != joints or told + after[-1] != whole[0]):
        raise _not_separable("the parts' ids, joined, are not those of the whole text")
    return Turns(start[0], before, after)


def _ids(one: Rendered | NotRendered) -> list[int]:
    if isinstance(one, NotRendered):
        raise _Refused(one)
    return one.prompt_ids


# Preflight


class _Probe:
    """A small conversation with one earlier answer, rendered by the target's template."""

    def __init__(self, template: ChatTemplate, profile: TargetProfile) -> None:
        self._template, self._profile = template, profile
        self.open, self.close = "", ""
        if _think_ids(profile):
            self.open, self.close = (
                template.tokenizer.decode([one]) for one in _think_ids(profile)
            )

    def history(self, answer: Json) -> str:
        conversation = [
            {"role": "user", "content": _ASK[0]},
            {"role": "assistant", **answer},
            {"role": "user", "content": _ASK[1]},
        ]
        try:
            return self._template.apply(conversation, ())
        except TEMPLATE_ERRORS as error:
            raise PreflightFailed(
                f"the target's template fails on a conversation of two turns: {error}",
                expected="an earlier answer rendered",
                change="check template_arguments in the target's profile",
            ) from error

    def keeps_reasoning_apart(self) -> bool:
        """Whether history is to hold reasoning, and takes it from `reasoning_content`."""
        kept = self._profile.history_reasoning == "kept" and self.open
        apart = {"content": _CONTENT, "reasoning_content": _REASON}
        return bool(kept) and _REASON in self.history(apart)

    def thought(self) -> str:
        return f"{self.open}\n{_REASON}\n{self.close}"

    def off_start(self) -> str:
        return self._off("", "start")

    def off_start_after_reasoning(self) -> str:
        """What goes with a thinking block that is cut off; `off_start` where none is."""
        drops = self._profile.history_reasoning == "dropped" and self.open
        if drops and _REASON not in self.history({"content": self.thought() + _CONTENT}):
            return self._off(self.thought(), "start")
        return self.off_start()

    def off_end(self) -> str:
        return self._off("", "end")

    def _off(self, before: str, side: Literal["start", "end"]) -> str:
        """The blanks that the template takes off that side of an answer."""
        plain = self.history({"content": before + _CONTENT})
        off = ""
        for blank in _BLANKS:
            content = blank + _CONTENT if side == "start" else _CONTENT + blank
            text = self.history({"content": before + content})
            if text == plain:
                off += blank
            elif text != plain.replace(_CONTENT, content):
                raise PreflightFailed(
                    f"the target's template rewrites an answer with {blank!r} at its {side}: "
                    f"{_excerpt(text)}",
                    expected="an answer written as it is, or trimmed",
                    change="set prompts.turns to last",
                )
        return off


def _think_ids(profile: TargetProfile) -> tuple[int, ...]:
    opening, closing = profile.think_open_id, profile.think_close_id
    return () if opening is None or closing is None else (opening, closing)


def _reasoning_ids(profile: TargetProfile) -> tuple[int, ...]:
    channels = profile.channels
    return _think_ids(profile) if channels is None else tuple(channels.ids.values())


def _excerpt(text: str) -> str:
    start = text.find(_ASK[0]) + len(_ASK[0])
    return repr(text[start : start + _EXCERPT_CHARACTERS])
