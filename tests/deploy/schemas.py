"""Schemas of the programs that read rendered files, and a search for faults by them.

find_schema_faults(kuberay_schema("RayJob"), tree)     # ["spec: there is no field 'entrypont'; did you mean entrypoint?"]

`specifications/README.md` names their sources and licences.
"""

import difflib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Schema = Mapping[str, Any]

SPECIFICATIONS = Path(__file__).with_name("specifications")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""PyYAML's loader in C if it is built: it reads KubeRay's definitions, two megabytes, in a quarter of the time."""


@cache
def kuberay_schema(kind: str, definitions: Path | None = None) -> Schema:
    """Returns the schema of `RayJob` or `RayCluster`, with no other fields allowed.

    It is read from a file of custom resource definitions, if given, or else from our own list of the fields that we set.
    """
    if definitions is None:
        return _to_schema(yaml.safe_load((SPECIFICATIONS / "kuberay.yaml").read_text())[kind])
    documents = yaml.load_all(definitions.read_text(), Loader=LOADER)
    for definition in (each for document in documents if document for each in document.get("items", [document])):
        if definition.get("spec", {}).get("names", {}).get("kind") == kind:
            versions = {each["name"]: each["schema"]["openAPIV3Schema"] for each in definition["spec"]["versions"]}
            schema: Schema = _close_objects(versions["v1"])
            return schema
    raise LookupError(f"{definitions} does not define {kind}")


def _to_schema(entry: Any) -> Schema:
    """Converts an entry of our list of fields to a schema."""
    if isinstance(entry, dict):
        inner = {name: _to_schema(each) for name, each in entry.items()}
        return {"type": "object", "properties": inner, "additionalProperties": False}
    if isinstance(entry, list):
        return {"type": "array", "items": _to_schema(entry[0])}
    return {"type": {"map": "object", "quantity": ["string", "integer"]}.get(entry, entry)}


@cache
def sky_schema(part: str) -> Schema:
    """Returns the schema of SkyPilot's `task`, or of the `resources` in it."""
    schema: Schema = json.loads((SPECIFICATIONS / "sky-task.json").read_text())[part]
    return schema


@cache
def launcher_schema() -> Schema:
    """Returns the installed Ray's schema of the cluster launcher's file."""
    spec = find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    schema: Schema = json.loads((Path(spec.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    return schema


@cache
def serve_schema() -> Schema:
    """Returns the schema of Ray Serve's configuration with one application of Ray Serve LLM."""
    schema: Schema = yaml.safe_load((SPECIFICATIONS / "serve-llm.yaml").read_text())
    return schema


@cache
def compose_schema() -> Schema:
    """Returns the Compose specification that the package check-jsonschema has."""
    schema: Schema = json.loads((files("check_jsonschema") / "builtin_schemas" / "vendor" / "compose-spec.json").read_text())
    return schema


def _close_objects(schema: Any) -> Any:
    """Returns the schema with unknown fields forbidden in objects that list theirs: API servers drop them silently."""
    if isinstance(schema, list):
        return [_close_objects(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _close_objects(each) for key, each in schema.items()}
    if isinstance(schema.get("properties"), dict):
        closed["properties"] = {name: _close_objects(each) for name, each in schema["properties"].items()}
        if schema.get("type") == "object" and not schema.get("x-kubernetes-preserve-unknown-fields"):
            closed.setdefault("additionalProperties", False)
    return closed


def find_schema_faults(schema: Schema, tree: Any) -> list[str]:
    """Returns a line for each fault, with its place; for an unknown name also the nearest known one."""
    return sorted(_find_faults(schema, tree))


def _find_faults(schema: Schema, tree: Any) -> Iterator[str]:
    for error in jsonschema.validators.validator_for(schema, jsonschema.Draft7Validator)(schema).iter_errors(tree):
        nearest = jsonschema.exceptions.best_match([error]) if error.context else error
        place = ".".join(str(part) for part in nearest.absolute_path) or "the file"
        if nearest.validator != "additionalProperties" or not isinstance(nearest.schema, dict):
            yield f"{place}: {nearest.message}"
            continue
        known = nearest.schema.get("properties", {})
        for name in sorted(set(nearest.instance) - set(known)):
            meant = difflib.get_close_matches(name, known, 1)
            yield f"{place}: there is no field {name!r}" + (f"; did you mean {meant[0]}?" if meant else "")
