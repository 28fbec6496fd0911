"""Kubernetes and KubeRay accept the files that `raystride deploy kuberay` writes, for all places."""

import gzip
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import celpy
import kubernetes_validate
import pytest
import yaml

from raystride.command import run as run_command
from tests.deploy.faults import find_faults, find_kuberay_faults, iterate_pods
from tests.deploy.kustomize import Document, build_folder, find_folders
from tests.deploy.rendering import find_entry_point, find_ray_object, render_for
from tests.deploy.schemas import find_schema_faults, kuberay_schema
from tests.some import some

CASES: dict[str, dict[str, Any]] = {
    "cpu": {"nodes": 2},
    "one node": {"nodes": 1, "run": "124m"},
    "gpu": {"nodes": 4, "gpus": 8},
    "some gpus": {"nodes": 4, "gpus": 2, "kubernetes": {"node_labels": ("pool=h100", "zone=a")}},
    "spot": {"nodes": 4, "gpus": 8, "kubernetes": {"spot": True}},
    "bucket": {"storage": "s3://bucket/runs", "kubernetes": {"role": "arn:aws:iam::1:role/runs", "secret": "aws-keys"}},
    "queue": {"nodes": 4, "gpus": 8, "kubernetes": {"queue": "team"}},
    "own server": {"mlflow_uri": "https://mlflow.example", "kubernetes": {"namespace": "ml", "retries": 0}},
}
DEFINITIONS = Path(__file__).with_name("kuberay-1.7.0.json.gz")
"""The custom resource definitions of KubeRay v1.7.0 (`helm-chart/kuberay-operator/crds`, Apache-2.0): v1 of RayJob and
of RayCluster, without descriptions."""
WITH_OLD_SELF = {"self == oldSelf"}
"""Rules that compare with the object's previous state, which a file does not have: fields that may not change."""


USUAL = ("gpu", "bucket")
"""The cases that `make test` runs."""


@pytest.fixture(params=[pytest.param(name, marks=[] if name in USUAL else pytest.mark.long) for name in CASES])
def files(request: pytest.FixtureRequest) -> dict[str, str]:
    return render_for("kuberay", "kubernetes", **CASES[request.param])


def _build_documents(files: dict[str, str]) -> list[Document]:
    return [each for folder in find_folders(files) for each in build_folder(files, folder)]


