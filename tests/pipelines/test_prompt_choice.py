"""Which of several copies is taken, and that nothing held out is trained on."""

import hashlib
import json

import numpy as np
import pyarrow as pa
import pytest

from pipelines.errors import BadRecipe
from pipelines.prepare_worker import PREPARED_SCHEMA, Worked, passages_of
from pipelines.prompt_choice import Chooser, HeldOut
from pipelines.recipe import PromptSet
from pipelines.selection.near_duplicates import NearDuplicates, signatures

BIRDS = PromptSet(name="birds", path="/data/birds.jsonl", domain="chat")
OWLS = PromptSet(name="owls", path="/data/owls", domain="chat")
LONG = "the quick brown hawk circles over the wide green field and looks for voles at noon"


def worked(*texts: str, file: str = "birds.jsonl") -> Worked:
    digests = tuple(hashlib.sha256(text.encode()).digest() for text in texts)
    rows = [
        {
            "sample_id": f"birds-{digest.hex()[:12]}",
            "dataset": "birds",
            "domain": "chat",
            "messages": json.dumps(
                [{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}]
            ),
            "tools": "[]",
            "tools_given": "null",
            "repairs": "[]",
            "format": "messages",
            "prompt_ids": [1],
            "history": [],
            "continuations": [],
            "source": "",
            "license": "",
            "file": file,
            "line": line,
            "draw_key": 0,
            "cut_at_tool_turn": False,
            "language": None,
        }
        for line, (text, digest) in enumerate(zip(texts, digests, strict=True), start=1)
    ]
    return Worked(
        rows=len(rows),
        read_bytes=0,
        prompts=pa.RecordBatch.from_pylist(rows, PREPARED_SCHEMA),
        digests=digests,
        said=tuple((digest[:16],) for digest in digests),
        signatures=signatures(texts),
        rejected=(),
        answer_characters=0,
    )


def test_the_first_of_equal_prompts_is_taken_and_named_by_its_place_also_over_sets():
    chooser = Chooser({}, None)
    kept, bad = chooser.choose(worked("a", "b", "a"), BIRDS)
    assert kept == [0, 1]
    assert [(one.line, one.reason) for one in bad] == [(3, "duplicate")]
    assert bad[0].detail == "the same prompt as /data/birds.jsonl:1"
    kept, bad = chooser.choose(worked("c", "b", file="part/x.jsonl"), OWLS)
    assert kept == [0]
    assert bad[0].detail == "the same prompt as /data/birds.jsonl:2"
    kept, bad = chooser.choose(worked("c"), BIRDS)
    assert bad[0].detail == "the same prompt as /data/owls (part/x.jsonl):1"


def test_two_contents_with_one_id_are_not_called_duplicates():
    chooser, one = Chooser({}, None), worked("a")
    other = worked("b")
    alike = (one.digests[0][:6] + other.digests[0][6:],)
    chooser.choose(one, BIRDS)
    _, bad = chooser.choose(Worked(**{**vars(other), "digests": alike}), BIRDS)
    assert [one.reason for one in bad] == ["id_collision"]


def test_a_near_duplicate_is_named_with_its_likeness_and_exact_ones_come_first(tmp_path):
    with NearDuplicates(0.7, tmp_path) as near:
        chooser = Chooser({}, near)
        kept, bad = chooser.choose(worked("other words", LONG, LONG, f"{LONG} today"), BIRDS)
    assert kept == [0, 1]
    assert [(one.line, one.reason) for one in bad] == [(3, "duplicate"), (4, "near_duplicate")]
    assert bad[1].detail.endswith("like /data/birds.jsonl:2")


def test_likeness_is_of_kept_prompts_whatever_was_left_out_before(tmp_path):
    with NearDuplicates(0.7, tmp_path) as near:
        chooser = Chooser({}, near)
        chooser.choose(worked("a b c d e f", "a b c d e f", LONG), BIRDS)
        _, bad = chooser.choose(worked(f"{LONG} today"), OWLS)
    assert bad[0].detail.endswith("like /data/birds.jsonl:3")


def test_a_held_out_prompt_stops_a_training_set_with_both_places():
    held_out = HeldOut()
    held_out.add(worked("x", "y"), [1], BIRDS)
    chooser = Chooser(held_out.said, None)
    assert chooser.choose(worked("x"), OWLS)[0] == [0]
    with pytest.raises(BadRecipe) as failure:
        chooser.choose(worked("z", "y"), OWLS)
    assert "/data/birds.jsonl:2" in failure.value.seen
    assert "/data/owls (birds.jsonl):2" in failure.value.seen


def test_held_out_passages_are_of_what_is_asked_alone(tmp_path):
    held_out = HeldOut()
    held_out.add(worked(LONG, "short"), [0, 1], BIRDS)
    passages = passages_of(held_out.write(tmp_path), 8)
    assert passages.too_short == 1
    name, words = passages.overlap(f"Well: {LONG.upper()}!") or ("", "")
    assert name.startswith("birds-")
    assert words == "the quick brown hawk circles over the wide"
    assert passages.overlap("be kind the quick brown hawk") is None


def test_a_chunk_without_prompts_is_chosen_from_too(tmp_path):
    empty = Worked(3, 0, pa.RecordBatch.from_pylist([], PREPARED_SCHEMA), (), (), None, (), 0)
    with NearDuplicates(0.8, tmp_path) as near:
        assert Chooser({}, near).choose(empty, BIRDS) == ([], [])
    assert np.array_equal(signatures(["a"]), signatures(["a"]))
