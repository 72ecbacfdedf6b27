"""The harness: bars, output, steady rates, and the cost of a process tree."""

import json
import math
import os
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.harness import Bar, Options, TreeCost, run_measured, steady_rate

BARS = {"rate": Bar("at least", 0.99), "cost": Bar("at most", 2.0), "context": None}
LONG, SHORT = Options(short=False, only=frozenset()), Options(short=True, only=frozenset())


@pytest.mark.parametrize(
    ("bar", "figure", "holds"),
    [
        (Bar("at least", 1.0), 1.0, True),
        (Bar("at least", 1.0), 0.999, False),
        (Bar("at most", 2.0), 2.0, True),
        (Bar("at most", 2.0), 2.001, False),
        (Bar("at least", 1.0), math.nan, False),
        (Bar("at most", 1.0), math.nan, False),
    ],
)
def test_a_bar_holds_on_its_side_only(bar: Bar, figure: float, holds: bool):
    assert bar.holds(figure) == holds


def test_a_long_form_misses_what_is_below_its_bar_and_what_was_not_measured():
    assert harness.missed({"rate": 0.98, "cost": 1.0}, BARS, LONG) == ["rate"]
    assert harness.missed({"rate": 0.99}, BARS, LONG) == ["cost"]
    assert harness.missed({"rate": 0.99}, BARS, Options(False, frozenset({"some"}))) == []


def test_a_short_form_judges_only_the_bars_of_any_form():
    bars = {"rate": Bar("at least", 0.99), "lost": Bar("at most", 0.0, in_any_form=True)}
    assert harness.missed({"rate": 0.1, "lost": 0.0}, bars, SHORT) == []
    assert harness.missed({"rate": 0.1, "lost": 1.0}, bars, SHORT) == ["lost"]


def test_json_is_one_object_and_nothing_else_reaches_stdout(capfd: pytest.CaptureFixture[str]):
    def measure(options: Options) -> dict[str, float]:
        assert options == LONG
        os.write(1, b"a child's greeting")
        sys.stdout.write("a library's greeting")
        return {"rate": 1.0, "cost": 3.0}

    code = harness.main("example", BARS, measure, arguments=["--json"])
    result = json.loads(capfd.readouterr().out)
    assert code == 1
    assert result["name"] == "example"
    assert result["figures"] == {"rate": 1.0, "cost": 3.0}
    assert result["versions"].keys() >= {"python", "ray", "aiohttp"}
    assert result["machine"]["cpus"] >= 1


def test_the_table_names_every_figure_its_bar_and_whether_it_holds(
    capsys: pytest.CaptureFixture[str],
):
    code = harness.main(
        "example", BARS, lambda _: {"rate": 0.5, "cost": 1.5}, arguments=["--short"]
    )
    shown = capsys.readouterr().out
    assert code == 0
    for part in ("rate", "0.5", "at least 0.99", "NO", "at most 2", "yes", "not measured"):
        assert part in shown


def test_only_asks_for_the_named_groups():
    asked = []
    harness.main(
        "example",
        {},
        lambda options: asked.append(options) or {},
        groups=("a", "b"),
        arguments=["--only", "b"],
    )
    assert asked[0].wants("b")
    assert not asked[0].wants("a")


def test_a_steady_rate_leaves_out_start_and_end():
    even = [second / 10 for second in range(100)]
    assert steady_rate([*even[:90], *(200.0 + n for n in range(10))]) == pytest.approx(10.0)
    assert steady_rate(reversed(even)) == pytest.approx(10.0)


def test_cpu_between_two_samples_is_in_proportion():
    cost = TreeCost(0, 3.0, ((100.0, 1.0), (102.0, 5.0), (103.0, 5.5)), {})
    assert [cost.cpu_at(at) for at in (99.0, 100.0, 101.0, 103.0, 110.0)] == [1, 1, 3, 5.5, 5.5]
    assert cost.cpu_since(101.0) == 2.5


def test_a_tree_costs_what_its_ended_and_orphaned_processes_used(tmp_path: Path):
    burn = "import time\nwhile time.process_time() < 0.6: pass\nheld = bytearray(64 << 20)\n"
    burn += "time.sleep(0.4)"
    # The child ends long before the parent; the grandchild outlives the child that started it.
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {burn!r}])\n{burn}"
    parent = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {child!r}])\n"
    parent += "time.sleep(1.5); sys.exit(7)"
    cost = run_measured(
        [sys.executable, "-c", parent],
        log=tmp_path / "log",
        every_seconds=0.1,
        memory_every_seconds=0.1,
        role_of=lambda line: "burner" if line[-1].endswith(burn) else None,
    )
    assert cost.code == 7
    assert 1.0 < cost.samples[-1][1] < 2.5
    assert [cpu for _, cpu in cost.samples] == sorted(cpu for _, cpu in cost.samples)
    assert 64 << 20 < cost.peak_bytes["burner"] < 160 << 20
