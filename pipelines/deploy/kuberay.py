"""What `raystride deploy kuberay` writes, looked at: by KubeRay's schema, and for what no schema says.

look_at_kuberay(files)          # ["overlays/gpu: RayJob by the fields that KubeRay v1.7.0 names", ...]
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from raystride.pipelines.deploy.overlays import Document, built, folders_of
from raystride.pipelines.deploy.schemas import FileError, kuberay_schema, schema_faults

SHARED = "once"
"""The folder of what outlives a job."""
RAY = ("RayJob", "RayCluster")


def look_at_kuberay(files: Mapping[str, str]) -> list[str]:
    """Every folder that can be applied; a line for each. Raises SettingError, with the place and the fault."""
    looked = []
    source = "the cluster's own schema" if "RAYSTRIDE_CRDS" in os.environ else "the fields that KubeRay v1.7.0 names"
    shared = built(files, SHARED)
    for folder in folders_of(files):
        documents = built(files, folder)
        kinds = [each["kind"] for each in documents if each["kind"] in RAY]
        wrong = [
            f"{each['kind']}: {fault}"
            for each in documents
            if each["kind"] in RAY
            for fault in schema_faults(kuberay_schema(each["kind"]), each)
        ]
        if wrong := [*wrong, *_by_sense([*shared, *documents] if folder != SHARED else documents)]:
            raise FileError(f"{folder} cannot work: " + "; ".join(wrong), file=folder, faults=wrong)
        by = f"{', '.join(kinds)} by {source}" if kinds else "no object of KubeRay's"
        looked.append(f"{folder}: {by}; what it names is there, every pod keeps to `restricted`")
    return looked


def pods_of(document: Document) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The pods that an object leads to, each with its labels' place in it: (where, template)."""
    spec = document.get("spec", {})
    cluster = spec.get("rayClusterSpec", spec)
    if document["kind"] in RAY:
        yield "head", cluster["headGroupSpec"]["template"]
        for group in cluster["workerGroupSpecs"]:
            yield group["groupName"], group["template"]
    elif document["kind"] in ("Deployment", "StatefulSet"):
        yield document["metadata"]["name"], spec["template"]


def _by_sense(documents: Sequence[Document]) -> Iterator[str]:
    """Names that nothing has, pods that may do more than they need, secrets, and names that Kubernetes refuses."""
    there = {(each["kind"], each["metadata"]["name"]) for each in documents}
    for document in documents:
        if document["kind"] == "Secret":
            yield "a Secret stands in a file"
        for where, template in pods_of(document):
            pod, place = template["spec"], f"{document['kind']} {where}"
            yield from (f"{place}: {fault}" for fault in _rights(pod))
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


def _rights(pod: Mapping[str, Any]) -> Iterator[str]:
    """What Kubernetes' `restricted` standard, and a limit on each container, ask for."""
    whole = pod.get("securityContext", {})
    if not whole.get("runAsNonRoot") or whole.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "it may run as root, or without seccomp"
    for container in pod["containers"]:
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{container['name']} may gain privileges"
        if not {"cpu", "memory"} <= set(container.get("resources", {}).get("limits", {})):
            yield f"{container['name']} has no limits"
