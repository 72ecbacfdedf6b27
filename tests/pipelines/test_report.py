"""The page holds the run's own numbers, needs nothing from outside, and escapes people's text."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.errors import BadRecipe
from pipelines.report import report
from pipelines.store import RunFolder, write_parquet
from tests.support.good_run import make_good_run


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


def test_nothing_comes_from_outside_and_nothing_runs(page):
    assert "script" not in {tag for tag, _ in page.tags}
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


def test_the_funnel_holds_the_counts_of_the_stages(page):
    for words in (
        "source rows 40",
        "answers ok 37",
        "rejected empty_content 2, failed deadline 1",
        "hidden states 37",
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


def test_about_twenty_samples_are_shown_with_those_that_were_set_aside(page):
    shown = [tag for tag, _ in page.tags if tag == "details"]
    assert 18 <= len(shown) <= 26
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
    assert {tag for tag, _ in page.tags} & {"script", "img"} == set()
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
