"""What workers of a training get: no environment of their own unless one is asked for, and its variables all the same.

Workers that wait for their slots say so and, if a limit is set, end.
"""

import os
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from raystride.pipelines.launch.cluster import fast_start
from raystride.pipelines.launch.cluster.cluster import CannotRun, run_on_node
from raystride.pipelines.launch.cluster.internals import RAY_TRAIN
from raystride.pipelines.launch.cluster.resources import Allocation
from raystride.pipelines.launch.cluster.trainer import PlacementWatcher

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize("asked", [{}, {"py_executable": "nsys profile python"}, {"env_vars": {"MINE": "1"}}])
def test_a_worker_has_an_environment_of_its_own_only_where_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """With one, Ray starts a process for each worker anew, and those that it keeps are of no use."""
    monkeypatch.setenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", "77")
    group = import_module(f"{RAY_TRAIN}.execution.worker_group").WorkerGroup
    assert group._get_worker_runtime_env(asked) != asked, "Ray Train's own has what the driver's environment says"
    assert fast_start._make_group_class()._get_worker_runtime_env(asked) == asked


def test_what_ray_train_would_set_there_is_set_in_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", "77")
    there = fast_start._propagated_environment()
    assert there["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] == "77"
    assert there["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] == "0", "nobody is left to be told where the only node goes"
    worker = fast_start._make_group_class()._worker_cls.fget(None)
    monkeypatch.delenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S")
    worker()
    assert os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] == "77"
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}])
    assert "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER" not in fast_start._propagated_environment()


class Holder:
    """Has both of the cluster's processors."""

    def hold(self) -> bool:
        """Is there."""
        return True


@pytest.fixture
def taken() -> Iterator[Any]:
    """Somebody else's actor, which has all processors; ends with the test at the latest."""
    import ray

    holder = ray.remote(num_cpus=2)(Holder).remote()
    assert ray.get(holder.hold.remote(), timeout=60)
    yield holder
    ray.kill(holder)


@pytest.fixture
def asked() -> Iterator[Any]:
    """The places of two workers, asked for as Ray Train does."""
    from ray.util import placement_group, remove_placement_group

    group = placement_group([{"CPU": 1}] * 2)
    yield group
    remove_placement_group(group)


def _share() -> Allocation:
    return Allocation(workers=2, device="cpu", threads=1)


@pytest.mark.long
def test_what_waits_says_for_what_and_ends_when_told(taken: Any, asked: Any) -> None:
    import ray

    places = PlacementWatcher(_share(), timeout_s=0)
    assert places.describe_wait() == "waiting for 2 workers with CPU 1 each: 0 of 2 CPUs free"
    now = [1.0]
    short = PlacementWatcher(_share(), timeout_s=60, clock=lambda: now[0])
    short.describe_wait()
    now[0] += 60
    short.describe_wait()
    now[0] += 1
    with pytest.raises(CannotRun, match=r"60 s \(launch\.placement_timeout_s\).*0 of 2 CPUs.*scaling\.workers") as raised:
        short.describe_wait()
    assert (raised.value.setting, raised.value.value) == ("launch.placement_timeout_s", 60)
    ray.kill(taken)
    assert asked.wait(60)
    assert places.describe_wait() is None
    short.describe_wait()  # it waits no longer


def test_a_probe_that_does_not_come_back_ends() -> None:
    with pytest.raises(CannotRun, match=r"0\.5 s \(launch\.cluster_timeout_s\)") as raised:
        run_on_node(_sleeper, 0.5)
    assert (raised.value.setting, raised.value.value) == ("launch.cluster_timeout_s", 0.5)
    assert run_on_node(_answer, 60) == "here"


def _sleeper() -> str:
    time.sleep(20)
    return ""


def _answer() -> str:
    return "here"
