"""What kustomize makes of files, as far as ours go."""

import pytest
import yaml

from raystride.pipelines.deploy.overlays import built, folders_of
from tests.errors import rejected

JOB = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"pods": [{"limits": {}, "tolerations": []}]}}


def _files(*operations: object, kind: str = "Job") -> dict[str, str]:
    patch = {"target": {"kind": kind}, "patch": yaml.safe_dump(list(operations))}
    base = {"resources": ["job.yaml"], "namespace": "n", "configMapGenerator": [{"name": "s", "files": ["a.txt"]}]}
    return {
        "base/kustomization.yaml": yaml.safe_dump(base),
        "base/job.yaml": yaml.safe_dump(JOB) + "---\n",
        "base/a.txt": "x: 1\n",
        "over/kustomization.yaml": yaml.safe_dump({"resources": ["../base"], "patches": [patch]}),
    }


def test_an_overlay_is_the_base_with_patches() -> None:
    files = _files(
        {"op": "add", "path": "/spec/pods/0/limits/nvidia.com~1gpu", "value": "8"},
        {"op": "add", "path": "/spec/pods/0/tolerations/-", "value": {"key": "k"}},
        {"op": "replace", "path": "/kind", "value": "Cluster"},
        {"op": "move", "from": "/spec/pods", "path": "/spec"},
    )
    assert folders_of(files) == ["base", "over"]
    job, settings = built(files, "over")
    assert job["spec"] == [{"limits": {"nvidia.com/gpu": "8"}, "tolerations": [{"key": "k"}]}]
    assert job["kind"] == "Cluster"
    assert job["metadata"] == {"name": "j", "namespace": "n"}
    assert settings["data"] == {"a.txt": "x: 1\n"}
    assert built(files, "base")[0]["spec"] == JOB["spec"]


def test_a_patch_of_another_kind_changes_nothing() -> None:
    files = _files({"op": "replace", "path": "/kind", "value": "Cluster"}, kind="Deployment")
    assert built(files, "over") == built(files, "base")


@pytest.mark.parametrize("operation", [
    {"op": "replace", "path": "/spec/none", "value": 1},
    {"op": "add", "path": "/spec/none/deeper", "value": 1},
    {"op": "add", "path": "/spec/pods/7/limits", "value": 1},
    {"op": "move", "from": "/none", "path": "/spec"},
])  # fmt: skip
def test_a_patch_that_finds_nothing_is_refused(operation: object) -> None:
    with rejected("over/kustomization.yaml", " /spec"):
        built(_files(operation), "over")


def test_what_is_missing_or_not_known_is_refused() -> None:
    files = _files()
    with rejected("gone/kustomization.yaml"):
        built({**files, "over/kustomization.yaml": "resources: [../gone]"}, "over")
    with rejected("over/kustomization.yaml", "namePrefix"):
        built({**files, "over/kustomization.yaml": "namePrefix: x"}, "over")
