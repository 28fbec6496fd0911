"""What reaches into Ray works with this Ray; without any one of the names, what stands for it works, and says so."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from raystride.pipelines.launch.cluster import internals
from raystride.pipelines.launch.cluster.internals import (
    CLUSTER_CONSTANT,
    CLUSTER_VARIABLE,
    JOB_CONFIG_VARIABLE,
    cancel_lost_requests,
    free_resources_by_node,
    head_node_resources,
    is_submitted_job,
    listen_on_loopback,
    refresh_node_view,
    remove_orphaned_placement_groups,
    send_token,
    submission_id,
)
from tests.pipelines.launch.cluster.controller import Controller
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("ray_cluster", "ray_train_is_imported", "nothing_warned")


STATE = "ray._private.state"
CPU = {"CPU": 1.0}


def test_free_places_are_told_by_node_or_as_many_as_are_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    warned: list[str] = []
    assert [free["CPU"] for free in free_resources_by_node(CPU, warned.append)] == [2.0]
    assert not warned
    monkeypatch.delattr(f"{STATE}.available_resources_per_node")
    for _ in range(2):
        assert free_resources_by_node(CPU, warned.append) == [{"CPU": 2.0}]
    (text,) = warned
    assert f"{STATE}.available_resources_per_node is gone" in text
    assert free_resources_by_node({"CPU": 4.0}, warned.append) == [{"CPU": 0.0}]
    # Seven free ones on two nodes may lie as 3 and 4 or as 1 and 6: a worker of three finds a place once at least.
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 7.0})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True}, {"Alive": True}, {"Alive": False}])
    assert free_resources_by_node({"CPU": 3.0}, warned.append) == [{"CPU": 3.0}]
    assert free_resources_by_node(CPU, warned.append) == [{"CPU": 7.0}]


def test_free_places_in_another_form_are_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    monkeypatch.setattr(f"{STATE}.available_resources_per_node", lambda: [("node", 2.0)])
    assert free_resources_by_node(CPU, warned.append) == [{"CPU": 2.0}]
    assert len(warned) == 1


def test_a_mode_that_cannot_be_read_again_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "")
    monkeypatch.delattr("ray._raylet.Config")
    warned: list[str] = []
    send_token(warned.append)
    assert "set RAY_AUTH_MODE=token" in warned[0]


ACTOR = "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator._AutoscalingCoordinatorActor"


def _rename(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks for the actor by another name: Ray's own lives as long as the cluster, once a stock trainer has made it."""
    there = import_module(ACTOR.rpartition(".")[0])
    monkeypatch.setattr(internals, "COORDINATOR", "Another")
    monkeypatch.setattr(there, "_AnotherActor", there._AutoscalingCoordinatorActor, raising=False)


def test_ray_train_is_told_of_nodes_where_it_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    class Coordinator:
        def __init__(self) -> None:
            self.asked: list[Any] = []

        def get_reserved_resources(self, requester: str, recompute: bool = False) -> None:
            self.asked.append((requester, recompute))

        def told(self) -> list[Any]:
            return self.asked

    _rename(monkeypatch)
    warned: list[str] = []
    refresh_node_view(False, warned.append)  # before the first group there is no such actor
    assert not warned
    there = ray.remote(num_cpus=0)(Coordinator).options(name="Another", namespace="Another").remote()
    ray.get(there.told.remote())
    refresh_node_view(True, warned.append)
    assert ray.get(there.told.remote()) == [("", True)]
    assert not warned


