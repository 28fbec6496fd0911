"""`wait_for_nodes` counts the compute nodes of a cluster, says which are missing, and stops at its time limit."""

import pytest

from raystride.pipelines.config import LaunchConfig
from raystride.pipelines.launch.cluster import wait_for_nodes as module
from raystride.pipelines.launch.cluster.wait_for_nodes import wait_for_nodes
from tests.errors import cannot_run

HEAD = {"Alive": True, "Resources": {"node:1": 1.0}}
NODE = {"Alive": True, "Resources": {"CPU": 4.0}}
GPU_NODE = {"Alive": True, "Resources": {"GPU": 8.0}}
LOST = {"Alive": False, "Resources": {"CPU": 4.0}}


def test_compute_nodes_are_counted_as_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    polls, lines = iter([[HEAD], [HEAD, NODE, LOST], [HEAD, NODE, LOST], [HEAD, NODE, GPU_NODE]]), []
    assert module._count_until(lambda: next(polls), 2, 60.0, lines.append) == 2
    assert lines == [f"nodes    {count} of 2 are there, waiting up to 60 s for the others" for count in (0, 1)]


def test_nothing_is_said_where_all_are_there() -> None:
    lines: list[str] = []
    assert module._count_until(lambda: [NODE, NODE], 1, 60.0, lines.append) == 2
    assert lines == []


def test_a_job_ends_where_nodes_are_missing(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    wait_for_nodes(1, LaunchConfig(), lines.append)
    assert lines == []
    launch = LaunchConfig(address="127.0.0.1:6379", cluster_timeout_s=0.01)
    with cannot_run("nodes", "1 of 2"):
        wait_for_nodes(2, launch, lines.append)
    assert lines == ["nodes    1 of 2 are there, waiting up to 0.01 s for the others"]
    lines.clear()
    with cannot_run("nodes", "1 of 2") as raised:  # at once: no machine can join the Ray that a job has started
        wait_for_nodes(2, LaunchConfig(), lines.append)
    assert lines == []
    assert "launch.address" in str(raised.value)
