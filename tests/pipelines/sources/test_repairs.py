"""Repairs: each rule mends what its name says, and leaves everything else as it is."""

import pytest

from pipelines.sources import repairs
from pipelines.sources.messages import parse_row
from pipelines.sources.repairs import (
    ALIASES,
    KEY_RULES,
    ROLES,
    VALUE_RULES,
    mend_each,
    mend_together,
    present,
)
from pipelines.sources.row import Refused, SourceRow

ASK = {"role": "user", "content": "What do hawks eat?"}
ANSWER = {"role": "assistant", "content": "Voles."}
SYSTEM = {"role": "system", "content": "Be brief."}


def call(name="look_up", arguments=None, **more):
    function = {"name": name, "arguments": {} if arguments is None else arguments}
    return {**more, "type": "function", "function": function}


def calls(*some, **more):
    return {"role": "assistant", "content": "", **more, "tool_calls": list(some)}


def result(content="voles", **more):
    return {"role": "tool", "content": content, **more}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def each(message):
    (found,), names = mend_each([present(message)], (*KEY_RULES, *VALUE_RULES))
    return found, names


def together(*messages, answered=True):
    return mend_together(list(messages), answered=answered)


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        (
            assistant("", reasoning="Prey."),
            "reasoning_renamed",
            assistant("", reasoning_content="Prey."),
        ),
        (
            assistant("", thinking="Prey."),
            "reasoning_renamed",
            assistant("", reasoning_content="Prey."),
        ),
        (
            assistant("Yes.", function_call={"name": "f", "arguments": "{}"}),
            "function_call_renamed",
            calls({"type": "function", "function": {"name": "f", "arguments": "{}"}})
            | {"content": "Yes."},
        ),
        ({**ASK, "weight": 1, "name": "Ann"}, "unknown_keys_dropped", ASK),
        ({**ASK, "tool_call_id": "call_0"}, "unknown_keys_dropped", ASK),
        (user([{"type": "text", "text": "a"}, "b"]), "parts_joined", user("a\nb")),
        (user([{"type": "input_text", "text": "a"}, {"text": "b"}]), "parts_joined", user("a\nb")),
        (user([]), "parts_joined", user("")),
        (result([{"type": "text", "text": "a"}]), "parts_joined", result("a")),
        (result({"a": [1, None]}), "result_as_json", result('{"a":[1,null]}')),
        (result([{"type": "hawk"}]), "result_as_json", result('[{"type":"hawk"}]')),
        (result(["é", "b"]), "result_as_json", result('["é","b"]')),
        (result([]), "result_as_json", result("[]")),
        (result(False), "result_as_json", result("false")),
        (result(0), "result_as_json", result("0")),
        (user("\ufeff\ufeffa\ufeffb"), "bom_removed", user("a\ufeffb")),
        (
            assistant("a", reasoning_content="\ufeffb"),
            "bom_removed",
            assistant("a", reasoning_content="b"),
        ),
        (
            calls({"name": "f", "arguments": {"x": 1}}),
            "call_wrapped",
            calls(call("f", {"x": 1})),
        ),
        *(
            (calls(call("f", empty)), "empty_arguments", calls(call("f", {})))
            for empty in ("", " \n")
        ),
        (
            calls({"type": "function", "function": {"name": "f", "arguments": None}}),
            "empty_arguments",
            calls(call("f")),
        ),
        (
            calls({"type": "function", "function": {"name": "f"}}),
            "empty_arguments",
            calls(call("f")),
        ),
    ],
)
def test_a_message_is_mended_by_the_rule_that_is_named(given, name, expected):
    before = repr(given)
    assert each(given) == (expected, [name])
    assert repr(given) == before
    assert each(expected) == (expected, [])


def test_an_absent_key_has_many_spellings_and_no_name():
    bare = {"role": "user", "content": None, "tool_calls": None, "name": "", "function_call": None}
    assert present(bare) == {"role": "user", "content": ""}
    assert present({"role": "user", "tool_calls": [], "weight": 0}) == {
        "role": "user",
        "content": "",
        "weight": 0,
    }
    assert present(ASK) == ASK


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "'image_url'"),
        ([{"type": "text", "text": "a"}, {"type": "input_audio"}], "'input_audio'"),
        ([{"type": ["text"], "text": "a"}], r"\['text'\]"),
        ([{"type": "text"}], "null"),
        ([{"type": "text", "text": 3}], "int"),
        ([["a"]], "list"),
        ([None], "null"),
    ],
)
def test_a_part_that_is_no_text_is_named(content, seen):
    with pytest.raises(Refused, match=seen) as refusal:
        each(user(content))
    assert refusal.value.reason == "unsupported_content"


def test_an_image_that_a_tool_gave_back_is_no_json():
    with pytest.raises(Refused, match="'image'") as refusal:
        each(result([{"type": "text", "text": "a"}, {"type": "image", "data": "x"}]))
    assert refusal.value.reason == "unsupported_content"


def test_two_ways_of_calling_in_one_message_are_one_too_many():
    with pytest.raises(Refused, match="both") as refusal:
        each({**calls(call()), "function_call": {"name": "f"}})
    assert refusal.value.reason == "bad_tool_call"


