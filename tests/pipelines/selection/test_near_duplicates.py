"""Near duplicates against exact Jaccard similarity, in order, and in little memory."""

import json
import os
import random
import subprocess
import sys
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from pipelines.selection import near_duplicates as module
from pipelines.selection.near_duplicates import PLACES, NearDuplicates, bands_for, signatures

PROMPTS = sorted(Path("recipes/prompts").glob("train-*.jsonl"))
# Standard deviations of an estimated similarity from its true one that no pair here exceeds: one
# of 2,000 pairs does by chance, and the seed is fixed.
SIGMAS = 3.5


def asked():
    rows = [json.loads(line) for path in PROMPTS for line in path.read_text().splitlines()]
    return ["\n".join(m["content"] for m in row["messages"]) for row in rows]


def shingles(text):
    words = text.casefold().split()
    return {tuple(words[i : i + 5]) for i in range(max(len(words) - 4, 1))}


def jaccard(a, b):
    a, b = shingles(a), shingles(b)
    return len(a & b) / len(a | b)


def edited(text, edits, rng):
    words = text.split()
    for edit in range(edits):
        at = rng.randrange(len(words))
        match edit % 3:
            case 0:
                words[at] = f"word{rng.randrange(10**6)}"
            case 1:
                words.insert(at, f"more{rng.randrange(10**6)}")
            case 2:
                del words[at]
    return " ".join(words)


def margin(similarity):
    return SIGMAS * (similarity * (1 - similarity) / PLACES) ** 0.5


@pytest.fixture(scope="module")
def pairs():
    """Texts of 100 to 300 words and the same with some edited, over the whole range."""
    rng = random.Random(7)
    texts = asked()
    rng.shuffle(texts)
    long = [" ".join(texts[i : i + 12]).split()[: rng.randrange(100, 300)] for i in range(600)]
    return [
        (text, edited(text, edits, rng))
        for text in map(" ".join, long)
        for edits in (rng.randrange(1, 4), rng.randrange(1, 20))
    ]


def look(texts, tmp_path, threshold=0.8, batch=10_000):
    hashed, found = signatures(texts), []
    with NearDuplicates(threshold, tmp_path) as near:
        for start in range(0, len(texts), batch):
            found += near.first_of(hashed[start : start + batch])
    return found


@pytest.mark.parametrize("threshold", [0.7, 0.8, 0.9])
def test_pairs_above_the_threshold_are_found_and_those_below_are_not(pairs, tmp_path, threshold):
    bands, places = bands_for(threshold)
    expected = found = above = below = 0
    for text, copy in pairs:
        exact = jaccard(text, copy)
        near = look([text, copy], tmp_path, threshold)[1]
        if near is not None:
            assert near[0] == 0
            assert abs(near[1] - exact) <= margin(exact) + 1e-9
        if exact - margin(exact) >= threshold:
            above += 1
            found += near is not None
            expected += 1 - (1 - exact**places) ** bands
        elif exact + margin(exact) < threshold:
            below += 1
            assert near is None
    assert min(above, below) > 50
    # The S-curve gives the mean; three standard deviations of a sum of that many draws.
    assert found >= expected - 3 * (expected * (1 - expected / above)) ** 0.5 - 1e-9
    assert found >= 0.95 * above


def test_similarities_are_estimated_without_bias(pairs):
    one, other = (signatures(list(texts)) for texts in zip(*pairs, strict=True))
    errors = (one == other).mean(axis=1) - [jaccard(*pair) for pair in pairs]
    assert abs(errors.mean()) < 0.005
    assert errors.std() < 0.045


@pytest.mark.parametrize(
    ("threshold", "bands", "places"), [(0.6, 32, 4), (0.8, 16, 8), (0.9, 9, 14), (1.0, 1, 128)]
)
def test_bands_are_as_few_as_find_nine_of_ten_at_the_threshold(threshold, bands, places):
    assert bands_for(threshold) == (bands, places)
    assert 1 - (1 - threshold**places) ** bands >= 0.9


def test_a_threshold_that_no_bands_reach_is_refused():
    with pytest.raises(ValueError, match="too low"):
        bands_for(0.01)


def test_the_first_is_kept_and_later_ones_name_it(tmp_path):
    story = "Write a long story about a lighthouse keeper and the storm of nineteen hundred and two"
    other = "Prove that the sum of two odd numbers is even and say why the converse does not hold"
    texts = [other, story, story.upper(), f"  {story.replace(' ', '  ')}", other, "short", "short"]
    assert look(texts, tmp_path) == [
        None,
        None,
        (1, 1.0),
        (1, 1.0),
        (0, 1.0),
        None,
        (2, 1.0),  # the number among the kept rows, not among all
    ]


def test_a_copy_of_a_copy_is_compared_with_what_was_kept(tmp_path):
    rows = np.arange(3 * PLACES, dtype=np.uint32).reshape(3, PLACES)
    rows[1, :110] = rows[0, :110]
    rows[2, :110] = rows[1, :110]
    rows[2, :20] += 1000  # 110 of 128 like its neighbour at most, 90 like the first
    with NearDuplicates(0.8, tmp_path) as near:
        assert near.first_of(rows) == [None, (0, 110 / 128), None]


def test_signs_between_words_count():
    one, other = signatures(["x + 1 = 2", "x - 1 = 2"])
    assert (one == other).mean() < 0.1


