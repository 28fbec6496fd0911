"""Implements the part of kustomize that `deploy/kuberay` uses, so that its files are tested on machines without kubectl.

build_folder(files, "overlays/gpu")   # [{"kind": "RayJob", ...}, {"kind": "ConfigMap", ...}]; raises ValueError

`kustomization.yaml` may have resources (files and folders), a namespace, a configMapGenerator of files, and JSON patches of
a kind; anything else is refused. If kubectl is installed, a test compares the two.
"""

import posixpath
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import yaml

FILE = "kustomization.yaml"
KNOWN_FIELDS = {"apiVersion", "kind", "namespace", "resources", "configMapGenerator", "patches"}
Document = dict[str, Any]


def find_folders(files: Mapping[str, str]) -> list[str]:
    """Returns the folders that can be applied."""
    return [posixpath.dirname(name) for name in files if posixpath.basename(name) == FILE]


def build_folder(files: Mapping[str, str], folder: str) -> list[Document]:
    """Builds the documents of a folder. Raises ValueError if a file is missing or a patch has no target."""
    tree = yaml.safe_load(_read_file(files, f"{folder}/{FILE}"))
    if unknown := set(tree) - KNOWN_FIELDS:
        raise ValueError(f"{folder}/{FILE}: {', '.join(sorted(unknown))} is not known here")
    documents: list[Document] = []
    for resource in tree.get("resources", ()):
        path = posixpath.normpath(posixpath.join(folder, resource))
        inside = path in files
        documents += load_documents(files[path]) if inside else build_folder(files, path)
    for generator in tree.get("configMapGenerator", ()):
        data = {posixpath.basename(name): _read_file(files, f"{folder}/{name}") for name in generator["files"]}
        metadata = {"name": generator["name"]}
        documents.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
    for patch in tree.get("patches", ()):
        for document in documents:
            if document["kind"] == patch["target"]["kind"]:
                for operation in yaml.safe_load(patch["patch"]):
                    _apply_operation(document, operation, f"{folder}/{FILE}")
    if "namespace" in tree:
        for document in documents:
            document["metadata"] = {**document["metadata"], "namespace": tree["namespace"]}
    return documents


def load_documents(text: str) -> list[Document]:
    """Loads the documents of one file, except for empty ones."""
    return [deepcopy(each) for each in yaml.safe_load_all(text) if each]


def _read_file(files: Mapping[str, str], name: str) -> str:
    if name not in files:
        raise ValueError(f"there is no {name}")
    return files[name]


def _apply_operation(document: Document, operation: Mapping[str, Any], where: str) -> None:
    """Applies one operation of RFC 6902."""
    try:
        if operation["op"] == "move":
            value = _get_value(document, operation["from"])
            _set_value(document, operation["path"], value, new=False)
        else:
            _set_value(document, operation["path"], deepcopy(operation["value"]), new=operation["op"] == "add")
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise ValueError(f"{where}: {operation['op']} {operation.get('path')}: there is no {error}") from None


def _split_pointer(pointer: str) -> list[str]:
    return [step.replace("~1", "/").replace("~0", "~") for step in pointer.split("/")[1:]]


def _get_value(tree: Any, pointer: str) -> Any:
    for step in _split_pointer(pointer):
        tree = tree[int(step)] if isinstance(tree, list) else tree[step]
    return tree


def _set_value(tree: Any, pointer: str, value: Any, *, new: bool) -> None:
    above, _, last = pointer.rpartition("/")
    inside, (name,) = _get_value(tree, above), _split_pointer(f"/{last}")
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
