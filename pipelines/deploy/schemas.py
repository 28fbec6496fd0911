"""Schemas of other programs' files, and what in a file they would refuse or silently drop.

schema_faults(kuberay_schema("RayJob"), tree)          # ["spec: there is no field 'entrypont'; did you mean entrypoint?"]

Where they come from, and under which licence, is in `deploy/schemas/README.md`.
"""

import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import yaml

from raystride.pipelines.config import SettingError
from raystride.pipelines.credentials import hidden
from raystride.pipelines.deploy.plan import TEMPLATES

Schema = Mapping[str, Any]


class FileError(SettingError):
    """A rendered file that its reader would not take: `file` by its name, and `faults`, each with its place."""

    def __init__(self, message: str = "", *, file: str = "", faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.file, self.faults = file, tuple(map(hidden, faults))


SCHEMAS = TEMPLATES / "schemas"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's in C, where it has that: KubeRay's definitions are two megabytes, which it reads in a quarter of the time."""


def kuberay_schema(kind: str) -> Schema:
    """Of `RayJob` or `RayCluster`, in which nothing is allowed that it does not name: that of the cluster, from the file of
    custom resource definitions that $RAYSTRIDE_CRDS names, else ours of the fields that we set.

    Raises SettingError where that file has none.
    """
    return _of_definitions(crds, kind) if (crds := os.environ.get("RAYSTRIDE_CRDS")) else _of_table(kind)


@cache
def _of_table(kind: str) -> Schema:
    return _typed(yaml.safe_load((SCHEMAS / "kuberay.yaml").read_text())[kind])


def _typed(entry: Any) -> Schema:
    """An entry of the table as a schema."""
    if isinstance(entry, dict):
        inner = {name: _typed(each) for name, each in entry.items()}
        return {"type": "object", "properties": inner, "additionalProperties": False}
    if isinstance(entry, list):
        return {"type": "array", "items": _typed(entry[0])}
    return {"type": {"map": "object", "quantity": ["string", "integer"]}.get(entry, entry)}


@cache
def _of_definitions(file: str, kind: str) -> Schema:
    try:
        documents = list(yaml.load_all(Path(file).read_text(), Loader=LOADER))
    except (OSError, yaml.YAMLError) as error:
        message = f"RAYSTRIDE_CRDS is {file!r}, which cannot be read: {error}"
        raise SettingError(message, setting="RAYSTRIDE_CRDS", value=file) from None
    definitions = [each for document in documents if document for each in document.get("items", [document])]
    for definition in definitions:
        if definition.get("spec", {}).get("names", {}).get("kind") == kind:
            versions = {each["name"]: each["schema"]["openAPIV3Schema"] for each in definition["spec"]["versions"]}
            schema: Schema = _closed(versions["v1"])
            return schema
    message = f"RAYSTRIDE_CRDS is {file!r}, in which there is no definition of {kind}"
    raise SettingError(message, setting="RAYSTRIDE_CRDS", value=file)


@cache
def sky_schema(part: str) -> Schema:
    """Of SkyPilot's `task`, or of the `resources` in it."""
    schema: Schema = json.loads((SCHEMAS / "sky-task.json").read_text())[part]
    return schema


@cache
def launcher_schema() -> Schema:
    """Of the cluster launcher's file, as the Ray that is installed here has it."""
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema: Schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    return schema


def _closed(schema: Any) -> Any:
    """The schema with every object that names its fields closed to others, which an API server drops in silence."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(each) for key, each in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed["properties"] = {name: _closed(each) for name, each in schema["properties"].items()}
        if schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
    return closed


def schema_faults(schema: Schema, tree: Any) -> list[str]:
    """What is wrong with it, a line each with its place; a name that nobody knows with the nearest that there is."""
    return sorted(_faults(schema, tree))


def _faults(schema: Schema, tree: Any) -> Iterator[str]:
    for error in jsonschema.validators.validator_for(schema, jsonschema.Draft7Validator)(schema).iter_errors(tree):
        place = ".".join(str(part) for part in error.absolute_path) or "the file"
        if error.validator != "additionalProperties" or not isinstance(error.schema, dict):
            yield f"{place}: {error.message}"
            continue
        known = error.schema.get("properties", {})
        for name in sorted(set(error.instance) - set(known)):
            meant = difflib.get_close_matches(name, known, 1)
            yield f"{place}: there is no field {name!r}" + (f"; did you mean {meant[0]}?" if meant else "")
