"""Stage prepare: rows in = prompts + rejected, all or nothing, the same bytes every time."""

import json
import os
import shutil
import signal
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pipelines import prepare as stage
from pipelines import prompt_files
from pipelines.errors import BadRecipe, PreflightFailed
from pipelines.prepare import prepare
from pipelines.recipe import load_recipe
from pipelines.schema import PROMPT_SCHEMA, REJECTED_PROMPT_SCHEMA
from pipelines.sources.messages import parse_row
from pipelines.store import RunFolder
from pipelines.telemetry import EventLog
from tests.support.road import NO_SELECTION

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"
PROFILE = {
    "tools": "system_message",
    "think_open_id": None,
    "think_close_id": None,
    "tool_markers": None,
    "channels": None,
    "template_arguments": {},
    "stop_token_ids": [2],
    "history_reasoning": "kept",
    "reserved_ids": [0],
    "aux_layer_ids": [1, 2, 3],
}
TOOL = {"name": "look_up", "description": "Look up a bird.", "parameters": {"type": "dict"}}


def ask(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def birds(path, **more):
    return {"name": "birds", "path": str(path), "domain": "chat", "format": "messages", **more}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Bench:
    """A run folder, a tiny target, and the source files that a test writes."""

    def __init__(self, folder, target):
        self.folder, self.target = folder, target
        self.run = RunFolder(folder / "run")
        self.run.create()
        self.train = write(folder / "train.jsonl", [ask(f"question {i}") for i in range(40)])
        self.evaluation = write(folder / "eval.jsonl", [ask("another question", license="MIT")])

    def prepare(self, **changes):
        values = {
            "target.path": self.target,
            "target.profile": PROFILE,
            "prompts.context_tokens": 512,
            "prompts.on_bad_prompt": "stop",
            "prompts.train": [birds(self.train)],
            "prompts.evaluation": [
                {**birds(self.evaluation), "name": "eval-birds", "domain": "other"}
            ],
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        overrides = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items()]
        recipe = load_recipe(QUICKSTART, overrides)
        return prepare(recipe, self.run, EventLog(self.run))

    def table(self, name):
        return pq.read_table(self.run.prompts / name)

    def files(self):
        return {
            str(path.relative_to(self.run.root)): path.read_bytes()
            for path in sorted(self.run.root.rglob("*"))
            if path.is_file() and path.name != "events.jsonl"
        }


@pytest.fixture
def bench(tmp_path, tiny_target):
    return Bench(tmp_path, tiny_target)


def test_a_prompt_row_holds_what_the_contract_says(bench):
    answered = ask("Where do hawks nest?", tools=[TOOL], source="book #1", license="MIT")
    answered["messages"].append({"role": "assistant", "content": "In trees."})
    write(bench.train, [answered])
    counts = bench.prepare()
    table = bench.table("birds/part-00000.parquet")
    assert table.schema.equals(PROMPT_SCHEMA, check_metadata=True)
    (row,) = table.to_pylist()
    assert row["messages"] == '[{"role":"user","content":"Where do hawks nest?"}]'
    assert json.loads(row["tools"])[0]["function"]["parameters"]["type"] == "object"
    assert (row["source"], row["license"]) == ("book #1", "MIT")
    assert (row["dataset"], row["domain"]) == ("birds", "chat")
    digest = parse_row(answered, file="x", line=1).content_sha256
    assert row["sample_id"] == f"birds-{digest[:12]}"
    assert len(row["prompt_ids"]) == counts["sets"]["birds"]["prompt_tokens"]
    (other,) = bench.table("eval-birds").to_pylist()
    assert (other["tools"], other["domain"], other["license"]) == ("[]", "other", "MIT")
    assert not (bench.run.prompts / "_rejected").exists()


def test_rows_are_ordered_by_sample_id_over_parts_of_bounded_size(bench, monkeypatch):
    monkeypatch.setattr(prompt_files, "_PART_ROWS", 7)
    monkeypatch.setattr(prompt_files, "_HELD_BYTES", 2000)
    monkeypatch.setattr(stage, "_CHUNK_BYTES", 300)
    bench.prepare()
    parts = sorted((bench.run.prompts / "birds").glob("*"))
    assert [part.name for part in parts] == [f"part-{i:05d}.parquet" for i in range(6)]
    tables = [pq.read_table(part) for part in parts]
    assert [table.num_rows for table in tables] == [7, 7, 7, 7, 7, 5]
    ids = [one for table in tables for one in table["sample_id"].to_pylist()]
    assert ids == sorted(set(ids))
    messages = {one for table in tables for one in table["messages"].to_pylist()}
    assert len(messages) == 40


def test_the_same_input_gives_the_same_bytes_whatever_the_batches(bench, monkeypatch):
    bench.prepare()
    first = bench.files()
    monkeypatch.setattr(stage, "_CHUNK_BYTES", 200)
    monkeypatch.setattr(prompt_files, "_HELD_BYTES", 1000)
    bench.prepare()
    assert bench.files() == first


def test_the_order_of_the_source_does_not_matter(bench):
    bench.prepare()
    before = bench.table("birds").drop(["source"])  # which names the line
    lines = bench.train.read_text().splitlines()
    bench.train.write_text("\n".join(reversed(lines)))
    bench.prepare()
    assert bench.table("birds").drop(["source"]).equals(before)


def test_the_counts_add_up_and_quantiles_are_of_the_prompts(bench):
    write(bench.train, [ask("a" * n) for n in (1, 10, 100)] + [{"messages": []}, ask("a")])
    counts = bench.prepare(prompts__on_bad_prompt="reject")
    seen = dict(counts["sets"]["birds"])
    lengths = sorted(len(ids) for ids in bench.table("birds")["prompt_ids"].to_pylist())
    lengths_seen = seen.pop("lengths")
    assert (len(lengths_seen), lengths_seen.count("█")) == (10, 3)
    assert seen == {
        "rows": 5,
        "prompts": 3,
        "turns": 3,
        "cut_at_tool_turn": 0,
        "rejected": {"bad_messages": 1, "duplicate": 1},
        "repaired": {},
        "formats": ["messages"],
        "languages": {"unknown": 1.0},
        "prompt_tokens": sum(lengths),
        "tokens_p50": lengths[1],
        "tokens_p90": lengths[2],
        "tokens_max": lengths[2],
    }
    assert (counts["rows"], counts["prompts"], counts["rejected"]) == (6, 4, 2)
    events = [json.loads(line) for line in bench.run.events.read_text().splitlines()]
    assert [event["dataset"] for event in events] == ["birds", "eval-birds"]
    assert events[0]["rejected"] == {"bad_messages": 1, "duplicate": 1}


def test_rejected_rows_are_kept_aside_with_line_and_reason(bench):
    bench.train.write_text(
        json.dumps(ask("one"))
        + "\n\n{broken\n"
        + json.dumps({**ask("one"), "license": "MIT"})
        + "\n"
        + json.dumps(ask("x" * 600))
        + "\n"
        + json.dumps(ask("a <|im_end|> b"))
        + "\n"
    )
    bench.prepare(prompts__on_bad_prompt="reject")
    table = bench.table("_rejected/birds.parquet")
    assert table.schema.equals(REJECTED_PROMPT_SCHEMA, check_metadata=True)
    assert [(row["file"], row["line"], row["status"]) for row in table.to_pylist()] == [
        ("train.jsonl", 3, "rejected:malformed_json"),
        ("train.jsonl", 4, "rejected:duplicate"),
        ("train.jsonl", 5, "rejected:prompt_too_long"),
        ("train.jsonl", 6, "rejected:special_token_in_content"),
    ]
    assert f"{bench.train}:1" in table["detail"][1].as_py()
    assert not (bench.run.prompts / "_rejected" / "eval-birds.parquet").exists()


@pytest.mark.parametrize(("room", "prompts"), [(128, 1), (129, 0)])
def test_the_context_guard_is_exact(bench, room, prompts):
    write(bench.train, [ask("short"), ask("x" * 100)])
    template = len("user\n" + "assistant\n") + len("\n") + 3
    fits = 100 + template + 128 + 1
    counts = bench.prepare(
        prompts__context_tokens=fits,
        prompts__min_response_tokens=room,
        prompts__on_bad_prompt="reject",
    )
    assert counts["sets"]["birds"]["prompts"] == 1 + prompts


def test_a_bad_prompt_stops_the_run_with_its_place_and_nothing_is_written(bench):
    bench.evaluation.write_text(json.dumps(ask("fine")) + "\n" + '{"messages": 3}\n')
    with pytest.raises(BadRecipe, match=r"eval\.jsonl:2 is not a usable prompt: wrong_format"):
        bench.prepare()
    assert bench.files() == {}


def test_a_failed_prepare_leaves_the_earlier_prompts_alone(bench):
    bench.prepare()
    before = bench.files()
    bench.evaluation.write_text("{")
    with pytest.raises(BadRecipe, match="malformed_json"):
        bench.prepare()
    assert bench.files() == before
    assert [path.name for path in bench.run.root.glob(".prompts*")] == []


def test_a_new_prepare_replaces_old_sets_and_what_a_killed_one_left(bench):
    bench.prepare()
    left = bench.run.root / ".prompts.12345" / "birds"
    left.mkdir(parents=True)
    (left / "part-00000.parquet").write_bytes(b"half")
    bench.prepare(
        prompts__train=[{"name": "owls", "path": str(bench.train), "domain": "chat"}],
    )
    assert sorted(bench.files()) == [
        "prompts/eval-birds/part-00000.parquet",
        "prompts/owls/part-00000.parquet",
    ]


def test_prompts_that_a_killed_run_had_moved_aside_come_back(bench):
    bench.prepare()
    before = bench.files()
    bench.run.prompts.rename(bench.run.root / ".prompts.12345.old")
    bench.evaluation.write_text("{")
    with pytest.raises(BadRecipe):
        bench.prepare()
    assert bench.files() == before


@pytest.mark.parametrize("mode", ["stop", "reject"])
def test_an_evaluation_prompt_that_was_trained_on_stops_the_run(bench, mode):
    write(bench.evaluation, [ask("fresh"), ask("Question  7", tools=[TOOL])])
    with pytest.raises(BadRecipe) as failure:
        bench.prepare(prompts__on_bad_prompt=mode)
    assert f"{bench.evaluation}:2" in failure.value.seen
    assert f"{bench.train}:8" in failure.value.seen
    assert not bench.run.prompts.exists()


@pytest.mark.parametrize(
    ("content", "seen"),
    [("", "no rows"), ("\n\n", "no rows"), ("{\n[\n", "2 of 2 rows: malformed")],
)
def test_a_set_without_a_usable_prompt_stops_the_run(bench, content, seen):
    bench.train.write_text(content)
    with pytest.raises(BadRecipe, match=seen):
        bench.prepare(prompts__on_bad_prompt="reject")
    assert not bench.run.prompts.exists()


def test_a_context_longer_than_the_target_reads_is_refused(bench):
    with pytest.raises(PreflightFailed, match="context_tokens is 513, the target reads 512"):
        bench.prepare(prompts__context_tokens=513)


def test_a_target_that_is_not_there_is_refused(bench):
    with pytest.raises(PreflightFailed, match="no target folder"):
        bench.prepare(target__path="/nowhere")


# Every turn of a conversation


def say(*turns):
    """A conversation of (role, content) pairs."""
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


CONVERSATION = say(
    ("system", "Be brief."),
    ("user", "one"),
    ("assistant", "the set's own answer"),
    ("user", "two"),
    ("assistant", "another"),
    ("user", "three"),
    ("assistant", "the last"),
)


def test_every_turn_is_prepared_with_places_for_the_targets_answers(bench):
    write(bench.train, [CONVERSATION])
    counts = bench.prepare(prompts__turns="every")
    (row,) = bench.table("birds").to_pylist()
    assert "answer" not in row["messages"]
    assert [one["content"] for one in json.loads(row["messages"])] == [
        "Be brief.",
        "one",
        "two",
        "three",
    ]
    tokenizer = AutoTokenizer.from_pretrained(bench.target)
    texts = [tokenizer.decode(ids) for ids in (row["history"] + row["continuations"])]
    header = "<|im_start|>assistant\n"
    after = [f"<|im_end|>\n<|im_start|>user\n{one}<|im_end|>\n{header}" for one in ("two", "three")]
    assert texts == [tokenizer.decode(row["prompt_ids"]), after[0], *after]
    assert counts["sets"]["birds"]["turns"] == 3
    assert "3 turns" not in counts["headline"]
    assert "4 turns" in counts["headline"]


def test_a_single_turn_is_the_same_row_whichever_turns_are_asked(bench):
    bench.prepare()
    before = bench.files()
    bench.prepare(prompts__turns="every")
    assert bench.files() == before


def test_the_last_turn_keeps_the_sets_own_answers_and_its_id(bench):
    write(bench.train, [CONVERSATION])
    counts = bench.prepare()
    (row,) = bench.table("birds").to_pylist()
    assert row["messages"].count("assistant") == 2
    assert (
        row["sample_id"] == "birds-" + parse_row(CONVERSATION, file="x", line=1).content_sha256[:12]
    )
    assert (row["history"], row["continuations"]) == ([], [])
    assert counts["sets"]["birds"]["turns"] == 1


def test_a_conversation_ends_before_a_tools_result_and_is_counted(bench):
    row = say(("user", "How many?"), ("assistant", ""), ("tool", "42"), ("user", "Why?"))
    row["messages"][1]["tool_calls"] = [{"function": {"name": "count", "arguments": {}}}]
    write(bench.train, [row, ask("plain")])
    counts = bench.prepare(prompts__turns="every")["sets"]["birds"]
    assert (counts["turns"], counts["cut_at_tool_turn"]) == (2, 1)
    texts = {row["messages"] for row in bench.table("birds").to_pylist()}
    assert '[{"role":"user","content":"How many?"}]' in texts


def test_conversations_that_ask_the_same_are_duplicates(bench):
    other = json.loads(json.dumps(CONVERSATION).replace("another", "something else"))
    write(bench.train, [CONVERSATION, other])
    counts = bench.prepare(prompts__turns="every", prompts__on_bad_prompt="reject")
    assert counts["sets"]["birds"]["rejected"] == {"duplicate": 1}


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_held_out_conversation_may_be_no_turn_of_a_training_one(bench, turns):
    write(bench.train, [CONVERSATION])
    # Other answers in between do not make it another conversation.
    text = json.dumps(say(*(tuple(one.values()) for one in CONVERSATION["messages"][: 2 * turns])))
    bench.evaluation.write_text(text.replace("own answer", "OTHER"))
    with pytest.raises(BadRecipe, match="is also a training prompt"):
        bench.prepare(prompts__turns="every")
    bench.evaluation.write_text(text.replace("Be brief", "Be long"))
    bench.prepare(prompts__turns="every")
    (row,) = bench.table("eval-birds").to_pylist()
    assert (row["messages"].count("assistant"), row["continuations"]) == (turns - 1, [])


def test_a_template_whose_turns_cannot_be_told_apart_is_refused_before_anything(bench, tmp_path):
    target = shutil.copytree(bench.target, tmp_path / "other")
    template = target / "chat_template.jinja"
    template.write_text(template.read_text().replace("'<|im_end|>", "' <|im_end|>"))
    bench.prepare(target__path=target)
    with pytest.raises(PreflightFailed, match="cannot be told apart"):
        bench.prepare(target__path=target, prompts__turns="every")


ROWS = st.lists(
    st.one_of(
        st.builds(ask, st.text(max_size=30)),
        st.builds(ask, st.sampled_from(["again", "<|im_end|>", "z" * 500, "\ud800", "a\0"])),
        st.sampled_from([{}, [], 3, {"messages": [{"role": "bird", "content": "x"}]}]),
    ),
    max_size=20,
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(ROWS)
def test_rows_in_are_prompts_plus_rejected_from_the_files(bench, rows):
    write(bench.train, [ask("always usable"), *rows])
    write(bench.evaluation, [ask("e" * 31)])  # longer than any generated question but one
    counts = bench.prepare(prompts__on_bad_prompt="reject")["sets"]["birds"]
    prompts = bench.table("birds").num_rows
    rejected = bench.run.prompts / "_rejected" / "birds.parquet"
    lines = pq.read_table(rejected)["line"].to_pylist() if rejected.exists() else []
    assert 1 + len(rows) == counts["rows"] == prompts + len(lines)
    assert lines == sorted(set(lines))
    assert counts["prompts"] == prompts
    assert sum(counts["rejected"].values()) == len(lines)


# Sets as they are found


def test_a_folder_of_files_in_several_formats_is_one_set(bench):
    folder = bench.folder / "found"
    folder.mkdir()
    write(folder / "a.jsonl", [{"instruction": f"Name hawk {n}.", "output": "x"} for n in range(3)])
    talk = [{"from": "human", "value": "Which owl?"}, {"from": "gpt", "value": "The barn owl."}]
    (folder / "b.json").write_text(json.dumps([{"conversations": talk}]))
    (folder / "README.md").write_text("about")
    one = {"name": "birds", "path": str(folder), "domain": "chat"}
    counts = bench.prepare(prompts__train=[one])["sets"]["birds"]
    assert (counts["rows"], counts["prompts"]) == (4, 4)
    assert counts["formats"] == ["alpaca", "sharegpt"]
    formats = {(row["format"], row["source"]) for row in bench.table("birds").to_pylist()}
    assert ("sharegpt", "b.json #1") in formats


def test_what_was_mended_is_told_by_row_and_counted(bench):
    turns = [{"from": "gpt", "value": "Hello!"}, {"from": "human", "value": "Which owl?"}]
    write(bench.train, [{"conversations": turns}, {"conversations": turns[1:]}][:1])
    one = {"name": "birds", "path": str(bench.train), "domain": "chat"}
    counts = bench.prepare(prompts__train=[one])["sets"]["birds"]
    assert counts["repaired"] == {"opening_answer_dropped": 1}
    (row,) = bench.table("birds").to_pylist()
    assert json.loads(row["repairs"]) == ["opening_answer_dropped"]


def test_tools_are_kept_as_given_beside_the_normalised_ones(bench):
    write(bench.train, [ask("Which hawk?", tools=[TOOL])])
    bench.prepare()
    (row,) = bench.table("birds").to_pylist()
    assert json.loads(row["tools_given"]) == [TOOL]
    assert json.loads(row["tools"])[0]["function"]["parameters"]["type"] == "object"


# Selection


def selection(**changes):
    return {**NO_SELECTION, **changes}


LONG = "the quick brown hawk circles over the wide green field and looks for voles at noon"


def test_a_cap_draws_by_the_seed_whatever_the_order_and_names_the_rest(bench, monkeypatch):
    monkeypatch.setattr(stage, "_CHUNK_BYTES", 300)
    monkeypatch.setattr(stage, "_DRAW_LAG", 2)
    counts = bench.prepare(prompts__train=[birds(bench.train, cap=7)])["sets"]["birds"]
    assert (counts["prompts"], counts["rejected"]) == (7, {"not_drawn": 33})
    drawn = set(bench.table("birds")["sample_id"].to_pylist())
    aside = bench.table("_rejected/birds.parquet")
    assert aside["line"].to_pylist() == sorted(aside["line"].to_pylist())
    lines = bench.train.read_text().splitlines()
    bench.train.write_text("\n".join(reversed(lines)))
    bench.prepare(prompts__train=[birds(bench.train, cap=7)])
    assert set(bench.table("birds")["sample_id"].to_pylist()) == drawn
    more = birds(bench.train, cap=9)
    bench.prepare(prompts__train=[more])
    assert drawn < set(bench.table("birds")["sample_id"].to_pylist())
    bench.prepare(prompts__train=[more], prompts__selection=selection(seed=2))
    assert not drawn < set(bench.table("birds")["sample_id"].to_pylist())


def test_a_mix_gives_each_set_its_share(bench):
    owls = write(bench.folder / "owls.jsonl", [ask(f"owl {n}") for n in range(40)])
    mix = {"rows": 12, "weights": {"birds": 2, "owls": 1}}
    counts = bench.prepare(
        prompts__train=[birds(bench.train), {**birds(owls), "name": "owls"}],
        prompts__selection=selection(mix=mix),
    )["sets"]
    assert (counts["birds"]["prompts"], counts["owls"]["prompts"]) == (8, 4)


def test_near_duplicates_are_left_out_over_all_sets_and_do_not_stop_the_run(bench):
    owls = write(bench.folder / "owls.jsonl", [ask(f"{LONG} today"), ask("something else")])
    write(bench.train, [ask(LONG)])
    counts = bench.prepare(
        prompts__train=[birds(bench.train), {**birds(owls), "name": "owls"}],
        prompts__selection=selection(near_duplicates=0.7),
    )["sets"]
    assert counts["owls"]["rejected"] == {"near_duplicate": 1}
    aside = bench.table("_rejected/owls.parquet").to_pylist()
    assert f"{bench.train}:1" in aside[0]["detail"]


def test_a_prompt_that_shares_a_passage_with_an_evaluation_prompt_is_left_out(bench):
    write(bench.evaluation, [ask(LONG)])
    write(bench.train, [ask(f"Tell me: {LONG.title()}, why?"), ask("fine"), ask(LONG)])
    counts = bench.prepare(prompts__selection=selection(shared_words=8))["sets"]["birds"]
    assert (counts["prompts"], counts["rejected"]) == (1, {"contaminated": 2})


def test_lengths_and_languages_are_chosen(bench):
    french = "Quelle est la différence entre une buse variable et un faucon crécerelle, en vol ?"
    english = "What is the difference between a buzzard and a kestrel when they are flying?"
    write(bench.train, [ask(french), ask(english), ask("hi"), ask("x" * 300)])
    counts = bench.prepare(
        prompts__selection=selection(languages=["en"], min_prompt_tokens=25, max_prompt_tokens=200),
        prompts__on_bad_prompt="reject",
    )["sets"]["birds"]
    assert counts["rejected"] == {
        "other_language": 1,
        "prompt_too_long": 1,
        "prompt_too_short": 1,
    }
    assert counts["languages"] == {"en": 1.0}


def test_the_first_question_is_asked_without_the_sets_answers(bench):
    write(bench.train, [CONVERSATION])
    bench.prepare(prompts__turns="first")
    (row,) = bench.table("birds").to_pylist()
    assert [one["role"] for one in json.loads(row["messages"])] == ["system", "user"]


# Processes


def test_processes_make_the_same_bytes(bench, monkeypatch):
    write(bench.train, [ask(f"question {n}") for n in range(60)] + [{"messages": []}])
    reject = {"prompts__on_bad_prompt": "reject"}
    bench.prepare(**reject)
    first = bench.files()
    monkeypatch.setattr(stage, "_POOL_BYTES", 0)
    monkeypatch.setattr(stage, "_CHUNK_BYTES", 500)
    bench.prepare(**reject)
    assert bench.files() == first


def test_a_process_that_dies_ends_the_stage_and_nothing_is_written(bench, monkeypatch):
    monkeypatch.setattr(stage, "_POOL_BYTES", 0)
    monkeypatch.setattr(stage, "work", die)
    with pytest.raises(PreflightFailed, match="a process that prepares prompts died"):
        bench.prepare()
    assert bench.files() == {}


def die(_task):
    os.kill(os.getpid(), signal.SIGKILL)
