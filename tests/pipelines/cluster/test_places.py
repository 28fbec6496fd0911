"""What waits for places says so and, where it was told to, ends."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from raystride.pipelines.cluster.cluster import CannotRun, ask_a_node
from raystride.pipelines.cluster.places import PlacesWatch
from raystride.pipelines.cluster.resources import Share

pytestmark = pytest.mark.usefixtures("ray_cluster")


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


def _share() -> Share:
    return Share(workers=2, device="cpu", threads=1)


@pytest.mark.long
def test_what_waits_says_for_what_and_ends_when_told(taken: Any, asked: Any) -> None:
    import ray

    places = PlacesWatch(_share(), wait_s=0)
    assert places.look() == "waiting for 2 workers with CPU 1 each: 0 of 2 CPUs free"
    now = [1.0]
    short = PlacesWatch(_share(), wait_s=60, clock=lambda: now[0])
    short.look()
    now[0] += 60
    short.look()
    now[0] += 1
    with pytest.raises(CannotRun, match=r"60 s \(launch\.wait_s\).*0 of 2 CPUs.*scaling\.workers") as raised:
        short.look()
    assert (raised.value.setting, raised.value.value) == ("launch.wait_s", 60)
    ray.kill(taken)
    assert asked.wait(60)
    assert places.look() is None
    short.look()  # it waits no longer


def test_a_probe_that_does_not_come_back_ends() -> None:
    with pytest.raises(CannotRun, match=r"0\.5 s \(launch\.timeout_s\)") as raised:
        ask_a_node(_sleeper, 0.5)
    assert (raised.value.setting, raised.value.value) == ("launch.timeout_s", 0.5)
    assert ask_a_node(_answer, 60) == "here"


def _sleeper() -> str:
    time.sleep(20)
    return ""


def _answer() -> str:
    return "here"