def test_arguments_under_another_name_are_not_absent():
    odd = {"type": "function", "function": {"name": "f", "parameters": {"x": 1}}}
    assert each(calls(odd)) == (calls(odd), [])


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ([user(" "), ASK], "empty_message_dropped", [ASK]),
        ([{**SYSTEM, "content": ""}, ASK], "empty_message_dropped", [ASK]),
        ([SYSTEM, ANSWER, ASK], "opening_answer_dropped", [SYSTEM, ASK]),
        ([user("a"), user("b")], "same_role_joined", [user("a\n\nb")]),
        (
            [SYSTEM, SYSTEM, ASK],
            "same_role_joined",
            [{**SYSTEM, "content": "Be brief.\n\nBe brief."}, ASK],
        ),
        (
            [ASK, assistant("a"), assistant("b", reasoning_content="r"), ASK],
            "same_role_joined",
            [ASK, assistant("a\n\nb", reasoning_content="r"), ASK],
        ),
        (
            [ASK, assistant("Wait."), calls(call(id="x")), result(tool_call_id="x")],
            "same_role_joined",
            [ASK, {**calls(call(id="x")), "content": "Wait."}, result(tool_call_id="x")],
        ),
        (
            [ASK, calls(call()), result()],
            "call_ids_given",
            [ASK, calls(call(id="call_0")), result(tool_call_id="call_0")],
        ),
        (
            [ASK, calls(call(id="x")), result()],
            "call_ids_given",
            [ASK, calls(call(id="x")), result(tool_call_id="x")],
        ),
    ],
)
def test_a_conversation_is_mended_by_the_rule_that_is_named(given, name, expected):
    assert together(*given) == (expected, [name])
    assert together(*expected) == (expected, [])


def test_a_tool_may_have_no_output_and_a_call_no_words():
    messages = [ASK, calls(call(id="x")), result("", tool_call_id="x")]
    assert together(*messages) == (messages, [])


def test_questions_of_a_set_without_answers_are_turns():
    assert together(user("a"), user("b"), answered=False) == ([user("a"), user("b")], [])
    joined, names = together(SYSTEM, SYSTEM, user("a"), answered=False)
    assert (len(joined), names) == (2, ["same_role_joined"])


def test_a_later_system_message_stays_where_it_is():
    messages = [SYSTEM, ASK, ANSWER, SYSTEM, ASK]
    assert together(*messages) == (messages, [])


def test_ids_that_are_given_are_new_and_counted_over_the_conversation():
    taken = calls(call(id="call_1"))
    messages, _ = together(
        ASK,
        calls(call("f"), call("g")),
        result(),
        result(),
        taken,
        result(),
        calls(call()),
        result(),
    )
    ids = [one["id"] for message in messages for one in message.get("tool_calls", ())]
    assert ids == ["call_0", "call_2", "call_1", "call_3"]
    assert [one["tool_call_id"] for one in messages if one["role"] == "tool"] == ids


def test_results_find_their_calls_by_id_by_name_or_in_order():
    def answered(*results):
        two = calls(call("f", id="x"), call("g", id="y"), call("f", id="z"))
        messages, _ = together(ASK, two, *results)
        return [one["tool_call_id"] for one in messages[2:]]

    assert answered(result(), result(), result()) == ["x", "y", "z"]
    assert answered(*(result(tool_call_id=one) for one in "zxy")) == ["z", "x", "y"]
    assert answered(result(name="g"), result(name="f"), result(name="f")) == ["y", "x", "z"]
    assert answered(result(tool_call_id="z", name="f"), result(), result()) == ["z", "x", "y"]


@pytest.mark.parametrize(
    "messages",
    [
        [ASK, result()],
        [ASK, ANSWER, result()],
        [ASK, calls(call(id="x")), result(tool_call_id="y")],
        [ASK, calls(call("f", id="x")), result(name="g")],
        [ASK, calls(call("f", id="x")), result(tool_call_id="x", name="g")],
        [ASK, calls(call(id="x")), result(tool_call_id="x"), result(tool_call_id="x")],
        [ASK, calls(call(id="x")), result(), ANSWER, result(tool_call_id="x")],
        [ASK, calls(call()), result(tool_call_id="x")],
    ],
)
def test_a_result_that_answers_no_waiting_call_is_refused(messages):
    with pytest.raises(Refused) as refusal:
        together(*messages)
    assert refusal.value.reason == "orphan_tool_result"


@pytest.mark.parametrize(
    "messages",
    [
        [ASK, calls(call()), ASK],
        [ASK, calls(call()), ANSWER, ASK],
        [ASK, calls(call()), calls(call()), result(), result()],
        [ASK, calls(call(), call()), result()],
        [ASK, calls(call(), call()), result(), ASK, result()],
        [ASK, calls(call()), SYSTEM, result()],
    ],
)
def test_a_call_whose_result_is_missing_is_refused(messages):
    with pytest.raises(Refused, match="has no result") as refusal:
        together(*messages)
    assert refusal.value.reason == "unanswered_tool_call"


def test_the_aliases_are_of_known_roles():
    assert set(ALIASES.values()) == set(ROLES)
    assert not set(ALIASES) & set(ROLES)


def test_every_rule_is_a_public_function_of_its_name_and_reaches_a_row():
    messy = [
        {"role": "bot", "content": "Hello."},
        {"role": "Human", "content": [{"type": "text", "text": "\ufeffa"}], "weight": 1},
        user("b"),
        assistant("", reasoning="r", function_call={"name": "f", "arguments": ""}),
        {"role": "function", "content": {"x": 1}, "name": "f"},
        user(""),
        assistant("c", tool_calls=[{"name": "g", "arguments": "{}"}]),
        result(),
    ]
    row = parse_row({"messages": messy}, file="a", line=1)
    assert isinstance(row, SourceRow)
    rules = [rule.__name__ for rule in (*KEY_RULES, *VALUE_RULES)]
    whole = [
        "empty_message_dropped",
        "opening_answer_dropped",
        "same_role_joined",
        "call_ids_given",
    ]
    assert list(row.repairs) == ["role_renamed", *rules, *whole]
    assert all(callable(getattr(repairs, name)) for name in row.repairs)
    again = parse_row({"messages": list(row.messages)}, file="a", line=1)
    assert (again.messages, again.repairs) == (row.messages, ())