@pytest.mark.parametrize("change", ["name", "keyword", "actor"])
def test_where_it_does_not_listen_it_is_said_once(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    import_module(ACTOR.rpartition(".")[0])
    if change == "name":
        monkeypatch.delattr(ACTOR)
    if change == "keyword":
        monkeypatch.setattr(f"{ACTOR}.get_reserved_resources", lambda self, requester: None)
    if change == "actor":
        _rename(monkeypatch)
    warned: list[str] = []
    for _ in range(2):
        refresh_node_view(True, warned.append)
    (text,) = warned
    assert "20 s" in text


IMPORTS = """
import sys, time
from types import SimpleNamespace
import ray
from raystride.pipelines.launch.cluster import elastic, internals

class Watch:  # in place of the one that looks each second: it asks for the parts at once
    def __init__(self, *given):
        self.next, self.found = None, []

    def poll(self):
        while "ray.train" not in sys.modules:  # the other thread imports it now, or has
            time.sleep(0)
        try:
            internals.import_private(internals._COORDINATOR_CLIENT, "AUTOSCALING_REQUESTS_EXPIRE_TIME_S")
        except Exception as error:
            print(error)
        return True

def fit(start):
    from ray.train import FailureConfig
    import ray.train.torch
    return {}

from raystride.pipelines.launch.cluster.resources import Allocation
elastic.NodeWatcher = Watch
recorder = SimpleNamespace(warn=print)
elastic.train_on_nodes(fit, Allocation(workers=2, device="cpu", threads=1, min_workers=1), recorder, 5.0)
"""


@pytest.mark.long
def test_two_threads_do_not_import_ray_train_at_once() -> None:
    """Each would find it half made, and the training end by an ImportError."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_what_a_lost_training_has_asked_for_is_forgotten_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own actor, of which a training that lives, one that has renewed nothing for half a minute, and Ray Data ask."""
    import ray
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import get_or_create_autoscaling_coordinator

    warned: list[str] = []
    coordinator = get_or_create_autoscaling_coordinator()
    for name, left_s in (("train-lives", 179.0), ("train-lost", 149.0), ("data-x", 100.0)):
        ray.get(coordinator.request_resources.remote(requester_id=name, resources=[{"CPU": 0.01}], expire_after_s=left_s))
    cancel_lost_requests(warned.append)
    left = ray.get(coordinator.__ray_call__.remote(lambda actor: sorted(actor._ongoing_reqs)))
    for name in left:
        ray.get(coordinator.cancel_request.remote(name))
    assert left == ["data-x", "train-lives"]
    assert not warned
    _rename(monkeypatch)  # there is no such actor before the first training
    cancel_lost_requests(warned.append)
    assert not warned
    monkeypatch.delattr(f"{ACTOR}.cancel_request")
    for _ in range(2):
        cancel_lost_requests(warned.append)
    (text,) = warned
    assert "180 s" in text


@contextmanager
def _places() -> Iterator[tuple[str, str]]:
    """Two placement groups, the maker of the first of which has died."""
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    dead, alive = (ray.remote(num_cpus=0)(Controller).remote() for _ in range(2))
    held, kept = ray.get([dead.reserve.remote(), alive.reserve.remote()])
    ray.kill(dead)
    try:
        yield held, kept
    finally:
        for key in (held, kept):
            remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(key))))
        ray.kill(alive)


def _state(key: str) -> str:
    from ray.util.placement_group import placement_group_table

    return str(placement_group_table()[key]["state"])


def test_places_of_a_controller_that_was_ended_are_free_again_and_no_others() -> None:
    warned: list[str] = []
    with _places() as (held, kept):

        def removed() -> bool:
            remove_orphaned_placement_groups(False, warned.append)
            return _state(held) == "REMOVED"

        wait_until(removed, "the end of the controller's places", pause_s=0.1)
        assert _state(kept) == "CREATED"
    assert not warned


