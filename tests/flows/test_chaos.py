"""Generation while everything around it dies: the short storm of the benchmark."""

import json
import subprocess
import sys

from tests.support.road import ROOT


def test_no_row_is_lost_doubled_or_wrong_while_servers_workers_and_drivers_die():
    done = subprocess.run(
        [sys.executable, "benchmarks/chaos.py", "--short", "--only", "storm", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
        stdin=subprocess.DEVNULL,
    )
    assert done.stdout, done.stderr[-4000:]
    figures = json.loads(done.stdout)["figures"]
    promised = ("lost", "doubled", "malformed", "regenerated")
    assert {name: figures[name] for name in promised} == dict.fromkeys(promised, 0), done.stderr
    assert figures["rows_identical"] == 1
    assert figures["kills"] == 1
    assert done.returncode == 0
