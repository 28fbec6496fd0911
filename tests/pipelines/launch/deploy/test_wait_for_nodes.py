"""`wait_for_nodes` counts the compute nodes of a cluster and stops at its time limit."""

import pytest

from raystride.pipelines.launch.deploy import wait_for_nodes as module
from raystride.pipelines.launch.deploy.wait_for_nodes import wait_for_nodes

HEAD = {"Alive": True, "Resources": {"node:1": 1.0}}
NODE = {"Alive": True, "Resources": {"CPU": 4.0}}
LOST = {"Alive": False, "Resources": {"CPU": 4.0}}


def test_compute_nodes_are_counted_as_they_join(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    looks = iter([[HEAD], [HEAD, NODE, LOST], [HEAD, NODE, LOST], [HEAD, NODE, NODE]])
    assert wait_for_nodes(lambda: next(looks), 2, seconds=60) == 2
    assert capsys.readouterr().out.splitlines() == [f"nodes    {count} of 2 are there" for count in (0, 1, 2)]


def test_waiting_ends_at_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.0)
    assert wait_for_nodes(lambda: [HEAD, NODE], 2, seconds=0.01) == 1
