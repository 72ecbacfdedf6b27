"""The page in a real browser: at every width, in light and dark, by keyboard, by touch, and read
aloud. Nothing that people or models wrote runs in it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.recipe import cache_folder
from pipelines.report import report
from tests.support.good_run import make_good_run
from tests.support.report_run import make_eventful_run, make_faulty_run, make_killed_run

webdriver = pytest.importorskip("selenium.webdriver")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
AXE = cache_folder() / "axe/node_modules/axe-core/axe.min.js"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
)
RUNS = ("good", "prepared", "killed", "faulty", "eventful")
WIDTHS = {1280: False, 390: True, 320: True}  # pixels, and whether it is a phone

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver here: make browser"
)


class Browser:
    """One Chromium, and what it wrote to its console."""

    def __init__(self, profile: Path) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        service = webdriver.ChromeService(executable_path=DRIVER)
        self.driver = webdriver.Chrome(options=options, service=service)

    def open(self, path: Path, width: int = 1280, *, dark: bool = False, script: bool = True):
        """Show a page; forget what the console said before."""
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": WIDTHS[width]}
        media = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.tell("Emulation.setDeviceMetricsOverride", **screen)
        self.tell("Emulation.setTouchEmulationEnabled", enabled=WIDTHS[width])
        self.tell("Emulation.setEmulatedMedia", features=media)
        self.tell("Emulation.setScriptExecutionDisabled", value=not script)
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(path.as_uri())

    def tell(self, command: str, **given) -> None:
        self.driver.execute_cdp_cmd(command, given)

    def ask(self, script: str, *given):
        """The value of a JavaScript expression."""
        return self.driver.execute_script(f"return {script}", *given)

    def console(self) -> list[str]:
        return [line["message"] for line in self.driver.get_log("browser")]

    def press(self, *keys: str) -> None:
        webdriver.ActionChains(self.driver).send_keys(*keys).perform()

    def shown(self) -> list[str]:
        """The ids of the samples that can be seen and are open."""
        return self.ask(
            "[...document.querySelectorAll('details.sample')].filter(one => one.open && "
            "!one.hidden).map(one => one.querySelector('summary code').textContent)"
        )

    def place(self) -> str:
        return self.ask("document.getElementById('browse-place').textContent")


@pytest.fixture(scope="module")
def pages(tmp_path_factory, tiny_target) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    good = make_good_run(folder / "good", tiny_target)
    runs = {
        "good": good,
        "prepared": make_good_run(folder / "prepared", tiny_target, until="prepare"),
        "killed": make_killed_run(good, folder / "killed"),
        "faulty": make_faulty_run(good, folder / "faulty"),
        "eventful": make_eventful_run(good, folder / "eventful"),
    }
    return {name: report(run) for name, run in runs.items()}


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", RUNS)
def test_a_page_fits_its_width_loads_nothing_and_has_no_error(browser, pages, name, width):
    browser.open(pages[name], width)
    assert browser.console() == []
    wide, room = browser.ask(
        "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
    )
    assert wide <= room == width
    assert browser.ask("performance.getEntriesByType('resource').length") == 0


def test_no_text_of_a_run_becomes_markup_or_runs(browser, pages):
    browser.open(pages["eventful"])
    assert browser.ask("document.title") == "eventful: an Eyas run"
    assert browser.ask("document.querySelectorAll('script').length") == 1
    assert browser.ask("document.querySelectorAll('img, iframe, object').length") == 0
    assert "<img src=x onerror=alert(1)>" in browser.ask("document.body.textContent")


def test_the_policy_of_the_page_runs_no_other_script(browser, pages, tmp_path):
    html = pages["good"].read_text()
    attacked = tmp_path / "attacked.html"
    attack = (
        "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    )
    attacked.write_text(html.replace("<header>", f"<header>{attack}", 1))
    browser.open(attacked)
    assert browser.ask("document.title") == "road: an Eyas run"
    assert any("Content Security Policy" in line for line in browser.console())


def test_arrow_keys_and_buttons_walk_through_the_samples(browser, pages):
    from selenium.webdriver.common.keys import Keys

    browser.open(pages["eventful"])
    count = browser.ask("document.querySelectorAll('details.sample').length")
    assert count > 20
    assert browser.place() == f"1 of {count}"
    seen = browser.shown()
    for at in range(2, count + 1):
        browser.press(Keys.ARROW_RIGHT)
        assert browser.place() == f"{at} of {count}"
        seen += browser.shown()
    assert len(seen) == len(set(seen)) == count
    browser.press(Keys.ARROW_RIGHT)
    assert browser.shown() == seen[:1]
    browser.press(Keys.ARROW_LEFT)
    assert browser.shown() == seen[-1:]
    browser.driver.find_element("id", "browse-next").send_keys(Keys.ENTER)
    assert browser.shown() == seen[:1]
    browser.press(Keys.TAB, Keys.SHIFT)  # the focus is on the next button: buttons go by Tab
    assert browser.ask("document.activeElement.id") == "browse-set"


@pytest.mark.parametrize("status", ["ok", "rejected", "failed", "evaluated"])
def test_a_set_and_a_status_choose_the_samples(browser, pages, status):
    from selenium.webdriver.support.select import Select

    browser.open(pages["eventful"])
    Select(browser.driver.find_element("id", "browse-status")).select_by_value(status)
    total = int(browser.place().removeprefix("1 of "))
    assert total > 0
    name = "eval-math" if status == "evaluated" else "math"
    Select(browser.driver.find_element("id", "browse-set")).select_by_value(name)
    assert 0 < int(browser.place().removeprefix("1 of ")) < total
    (shown,) = browser.shown()
    assert shown.startswith(f"{name}-")
    Select(browser.driver.find_element("id", "browse-set")).select_by_value(
        "math" if status == "evaluated" else "eval-math"
    )
    assert (browser.place(), browser.shown()) == ("none of these", [])


def test_a_swipe_goes_on_and_back(browser, pages):
    browser.open(pages["eventful"], 390)
    first = browser.shown()

    def swipe(start: int, end: int) -> None:
        part = "document.querySelector('details.sample[open] .part')"
        browser.ask(f"{part}.scrollIntoView({{block: 'center'}})")
        y = browser.ask(f"{part}.getBoundingClientRect().top") + 10
        for kind, touched in (("Start", [start]), ("Move", [end]), ("End", [])):
            points = [{"x": x, "y": y} for x in touched]
            browser.tell("Input.dispatchTouchEvent", type=f"touch{kind}", touchPoints=points)

    swipe(300, 100)
    assert browser.shown() != first
    assert browser.place().startswith("2 of")
    swipe(100, 300)
    assert browser.shown() == first
    swipe(120, 100)
    assert browser.shown() == first, "a tap that trembles is no swipe"


def test_accepted_tokens_are_marked_in_evaluated_answers_only(browser, pages):
    browser.open(pages["eventful"])
    marked = browser.ask(
        "[...document.querySelectorAll('details.sample')].filter(one => "
        "one.querySelector('mark')).map(one => one.dataset.status)"
    )
    assert marked == ["evaluated"] * 4


def test_without_scripts_everything_but_the_filters_is_there(browser, pages):
    browser.open(pages["eventful"], script=False)
    tree = browser.driver.execute_cdp_cmd("DOM.getDocument", {"depth": -1})["root"]["nodeId"]

    def found(selector: str) -> int:
        given = {"nodeId": tree, "selector": selector}
        return len(browser.driver.execute_cdp_cmd("DOM.querySelectorAll", given)["nodeIds"])

    assert found("#browser[hidden]") == 1
    assert found("details.sample") > 20
    assert found("details.sample[hidden]") == 0
    assert found("figure svg") > 10


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not in the cache folder: make browser")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", RUNS)
def test_axe_finds_no_serious_fault(browser, pages, name, width, dark):
    browser.open(pages[name], width, dark=dark)
    browser.driver.execute_script(
        "for (const one of document.querySelectorAll('details')) one.open = true;"
    )
    browser.driver.execute_script(AXE.read_text())
    found = browser.driver.execute_async_script(
        "const done = arguments[arguments.length - 1];"
        "axe.run().then(found => done(found.violations), error => done([{impact: 'critical', "
        "id: String(error), nodes: []}]))"
    )
    grave = [
        (one["id"], [node["html"] for node in one["nodes"]][:3])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]
    assert grave == []