def clustered(rng, rows, share, clusters=40):
    """Signatures around a few centres that agree with them in a share of the places."""
    centres = rng.integers(0, 2**32, (clusters, PLACES), np.uint32)
    alone = rng.integers(0, 2**32, (rows, PLACES), np.uint32)
    of = centres[rng.integers(0, clusters, rows)]
    return np.where(rng.random((rows, PLACES)) < share, of, alone)


@pytest.mark.parametrize("share", [0.8, 0.93, 1.0])
def test_how_rows_are_cut_into_batches_changes_nothing(tmp_path, monkeypatch, share):
    rows = clustered(np.random.default_rng(3), 800, share)
    monkeypatch.setattr(module, "_CROWD", 4)
    results = set()
    for batch, chunk in ((800, 1024), (800, 7), (3, 1024), (250, 100)):
        monkeypatch.setattr(module, "_CHUNK", chunk)
        with NearDuplicates(0.8, tmp_path) as near:
            cuts = range(0, len(rows), batch)
            found = [one for at in cuts for one in near.first_of(rows[at : at + batch])]
            results.add((tuple(found), near.crowded, near.kept))
    assert len(results) == 1
    assert near.kept == found.count(None)
    if share == 1.0:
        assert near.kept == 40


def test_every_answer_is_what_comparing_all_rows_gives(tmp_path):
    """Bands miss few; what they find is the nearest kept row and its similarity."""
    rows = clustered(np.random.default_rng(5), 1500, 0.95)
    with NearDuplicates(0.8, tmp_path) as near:
        found = near.first_of(rows)
    kept, missed = np.zeros((0, PLACES), np.uint32), 0
    for row, one in zip(rows, found, strict=True):
        similar = (kept == row).mean(axis=1)
        if one is not None:
            assert similar[one[0]] == one[1] >= 0.8
            missed += bool(similar.max() > one[1])
        else:
            missed += bool(len(kept) and similar.max() >= 0.8)
            kept = np.vstack([kept, row])
    assert missed <= 0.02 * len(rows)


def test_boilerplate_that_many_share_bounds_the_work_and_is_counted(tmp_path, monkeypatch):
    rows = clustered(np.random.default_rng(4), 2000, 0.85, clusters=1)
    compared = 0
    real = NearDuplicates._read

    def counting(self, number):
        nonlocal compared
        compared += 1
        return real(self, number)

    monkeypatch.setattr(NearDuplicates, "_read", counting)
    with NearDuplicates(0.9, tmp_path) as near:
        near.first_of(rows)
        assert near.kept > 1900
        assert near.crowded > 1000
        for band in near._bands:
            values = np.concatenate(band._runs) >> np.uint64(32)
            assert np.unique(values, return_counts=True)[1].max() <= 32
    assert compared <= 64 * len(rows)


def test_of_too_many_candidates_those_with_the_most_bands_are_compared(tmp_path, monkeypatch):
    rows = np.random.default_rng(6).integers(0, 2**32, (5, PLACES), np.uint32)
    for other in range(3):
        rows[other, 8 * other : 8 * other + 8] = rows[4, 8 * other : 8 * other + 8]
    rows[3, 8:] = rows[4, 8:]
    read = []
    real = NearDuplicates._read
    monkeypatch.setattr(module, "_CHECKED", 1)
    monkeypatch.setattr(
        NearDuplicates, "_read", lambda self, number: read.append(number) or real(self, number)
    )
    with NearDuplicates(0.8, tmp_path) as near:
        assert near.first_of(rows[:4]) == [None] * 4
        assert near.first_of(rows[4:]) == [(3, 120 / 128)]
    assert read == [3]


def test_a_million_rows_fit_in_memory(tmp_path):
    """8 bytes per band are 128 per row; a batch in work and a band that is merged are the rest."""
    rows, batch = 100_000, 4000
    rng = np.random.default_rng(1)
    tracemalloc.start()
    with NearDuplicates(0.8, tmp_path) as near:
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(0, rows, batch):
            near.first_of(rng.integers(0, 2**32, (batch, PLACES), np.uint32))
        after, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert near.kept == rows
    assert (after - before) / rows <= 130
    assert (peak - before) / rows <= 250


def test_the_spill_file_has_no_name_and_holds_kept_rows_only(tmp_path):
    rows = clustered(np.random.default_rng(2), 500, 1.0)
    with NearDuplicates(0.8, tmp_path) as near:
        near.first_of(rows)
        assert list(tmp_path.iterdir()) == []
        assert os.fstat(near._spill.fileno()).st_size == near.kept * 512
    assert near._spill.closed


def test_signatures_of_another_type_are_refused(tmp_path):
    with NearDuplicates(0.8, tmp_path) as near, pytest.raises(AssertionError):
        near.first_of(np.zeros((1, PLACES), np.uint64))


def test_nothing_gives_nothing(tmp_path):
    assert signatures([]).shape == (0, PLACES)
    assert look([], tmp_path) == []
    assert look(["", " "], tmp_path) == [None, (0, 1.0)]


def test_signatures_do_not_depend_on_the_process_or_the_batch():
    texts = asked()[:30]
    program = (
        "import json, sys; from pipelines.selection.near_duplicates import signatures\n"
        "print(signatures(json.load(sys.stdin)).tobytes().hex())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(texts),
        env=os.environ | {"PYTHONHASHSEED": "7"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    whole = signatures(texts)
    assert bytes.fromhex(printed) == whole.tobytes()
    cuts = [0, 1, 7, 30]
    assert np.array_equal(
        np.concatenate([signatures(texts[a:b]) for a, b in pairwise(cuts)]), whole
    )
