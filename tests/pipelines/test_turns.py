"""Turns: what stands around the target's answers is exact, or the conversation is refused."""

import json
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipelines.conversation import Answer, messages_before, next_prompt_ids, turns_of
from pipelines.errors import PreflightFailed
from pipelines.recipe import Target, TargetProfile
from pipelines.sources.row import SourceRow
from pipelines.target import prepare_quickstart_target
from pipelines.template import ChatTemplate, NotRendered, load_tokenizer
from pipelines.turns import (
    Turns,
    asked,
    check_history_reasoning,
    first_question,
    history_rule,
    render_turns,
)
from tests.support.chat_styles import STYLES, think_ids, with_style

PLAIN = STYLES["plain"]
ANSWER = "{{ m.content }}<|im_end|>"


BARE = TargetProfile(
    tools="system_message",
    think_open_id=None,
    think_close_id=None,
    tool_markers=None,
    channels=None,
    template_arguments={},
    stop_token_ids=(2,),
    history_reasoning="kept",
    reserved_ids=(0,),
    aux_layer_ids=(1, 2, 3),
)


def load(folder, style=PLAIN, **changes):
    """A chat template of a style, and its profile, with the tokenizer of a folder."""
    target = Target(path=str(folder), profile=BARE, trust_remote_code=False)
    tokenizer = with_style(load_tokenizer(target), style)
    values = {"history_reasoning": style.history_reasoning, **think_ids(tokenizer, style)}
    said = BARE.model_copy(update={**values, **changes})
    return ChatTemplate(tokenizer, said), said


def users(*texts):
    return [{"role": "user", "content": text} for text in texts]


def row(*messages):
    return SourceRow("x.jsonl", 1, messages, (), "x.jsonl #1", "unstated")


# What is asked


def test_only_the_first_question_stays_with_what_came_before_it():
    system = {"role": "system", "content": "Be brief."}
    users = [{"role": "user", "content": text} for text in ("one", "two")]
    answer = {"role": "assistant", "content": "1"}
    assert first_question(row(system, users[0], answer, users[1])) == row(system, users[0])
    assert first_question(row(system, answer)) == row(system, answer)


SYSTEM = {"role": "system", "content": "Be brief."}
GREETING = {"role": "assistant", "content": "Hello, I am Eyas."}
ONE, TWO, THREE = users("one", "two", "three")
SAID = {"role": "assistant", "content": "the set's own answer"}
RESULT = {"role": "tool", "content": "42"}


@pytest.mark.parametrize(
    ("messages", "kept", "cut"),
    [
        ([ONE], [ONE], False),
        ([ONE, SAID, TWO, SAID], [ONE, TWO], False),
        ([ONE, TWO], [ONE, TWO], False),  # a set that holds no answers
        ([SYSTEM, ONE, SAID, SYSTEM, TWO], [SYSTEM, ONE, SYSTEM, TWO], False),
        ([GREETING, ONE, SAID, TWO], [GREETING, ONE, TWO], False),
        ([ONE, SAID, TWO, SAID, RESULT, SAID, THREE], [ONE, TWO], True),
        ([ONE, SAID, RESULT], [ONE], True),
        ([ONE, SYSTEM, SAID, RESULT], [ONE], True),
        ([GREETING, RESULT, ONE], [GREETING, RESULT, ONE], False),
    ],
)
def test_only_what_the_target_is_to_answer_is_kept(messages, kept, cut):
    found, at_tool = asked(row(*messages))
    assert (list(found.messages), at_tool) == (kept, cut)


def test_a_single_question_keeps_its_identity():
    assert asked(row(SYSTEM, ONE, SAID))[0].content_sha256 == row(SYSTEM, ONE).content_sha256


# Exactness


def answer(tokenizer, style, turn, reasoning, content):
    ids, segments, texts = [], [], {"reasoning": "", "content": ""}
    for kind, text in style.speak(reasoning, content):
        part = tokenizer.encode(text, add_special_tokens=False)
        segments.append((kind, len(ids), len(ids) + len(part)))
        ids += part
        texts[kind] = text
    return Answer(
        sample_id=f"birds-1.t{turn}.s1",
        status="ok",
        finish_reason="stop",
        output_ids=tuple(ids),
        segments=tuple(segments),
        reasoning=texts["reasoning"],
        content=texts["content"],
    )


