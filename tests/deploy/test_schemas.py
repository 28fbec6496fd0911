"""The schemas of other programs find unknown fields and wrong values."""

from pathlib import Path

import pytest

from tests.deploy.schemas import find_schema_faults, kuberay_schema, launcher_schema, sky_schema


def test_an_unknown_field_is_reported_with_its_path_and_the_nearest_name() -> None:
    tree = {"spec": {"rayClusterSpec": {"headGroupSpec": {"template": {}, "rayStartParam": {}}}}}
    assert find_schema_faults(kuberay_schema("RayJob"), tree) == [
        "spec.rayClusterSpec.headGroupSpec: there is no field 'rayStartParam'; did you mean rayStartParams?"
    ]
    (fault,) = find_schema_faults(sky_schema("task"), {"zzz": 1})
    assert "'zzz'" in fault
    assert "did you mean" not in fault


def test_a_value_of_a_wrong_type_is_reported_with_its_path() -> None:
    (fault,) = find_schema_faults(
        kuberay_schema("RayCluster"), {"spec": {"headGroupSpec": {"template": {}}, "suspend": "yes"}}
    )
    assert fault.startswith("spec.suspend: 'yes' ")
    assert "'boolean'" in fault


def test_maps_with_free_keys_accept_any_key() -> None:
    labels = {"metadata": {"labels": {"anything": "x"}}}
    template = {**labels, "spec": {"containers": [{"name": "x", "resources": {"limits": {"nvidia.com/gpu": 8}}}]}}
    tree = {**labels, "spec": {"headGroupSpec": {"template": template, "rayStartParams": {"num-cpus": "0"}}}}
    assert not find_schema_faults(kuberay_schema("RayCluster"), tree)


def test_the_launchers_schema_is_that_of_the_installed_ray() -> None:
    assert "head_start_ray_commands" in launcher_schema()["properties"]
    assert not find_schema_faults(launcher_schema(), {"cluster_name": "x", "provider": {"type": "local"}})


DEFINITION = """
spec:
  names: {kind: RayJob}
  versions:
    - name: v1
      schema:
        openAPIV3Schema: {type: object, properties: {spec: {type: object, properties: {entrypoint: {type: string}}}}}
"""


def test_definitions_of_a_cluster_override_ours(tmp_path: Path) -> None:
    crds = tmp_path / "crds.yaml"
    crds.write_text(DEFINITION)
    schema = kuberay_schema("RayJob", crds)
    assert not find_schema_faults(schema, {"spec": {"entrypoint": "x"}})
    (fault,) = find_schema_faults(schema, {"spec": {"backoffLimit": 1}})
    assert "'backoffLimit'" in fault
    with pytest.raises(LookupError, match="RayCluster"):
        kuberay_schema("RayCluster", crds)