def _find_rules(schema: Any, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the CEL rules of the fields that are present, each with the value that it checks."""
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["rule"], value
    if isinstance(value, dict):
        for name, each in value.items():
            inner = schema.get("properties", {}).get(name) or schema.get("additionalProperties") or {}
            yield from _find_rules(inner, each) if isinstance(inner, dict) else ()
    elif isinstance(value, list):
        for each in value:
            yield from _find_rules(schema.get("items", {}), each)


def _find_broken_rules(document: Document, definitions: Path) -> list[str]:
    environment = celpy.Environment()
    found = []
    for rule, value in _find_rules(kuberay_schema(document["kind"], definitions), document):
        if rule not in WITH_OLD_SELF:
            program = environment.program(environment.compile(rule))
            if not program.evaluate({"self": celpy.json_to_cel(value)}):
                found.append(rule)
    return found


def test_kuberay_accepts_the_files(files: dict[str, str]) -> None:
    assert len(find_folders(files)) == 5
    assert not find_faults("kuberay", files)


def test_an_overlay_of_ones_own_is_as_the_page_has_it() -> None:
    page = Path(__file__).resolve().parents[2] / "deploy" / "kuberay" / "README.md"
    (overlay,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", page.read_text(), re.DOTALL)
    files = render_for("kuberay", "kubernetes", nodes=4, gpus=8)
    files = {**files, "overlays/ours/kustomization.yaml": overlay}
    assert not find_faults("kuberay", files)
    job = find_ray_object(files, "overlays/ours")
    pod = job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]
    assert job["metadata"]["labels"]["team"] == pod["metadata"]["labels"]["team"] == "parser"
    assert pod["metadata"]["annotations"] == {"cost-center": "42"}
    assert (pod["spec"]["priorityClassName"], pod["spec"]["imagePullSecrets"]) == ("batch", [{"name": "registry"}])
    assert [toleration["key"] for toleration in pod["spec"]["tolerations"]] == ["nvidia.com/gpu", "dedicated"]


@pytest.fixture(scope="module")
def definitions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with KubeRay's own custom resource definitions."""
    file = tmp_path_factory.getbasetemp() / DEFINITIONS.stem
    file.write_bytes(gzip.decompress(DEFINITIONS.read_bytes()))
    return file


@pytest.mark.long
def test_the_rules_of_kuberays_own_definitions_hold(files: dict[str, str], definitions: Path) -> None:
    assert not list(find_kuberay_faults(files, definitions))
    for document in some(document for document in _build_documents(files) if document["kind"] in ("RayJob", "RayCluster")):
        assert not _find_broken_rules(document, definitions)


@pytest.mark.long
def test_a_broken_rule_is_found(definitions: Path) -> None:
    job = find_ray_object(render_for("kuberay", "kubernetes"), "overlays/cpu")
    both = {"onSuccess": {"policy": "DeleteSelf"}, "onFailure": {"policy": "DeleteSelf"}, "deletionRules": []}
    assert len(_find_broken_rules({**job, "spec": {**job["spec"], "deletionStrategy": both}}, definitions)) == 1


def test_kubernetes_accepts_the_pods_of_ray(files: dict[str, str]) -> None:
    for document in _build_documents(files):
        if document["kind"] in ("RayJob", "RayCluster"):
            for where, template in iterate_pods(document):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": where}, "spec": template["spec"]}
                kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_kubernetes_accepts_the_other_objects(files: dict[str, str]) -> None:
    others = [each for each in _build_documents(files) if each["kind"] not in ("RayJob", "RayCluster")]
    assert {"NetworkPolicy", "PodDisruptionBudget", "ServiceAccount", "ConfigMap"} <= {each["kind"] for each in others}
    for document in others:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_every_object_is_in_the_namespace(files: dict[str, str]) -> None:
    (one,) = {each["metadata"]["namespace"] for each in _build_documents(files)}
    assert one in ("raystride", "ml")


def test_no_secret_is_in_a_file(files: dict[str, str]) -> None:
    documents = some(_build_documents(files))
    assert "Secret" not in {document["kind"] for document in documents}
    pods = [template for document in documents for _, template in iterate_pods(document)]
    containers = some(container for template in pods for container in template["spec"]["containers"])
    named = some(each["name"] for container in containers for each in container.get("env", ()) if "value" in each)
    assert not [name for name in named if name.endswith(("PASSWORD", "TOKEN", "KEY", "SECRET"))]


def test_every_pod_of_ray_has_a_network_policy_and_time_to_save(files: dict[str, str]) -> None:
    (overlay,) = [name for name in ("overlays/cpu", "overlays/gpu") if f"{name}/kustomization.yaml" in files]
    documents = build_folder(files, overlay)
    (policy,) = [each["spec"] for each in documents if each["kind"] == "NetworkPolicy"]
    (label,) = policy["podSelector"]["matchLabels"].items()
    assert policy["policyTypes"] == ["Ingress"]
    assert [list(peer) for rule in policy["ingress"] for peer in rule["from"]] == [
        ["podSelector"],
        ["namespaceSelector", "podSelector"],
    ]
    job = find_ray_object(files, overlay)
    grace = int(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    for _, template in iterate_pods(job):
        assert label in template["metadata"]["labels"].items()
        assert template["spec"]["terminationGracePeriodSeconds"] > grace >= 120
        command = template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert command[-2:] == ["--seconds", str(grace)]


def test_the_entry_point_is_the_command_of_the_run() -> None:
    command, contents = find_entry_point(render_for("kuberay", "kubernetes", nodes=4, gpus=8))
    assert command == ["raystride", "train", "--config", "/etc/raystride/settings.yaml"]
    settings = yaml.safe_load(contents["/etc/raystride/settings.yaml"])
    assert (settings["run"], settings["storage"], settings["scaling"]["workers"]) == ("mine", "/runs", 32)
    assert settings["record"]["mlflow_uri"] == "http://mlflow:5000"


def test_overlays_add_gpus_and_spot_to_the_base() -> None:
    files = render_for("kuberay", "kubernetes", **CASES["some gpus"])
    (base, gpu, spot) = (
        find_ray_object(files, folder)["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"]
        for folder in ("base", "overlays/gpu", "overlays/spot")
    )
    assert "nvidia.com/gpu" not in base["containers"][0]["resources"]["limits"]
    assert gpu["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert gpu["containers"][0]["resources"]["limits"]["cpu"] == "45", "a quarter of the node"
    assert [each["key"] for each in gpu["tolerations"]] == ["nvidia.com/gpu"]
    assert {"cloud.google.com/gke-spot", "nvidia.com/gpu"} <= {each["key"] for each in spot["tolerations"]}
    assert spot["nodeSelector"] == {"pool": "h100", "zone": "a"}
    standing = find_ray_object(files, "overlays/standing")
    assert standing["kind"] == "RayCluster"
    assert standing["spec"]["workerGroupSpecs"][0]["template"]["spec"] == gpu


def test_a_queue_sets_the_fields_that_kueue_requires() -> None:
    job = find_ray_object(render_for("kuberay", "kubernetes", **CASES["queue"]), "overlays/gpu")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert job["spec"]["suspend"]
    assert job["spec"]["shutdownAfterJobFinishes"]
    assert not job["spec"]["rayClusterSpec"]["enableInTreeAutoscaling"]


def test_a_bucket_needs_no_volume_but_a_role_and_keys_by_reference() -> None:
    documents = _build_documents(files := render_for("kuberay", "kubernetes", **CASES["bucket"]))
    assert "raystride-runs" not in {each["metadata"]["name"] for each in documents}
    (account,) = [each for each in documents if each["kind"] == "ServiceAccount"]
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/runs"}
    for _, template in iterate_pods(find_ray_object(files, "overlays/cpu")):
        assert template["spec"]["containers"][0]["envFrom"] == [{"secretRef": {"name": "aws-keys"}}]


def test_fields_that_kuberay_would_drop_are_found() -> None:
    job = find_ray_object(render_for("kuberay", "kubernetes"), "overlays/cpu")
    misspelt = {**job, "spec": {**job["spec"], "backofLimit": 3}}
    assert find_schema_faults(kuberay_schema("RayJob"), misspelt) == [
        "spec: there is no field 'backofLimit'; did you mean backoffLimit?"
    ]
    deep = yaml.safe_load(yaml.safe_dump(job))
    deep["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["resorces"] = {}
    assert "containers.0: there is no field 'resorces'" in find_schema_faults(kuberay_schema("RayJob"), deep)[0]


def test_a_place_that_cannot_run_the_job_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "place.yaml"
    place.write_text("nodes: 4\nstorage: /runs\nshared: true\ngpus_per_node: 8\n")
    flags = [
        "--config",
        "lm_124m",
        "--data.source",
        "python",
        "--nodes",
        "2",
        "--place",
        str(place),
        "--output",
        str(tmp_path / "out"),
    ]
    assert run_command(["deploy", "kuberay", *flags]) == 3
    assert "kubernetes.storage_class is empty" in capsys.readouterr().err
    assert run_command(["deploy", "kuberay", *flags, "--nodes", "9"]) == 3
    assert not (tmp_path / "out").exists()
