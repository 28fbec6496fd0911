"""What workers of a training get: no environment of their own unless one is asked for, and its variables all the same."""

import os
from importlib import import_module
from typing import Any

import pytest

from raystride.pipelines.cluster import internals
from raystride.pipelines.cluster.internals import TRAIN

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.mark.parametrize("asked", [{}, {"py_executable": "nsys profile python"}, {"env_vars": {"MINE": "1"}}])
def test_a_worker_has_an_environment_of_its_own_only_where_one_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """With one, Ray starts a process for each worker anew, and those that it keeps are of no use."""
    monkeypatch.setenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", "77")
    group = import_module(f"{TRAIN}.execution.worker_group").WorkerGroup
    assert group._get_worker_runtime_env(asked) != asked, "Ray Train's own has what the driver's environment says"
    assert internals._group_class()._get_worker_runtime_env(asked) == asked


def test_what_ray_train_would_set_there_is_set_in_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    monkeypatch.setenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", "77")
    there = internals._for_processes()
    assert there["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] == "77"
    assert there["RAY_TRAIN_ENABLE_PREEMPTION_WATCHER"] == "0", "nobody is left to be told where the only node goes"
    worker = internals._group_class()._worker_cls.fget(None)
    monkeypatch.delenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S")
    worker()
    assert os.environ["RAY_TRAIN_COLLECTIVE_TIMEOUT_S"] == "77"
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}])
    assert "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER" not in internals._for_processes()
