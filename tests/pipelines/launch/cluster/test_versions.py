"""What differs between a driver and a cluster is one line; what runs on the nodes travels by value."""

import pickle
import subprocess
import sys
from importlib import import_module

import pytest

from raystride.pipelines.launch.cluster import versions
from raystride.pipelines.launch.cluster.versions import describe_mismatch, find_version_mismatch, parse_ray_mismatch

ALIKE = {"raystride": "0.2.0", "python": "3.11", "ray": "2.60.0", "torch": "2.13.0"}


def test_alike_nodes_are_asked_once(ray_cluster: None) -> None:
    import ray

    versions._matching_nodes.clear()
    assert find_version_mismatch(60.0) is None
    assert versions._matching_nodes == {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    assert find_version_mismatch(0.0) is None


def test_a_node_of_another_version_is_named(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This driver says that it is another, while the workers are what they are."""
    ours = import_module("raystride").__version__
    versions._matching_nodes.clear()
    monkeypatch.setattr("raystride.__version__", "9.8.7")
    line = find_version_mismatch(60.0)
    assert line
    driver, _, workers = line.partition("; ")
    assert "raystride 9.8.7" in driver
    assert f"raystride {ours}." in workers
    assert f"pip install raystride=={ours}" in workers
    assert "\n" not in line
    assert not versions._matching_nodes


def test_a_worker_without_raystride_can_tell(tmp_path: object) -> None:
    """The function unpickles in a Python that finds no Raystride."""
    import ray

    import raystride  # noqa: F401

    text = ray.cloudpickle.dumps(versions._make_version_reader())
    program = "import sys, pickle; sys.modules['raystride'] = None; print(pickle.loads(sys.stdin.buffer.read())())"
    done = subprocess.run([sys.executable, "-c", program], input=text, capture_output=True, check=True)
    assert b"'raystride': None" in done.stdout
    assert pickle.loads(text)()["raystride"]


def test_what_is_missing_and_what_differs_is_said_in_one_line() -> None:
    assert describe_mismatch(ALIKE, dict(ALIKE), "the workers have") is None
    line = describe_mismatch(ALIKE, ALIKE | {"raystride": None, "torch": "2.12.1"}, "the workers on 10.0.0.2 have")
    assert line == (
        "versions differ: this driver has raystride 0.2.0, torch 2.13.0; the workers on 10.0.0.2 have no raystride, torch "
        "2.12.1. Have the same on both, for instance by pip install raystride==0.2.0 torch==2.12.1, or start the job where "
        "they are alike: ray job submit starts it on the head"
    )
    other_python = str(describe_mismatch(ALIKE, ALIKE | {"python": "3.12"}, "they have"))
    assert "python 3.12" in other_python
    assert "pip" not in other_python


def test_rays_own_refusal_is_said_in_the_same_line() -> None:
    import ray

    check = import_module("ray._private.utils").check_version_info
    with pytest.raises(RuntimeError) as raised:
        check({"ray_version": "2.1.0", "python_version": "3.9.1"}, "node 10.0.0.1")
    line = parse_ray_mismatch(str(raised.value))
    assert line
    driver, _, cluster = line.partition("; ")
    assert driver.endswith(f"python {sys.version.split()[0]}, ray {ray.__version__}")
    assert " python 3.9.1, ray 2.1.0." in cluster
    assert parse_ray_mismatch("Version mismatch: in other words") is None
    assert parse_ray_mismatch("no such address") is None
