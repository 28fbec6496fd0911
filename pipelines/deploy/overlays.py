"""What `kubectl apply -k` makes of rendered files, without kubectl: as much of kustomize as `deploy/kuberay` uses.

built(files, "overlays/gpu")          # [{"kind": "RayJob", ...}, {"kind": "ConfigMap", ...}]; raises SettingError

`kustomization.yaml` may have resources (files and folders), a namespace, a configMapGenerator of files, and JSON patches of
a kind; anything else in it is refused. Where kubectl is installed, a test compares the two.
"""

import posixpath
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import yaml

from raystride.pipelines.deploy.schemas import FileError

FILE = "kustomization.yaml"
KNOWN = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "patches"}
Document = dict[str, Any]


def folders_of(files: Mapping[str, str]) -> list[str]:
    """Folders that can be applied."""
    return [posixpath.dirname(name) for name in files if posixpath.basename(name) == FILE]


def built(files: Mapping[str, str], folder: str) -> list[Document]:
    """The documents that a folder stands for. Raises SettingError where a file is missing or a patch finds nothing."""
    tree = yaml.safe_load(_file(files, f"{folder}/{FILE}"))
    if unknown := set(tree) - KNOWN:
        message = f"{folder}/{FILE}: {', '.join(sorted(unknown))} is not looked at here"
        raise FileError(message, file=f"{folder}/{FILE}", faults=sorted(unknown))
    documents: list[Document] = []
    for resource in tree.get("resources", ()):
        path = posixpath.normpath(posixpath.join(folder, resource))
        inside = path in files
        documents += documents_of(files[path]) if inside else built(files, path)
    for generator in tree.get("configMapGenerator", ()):
        data = {posixpath.basename(name): _file(files, f"{folder}/{name}") for name in generator["files"]}
        metadata = {"name": generator["name"]}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for patch in tree.get("patches", ()):
        for document in documents:
            if document["kind"] == patch["target"]["kind"]:
                for operation in yaml.safe_load(patch["patch"]):
                    _apply(document, operation, f"{folder}/{FILE}")
    if "namespace" in tree:
        for document in documents:
            document["metadata"] = {**document["metadata"], "namespace": tree["namespace"]}
    return documents


def documents_of(text: str) -> list[Document]:
    """The documents of one file, but for empty ones."""
    return [deepcopy(each) for each in yaml.safe_load_all(text) if each]


def _file(files: Mapping[str, str], name: str) -> str:
    if name not in files:
        raise FileError(f"there is no {name}", file=name)
    return files[name]


def _apply(document: Document, operation: Mapping[str, Any], where: str) -> None:
    """One operation of RFC 6902."""
    try:
        if operation["op"] == "move":
            value = _at(document, operation["from"])
            _put(document, operation["path"], value, new=False)
        else:
            _put(document, operation["path"], deepcopy(operation["value"]), new=operation["op"] == "add")
    except (KeyError, IndexError, ValueError, TypeError) as error:
        fault = f"{operation['op']} {operation.get('path')}: there is no {error}"
        raise FileError(f"{where}: {fault}", file=where, faults=[fault]) from None


def _steps(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _at(tree: Any, pointer: str) -> Any:
    for step in _steps(pointer):
        tree = tree[int(step)] if isinstance(tree, list) else tree[step]
    return tree


def _put(tree: Any, pointer: str, value: Any, *, new: bool) -> None:
    above, _, last = pointer.rpartition("/")
    inside, (name,) = _at(tree, above), _steps(f"/{last}")
    if isinstance(inside, list):
        if name == "-":
            inside.append(value)
        elif new:
            inside.insert(int(name), value)
        else:
            inside[int(name)] = value
        return
    if not new and name not in inside:
        raise KeyError(name)
    inside[name] = value
