"""Settings and fixtures of the whole suite: loopback only, quiet Ray, known thread counts."""

import functools
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# Before any import of ray, torch or deepspeed in a test.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # a loopback cluster that lives for one test run
os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.2")
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A test run that was started in the background ignores SIGINT, and would hand that on.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("suite", deadline=None)  # on a busy machine a slow example is no fault
settings.load_profile("suite")


@functools.cache
def _group(path: Path) -> str:
    """With `-n`, files of one group share a process: all on the session's Ray, and all flows."""
    if "local_ray" in path.read_text():
        return "ray"
    return "flows" if path.parent.name == "flows" else str(path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first, so that no process is left with it at the end."""
    order = {"flows": 0, "ray": 1}
    items.sort(key=lambda item: order.get(_group(item.path), 2))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """A scheduler of ours: xdist 3.8 sets marks of groups that pytest 9.2 does not read."""
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(config.rootpath / nodeid.partition("::")[0])

    return ByGroup(config, log)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny target folder, shared read-only by the session."""
    from tests.support.tiny_target import make_tiny_target

    return make_tiny_target(tmp_path_factory.mktemp("targets") / "tiny")


@pytest.fixture
def object_store(monkeypatch: pytest.MonkeyPatch):
    """An S3 server with one empty bucket, and the keys for it in the environment."""
    from tests.support.object_store import KEYS, serve_store

    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    with serve_store() as store:
        yield store


@pytest.fixture
def small_disk(tmp_path: Path):
    """A file system of half a megabyte, which a test may fill."""
    from tests.support.small_disk import mounted

    with mounted(tmp_path / "disk") as folder:
        yield folder


@pytest.fixture(scope="session")
def local_ray():
    """One small Ray for the session."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,  # logical: train workers, data tasks and server actors together
        object_store_memory=200 * 2**20,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()
