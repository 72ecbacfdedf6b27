"""One look tells what is in any file, whether it is alive and healthy, and what to do."""

import gzip
import io
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from safetensors.torch import save_file

from pipelines import glance as shell
from pipelines.errors import BadRecipe
from pipelines.glance import glance
from pipelines.glancing.render import render
from pipelines.glancing.report import GlanceReport, SetGlance
from tests.support.faulty_files import answer
from tests.support.good_run import make_good_run


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def look(path: Path, **options: Any) -> SetGlance:
    (one,) = glance([str(path)], **options).sets
    return one


def names(one: SetGlance) -> set[str]:
    return {finding.name for finding in one.findings}


def shown(report: GlanceReport) -> str:
    console = Console(file=io.StringIO(), width=80, record=True, no_color=True)
    render(report, console)
    text = console.export_text()
    assert max((cell_len(line) for line in text.splitlines()), default=0) <= 80
    return text


@pytest.fixture
def healthy(tmp_path) -> Path:
    return write_lines(tmp_path / "rows.jsonl", [answer(number) for number in range(60)])


def test_a_healthy_file_is_called_healthy(healthy):
    one = look(healthy)
    assert one.is_healthy
    assert one.findings == ()
    assert (one.kind, one.format, one.rows, one.rows_exact) == ("responses", "JSONL", 60, True)
    assert one.responses is not None
    assert one.responses.with_reasoning == 60
    assert one.responses.usage == {"ok": 60}
    assert one.responses.completion_tokens.quantiles["min"] == 20
    assert sum(one.count for one in one.responses.completion_tokens.histogram) == 60


@pytest.mark.parametrize("usage", [None, {}, {"completion_tokens": None}, "gone"])
def test_the_seed_fault_is_said_plainly_with_cause_and_cure(tmp_path, usage):
    rows = [answer(number, reasoning="") for number in range(30)]
    for row in rows:
        if usage == "gone":
            del row["usage"]
        else:
            row["usage"] = usage
    report = glance([str(write_lines(tmp_path / "rows.jsonl", rows))])
    assert not report.is_healthy
    assert "reasoning_and_usage_lost" in names(report.sets[0])
    text = " ".join(shown(report).split())
    assert "FAULT" in text
    assert "reasoning parser" in text
    assert "/model_info" in text


def test_absent_null_empty_and_zero_are_four_things(tmp_path):
    rows = [answer(number) for number in range(8)]
    rows[0]["content"], rows[1]["content"] = "", None
    del rows[2]["content"]
    rows[3]["usage"]["completion_tokens"] = 0
    del rows[4]["usage"]["completion_tokens"]
    one = look(write_lines(tmp_path / "rows.jsonl", rows))
    content = next(field for field in one.fields if field.name == "content")
    assert (content.filled, content.empty, content.null, content.missing) == (5, 1, 1, 1)
    count = next(field for field in one.fields if field.name == "usage.completion_tokens")
    assert (count.filled, count.missing) == (7, 1)
    assert one.responses is not None
    assert one.responses.usage == {"ok": 6, "zero": 1, "missing": 1}
    assert {"usage_absent", "usage_not_a_count"} <= names(one)


CORRUPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "thinking left inside": ("think_markers_in_content", {"content": "so</think>The answer"}),
    "thinking of another family": ("think_markers_in_content", {"content": "◁think▷ so"}),
    "broken logits": ("reserved_tokens", {"content": "x <|reserved_token_163672|> y"}),
    "markup left inside": ("special_tokens_in_content", {"content": "hello<|im_end|>"}),
    "no answer": ("content_empty", {"content": ""}),
    "no answer, cut": ("cut_inside_reasoning", {"content": "", "finish_reason": "length"}),
    "an abort inside a 200": ("finish_reason", {"finish_reason": {"type": "abort"}}),
    "NaN": ("nan_in_server", {"finish_reason": {"type": "stop", "matched": "NaN happened"}}),
    "a count of other ids": ("usage_differs_from_ids", {"output_ids": [1, 2, 3]}),
    "one sign for ever": ("repetition", {"content": "!" * 400}),
    "one phrase for ever": ("repetition", {"content": "Well, " + "and then again, " * 40}),
    "one token for ever": (
        "repetition",
        {"output_ids": [5] * 40, "usage": {"completion_tokens": 40}},
    ),
    "half a character": ("broken_characters", {"content": "caf\ufffd"}),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_sick_row_is_found_and_named(tmp_path, name):
    finding, changes = CORRUPTIONS[name]
    rows = [answer(number) for number in range(40)]
    rows[17] = answer(17, **changes)
    one = look(write_lines(tmp_path / "rows.jsonl", rows))
    found = next(one for one in one.findings if one.name == finding)
    assert found.severity in ("fault", "warning")
    assert "b1-000000000011" in found.seen or "abort" in found.seen
    assert found.cause
    assert found.cure


def test_reasoning_inside_content_of_every_row_is_a_fault(tmp_path):
    rows = [answer(n, reasoning="", content=f"I think {n}</think>So.") for n in range(9)]
    one = look(write_lines(tmp_path / "rows.jsonl", rows))
    assert "reasoning_inside_content" in names(one)
    assert not one.is_healthy


def test_a_target_that_does_not_reason_is_a_warning_and_no_fault(tmp_path):
    one = look(write_lines(tmp_path / "r.jsonl", [answer(n, reasoning="") for n in range(9)]))
    assert names(one) == {"reasoning_empty"}
    assert one.is_healthy


def test_the_servers_default_length_is_recognised(tmp_path):
    usage = {"completion_tokens": 128}
    rows = [answer(n, finish_reason="length", usage=usage) for n in range(20)]
    one = look(write_lines(tmp_path / "rows.jsonl", rows))
    found = next(one for one in one.findings if one.name == "cut_at_one_length")
    assert "128 is SGLang's own default" in found.cause


def test_ids_and_texts_that_come_twice_are_found(tmp_path):
    rows = [answer(number) for number in range(30)]
    rows.append(rows[4])
    one = look(write_lines(tmp_path / "rows.jsonl", rows))
    assert {"duplicate_id", "duplicate_text"} <= names(one)
    assert not one.is_healthy


def test_broken_lines_are_given_by_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(answer(number)) for number in range(10)]
    lines[3], lines[7] = '{"sample_id": "b1', "[1, 2]"
    path.write_text("\n".join(lines) + "\n")
    one = look(path)
    assert one.malformed_count == 2
    assert [place.split(":")[0] for place in one.malformed] == ["line 4", "line 8"]
    assert "malformed_lines" in names(one)


def test_a_growing_file_with_half_a_line_is_alive_and_not_sick(healthy):
    with healthy.open("a") as handle:
        handle.write('{"sample_id": "b1-0000')
    one = look(healthy)
    assert one.ends_in_half_line
    assert one.rows == 60
    assert one.is_healthy
    text = shown(glance([str(healthy)]))
    assert "being written" in text
    assert "ends in half a line" in text


def test_half_a_line_that_nobody_finishes_is_reported(healthy):
    with healthy.open("a") as handle:
        handle.write('{"sample_id": "b1-0000')
    os.utime(healthy, (1_700_000_000, 1_700_000_000))
    assert "half_line_at_end" in names(look(healthy))


def test_a_schema_that_changes_on_the_way_is_a_fault(tmp_path):
    rows = [answer(n) for n in range(40)] + [answer(n, usage=None) for n in range(40, 80)]
    one = look(write_lines(tmp_path / "rows.jsonl", rows))
    drift = next(one for one in one.findings if one.name == "schema_drift")
    assert "usage: object in the head, null in the tail" in drift.seen


