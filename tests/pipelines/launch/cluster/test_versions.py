"""What differs between a driver and a cluster is one line; what runs on the nodes travels by value."""

import pickle
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import raystride
from raystride.pipelines.config import TrainConfig
from raystride.pipelines.launch.cluster import versions
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.cluster.versions import (
    describe_mismatch,
    describe_other_packages,
    find_version_mismatch,
    parse_ray_mismatch,
)
from raystride.pipelines.launch.preflight.check import refuse_other_packages

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
    assert f"the wheel of Raystride {ours} (docs/cluster.md)" in workers
    assert "pip install" not in line, "nobody of ours owns the name on the package index"
    assert "\n" not in line
    assert not versions._matching_nodes


def test_a_worker_without_raystride_can_tell(tmp_path: object) -> None:
    """The function unpickles in a Python that finds no Raystride."""
    import ray

    text = ray.cloudpickle.dumps(versions._make_readers())
    program = (
        "import sys, pickle; sys.modules['raystride'] = None; "
        "print(*(read() for read in pickle.loads(sys.stdin.buffer.read())))"
    )
    done = subprocess.run([sys.executable, "-c", program], input=text, capture_output=True, check=True)
    assert b"'raystride': None" in done.stdout
    assert done.stdout.endswith(b" {}\n"), "no files"
    read_versions, list_files = pickle.loads(text)
    assert read_versions()["raystride"]
    assert list_files() == versions._make_readers()[1]()


def test_a_node_with_other_code_is_refused_by_its_files_and_accepted_by_developers(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This driver's files are a copy with changes, while the workers' are what they are; the version is the same."""
    package = tmp_path / "raystride"
    shutil.copytree(raystride.locations.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(raystride, "__file__", str(package / "__init__.py"))
    versions._matching_nodes.clear()
    assert find_version_mismatch(60.0) is None, "a copy without links, as a wheel is, is the same code"
    (package / "pipelines" / "train" / "loop.py").open("a").write("print()\n")
    (package / "model" / "mine.py").touch()
    (package / "model" / "norm.py").unlink()
    (package / "api.py").open("a").write("\n")
    versions._matching_nodes.clear()
    line = str(find_version_mismatch(60.0))
    assert (
        "has the version of this driver, and other files: api.py, model/mine.py (only here), model/norm.py (only there) "
        in (line)
    )
    assert "and 1 more. Install one wheel on all nodes (docs/cluster.md)" in line
    assert "--launch.accept_other_code true" in line
    assert "\n" not in line
    assert not versions._matching_nodes
    assert find_version_mismatch(60.0, accept_other_code=True) is None


def test_other_packages_of_a_node_are_a_line_and_an_error_if_exact(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """This driver finds a package of another version first on its path."""
    (tmp_path / "numpy-9.8.7.dist-info").mkdir()
    (tmp_path / "numpy-9.8.7.dist-info" / "METADATA").write_text("Name: numpy\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    versions._matching_nodes.clear()
    assert find_version_mismatch(60.0) is None
    (line,) = describe_other_packages()
    assert re.fullmatch(r"\S+ has numpy 2\S+, and this driver numpy 9\.8\.7", line)
    warned = list[str]()
    refuse_other_packages(TrainConfig(), warned.append)
    assert warned == [f"{line}: have the same on all nodes"]
    with pytest.raises(CannotRun, match=r"train\.exact is true, and nodes have other versions of packages: \S+ has numpy"):
        refuse_other_packages(TrainConfig(exact=True), warned.append)
    versions._other_packages.clear()
    versions._matching_nodes.clear()
    assert describe_other_packages() == []


def test_what_is_missing_and_what_differs_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe_mismatch(ALIKE, dict(ALIKE), "the workers have") is None
    line = describe_mismatch(ALIKE, ALIKE | {"raystride": None, "torch": "2.12.1"}, "the workers on 10.0.0.2 have")
    assert line == (
        "versions differ: this driver has raystride 0.2.0, torch 2.13.0; the workers on 10.0.0.2 have no raystride, torch "
        "2.12.1. Have the same on both: the wheel of Raystride 0.2.0 (docs/cluster.md), pip install torch==2.12.1, or start "
        "the job where they are alike: ray job submit starts it on the head"
    )
    other_python = str(describe_mismatch(ALIKE, ALIKE | {"python": "3.12"}, "they have"))
    assert "python 3.12" in other_python
    assert "pip" not in other_python
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert "ray job submit" not in str(describe_mismatch(ALIKE, ALIKE | {"python": "3.12"}, "they have")), "it is one"


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
