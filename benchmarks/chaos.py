"""Generation while everything dies: `python benchmarks/chaos.py [--short] [--json]`.

The real command against four fault servers (tests/support/fault_server.py), and its rows beside
those of a calm run, from the files alone.

* storm: one request in ten is answered wrongly, in every way there is; one server is killed and
  comes back, one is killed and comes back with another model; a Ray worker is killed; the driver is
  killed and started again.
* kills: the driver is killed at random moments of its life, again and again, and started again.

Figures: `lost` (prompts without a row, or failed where a good server was there), `doubled`,
`malformed`, `regenerated` (rows that were durable when something was killed, and were made again)
must be 0, `rows_identical` must be 1. `asked_again` is extra requests per prompt of the storm,
`answers_lost_per_kill` is how many good answers one kill threw away.
"""

import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # started as a script

from benchmarks import harness  # noqa: E402
from benchmarks.driver import Driver, Stuck  # noqa: E402
from benchmarks.harness import Bar, Options  # noqa: E402
from benchmarks.row_checks import (  # noqa: E402
    Findings,
    committed_rows,
    compare,
    durable_replies,
    prompt_ids_of,
)
from tests.support.fault_process import FaultProcess  # noqa: E402
from tests.support.road import write_recipe  # noqa: E402
from tests.support.scripted_answers import ScriptedTarget  # noqa: E402
from tests.support.tiny_target import make_tiny_target  # noqa: E402

logger = logging.getLogger(__name__)

BARS: dict[str, Bar | None] = {
    "lost": Bar("at most", 0, in_any_form=True),
    "doubled": Bar("at most", 0, in_any_form=True),
    "malformed": Bar("at most", 0, in_any_form=True),
    "regenerated": Bar("at most", 0, in_any_form=True),
    "rows_identical": Bar("at least", 1, in_any_form=True),
    "asked_again": None,
    "answers_lost_per_kill": None,
    "kills": None,
}
GROUPS = ("storm", "kills")
PREFLIGHT_FAILED = 3
NOTHING = Findings(0, 0, 0, 0, 0)


@dataclass(frozen=True)
class Scale:
    """How much of it."""

    storm_prompts: int
    storm_latency_ms: int  # of one answer: what makes the storm last
    refusal: bool  # whether the resumed driver first meets the server with another model
    kills: int
    kill_prompts: int
    kills_per_run: int


SHORT = Scale(240, 600, refusal=False, kills=2, kill_prompts=100, kills_per_run=2)
LONG = Scale(2_000, 400, refusal=True, kills=50, kill_prompts=500, kills_per_run=5)

# Attempts enough for all that one prompt can meet, and deadlines that a hanging request reaches.
POOL = {
    "max_in_flight_per_server": 12,
    "attempts": 30,
    "rest_seconds": 0.5,
    "backoff_seconds": 0.05,
    "connect_seconds": 5.0,
    "deadline_base_seconds": 8.0,
    "deadline_per_token_seconds": 0.01,
}


@dataclass
class Scene:
    """The folder, the target, and what a calm run made of the prompts."""

    folder: Path
    target: Path
    scale: Scale
    answers: ScriptedTarget
    calm: pa.Table | None = None
    findings: Findings = NOTHING
    regenerated: int = 0
    kills: int = 0
    drivers: list[Driver] = field(default_factory=list)

    def start(self, name: str, prompts: int, places: Sequence[FaultProcess]) -> Driver:
        """Start the command, or start it again, for the run of this name."""
        folder = self.folder / name
        if not folder.exists():
            write_prompts(write_recipe(folder, self.target).parent / "train.jsonl", prompts)
        servers = {"kind": "attach", "urls": [one.url for one in places]}
        changes = {"generate.servers": servers, "generate.pool": POOL}
        sets = [
            part
            for key, value in changes.items()
            for part in ("--set", f"{key}={json.dumps(value)}")
        ]
        arguments = ["run", str(folder / "recipe.yaml"), "--until", "generate", *sets]
        driver = Driver(arguments, folder / "driver.log")
        self.drivers.append(driver)
        return driver

    def run(self, name: str) -> Path:
        """The run folder of this name."""
        return self.folder / name / "run"

    def finish(self, driver: Driver, name: str, durable: Mapping[str, Any]) -> None:
        """Wait for the end, and compare what was committed."""
        code = driver.wait()
        if code != 0:
            raise Stuck(f"the run ended with code {code}\n{driver.tail()}")
        rows = committed_rows(self.run(name))
        if self.calm is None:
            self.calm = rows
        finished = dict(
            zip(rows["sample_id"].to_pylist(), rows["finished_at"].to_pylist(), strict=True)
        )
        made_again = sum(finished.get(one) != at for one, at in durable.items())
        findings = compare(rows, self.calm, prompt_ids_of(self.run(name)), self.answers)
        logger.info("%s: %s, %d made again", name, findings, made_again)
        self.regenerated += made_again
        self.findings += findings

    def kill(self, driver: Driver, name: str, *, wait: bool) -> dict[str, Any]:
        """Kill the driver; return what was durable in that moment."""
        driver.kill()
        self.kills += 1
        if wait:
            driver.wait_for_orphans()
        return durable_replies(self.run(name))


def measure(options: Options) -> dict[str, float]:
    """All figures that are asked for."""
    scale = SHORT if options.short else LONG
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="eyas-chaos-") as name, _scene(Path(name), scale) as it:
        calm(it)
        if options.wants("storm"):
            figures["asked_again"] = storm(it)
        if options.wants("kills"):
            figures["answers_lost_per_kill"] = kills(it)
        found = it.findings
    return figures | {
        "lost": found.lost,
        "doubled": found.doubled,
        "malformed": found.malformed,
        "regenerated": it.regenerated,
        "rows_identical": 1 - found.different / found.rows,
        "kills": it.kills,
    }