def test_a_large_file_is_sampled_and_its_rows_are_estimated(tmp_path, monkeypatch):
    monkeypatch.setattr(shell, "SAMPLE_BYTES", 300_000)
    rows = [answer(number, content=f"{number} " * (number % 30)) for number in range(4000)]
    rows[3999] = answer(3999, content="<think>")
    path = write_lines(tmp_path / "rows.jsonl", rows)
    one = look(path)
    assert not one.rows_exact
    assert one.rows == pytest.approx(4000, rel=0.15)
    assert one.rows_read < 1000
    assert "duplicate_id" not in names(one)  # the places do not overlap
    assert "think_markers_in_content" in names(one)  # the tail is looked at
    assert "about" in shown(glance([str(path)]))
    whole = look(path, full=True)
    assert (whole.rows, whole.rows_exact, whole.rows_read) == (4000, True, 4000)


def test_the_rows_of_a_large_gzip_are_estimated_from_its_head(tmp_path, monkeypatch):
    rows = [
        answer(number, content=random.Random(number).randbytes(60).hex()) for number in range(9000)
    ]
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    monkeypatch.setattr(shell, "SAMPLE_BYTES", 1_000_000)
    one = look(path)
    assert not one.rows_exact
    assert one.rows == pytest.approx(9000, rel=0.2)
    assert one.rows_read < 5000
    assert look(path, full=True).rows == 9000


