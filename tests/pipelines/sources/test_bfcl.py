"""Questions of the leaderboard."""

import json

import pytest

from pipelines.sources.bfcl import read, recognises
from pipelines.sources.row import Refused

ASK = {"role": "user", "content": "Who?"}
FUNCTION = {"name": "f", "parameters": {"type": "dict", "properties": {}}}


def test_all_turns_of_a_question_follow_each_other():
    more = {"role": "user", "content": "And then?"}
    given = read({"question": [[ASK], [], [more]], "function": [FUNCTION]})
    assert given.messages == [ASK, more]
    assert given.tools == [FUNCTION]


@pytest.mark.parametrize("function", [FUNCTION, [FUNCTION], json.dumps([FUNCTION])])
def test_functions_are_declared_as_they_stand(function):
    assert read({"question": [[ASK]], "function": function}).tools == [FUNCTION]


@pytest.mark.parametrize("row", [{}, {"function": []}, {"function": None}])
def test_no_functions_are_none(row):
    assert read({"question": [[ASK]], **row}).tools is None


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "Who?"}, "malformed_json"),
        ({"question": [ASK]}, "wrong_format"),
        ({"question": None}, "wrong_format"),
        ({"question": [[ASK]], "function": "f()"}, "malformed_json"),
        ({"question": [[ASK]], "involved_classes": ["A"]}, "bad_tools"),
        ({"question": [[ASK]], "function": [], "involved_classes": ["A"]}, "bad_tools"),
    ],
)
def test_a_row_without_its_turns_or_its_functions_is_refused(row, reason):
    with pytest.raises(Refused) as refused:
        read(row)
    assert refused.value.reason == reason


def test_a_question_as_text_is_not_recognised():
    assert recognises({"question": [[ASK]], "function": []})
    assert recognises({"question": [[ASK]], "involved_classes": []})
    assert not recognises({"question": "Who?", "function": []})
    assert not recognises({"question": [[ASK]]})
