"""One checked form: every fault has a name and a line, and nothing else is lost."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.sources.messages import parse_row
from pipelines.sources.row import BadRow, Format, Given, Refused, SourceRow

ASK = {"role": "user", "content": "What do hawks eat?"}
ANSWER = {"role": "assistant", "content": "Voles."}
CALL = {"function": {"name": "look_up", "arguments": '{"bird": "hawk"}'}}


def parse(messages, **more):
    return parse_row({"messages": messages, **more}, file="a.jsonl", line=7)


def user(content):
    return {"role": "user", "content": content}


def calling(arguments):
    call = {"function": {"name": "look_up", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([ASK], "not_an_object"),
        ({}, "wrong_format"),
        ({"messages": []}, "bad_messages"),
        ({"messages": "hello"}, "malformed_json"),
        ({"messages": {"role": "user"}}, "wrong_format"),
        ({"messages": ["hello"]}, "bad_messages"),
        ({"messages": [{"role": "critic", "content": "hi"}]}, "unknown_role"),
        ({"messages": [{"role": ["user"], "content": "hi"}]}, "unknown_role"),
        ({"messages": [ASK, ANSWER, {"role": "critic", "content": "no"}]}, "unknown_role"),
        ({"messages": [{"content": "hi"}]}, "unknown_role"),
        ({"messages": [{"role": "user"}]}, "empty_content"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "empty_content"),
        ({"messages": [{"role": "user", "content": None}]}, "empty_content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "unsupported_content"),
        ({"messages": [{"role": "user", "content": 3}]}, "unsupported_content"),
        ({"messages": [ASK, ANSWER, user(" ")]}, "empty_content"),
        ({"messages": [{"role": "assistant", "content": {}}, ASK]}, "unsupported_content"),
        ({"messages": [ASK, {**ANSWER, "reasoning_content": 3}, ASK]}, "unsupported_content"),
        ({"messages": [{"role": "system", "content": "Be kind."}]}, "no_question"),
        ({"messages": [ASK, {"role": "system", "content": "Be kind."}, ANSWER]}, "no_question"),
        ({"messages": [ANSWER]}, "no_question"),
        ({"messages": [{"role": "user", "content": "a\0b"}]}, "nul_character"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "lone_surrogate"),
        ({"messages": [ASK, {"role": "tool", "content": "", "name": "\0"}]}, "nul_character"),
        ({"messages": [ASK, calling('{"a": "\\u0000"}'), ASK]}, "nul_character"),
        ({"messages": [ASK, calling({"a": "\ud83d"}), ASK]}, "lone_surrogate"),
        ({"messages": [ASK, calling('{"a": 1e999}'), ASK]}, "bad_field"),
        ({"messages": [ASK], "source": "\ud83d"}, "lone_surrogate"),
        ({"messages": [ASK], "source": 3}, "bad_field"),
        ({"messages": [ASK], "tools": [{"name": "a", "x": float("inf")}]}, "bad_field"),
        ({"messages": [ASK], "tools": {"name": "a"}}, "bad_tools"),
        ({"messages": [ASK], "tools": [{"name": "a"}, {"name": "a"}]}, "bad_tools"),
        ({"messages": [{**ASK, "tool_calls": [CALL]}]}, "bad_tool_call"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [{}]}, ASK]}, "bad_tool_call"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": "f()"}, ASK]}, "bad_tool_call"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": ["f()"]}, ASK]}, "bad_tool_call"),
        ({"messages": [ASK, {**ANSWER, "tool_calls": [{**CALL, "id": 0}]}, ASK]}, "bad_tool_call"),
        (
            {"messages": [ASK, {**ANSWER, "tool_calls": [{**CALL, "type": "custom"}]}, ASK]},
            "bad_tool_call",
        ),
        (
            {"messages": [ASK, {**ANSWER, "tool_calls": [{**CALL, "id": "x"}] * 2}, ASK]},
            "bad_tool_call",
        ),
        ({"messages": [ASK, {"role": "tool", "content": "a", "name": 3}]}, "bad_field"),
        ({"messages": [ASK, {"role": "tool", "content": "a"}]}, "orphan_tool_result"),
        ({"messages": [ASK, calling("{}"), ASK]}, "unanswered_tool_call"),
    ],
)
def test_every_fault_of_a_row_is_named(row, reason):
    bad = parse_row(row, file="a.jsonl", line=7)
    assert isinstance(bad, BadRow)
    assert (bad.file, bad.line, bad.reason) == ("a.jsonl", 7, reason)
    assert bad.detail


@pytest.mark.parametrize("arguments", ["not json", "[1]", "3", [1], 0, '{"a": 1, "a": 2}', '"{}"'])
def test_tool_call_arguments_have_to_be_an_object(arguments):
    bad = parse([ASK, calling(arguments), {"role": "tool", "content": "voles"}])
    assert isinstance(bad, BadRow)
    assert bad.reason == "bad_tool_call"


def test_the_sets_own_answer_is_dropped_and_earlier_ones_stay():
    row = parse([ASK, ANSWER, ASK, ANSWER, ANSWER])
    assert isinstance(row, SourceRow)
    assert list(row.messages) == [ASK, ANSWER, ASK]


def test_arguments_in_a_string_and_in_an_object_are_the_same_call():
    def row(arguments):
        return parse([ASK, calling(arguments), {"role": "tool", "content": "voles"}])

    assert row('{"bird": "hawk"}') == row({"bird": "hawk"})
    assert row({"bird": "hawk"}).messages[1]["tool_calls"] == [
        {
            "id": "call_0",
            "type": "function",
            "function": {"name": "look_up", "arguments": {"bird": "hawk"}},
        }
    ]


def test_the_dropped_answer_is_not_checked_and_only_measured():
    row = parse(
        [
            ASK,
            {"role": "gpt", "content": "\ud83d Voles.\0", "reasoning_content": "Prey."},
            {
                "role": "assistant",
                "content": [{"type": "image"}, {"type": "text", "text": "Hares."}],
            },
            {"role": "assistant", "content": 3, "tool_calls": "f()", "function_call": {}},
        ]
    )
    assert (list(row.messages), row.repairs) == ([ASK], ("role_renamed",))
    assert row.answer == "Prey.\n? Voles.\0\nHares."
    row.answer.encode()
    assert parse([ASK]).answer == ""


@pytest.mark.parametrize(
    "page",
    [
        '<div class="markdown prose w-full break-words light"><p>Voles.</p></div>',
        "<p>Hawks eat voles.</p>\n<ul>\n<li>and hares</li>\n</ul>\n",
        "\n<p>Voles.</p>",
    ],
)
def test_an_answer_that_is_a_saved_page_is_refused_and_a_users_html_is_not(page):
    bad = parse([ASK, {"role": "assistant", "content": page}, ASK])
    assert bad.reason == "page_markup"
    assert list(parse([user(page)]).messages) == [user(page)]
    assert isinstance(parse([ASK, {"role": "assistant", "content": page}]), SourceRow)
    for words in (f"Write this:\n{page}", f"```html\n{page}\n```", "<p> opens a paragraph."):
        assert isinstance(parse([ASK, {"role": "assistant", "content": words}, ASK]), SourceRow)


def test_what_is_dropped_may_hold_anything():
    row = parse([{**ASK, "seen_at": object(), "note": "\0"}])
    assert (list(row.messages), row.repairs) == ([ASK], ("unknown_keys_dropped",))


def test_texts_stay_as_they_are():
    text = " \r\n\tA\u0301 <p>é🦅\u200b\x07 \r\n"
    row = parse([user(text)])
    assert (row.messages[0]["content"], row.repairs) == (text, ())


def test_a_row_keeps_what_its_set_declared():
    given = [{"name": "look_up", "parameters": {"type": "dict", "optional": 1}}]
    as_text = json.dumps(given)
    row = parse([ASK], tools=as_text)
    assert row.tools_given == as_text
    assert row.tools == parse([ASK], tools=given).tools
    assert row.tools[0]["function"]["parameters"]["type"] == "object"
    assert parse([ASK]).tools_given is None


def test_a_row_is_read_by_its_format():
    def read(row):
        if "q" not in row:
            raise Refused("wrong_format", "no q")
        return Given([{"role": "human", "content": row["q"]}], row.get("functions"))

    reader = Format("alpaca", lambda row: "q" in row, read)
    row = parse_row({"q": "hi", "functions": [{"name": "f"}]}, reader, file="a", line=3)
    assert (row.format, row.messages, row.line) == ("alpaca", (user("hi"),), 3)
    assert row.tools_given == [{"name": "f"}]
    assert parse_row({}, reader, file="a", line=3) == BadRow("a", 3, "wrong_format", "no q")


def test_a_row_without_license_says_so():
    assert parse([ASK]).license == "unstated"
    assert parse([ASK]).source == "a.jsonl #7"
    assert parse([ASK], license="MIT", source="x #1").license == "MIT"
    assert parse([ASK], license=None).license == "unstated"


def test_identity_ignores_the_order_of_keys_and_nothing_else():
    one = parse([{"role": "user", "content": "hi"}])
    assert one.content_sha256 == parse([{"content": "hi", "role": "user"}]).content_sha256
    assert one.content_sha256 != parse([{"role": "user", "content": "hi "}]).content_sha256
    assert one.content_sha256 != parse([ASK]).content_sha256
    assert one.content_sha256 != parse(list(one.messages), tools=[{"name": "a"}]).content_sha256


def test_a_deeply_nested_row_is_refused_not_a_crash():
    nested = []
    for _ in range(500):
        nested = [nested]
    assert parse([ASK], tools=nested).reason == "bad_field"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["messages", "tools", "role", "content", "name", "type", "function"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


PROPERTY = settings(max_examples=300, deadline=None)


def messages_anywhere():
    """A conversation of every kind of message, with any value in any place."""
    call = st.fixed_dictionaries(
        {},
        optional={
            "id": st.sampled_from(["x", "y", ""]) | JSON,
            "type": st.just("function") | JSON,
            "function": st.fixed_dictionaries(
                {"name": st.sampled_from(["f", "g"])},
                optional={"arguments": st.sampled_from(["", "{}", '{"a": 1}']) | JSON},
            )
            | JSON,
        },
    )
    part = st.fixed_dictionaries({"type": st.sampled_from(["text", "image"]), "text": JSON})
    text = st.sampled_from(["hi", " ", "\ufeffhi", "<p>hi</p>", "a\r\n", "\ud83d", "a\0"])
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool", "gpt", "User"]) | JSON},
        optional={
            "content": text | text | st.lists(part, max_size=2) | JSON,
            "tool_calls": st.lists(call, max_size=2) | JSON,
            "function_call": JSON,
            "tool_call_id": st.sampled_from(["x", "y", "call_0"]) | JSON,
            "name": st.sampled_from(["f", "g"]) | JSON,
            "reasoning_content": text | JSON,
            "thinking": text,
            "weight": JSON,
        },
    )
    return st.lists(message | JSON, max_size=6)


def mostly_right():
    """Conversations that mostly pass: questions, answers, calls with their results."""
    words = st.sampled_from(["hi", "\ufeffhi", "", "a\n"])
    ask = st.builds(
        lambda text, role: [{"role": role, "content": text}],
        words,
        st.sampled_from(["user", "human"]),
    )
    answer = st.builds(
        lambda text, why: [{"role": "assistant", "content": text, "reasoning": why}], words, words
    )
    ids = st.sampled_from([("x", "y"), (None, None), ("x", None)])

    def called(given, results, names):
        one, two = ({"function": {"name": name, "arguments": "{}"}} for name in "fg")
        both = [{**one, "id": given[0]}, {**two, "id": given[1]}]
        answers = [
            {"role": "tool", "content": "ok", "tool_call_id": one, "name": name if names else None}
            for one, name in zip(results, "fg", strict=True)
        ]
        return [{"role": "assistant", "tool_calls": both}, *answers]

    tools = st.builds(called, ids, ids, st.booleans())
    system = st.just([{"role": "system", "content": "Be brief."}])
    return st.lists(st.one_of(ask, ask, answer, tools, system), max_size=6).map(
        lambda some: [one for group in some for one in group]
    )


def check(row):
    """What every row promises to the template and to those after it."""
    json.dumps([row.messages, row.tools, row.tools_given, row.source]).encode()
    stored = json.dumps([row.messages, row.tools, row.tools_given], ensure_ascii=False)
    assert json.loads(stored.encode())[0] == list(row.messages)
    roles = [one["role"] for one in row.messages]
    assert set(roles) <= {"system", "user", "assistant", "tool"}
    assert "user" in roles
    assert roles[-1] in ("user", "tool")
    first = roles.index("user")
    assert set(roles[:first]) <= {"system"}
    waiting = {}
    for before, one in zip([None, *row.messages], row.messages, strict=False):
        assert set(one) <= {
            "role",
            "content",
            "reasoning_content",
            "tool_calls",
            "tool_call_id",
            "name",
        }
        assert isinstance(one["content"], str)
        assert "\0" not in json.dumps(one, ensure_ascii=False)
        assert not one["content"].startswith("\ufeff")
        if before and before["role"] == one["role"]:
            assert one["role"] == "tool" or (one["role"] == "user" and "assistant" not in roles)
        if one["role"] == "tool":
            name = waiting.pop(one["tool_call_id"])
            assert one.get("name", name) == name
            continue
        assert not waiting
        assert one["content"].strip() or one.get("tool_calls")
        for call in one.get("tool_calls", ()):
            assert one["role"] == "assistant"
            assert isinstance(call["function"]["arguments"], dict)
            assert call["id"] not in waiting
            waiting[call["id"]] = call["function"]["name"]
    assert not waiting
    assert len(set(row.repairs)) == len(row.repairs)
    assert len(row.content_sha256) == 64


def checked(value):
    row = parse_row(value, file="a.jsonl", line=1)
    if isinstance(row, BadRow):
        assert row.reason
        assert row.detail
        return None
    check(row)
    again = {"messages": list(row.messages), "tools": list(row.tools)}
    twice = parse_row(again, file="a.jsonl", line=1)
    assert (twice.messages, twice.tools, twice.repairs) == (row.messages, row.tools, ())
    return row


@given(JSON)
def test_any_value_is_a_row_or_a_named_refusal(value):
    checked(value)


@PROPERTY
@given(messages_anywhere(), JSON, st.none() | JSON)
def test_any_value_in_any_place_of_a_message_is_a_row_or_a_named_refusal(messages, tools, source):
    checked({"messages": messages, "source": source})
    checked({"messages": [ASK, *messages, ASK], "tools": tools})


@PROPERTY
@given(mostly_right())
def test_a_row_keeps_its_promises_and_parses_to_itself(messages):
    checked({"messages": [*messages, ASK]})


def test_most_of_what_is_mostly_right_is_a_row():
    """The property above has to see rows, not only refusals."""
    seen = []

    @settings(PROPERTY, database=None)
    @given(mostly_right())
    def look(messages):
        seen.append(checked({"messages": [*messages, ASK]}) is not None)

    look()
    assert sum(seen) > len(seen) / 4