def test_the_same_rows_look_the_same_in_every_format(tmp_path):
    rows = [answer(number, output_ids=list(range(20 + number % 37))) for number in range(50)]
    table = pa.Table.from_pylist(rows)
    write_lines(tmp_path / "a.jsonl", rows)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    (tmp_path / "c.json").write_text(json.dumps(rows))
    (tmp_path / "d.json").write_text(json.dumps({"version": 1, "data": rows}))
    pq.write_table(table, tmp_path / "e.parquet", row_group_size=7)
    with pa.ipc.new_file(str(tmp_path / "f.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_stream(str(tmp_path / "g.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=9)
    looks = [look(path) for path in sorted(tmp_path.iterdir())]
    assert [one.format for one in looks] == [
        "JSONL",
        "JSONL",
        "JSON",
        "JSON",
        "Parquet",
        "Arrow",
        "Arrow",
    ]
    for one in looks:
        assert (one.rows, one.rows_exact, one.rows_read) == (50, True, 50), one.name
        assert one.responses == looks[0].responses
        assert one.findings == ()
        assert [(field.name, field.filled) for field in one.fields] == [
            (field.name, field.filled) for field in looks[0].fields
        ]


def test_tensors_are_named_with_their_range(tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file({"fc": torch.full((4, 6), 0.5).bfloat16(), "t2d": torch.ones(9).bool()}, path)
    one = look(path)
    by_name = {tensor.name: tensor for tensor in one.tensors}
    assert one.is_healthy
    assert (by_name["fc"].dtype, by_name["fc"].shape) == ("BF16", (4, 6))
    assert by_name["fc"].values == "0.5 to 0.5"
    assert "4 x 6" in shown(glance([str(path)]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_nan_among_tensors_is_a_fault(tmp_path, dtype):
    values = torch.ones(1000, 8, dtype=dtype)
    values[613, 2] = torch.nan
    path = tmp_path / "weights.safetensors"
    save_file({"norm": torch.ones(8), "fc": values}, path)
    one = look(path)
    assert names(one) == {"not_finite"}
    assert "fc" in one.findings[0].seen


@pytest.mark.parametrize("path", ["nothing.jsonl", "*.parquet"])
def test_a_path_without_data_is_refused(tmp_path, path):
    with pytest.raises(BadRecipe, match="expected"):
        glance([str(tmp_path / path)])


def test_a_folder_and_a_pattern_are_looked_at_as_sets(tmp_path):
    for name in ("b1", "b2"):
        (tmp_path / name).mkdir()
        for part in range(3):
            rows = [answer(100 * part + n) for n in range(10)]
            write_lines(tmp_path / name / f"part-{part}.jsonl", rows)
    report = glance([str(tmp_path)])
    assert [(one.files, one.rows) for one in report.sets] == [(3, 30), (3, 30)]
    assert report.is_healthy
    text = shown(report)
    assert "b1" in text
    assert "b2" in text
    (one,) = glance([str(tmp_path / "b*" / "part-1.jsonl")]).sets
    assert (one.files, one.rows) == (2, 20)


def test_no_more_of_a_persons_data_than_a_short_example(tmp_path):
    secret = "word " * 30 + "PRIVATE"
    rows = [answer(0, content=secret, messages=[{"role": "user", "content": secret}])]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    report = glance([str(path)])
    assert "PRIVATE" not in shown(report)
    assert "PRIVATE" not in json.dumps(report.to_json())
    asked = glance([str(path)], show=1)
    assert "PRIVATE" in shown(asked)


def test_whole_samples_tell_reasoning_and_content_apart(healthy):
    text = shown(glance([str(healthy)], show=2))
    assert text.count("[reasoning]") == 2
    assert text.count("[content]") == 2
    assert text.index("[reasoning]") < text.index("[content]")


def test_control_characters_of_data_do_not_reach_the_terminal(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [answer(0, content="\x1b[2J\x07 gone")])
    console = Console(
        file=io.StringIO(), width=80, record=True, force_terminal=True, color_system=None
    )
    render(glance([str(path)], show=1), console)
    assert "\x1b[2J" not in console.export_text()


def test_a_run_of_our_own_is_healthy_in_every_part(tmp_path, tiny_target):
    run = make_good_run(tmp_path, tiny_target)
    report = glance([str(run.root)])
    assert report.is_healthy, [one.findings for one in report.sets if not one.is_healthy]
    kinds = {one.name.removeprefix(f"{run.root}/").split("/")[0]: one.kind for one in report.sets}
    assert kinds["features"] == "tensors" or "features" in kinds
    aside = next(one for one in report.sets if "_rejected" in one.name)
    assert aside.responses is not None
    assert aside.responses.kept_aside == {"rejected:empty_content": 2, "failed:deadline": 1}
    shown(report)


def test_wide_numbers_and_deep_values_survive_as_json(tmp_path):
    deep: Any = "end"
    for _ in range(30):
        deep = {"in": [deep]}
    rows = [answer(0, deep=deep, big=2**80, mixed=[1, "a", None]), answer(1, mixed={"a": 1})]
    report = glance([str(write_lines(tmp_path / "rows.jsonl", rows))], show=2)
    json.dumps(report.to_json(), allow_nan=False)
    table = pa.table({"when": pa.array(np.array(["2026-01-01"], "datetime64[D]")), "b": [b"\x00"]})
    pq.write_table(table, tmp_path / "t.parquet")
    json.dumps(glance([str(tmp_path / "t.parquet")], show=1).to_json(), allow_nan=False)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
_NAMES = st.sampled_from(["sample_id", "content", "reasoning", "usage", "finish_reason", "status"])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rows=st.lists(st.dictionaries(_NAMES | st.text(max_size=5), _VALUES), max_size=6))
def test_rows_of_any_shape_are_looked_at_without_a_traceback(tmp_path, rows):
    report = glance([str(write_lines(tmp_path / "rows.jsonl", rows))], show=1)
    shown(report)
    assert json.loads(json.dumps(report.to_json()))["sets"][0]["rows_read"] == len(rows)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    start=st.sampled_from(
        [b"", b"PAR1", b"ARROW1\0\0", b"\x1f\x8b", b"{", b"[", b"\xff\xff\xff\xff"]
    ),
    rest=st.binary(max_size=200),
    name=st.sampled_from(["a", "a.jsonl", "a.json", "a.parquet", "a.arrow", "a.safetensors"]),
)
def test_bytes_of_any_kind_are_looked_at_without_a_traceback(tmp_path, start, rest, name):
    (tmp_path / name).write_bytes(start + rest)
    report = glance([str(tmp_path / name)])
    json.dumps(report.to_json(), allow_nan=False)
    shown(report)