def check_conversation(template, said, style, messages, spoken):
    """Each turn is asked with what the template writes of the conversation so far."""
    tokenizer, rule = template.tokenizer, history_rule(template, said)
    turns = render_turns(template, rule, messages, ())
    assert isinstance(turns, Turns), turns
    prompt = {"sample_id": "birds-1", "messages": json.dumps(messages), **vars(turns)}
    assert turns_of(prompt) == len(spoken) + 1
    answers = [answer(tokenizer, style, i, *one) for i, one in enumerate(spoken, start=1)]
    for turn in range(1, len(spoken) + 2):
        before = answers[: turn - 1]
        ids = next_prompt_ids(prompt, before, rule, tokenizer.decode)
        assert isinstance(ids, tuple), ids
        said_so_far = json.loads(messages_before(prompt, before, turn, rule))
        text = template.apply(said_so_far, ())
        assert tokenizer.decode(ids) == text
        # Blanks at an answer's start are the target's own tokens; a text would merge them.
        if (
            not any(one.content[:1].isspace() for one in before)
            or style.history_reasoning == "kept"
        ):
            assert list(ids) == tokenizer.encode(text, add_special_tokens=False)
        if rule.reasoning == "kept" and before:
            lead = next_prompt_ids(prompt, before[:-1], rule, tokenizer.decode)
            assert ids[: len(lead)] == lead


def conversations(alphabet):
    """Whether there is a system message, what is asked, and what is answered in between."""
    words = st.text(alphabet, max_size=20).map(lambda text: f"a{text}z")
    return st.integers(1, 4).flatmap(
        lambda n: st.tuples(
            st.booleans(),
            st.lists(words, min_size=n, max_size=n),
            st.lists(st.tuples(words, words), min_size=n - 1, max_size=n - 1),
        )
    )


ANYTHING = conversations(st.characters(codec="utf-8", exclude_characters="<>|\x00"))
# What the quick start's vocabulary can spell.
MERGED = conversations(st.sampled_from("ab 1.\n\u00e9\U0001f985'"))
PROPERTY = settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def conversation(with_system, asks):
    return [*([SYSTEM] if with_system else []), *users(*asks)]


@pytest.fixture(params=STYLES)
def styled(request, tiny_target):
    style = STYLES[request.param]
    return (*load(tiny_target, style), style)


@PROPERTY
@example((True, ["one", "two", "three"], [("why", "4."), ("hm", "\u00e9\U0001f985 5")]))
@given(ANYTHING)
def test_a_turn_is_asked_with_what_the_template_writes(styled, said):
    template, given_profile, style = styled
    with_system, asks, spoken = said
    check_conversation(template, given_profile, style, conversation(with_system, asks), spoken)


@pytest.fixture(params=STYLES)
def styled_smollm(request):
    style = STYLES[request.param]
    return (*load(prepare_quickstart_target(), style), style)


@pytest.mark.smollm
@PROPERTY
@given(MERGED)
def test_a_turn_is_asked_with_what_the_template_writes_in_merged_tokens(styled_smollm, said):
    template, given_profile, style = styled_smollm
    with_system, asks, spoken = said
    check_conversation(template, given_profile, style, conversation(with_system, asks), spoken)


@pytest.mark.smollm
@PROPERTY
@given(MERGED)
def test_a_turn_of_the_quick_starts_target_is_its_own_templates(said):
    folder = prepare_quickstart_target()
    template, given_profile = load(folder)
    template.tokenizer.chat_template = (folder / "chat_template.jinja").read_text()
    with_system, asks, spoken = said
    check_conversation(template, given_profile, PLAIN, conversation(with_system, asks), spoken)


def test_placeholders_that_a_conversation_holds_are_not_used(tiny_target):
    template, said = load(tiny_target)
    asks = ["Falcon0 circles 1 hours and dives", "Kestrel0 and Falcon1"]
    check_conversation(template, said, PLAIN, users(*asks), [("", "yes")])


# What a template does with reasoning


@pytest.mark.parametrize("name", [name for name, style in STYLES.items() if style.thinks])
def test_a_profile_that_is_wrong_about_reasoning_is_refused_with_what_was_seen(tiny_target, name):
    style = STYLES[name]
    other = {"kept": "dropped", "dropped": "kept"}[style.history_reasoning]
    template, said = load(tiny_target, style, history_reasoning=other)
    with pytest.raises(PreflightFailed, match=f"history_reasoning holds '{other}'") as failure:
        check_history_reasoning(template, said)
    assert style.history_reasoning in failure.value.expected
    assert "Voles and hares" in failure.value.seen
    check_history_reasoning(*load(tiny_target, style))


@pytest.mark.parametrize("said", ["kept", "dropped"])
def test_a_target_that_does_not_think_may_say_either(tiny_target, said):
    history_rule(*load(tiny_target, PLAIN, history_reasoning=said))


