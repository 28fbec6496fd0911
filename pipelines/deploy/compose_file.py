"""A compose file looked at: by the rules of the compose specification, and for what no rule says.

look_at_compose({"compose.yaml": "services: ...", ...})    # ["compose.yaml: compose specification", ...]
"""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files as files_of
from importlib.util import find_spec
from typing import Any

import jsonschema
import yaml

from raystride.pipelines.deploy.schemas import FileError

PACKAGE = "check_jsonschema"
"""Brings the specification's schema along; `pip install raystride[deploy]`."""


def look_at_compose(files: Mapping[str, str]) -> list[str]:
    """What was looked at, a line each. Raises SettingError, with the place and the fault."""
    looked = []
    for name in ("compose.yaml", "network_drive.yaml"):
        tree = yaml.safe_load(files[name])
        schema = compose_schema()
        if schema is None:
            looked.append(f"{name}: not by the compose specification, which is not here: pip install 'raystride[deploy]'")
            continue
        if faults := sorted(_by_schema(schema, tree)):
            raise FileError(f"{name} is no compose file: " + "; ".join(faults), file=name, faults=faults)
        looked.append(f"{name}: compose specification")
    if faults := list(_by_sense(yaml.safe_load(files["compose.yaml"]))):
        raise FileError("compose.yaml cannot work: " + "; ".join(faults), file="compose.yaml", faults=faults)
    return [*looked, "compose.yaml: what it names is there, ports are this machine's alone, no secret stands in it"]


def compose_schema() -> dict[str, Any] | None:
    """The JSON schema of the compose specification; None where it is not installed."""
    if find_spec(PACKAGE) is None:
        return None
    file = files_of(PACKAGE) / "builtin_schemas" / "vendor" / "compose-spec.json"
    if not file.is_file():
        return None
    schema: dict[str, Any] = json.loads(file.read_text())
    return schema


def _by_schema(schema: Mapping[str, Any], tree: Any) -> Iterator[str]:
    validator = jsonschema.validators.validator_for(schema)(schema)
    for error in validator.iter_errors(tree):
        nearest = jsonschema.exceptions.best_match([error])
        yield f"{'.'.join(str(part) for part in nearest.absolute_path)}: {nearest.message}"


def _by_sense(tree: Mapping[str, Any]) -> Iterator[str]:
    """Names that nothing declares, doors that are open to all, and passwords."""
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
