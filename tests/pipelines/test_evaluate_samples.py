"""Drafted text is told from the target's own; the file is that of the evaluation or is refused."""

import json

import pytest

from pipelines.errors import VerificationFailed
from pipelines.evaluate_samples import AnswerSample, read_samples, write_samples
from pipelines.store import RunFolder, write_json


def test_drafted_text_is_told_from_the_targets_own():
    pieces = ("a", "b", "c", "d", "e", "f")
    one = AnswerSample("id", "set", "chat", pieces, (2, 0, 3))
    assert one.runs() == [("", "a"), ("accepted", "bc"), ("", "de"), ("accepted", "f")]
    assert "".join(text for _, text in one.runs()) == "abcdef"


def test_the_file_is_that_of_the_evaluation_or_is_refused(tmp_path):
    run = RunFolder(tmp_path)
    one = AnswerSample("id", "set", "chat", ("a", "b"), (0,))
    write_json(run.evaluation, {"samples": write_samples(run, [one], {"too_long": 2})})
    assert read_samples(run) == [one]
    assert json.loads(run.evaluation.read_bytes())["samples"]["left_out"] == {"too_long": 2}
    run.evaluation_samples.write_text(run.evaluation_samples.read_text().replace('"a"', '"x"'))
    with pytest.raises(VerificationFailed, match="not the file that the evaluation wrote"):
        read_samples(run)


def test_an_evaluation_that_says_nothing_of_samples_has_none(tmp_path):
    run = RunFolder(tmp_path)
    write_json(run.evaluation, {})
    assert read_samples(run) == []
