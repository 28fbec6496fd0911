"""Faults of rendered files are found, so that the absence of faults proves something."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.deploy.faults import find_faults
from tests.deploy.rendering import render_for


def _has_fault(faults: list[str], *names: str) -> bool:
    """Returns whether one fault contains all the names."""
    return any(all(name in fault for name in names) for fault in faults)


def _change_worker_pod(change: Callable[[Any], object]) -> dict[str, str]:
    """Returns the files of a RayJob whose workers' pod is changed."""
    files = render_for("kuberay", "kubernetes")
    job = yaml.safe_load(files["base/rayjob.yaml"])
    change(job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"])
    return {**files, "base/rayjob.yaml": yaml.safe_dump(job)}


def test_faulty_scripts_and_yaml_are_found() -> None:
    assert _has_fault(find_faults("slurm", {"job.sbatch": "#!/bin/bash\nif true; then\n"}), "job.sbatch: ", "unexpected")
    with pytest.raises(yaml.YAMLError):
        find_faults("slurm", {"settings.yaml": "a: [1"})


@pytest.mark.parametrize(("change", "names"), [
    (lambda pod: pod.update(serviceAccountName="other"), ("ServiceAccount 'other'",)),
    (lambda pod: pod["volumes"].pop(), ("volume 'home'",)),
    (lambda pod: pod["securityContext"].update(runAsNonRoot=False), ("root",)),
    (lambda pod: pod["containers"][0]["securityContext"].pop("capabilities"), ("ray-worker", "privileges")),
    (lambda pod: pod["containers"][0]["resources"].pop("limits"), ("ray-worker", "no limits")),
    (lambda pod: pod["containers"][0].update(comand=[]), ("'comand'", "mean command?")),
])  # fmt: skip
def test_faults_of_kubernetes_files_are_found(change: Callable[[Any], object], names: tuple[str, ...]) -> None:
    assert _has_fault(find_faults("kuberay", _change_worker_pod(change)), "base: ", *names)


def test_a_secret_in_a_file_and_a_missing_volume_are_found() -> None:
    files = render_for("kuberay", "kubernetes")
    secret = {**files, "once/runs.yaml": "kind: Secret\nmetadata: {name: x}\n"}
    assert _has_fault(find_faults("kuberay", secret), "base: ", "Secret")
    missing = {**files, "once/runs.yaml": "---\n"}
    assert _has_fault(find_faults("kuberay", missing), "base: ", "PersistentVolumeClaim 'raystride-runs'")


@pytest.mark.parametrize(("old", "new", "names"), [
    ("mem_limit:", "memory_limit:", ("memory_limit",)),
    ('ports: ["127.0.0.1:', 'ports: ["', ("open to all",)),
    ("depends_on: [head]", "depends_on: [heads]", ("service 'heads'",)),
    ("POSTGRES_PASSWORD_FILE: /run/secrets/database_password", "POSTGRES_PASSWORD: no", ("POSTGRES_PASSWORD", "file")),
    ('"storage:/storage"', '"place:/storage"', ("'place'", "volumes")),
])  # fmt: skip
def test_faults_of_compose_files_are_found(old: str, new: str, names: tuple[str, ...]) -> None:
    files = render_for("compose", "this_machine", nodes=1, preset="lm_python")
    assert old in files["compose.yaml"]
    files |= {"compose.yaml": files["compose.yaml"].replace(old, new, 1)}
    assert _has_fault(find_faults("compose", files), "compose.yaml: ", *names)


def test_a_launchers_misspelt_field_and_a_missing_type_are_found() -> None:
    tree = yaml.safe_load(render_for("launcher", "aws")["cluster.yaml"])
    for change, names in (
        ({"setup_comands": []}, ("'setup_comands'", "mean setup_commands?")),
        ({"head_node_type": "haed"}, ("head_node_type", "'haed'")),
    ):
        assert _has_fault(find_faults("launcher", {"cluster.yaml": yaml.safe_dump({**tree, **change})}), *names)
    assert find_faults("launcher", {"cluster.yaml": "cluster_name: x"}) == [
        "cluster.yaml: the file: 'provider' is a required property"
    ]
    least = "{cluster_name: x, provider: {type: local, head_ip: a, worker_ips: []}}"
    assert not find_faults("launcher", {"cluster.yaml": least})


def test_a_tasks_misspelt_field_and_a_secret_with_a_value_are_found() -> None:
    tree = yaml.safe_load(render_for("sky", "aws", gpus=8)["task.yaml"])
    for change, names in (
        ({"num_node": 3}, ("'num_node'", "mean num_nodes?")),
        ({"num_nodes": "two"}, ("num_nodes", "'two'", "'integer'")),
        ({"resources": {"use_spots": True}}, ("'use_spots'",)),
        ({"secrets": {"RAY_AUTH_TOKEN": "x"}}, ("RAY_AUTH_TOKEN has a value",)),
    ):
        assert _has_fault(find_faults("sky", {"task.yaml": yaml.safe_dump({**tree, **change})}), *names)
    assert not find_faults("sky", {"task.yaml": "{resources: {accelerators: 'H100:8'}, run: 'true'}"})