def calm(scene: Scene) -> None:
    """The run that nothing disturbs: what all others must come to."""
    prompts = max(scene.scale.storm_prompts, scene.scale.kill_prompts)
    with _places(scene, 1, "calm", fault_share=0.0, latency_ms=5) as places:
        scene.finish(scene.start("calm", prompts, places), "calm", {})
    assert scene.calm is not None
    assert scene.calm.num_rows == prompts


def storm(scene: Scene) -> float:
    """Every fault and every death in one run; return the extra requests per prompt."""
    prompts = scene.scale.storm_prompts
    latency = scene.scale.storm_latency_ms
    with _places(scene, 4, "storm", fault_share=0.1, latency_ms=latency) as places:
        first, second, *_ = places
        driver = scene.start("storm", prompts, places)

        def asked(share: float) -> None:
            """Wait until so many requests came, as a share of the prompts."""
            reached = lambda: sum(one.asked() for one in places) >= share * prompts  # noqa: E731
            if not driver.wait_for(reached, f"{share:.0%} of the prompts asked"):
                raise Stuck(f"the run ended before its storm\n{driver.tail()}")
            logger.info("storm: %.0f%% asked", 100 * share)

        asked(0.15)
        first.kill()
        asked(0.25)
        second.kill()
        second.start("--model", "impostor")
        asked(0.35)
        first.start()
        asked(0.45)
        driver.kill_worker("GenerateWorker")
        asked(0.60)
        durable = scene.kill(driver, "storm", wait=True)
        if scene.scale.refusal:
            refused = scene.start("storm", prompts, places).wait()
            if refused != PREFLIGHT_FAILED:
                raise Stuck(f"a server with another model: code {refused}\n{driver.tail()}")
        second.kill()
        second.start()
        scene.finish(scene.start("storm", prompts, places), "storm", durable)
        return sum(one.asked() for one in places) / prompts - 1


def kills(scene: Scene) -> float:
    """Kill the driver at random moments; return how many good answers one kill cost."""
    dice = random.Random(20_260)
    prompts, wanted = scene.scale.kill_prompts, scene.kills + scene.scale.kills
    committed = rounds = 0
    with _places(scene, 2, "kills", fault_share=0.05, latency_ms=150) as places:
        while scene.kills < wanted:
            rounds += 1
            name = f"kills-{rounds}"
            durable: dict[str, Any] = {}
            for _ in range(min(scene.scale.kills_per_run, wanted - scene.kills)):
                driver = scene.start(name, prompts, places)
                if not wait_for_a_moment(driver, places, prompts - len(durable), dice):
                    break  # it was done before its moment came
                durable |= scene.kill(driver, name, wait=dice.random() < 0.5)
                logger.info("kill %d: %d rows durable", scene.kills, len(durable))
            scene.finish(scene.start(name, prompts, places), name, durable)
            committed += len(durable_replies(scene.run(name)))
        paid = sum(one.met().count("good") + one.met().count("slow") for one in places)
    return (paid - committed) / scene.scale.kills


def wait_for_a_moment(
    driver: Driver, places: Sequence[FaultProcess], left: int, dice: random.Random
) -> bool:
    """Wait for a random moment of a run that has so many rows to go; False if it ended before.

    One in five is while it starts, one in five about its commit, the others while rows come in.
    """
    before = sum(one.asked() for one in places)
    match dice.randrange(5):
        case 0:
            seconds, requests = dice.uniform(0.2, 8.0), 0
        case 1:
            seconds, requests = dice.uniform(0.0, 1.5), left
        case _:
            seconds, requests = dice.uniform(0.0, 0.3), dice.randint(1, max(1, left))
    reached = lambda: sum(one.asked() for one in places) - before >= requests  # noqa: E731
    if not driver.wait_for(reached, f"{requests} requests"):
        return False
    at = time.monotonic() + seconds
    return driver.wait_for(lambda: time.monotonic() >= at, "time")


def write_prompts(path: Path, count: int) -> None:
    """Prompts of many lengths; the scripted target refuses some, and answers some with nothing."""
    with path.open("w") as lines:
        for number in range(count):
            mark = {0: "!", 25: "~"}.get(number % 50 if number >= 50 else -1, ".")
            content = f"Tell me about number {number}" + " and more" * (number % 9) + mark
            record = {
                "messages": [{"role": "user", "content": content}],
                "source": "made for the tests",
                "license": "Apache-2.0",
            }
            lines.write(json.dumps(record) + "\n")


@contextmanager
def _scene(folder: Path, scale: Scale) -> Iterator[Scene]:
    """The target is made; on every path nothing is left running."""
    target = make_tiny_target(folder / "tiny")
    scene = Scene(folder, target, scale, ScriptedTarget.of(target, ""))
    try:
        yield scene
    finally:
        for driver in scene.drivers:
            driver.kill()
        for driver in scene.drivers:
            driver.wait_for_orphans()


@contextmanager
def _places(
    scene: Scene, count: int, name: str, *, fault_share: float, latency_ms: int
) -> Iterator[list[FaultProcess]]:
    """Fault servers. Each has its own seed: a prompt does not meet one fault everywhere."""
    options = ("--fault-share", str(fault_share), "--latency-ms", str(latency_ms))
    places = [
        FaultProcess(
            scene.target,
            scene.folder / f"{name}-{number}.state",
            ("--seed", str(1000 + number), *options),
        )
        for number in range(count)
    ]
    try:
        for one in places:
            one.start()
        yield places
    finally:
        for one in places:
            one.close()


if __name__ == "__main__":
    raise SystemExit(harness.main("chaos", BARS, measure, groups=GROUPS))
