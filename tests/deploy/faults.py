"""Finds faults of rendered files: by bash, by the schemas of the programs that read them, and by rules that no schema has.

find_faults("kuberay", files)          # []; or ["overlays/gpu: RayJob: spec: there is no field 'entrypont'; ..."]
"""

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from raystride.pipelines.launch.deploy.plan import Kind
from tests.deploy.kustomize import Document, build_folder, find_folders
from tests.deploy.schemas import LOADER, compose_schema, find_schema_faults, kuberay_schema, launcher_schema, sky_schema

Files = Mapping[str, str]
SHARED_FOLDER = "once"
"""Folder of the objects that outlive a job."""
BASH_LINES = ("#!/bin/bash", "#!/usr/bin/env bash")
RAY_KINDS = ("RayJob", "RayCluster")


def find_faults(kind: Kind, files: Files) -> list[str]:
    """Returns a line for each fault, with its place. Raises yaml.YAMLError for a file that is not YAML."""
    scripts = [(name, _bash_fault(text)) for name, text in files.items() if text.startswith(BASH_LINES)]
    for name, text in files.items():
        if name.endswith((".yaml", ".yml")):
            list(yaml.load_all(text, LOADER))
    return [*(f"{name}: {fault}" for name, fault in scripts if fault), *FINDERS[kind](files)]


@cache
def _bash_fault(script: str) -> str:
    """Returns what bash says to a script that it cannot parse, and nothing to another."""
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False).stderr


def find_kuberay_faults(files: Files, definitions: Path | None = None) -> Iterator[str]:
    """Yields the faults of every folder that can be applied; fields are checked by a cluster's definitions, if given."""
    shared = build_folder(files, SHARED_FOLDER)
    for folder in find_folders(files):
        documents = build_folder(files, folder)
        for document in documents:
            if document["kind"] in RAY_KINDS:
                faults = find_schema_faults(kuberay_schema(document["kind"], definitions), document)
                yield from (f"{folder}: {document['kind']}: {fault}" for fault in faults)
        together = [*shared, *documents] if folder != SHARED_FOLDER else documents
        yield from (f"{folder}: {fault}" for fault in _find_kubernetes_faults(together))


def find_compose_faults(files: Files) -> Iterator[str]:
    """Yields the faults by the Compose specification, undeclared names, open ports and passwords."""
    for name in ("compose.yaml", "network_drive.yaml"):
        yield from (f"{name}: {fault}" for fault in find_schema_faults(compose_schema(), yaml.safe_load(files[name])))
    yield from (f"compose.yaml: {fault}" for fault in _find_compose_faults(yaml.safe_load(files["compose.yaml"])))


def find_launcher_faults(files: Files) -> Iterator[str]:
    """Yields the faults by the schema of Ray's cluster launcher, and a head with an undeclared node type."""
    tree = yaml.safe_load(files["cluster.yaml"])
    yield from (f"cluster.yaml: {fault}" for fault in find_schema_faults(launcher_schema(), tree))
    types = tree.get("available_node_types", {})
    if types and tree.get("head_node_type") not in types:
        yield f"cluster.yaml: head_node_type: there is no {tree.get('head_node_type')!r} in available_node_types"


def find_sky_faults(files: Files) -> Iterator[str]:
    """Yields the faults by SkyPilot's schemas, and secrets with a value."""
    tree = yaml.safe_load(files["task.yaml"])
    faults = find_schema_faults(sky_schema("task"), tree)
    faults += find_schema_faults(sky_schema("resources"), tree.get("resources", {}))
    faults += [f"secrets.{name} has a value" for name, value in tree.get("secrets", {}).items() if value is not None]
    yield from (f"task.yaml: {fault}" for fault in faults)


FINDERS: dict[Kind, Callable[[Files], Iterator[str]]] = {
    "compose": find_compose_faults,
    "slurm": lambda files: iter(()),
    "kuberay": find_kuberay_faults,
    "launcher": find_launcher_faults,
    "sky": find_sky_faults,
}
"""The search of each kind."""


def iterate_pods(document: Document) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields the pod templates of an object, each with its name in the object."""
    spec = document.get("spec", {})
    cluster = spec.get("rayClusterSpec", spec)
    if document["kind"] in RAY_KINDS:
        yield "head", cluster["headGroupSpec"]["template"]
        for group in cluster["workerGroupSpecs"]:
            yield group["groupName"], group["template"]
    elif document["kind"] in ("Deployment", "StatefulSet"):
        yield document["metadata"]["name"], spec["template"]


def _find_kubernetes_faults(documents: Sequence[Document]) -> Iterator[str]:
    """Yields undeclared names, pods with more rights than they need, and secrets."""
    there = {(each["kind"], each["metadata"]["name"]) for each in documents}
    for document in documents:
        if document["kind"] == "Secret":
            yield "a Secret stands in a file"
        for where, template in iterate_pods(document):
            pod, place = template["spec"], f"{document['kind']} {where}"
            yield from (f"{place}: {fault}" for fault in _find_excess_rights(pod))
            account = pod.get("serviceAccountName")
            named = [("ServiceAccount", account)] if account else []
            claimed = document["spec"].get("volumeClaimTemplates", ())
            volumes = {each["metadata"]["name"] for each in claimed}
            for volume in pod.get("volumes", ()):
                volumes.add(volume["name"])
                if "configMap" in volume:
                    named.append(("ConfigMap", volume["configMap"]["name"]))
                if "persistentVolumeClaim" in volume:
                    named.append(("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]))
            yield from (f"{place}: there is no {kind} {name!r}" for kind, name in named if (kind, name) not in there)
            for container in pod["containers"]:
                missing = {each["name"] for each in container.get("volumeMounts", ())} - volumes
                yield from (f"{place}: there is no volume {name!r}" for name in sorted(missing))


def _find_excess_rights(pod: Mapping[str, Any]) -> Iterator[str]:
    """Yields breaches of Kubernetes' `restricted` standard, and containers without limits."""
    whole = pod.get("securityContext", {})
    if not whole.get("runAsNonRoot") or whole.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "it may run as root, or without seccomp"
    for container in pod["containers"]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{container['name']} may gain privileges"
        if not {"cpu", "memory"} <= set(container.get("resources", {}).get("limits", {})):
            yield f"{container['name']} has no limits"


def _find_compose_faults(tree: Mapping[str, Any]) -> Iterator[str]:
    """Yields names that nothing declares, ports that are open to all, and passwords."""
    for name, service in tree["services"].items():
        for kind in ("networks", "secrets"):
            for each in service.get(kind, ()):
                if each not in tree.get(kind, {}):
                    yield f"services.{name}: there is no {each!r} in {kind}"
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if not source.startswith((".", "/")) and source not in tree.get("volumes", {}):
                yield f"services.{name}: there is no {source!r} in volumes"
        for other in service.get("depends_on", ()):
            if other not in tree["services"]:
                yield f"services.{name}: there is no service {other!r}"
        for port in service.get("ports", ()):
            if not str(port).startswith("127.0.0.1:"):
                yield f"services.{name}: the port {port} is open to all"
        for variable in service.get("environment", {}):
            if variable.endswith(("PASSWORD", "TOKEN", "SECRET", "KEY")):
                yield f"services.{name}: {variable} belongs into a file, as {variable}_FILE"
