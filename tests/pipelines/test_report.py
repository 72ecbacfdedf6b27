"""The page holds the run's own numbers, needs nothing from outside, and is made of every run."""

import base64
import hashlib
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.errors import BadRecipe
from pipelines.report import report
from pipelines.store import RunFolder, write_parquet
from tests.support.good_run import make_good_run
from tests.support.report_run import (
    ATTACK,
    make_eventful_run,
    make_faulty_run,
    make_killed_run,
)


class Page(HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link", "rect", "line", "circle", "polyline"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"<{tag}> is closed out of order"

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def good(tmp_path_factory, tiny_target) -> RunFolder:
    return make_good_run(tmp_path_factory.mktemp("good"), tiny_target)


@pytest.fixture(scope="module")
def page(good) -> Page:
    return Page(report(good).read_text())


def test_the_page_lies_in_the_run_folder_and_is_whole(good, page):
    assert good.report.exists()
    assert page.open == []


def test_nothing_comes_from_outside_and_one_script_runs_by_its_hash(page):
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "data", "srcset"):
                assert value is not None
                assert value.startswith(("data:", "#")), (tag, name, value)
    outside = re.findall(r"https?://[^\s\"'<]+", page.html)
    assert set(outside) <= {"http://www.w3.org/2000/svg"}
    assert "@import" not in page.html
    assert "url(" not in page.html
    (script,) = re.findall(r"<script>(.*?)</script>", page.html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(one["content"] for _, one in page.tags if "http-equiv" in one)
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy


def test_the_funnel_holds_the_counts_of_the_stages(page):
    for words in (
        "source rows 40",
        "responses ok 37",
        "missing: rejected:empty_content 2, failed:deadline 1",
        "hidden states 37",
    ):
        assert words in page.text
    assert "without a reason" not in page.text


def test_a_loss_that_nothing_explains_is_said(good, tmp_path):
    page = Page(report(make_eventful_run(good, tmp_path / "run")).read_text())
    assert "hidden states 210 missing: failed capture_mismatch 1" in page.text
    assert "missing without a reason on record: 1" in page.text


def test_the_head_says_what_was_run_on_what_and_when(good, tmp_path):
    page = Page(report(make_eventful_run(good, tmp_path / "run")).read_text())
    for words in (
        "finished; all stages done",
        "target tiny (",
        "training sets chat (chat), math (math), code (code), tools (tools)",
        "machine not recorded",
        "2026-01-01 07:58:30 to 2026-01-01 22:25:00 UTC, 14h26m",
        "restarts 2, stops 2, server alarms 2",
    ):
        assert words in page.text


def test_acceptance_is_that_of_the_evaluation_with_its_interval(good, page):
    groups = json.loads(good.evaluation.read_bytes())["acceptance"]
    for kind in ("trained", "untrained", "ngram"):
        low, high = groups[kind]["chat"]["interval"]
        said = f"{groups[kind]['chat']['acceptance_length']:.2f} ({low:.2f} to {high:.2f})"
        assert said in page.text
    assert "unchanged by speculation" in page.text


def test_every_chart_has_a_text_alternative_with_its_numbers(good, page):
    spoken = [
        attributes["aria-label"] or ""
        for tag, attributes in page.tags
        if tag == "svg" and attributes.get("role") == "img"
    ]
    assert len(spoken) >= 5
    assert all(re.search(r"\d", words) for words in spoken)
    length = json.loads(good.evaluation.read_bytes())["acceptance"]["trained"]["chat"]
    assert any(f"{length['acceptance_length']:.2f}" in words for words in spoken)


def test_samples_are_of_every_status(page):
    shown = [one for tag, one in page.tags if one.get("class") == "sample"]
    statuses = Counter(one["data-status"] for one in shown)
    assert statuses == {"ok": 37, "rejected": 2, "failed": 1, "evaluated": 1}
    assert "rejected:empty_content" in page.text


def test_provenance_names_every_file_with_its_checksum(good, page):
    manifest = json.loads(good.manifest.read_bytes())
    for entry in manifest["stages"].values():
        assert entry["fingerprint"] in page.text
        for name, file in entry["files"].items():
            assert name in page.text
            assert file["sha256"] in page.text


def test_what_people_wrote_is_escaped(good, tmp_path):
    run = RunFolder(shutil.copytree(good.root, tmp_path / "run"))
    attack = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>"
    for path in run.responses.rglob("*.parquet"):
        table = pq.read_table(path, partitioning=None)
        rows = table.to_pylist()
        for row in rows:
            row |= {"content": attack, "reasoning": attack, "detail": attack}
            row["messages"] = json.dumps([{"role": attack, "content": attack}])
        write_parquet(path, pa.Table.from_pylist(rows, schema=table.schema))
    page = Page(report(run).read_text())
    assert [tag for tag, _ in page.tags if tag in ("script", "img")] == ["script"]
    assert attack in "".join(page.words)


@pytest.mark.parametrize("until", ["prepare", "generate", "capture", "train", "export"])
def test_a_run_on_its_way_has_a_page_that_says_what_is_missing(tmp_path, tiny_target, until):
    run = make_good_run(tmp_path, tiny_target, until=until)
    page = Page(report(run).read_text())
    assert "Not there yet: the draft was not measured." in page.text
    assert ("Not there yet: the draft was not trained." in page.text) == (
        until in ("prepare", "generate", "capture")
    )


def test_the_same_run_gives_the_same_page(good, page):
    assert report(good).read_text() == page.html


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(BadRecipe, match="no recipe"):
        report(RunFolder(tmp_path))


def test_a_page_is_small_enough_to_send(good):
    assert report(good).stat().st_size < 300_000


def test_a_killed_run_has_a_page_of_what_is_durable(good, tmp_path):
    page = Page(report(make_killed_run(good, tmp_path / "run")).read_text())
    assert "responses ok 20 missing: not answered yet 20" in page.text
    assert "the driver is dead" in page.text
    assert "generate went on, after it was killed" in page.text
    assert "Not there yet: the draft was not trained." in page.text
    assert "cannot be read" not in page.text


def test_what_cannot_be_read_is_said_and_the_rest_is_shown(good, tmp_path):
    page = Page(report(make_faulty_run(good, tmp_path / "run")).read_text())
    for words in (
        "Some of this run cannot be read",
        "3 lines of events.jsonl are no events",
        "chat: 0 ok rows can be read, the manifest promises 37",
        "Cannot be shown: KeyError: 'ngram'",
        "Loss",
    ):
        assert words in page.text


@pytest.mark.parametrize(
    "name", ["manifest.json", "events.jsonl", "recipe.yaml", "evaluation.json"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\x00", b'{"stages": {"train": 3}}'])
def test_a_page_is_made_whatever_a_file_holds(good, tmp_path, name, content):
    run = RunFolder(shutil.copytree(good.root, tmp_path / "run"))
    (run.root / name).write_bytes(content)
    page = Page(report(run).read_text())
    assert page.open == []
    assert "hidden states 37" in page.text or name == "manifest.json"


def test_half_a_surrogate_pair_is_shown_as_a_question_mark(good, tmp_path):
    run = RunFolder(shutil.copytree(good.root, tmp_path / "run"))
    for path in run.responses.rglob("*.parquet"):
        table = pq.read_table(path, partitioning=None)
        rows = [{**row, "messages": r'[{"role": "user", "content": "x\ud800y"}]'}
                for row in table.to_pylist()]  # fmt: skip
        write_parquet(path, pa.Table.from_pylist(rows, schema=table.schema))
    assert "x?y" in Page(report(run).read_text()).text


def test_long_texts_are_cut_and_the_page_stays_small(good, tmp_path):
    run = make_eventful_run(good, tmp_path / "run")
    for path in run.responses.rglob("*.parquet"):
        table = pq.read_table(path, partitioning=None)
        rows = [{**row, "content": "<&>" * 9000, "reasoning": ATTACK * 900}
                for row in table.to_pylist()]  # fmt: skip
        write_parquet(path, pa.Table.from_pylist(rows, schema=table.schema))
    path = report(run)
    assert path.stat().st_size < 1_000_000
    assert "more had no room" in Page(path.read_text()).text
