"""The part of kustomize that is implemented for tests builds what kubectl does."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.deploy.kustomize import build_folder, find_folders
from tests.deploy.rendering import render_for

JOB = {"kind": "Job", "metadata": {"name": "j"}, "spec": {"pods": [{"limits": {}, "tolerations": []}]}}


def _make_files(*operations: object, kind: str = "Job") -> dict[str, str]:
    patch = {"target": {"kind": kind}, "patch": yaml.safe_dump(list(operations))}
    base = {"resources": ["job.yaml"], "namespace": "n", "configMapGenerator": [{"name": "s", "files": ["a.txt"]}]}
    return {
        "base/kustomization.yaml": yaml.safe_dump(base),
        "base/job.yaml": yaml.safe_dump(JOB) + "---\n",
        "base/a.txt": "x: 1\n",
        "over/kustomization.yaml": yaml.safe_dump({"resources": ["../base"], "patches": [patch]}),
    }


def test_an_overlay_patches_the_base() -> None:
    files = _make_files(
        {"op": "add", "path": "/spec/pods/0/limits/nvidia.com~1gpu", "value": "8"},
        {"op": "add", "path": "/spec/pods/0/tolerations/-", "value": {"key": "k"}},
        {"op": "replace", "path": "/kind", "value": "Cluster"},
        {"op": "move", "from": "/spec/pods", "path": "/spec"},
    )
    assert find_folders(files) == ["base", "over"]
    job, settings = build_folder(files, "over")
    assert job["spec"] == [{"limits": {"nvidia.com/gpu": "8"}, "tolerations": [{"key": "k"}]}]
    assert job["kind"] == "Cluster"
    assert job["metadata"] == {"name": "j", "namespace": "n"}
    assert settings["data"] == {"a.txt": "x: 1\n"}
    assert build_folder(files, "base")[0]["spec"] == JOB["spec"]


def test_a_patch_of_another_kind_changes_nothing() -> None:
    files = _make_files({"op": "replace", "path": "/kind", "value": "Cluster"}, kind="Deployment")
    assert build_folder(files, "over") == build_folder(files, "base")


@pytest.mark.parametrize("operation", [
    {"op": "replace", "path": "/spec/none", "value": 1},
    {"op": "add", "path": "/spec/none/deeper", "value": 1},
    {"op": "add", "path": "/spec/pods/7/limits", "value": 1},
    {"op": "move", "from": "/none", "path": "/spec"},
])  # fmt: skip
def test_a_patch_without_a_target_is_refused(operation: object) -> None:
    with pytest.raises(ValueError, match=r"over/kustomization\.yaml: .* /spec"):
        build_folder(_make_files(operation), "over")


def test_missing_files_and_unknown_fields_are_refused() -> None:
    files = _make_files()
    with pytest.raises(ValueError, match=r"gone/kustomization\.yaml"):
        build_folder({**files, "over/kustomization.yaml": "resources: [../gone]"}, "over")
    with pytest.raises(ValueError, match=r"over/kustomization\.yaml: namePrefix"):
        build_folder({**files, "over/kustomization.yaml": "namePrefix: x"}, "over")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("gpus", [0, 8])
def test_kubectl_builds_the_same(gpus: int, tmp_path: Path) -> None:
    files = render_for("kuberay", "kubernetes", gpus=gpus, nodes=4)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for folder in find_folders(files):
        printed = subprocess.run(["kubectl", "kustomize", folder], cwd=tmp_path, capture_output=True, text=True, check=True)
        theirs = {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(printed.stdout)}
        ours = {(each["kind"], each["metadata"]["name"]): each for each in build_folder(files, folder)}
        assert ours.keys() == theirs.keys()
        for key, document in ours.items():
            assert document == theirs[key], (folder, key)