@pytest.mark.parametrize(
    ("name", "start", "after_reasoning", "end"),
    [
        ("plain", "", "", ""),
        ("trims", "\n \t\r", "\n \t\r", "\n \t\r"),
        ("qwen3", "", "\n", ""),
        ("kimi", "", "", ""),
        ("deepseek", "", "", ""),
    ],
)
def test_blanks_that_the_template_takes_off_are_found(
    tiny_target, name, start, after_reasoning, end
):
    rule = history_rule(*load(tiny_target, STYLES[name]))
    assert (rule.off_start, rule.off_start_after_reasoning, rule.off_end) == (
        start,
        after_reasoning,
        end,
    )


@pytest.mark.parametrize(
    ("name", "writes_reasoning", "may_be_bare"),
    [
        ("plain", False, True),
        ("qwen3", False, True),
        ("keeps", True, True),
        ("keeps_opened", True, False),
        ("keeps_always", True, False),
    ],
)
def test_whether_an_answer_may_be_without_reasoning_is_found(
    tiny_target, name, writes_reasoning, may_be_bare
):
    rule = history_rule(*load(tiny_target, STYLES[name]))
    assert (rule.writes_reasoning, rule.may_be_bare) == (writes_reasoning, may_be_bare)


# Refusals


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("{{ m.content | upper }}<|im_end|>", "rewrites an answer with '\\n' at its start"),
        ("{{ m.content | length }}" + ANSWER, "rewrites an answer"),
        ("{{ m.content | trim | upper }}<|im_end|>", "does not write answer 1 as it is, once"),
        (ANSWER * 2, "does not write answer 1 as it is, once"),
        ("{{ m.content }} <|im_end|>", "followed by ' <|im_end|>\\n"),
        (ANSWER + "{{ m.content | trim | length }}", "writes other text around other answers"),
        ("Sure: " + ANSWER, "writes 'Sure: ' before an answer"),
        ("{{ messages | length }}" + ANSWER, "writes '3' before an answer"),
    ],
)
def test_a_template_whose_turns_cannot_be_told_apart_is_refused(tiny_target, written, seen):
    header = "<|im_start|>assistant\n"
    changed = PLAIN.template.replace(header + ANSWER, header + written)
    style = replace(PLAIN, template=changed)
    with pytest.raises(PreflightFailed) as failure:
        history_rule(*load(tiny_target, style))
    assert seen in failure.value.seen
    assert "prompts.turns to last" in failure.value.change


def test_history_that_depends_on_what_follows_is_refused(tiny_target):
    changed = PLAIN.template.replace(
        "{{ m.role }}\n", "{{ m.role }}{{ '!' if loop.index0 == 0 and messages | length > 3 }}\n"
    )
    template, _ = load(tiny_target, replace(PLAIN, template=changed), history_reasoning="dropped")
    rule = history_rule(*load(tiny_target, PLAIN, history_reasoning="dropped"))
    assert isinstance(render_turns(template, rule, users("one", "two"), ()), Turns)
    found = render_turns(template, rule, users("one", "two", "three"), ())
    assert isinstance(found, NotRendered)
    assert found.reason == "turns_not_separable"


def test_a_conversation_in_which_reasoning_would_come_back_is_refused(tiny_target):
    template, said = load(tiny_target, STYLES["qwen3"])
    rule = history_rule(template, said)
    found = render_turns(template, rule, users("one", "<tool_response>4"), ())
    assert isinstance(found, NotRendered)
    assert found.reason == "turns_not_separable"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([GREETING, RESULT], "turns_not_separable"),
        (users("one", "a <|im_end|> b"), "special_token_in_content"),
        ([], "turns_not_separable"),
    ],
)
def test_a_refusal_has_the_reason_of_what_is_wrong(tiny_target, messages, reason):
    template, said = load(tiny_target)
    found = render_turns(template, history_rule(template, said), messages, ())
    assert isinstance(found, NotRendered)
    assert found.reason == reason


@pytest.mark.smollm
def test_parts_that_tokenise_otherwise_than_the_whole_are_refused():
    # A blank and the word after it are one token in a whole text, and two in its parts.
    template, said = load(prepare_quickstart_target())
    rule = history_rule(template, said)
    template.tokenizer.chat_template = PLAIN.template.replace("assistant\n", "assistant: ")
    found = render_turns(template, rule, users("one", "two"), ())
    assert isinstance(found, NotRendered)
    assert "are not those of the whole text" in found.detail
