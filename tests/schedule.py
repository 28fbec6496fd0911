"""The order of test files and which process runs which: the longest first, and those that wait beside those that compute.

`tests/seconds.json` has the seconds that each file took (`make test-table` writes it). A file's tests stay in one process,
which keeps their trainings and clusters. With three processes or more the last one begins with the files of `LAST_PROCESS`:
the others compute while it waits for polls, time limits and lost nodes. It also has the files that share one Ray cluster,
which each other process would have to start for itself.

    pytest -n 3 --dist loadfile --no-loadscope-reorder     # tests/conftest.py registers this plugin
"""

import json
import math
import os
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

SECONDS_FILE = Path(__file__).with_name("seconds.json")
UNKNOWN_FILE_S = 5.0
"""Seconds of a file that was never measured."""

LONG_MINUTES = float(os.environ.get("RAYSTRIDE_LONG_MINUTES", "inf"))
"""Minutes after which no test of the mark `long` begins any more. With such an end the order of the files is drawn anew in
each run, so that it is not always the same tests that there was no time for."""
_BEGAN = time.monotonic()

LAST_PROCESS = (
    "tests/cluster/",
    "tests/deploy/test_slurm.py",
    "tests/deploy/test_launcher.py",
    "tests/end_to_end/test_answers.py",
    "tests/end_to_end/test_mlflow_users.py",
    "tests/end_to_end/test_ray_job.py",
    "tests/faults/test_elastic.py",
    "tests/faults/test_hang.py",
    "tests/faults/test_ray.py",
    "tests/pipelines/launch/cluster/test_fast_start.py",
    "tests/pipelines/launch/cluster/test_internals.py",
    "tests/pipelines/launch/cluster/test_recorder_handle.py",
    "tests/pipelines/launch/cluster/test_resources.py",
    "tests/pipelines/launch/cluster/test_trainer.py",
    "tests/pipelines/launch/cluster/test_versions.py",
    "tests/pipelines/launch/console/test_failure.py",
    "tests/pipelines/launch/console/test_ray_job_status.py",
    "tests/pipelines/evaluate/test_prediction.py",
    "tests/pipelines/launch/test_preparing.py",
    "tests/pipelines/train/own_model/test_on_ray.py",
    "tests/pipelines/data/prepare/test_near_duplicates.py",
    "tests/pipelines/data/prepare/test_prepare.py",
    "tests/pipelines/data/prepare/test_ray_data.py",
    "tests/pipelines/sweep/test_tuning.py",
)
"""Files, and folders of files, whose tests mostly wait (less than half a core each) or take `ray_cluster`."""


def load_seconds() -> dict[str, dict[str, float]]:
    """Returns the measured seconds of each test file, of its usual and of its long tests."""
    return json.loads(SECONDS_FILE.read_text()) if SECONDS_FILE.exists() else {}


def file_of(nodeid: str) -> str:
    """Returns the path of a test's file, relative to the project."""
    return nodeid.split("::", 1)[0]


class WaitingBesideComputing(LoadFileScheduling):
    """Gives each process the first file of its kind in the queue, and of the other kind once there is none left."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        is_last = len(self.nodes) >= 3 and node.gateway.id == f"gw{self.numnodes - 1}"
        suitable = [scope for scope in self.workqueue if scope.startswith(LAST_PROCESS) == is_last]
        if suitable:
            self.workqueue.move_to_end(suitable[0], last=False)
        super()._assign_work_unit(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Any:
    """Replaces xdist's scheduler of whole files."""
    return WaitingBesideComputing(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts files by the seconds of their selected tests, longest first: no process is left with a long one at the end."""
    measured = load_seconds()
    long = {file_of(item.nodeid) for item in items if item.get_closest_marker("long")}

    def seconds(item: pytest.Item) -> float:
        file = file_of(item.nodeid)
        known = measured.get(file, {"usual": UNKNOWN_FILE_S, "long": 0.0})
        return known["usual"] + known["long"] * (file in long)

    if math.isfinite(LONG_MINUTES):
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")  # one for all processes of a run
        items.sort(key=lambda item: zlib.crc32((run + file_of(item.nodeid)).encode()))
    else:
        items.sort(key=lambda item: -seconds(item))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out long tests that a slow machine has no time for, before their fixtures are made."""
    if item.get_closest_marker("long") and time.monotonic() - _BEGAN > 60 * LONG_MINUTES:
        pytest.skip(f"after {LONG_MINUTES:g} minutes ($RAYSTRIDE_LONG_MINUTES) no long test begins")
