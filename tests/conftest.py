"""What tests share: one small Ray cluster and one S3 server for a session, and no deadlines, since machines are shared."""

import gc
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from hypothesis import settings

from tests.signals import restore_default_signals

pytest_plugins = ["tests.fork_server", "tests.schedule", "tests.seconds", "tests.source_map"]

# A session starts some thousand interpreters. Without bytecode each of them compiles our four hundred modules anew, and
# pytest rewrites the assertions of three hundred files: 5 s of 14 at each collection.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Nothing of a collection is garbage, but looking for it took 2.5 of 5.9 s.
gc.disable()

# A run of the tests that a script has started in the background ignores Ctrl-C, and so would all that it starts.
restore_default_signals()

# Triton reads this when it is imported, so it is set before anything could import it. What the tests start inherits it, and
# nothing there runs a kernel unless it asks for `kernels triton`.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Two processes test side by side on two cores; two threads in each of them wait for each other most of the time. Jobs set
# their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray has its workers stand back behind everything else (niceness 15): beside one busy process they get 3 % of a core.
os.environ.setdefault("RAY_worker_niceness", "0")

# What a first start measures differs from one to the next, and many tests compare bits; those of the measurement take this
# away again.
os.environ.setdefault("RAYSTRIDE_LINEAR", "torch")

# What a test draws without hypothesis is another draw each day, and the same one in all processes of a session.
os.environ.setdefault("RAYSTRIDE_SEED", str(date.today().toordinal()))

# What was compiled for one kind of processor must not be found where tests pretend to run on another: PyTorch does not look.
_KIND = os.environ.get("ATEN_CPU_CAPABILITY", "own")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor-tests-{os.getuid()}-{_KIND}")

# A developer's own tracking server must not hear of the tests.
for _name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
    os.environ.pop(_name, None)

settings.register_profile("raystride", deadline=None, max_examples=50)
settings.load_profile("raystride")


_EXAMPLES_SHARE = float(os.environ.get("RAYSTRIDE_EXAMPLES_SHARE", "1"))
"""Share of its examples that each property test draws: all, and a quarter in `make test`, others each time."""
_MIN_EXAMPLES = 4


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves weekly tests to `make test-weekly`, which names their mark."""
    if "weekly" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("weekly")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("weekly")]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Has a property test draw its share of examples."""
    test: Any = getattr(item, "function", None)
    # Hypothesis has no public way to change the settings of one test after its definition.
    if _EXAMPLES_SHARE < 1 and (own := getattr(test, "_hypothesis_internal_use_settings", None)):
        if not hasattr(test, "_all_examples"):
            test._all_examples = own.max_examples
        count = max(_MIN_EXAMPLES, round(test._all_examples * _EXAMPLES_SHARE))
        test._hypothesis_internal_use_settings = settings(own, max_examples=min(count, test._all_examples))


def pytest_collection_finish() -> None:
    """Collects garbage from now on, but not what was imported and collected."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish() -> None:
    """Kills the processes that failed tests have left: Python waits for them at its end, and a stopped one never ends."""
    for child in multiprocessing.active_children():
        child.kill()


def _start_cluster() -> None:
    from raystride.pipelines.launch.cluster.cluster import start_local_ray

    start_local_ray(num_cpus=2, log_to_driver=False, logging_level=logging.ERROR)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray cluster of two cores, started once a process."""
    import ray

    _start_cluster()
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _ray_cluster_is_up(request: pytest.FixtureRequest) -> None:
    """Starts the shared cluster again if a test before has ended it with a job of its own."""
    if "ray_cluster" in request.fixturenames:
        request.getfixturevalue("ray_cluster")
        import ray

        if not ray.is_initialized() or ray._private.state.state.gcs_options is None:
            ray.shutdown()
            _start_cluster()


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """The endpoint of a server that speaks S3, with an empty bucket, started once."""
    from tests.storage import server

    with server() as endpoint:
        yield endpoint
