"""The cluster file, read by Ray's own code."""

from pathlib import Path

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

CLUSTER = Path(__file__).parent.parent / "cluster.yaml"


def test_ray_accepts_the_cluster_file():
    config = prepare_config(yaml.safe_load(CLUSTER.read_text()))
    validate_config(config)
    assert config["provider"]["type"] == "local"


def test_every_node_installs_and_starts_the_same_eyas():
    config = yaml.safe_load(CLUSTER.read_text())
    assert any("make install" in command for command in config["setup_commands"])
    for kind in ("head", "worker"):
        starts = [one for one in config[f"{kind}_start_ray_commands"] if "ray start" in one]
        assert starts
        assert all("~/eyas/.venv/bin/ray" in one for one in starts)