def _without_accessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the name from us, and leaves the public table what it needs of it."""
    module = import_module(STATE)
    other = type("Other", (), {"placement_group_table": module.state.placement_group_table})
    monkeypatch.setattr(module, "state", other)


@pytest.mark.parametrize(
    "change",
    [
        _without_accessor,
        lambda monkeypatch: monkeypatch.delattr(f"{STATE}.actors"),
        lambda monkeypatch: monkeypatch.setattr(f"{STATE}.actors", lambda: {"12ab": {"Condition": "DEAD"}}),
        lambda monkeypatch: monkeypatch.setitem(sys.modules, "ray.core.generated.gcs_pb2", ModuleType("gcs_pb2")),
    ],
    ids=["accessor", "actors", "actor", "tables"],
)
def test_without_the_makers_all_workers_places_are_free_where_one_is_alone(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    import ray

    change(monkeypatch)
    warned: list[str] = []
    with _places() as places:
        remove_orphaned_placement_groups(False, warned.append)
        assert [_state(key) for key in places] == ["CREATED", "CREATED"]
        remove_orphaned_placement_groups(True, warned.append)
        assert [_state(key) for key in places] == ["REMOVED", "REMOVED"]
    assert [ray.__version__ in text for text in warned] == [True, True]
    assert "start again" in warned[0]


CONSTANTS = "ray._private.ray_constants"


def test_a_cluster_that_others_reach_all_the_same_is_warned_of() -> None:
    """That of the tests was started by itself, at this machine's address, where the variable has no say any more."""
    import ray

    warned: list[str] = []
    with listen_on_loopback(warned.append):
        assert (os.environ[CLUSTER_VARIABLE], import_module(CONSTANTS).ENABLE_RAY_CLUSTER) == ("0", False)
    assert (os.environ.get(CLUSTER_VARIABLE), import_module(CONSTANTS).ENABLE_RAY_CLUSTER) == (None, True)
    (text,) = warned
    assert f"has it listen at {ray.util.get_node_ip_address()}): who reaches this machine reaches its ports" in text


def test_without_its_name_the_environment_alone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(f"{CONSTANTS}.{CLUSTER_CONSTANT}")
    warned: list[str] = []
    with listen_on_loopback(warned.append):
        assert os.environ[CLUSTER_VARIABLE] == "0"
    (text,) = warned
    assert f"{CONSTANTS}.{CLUSTER_CONSTANT} is gone" in text


def test_a_user_who_wants_to_be_reached_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_VARIABLE, "1")
    with listen_on_loopback([].append):
        assert (os.environ[CLUSTER_VARIABLE], import_module(CONSTANTS).ENABLE_RAY_CLUSTER) == ("1", True)


def test_drivers_of_trials_have_a_place_that_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    warned: list[str] = []
    assert head_node_resources(warned.append) == {"node:__internal_head__": 0.001}
    assert not warned
    monkeypatch.setattr(internals, "HEAD_RESOURCE", "node:__another__")
    place = head_node_resources(warned.append)
    assert len(warned) == 1
    assert ray.get(ray.remote(num_cpus=0, resources=place)(lambda: "it ran").remote(), timeout=60) == "it ran"


def test_a_submitted_job_is_known_by_its_variable_or_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    warned: list[str] = []
    assert not is_submitted_job(warned.append)
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, "{}")
    assert is_submitted_job(warned.append)
    assert not warned
    monkeypatch.delenv(JOB_CONFIG_VARIABLE)
    place = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_12"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    assert is_submitted_job(warned.append)
    assert JOB_CONFIG_VARIABLE in warned[0]


def test_a_submitted_job_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    assert submission_id(warned.append) is None
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, '{"metadata": {"job_submission_id": "raysubmit_1"}}')
    assert submission_id(warned.append) == "raysubmit_1"
    monkeypatch.delenv(JOB_CONFIG_VARIABLE)
    monkeypatch.setattr(f"ray._private.runtime_env.constants.{JOB_CONFIG_VARIABLE}", "RAY_JOB")
    monkeypatch.setenv("RAY_JOB", '{"metadata": {"job_submission_id": "raysubmit_2"}}')
    assert submission_id(warned.append) == "raysubmit_2"
    assert not warned
    monkeypatch.setenv(JOB_CONFIG_VARIABLE, '{"submission": "raysubmit_3"}')
    assert submission_id(warned.append) is None
    assert "metadata" in warned[0]
    monkeypatch.delenv(JOB_CONFIG_VARIABLE)
    monkeypatch.delattr(f"ray._private.runtime_env.constants.{JOB_CONFIG_VARIABLE}")
    assert submission_id(warned.append) is None
    assert len(warned) == 1
