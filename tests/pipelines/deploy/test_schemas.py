"""Schemas of others, and what in a file they refuse."""

from pathlib import Path

import pytest

from raystride.pipelines.deploy.schemas import kuberay_schema, launcher_schema, schema_faults, sky_schema
from tests.errors import refused


def test_an_unknown_name_is_told_with_its_place_and_the_nearest() -> None:
    tree = {"spec": {"rayClusterSpec": {"headGroupSpec": {"template": {}, "rayStartParam": {}}}}}
    assert schema_faults(kuberay_schema("RayJob"), tree) == [
        "spec.rayClusterSpec.headGroupSpec: there is no field 'rayStartParam'; did you mean rayStartParams?"
    ]
    (fault,) = schema_faults(sky_schema("task"), {"zzz": 1})
    assert "'zzz'" in fault
    assert "did you mean" not in fault


def test_a_wrong_kind_of_value_is_told_with_its_place() -> None:
    (fault,) = schema_faults(kuberay_schema("RayCluster"), {"spec": {"headGroupSpec": {"template": {}}, "suspend": "yes"}})
    assert fault.startswith("spec.suspend: 'yes' ")
    assert "'boolean'" in fault


def test_maps_of_names_that_nobody_lists_stay_open() -> None:
    labels = {"metadata": {"labels": {"anything": "x"}}}
    template = {**labels, "spec": {"containers": [{"name": "x", "resources": {"limits": {"nvidia.com/gpu": 8}}}]}}
    tree = {**labels, "spec": {"headGroupSpec": {"template": template, "rayStartParams": {"num-cpus": "0"}}}}
    assert not schema_faults(kuberay_schema("RayCluster"), tree)


def test_the_launchers_schema_is_that_of_the_ray_that_is_here() -> None:
    assert "head_start_ray_commands" in launcher_schema()["properties"]
    assert not schema_faults(launcher_schema(), {"cluster_name": "x", "provider": {"type": "local"}})


DEFINITION = """
spec:
  names: {kind: RayJob}
  versions:
    - name: v1
      schema:
        openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {entrypoint: {type: string}}}}}
"""


def test_the_clusters_own_definitions_go_before_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crds = tmp_path / "crds.yaml"
    crds.write_text(DEFINITION)
    monkeypatch.setenv("RAYSTRIDE_CRDS", str(crds))
    assert not schema_faults(kuberay_schema("RayJob"), {"spec": {"entrypoint": "x"}})
    (fault,) = schema_faults(kuberay_schema("RayJob"), {"spec": {"backoffLimit": 1}})
    assert "'backoffLimit'" in fault
    with refused("RAYSTRIDE_CRDS", str(crds), names=[repr(str(crds)), "RayCluster"]):
        kuberay_schema("RayCluster")
    monkeypatch.setenv("RAYSTRIDE_CRDS", str(tmp_path / "none.yaml"))
    with refused("RAYSTRIDE_CRDS", str(tmp_path / "none.yaml"), names=["No such file"]):
        kuberay_schema("RayJob")
