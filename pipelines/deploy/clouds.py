"""Files for Ray's cluster launcher and for SkyPilot, looked at by the schemas of both, and for what no schema says.

look_at_launcher({"cluster.yaml": "cluster_name: ..."})       # ["cluster.yaml: the schema of Ray 2.60.0's launcher"]
look_at_sky({"task.yaml": "resources: ..."})                  # ["task.yaml: SkyPilot 0.14.1's schema"]
"""

from collections.abc import Mapping
from importlib.metadata import version

import yaml

from raystride.pipelines.deploy.schemas import FileError, launcher_schema, schema_faults, sky_schema


def look_at_launcher(files: Mapping[str, str]) -> list[str]:
    """What was looked at, a line each. Raises SettingError, with the place and the fault."""
    tree = yaml.safe_load(files["cluster.yaml"])
    wrong = schema_faults(launcher_schema(), tree)
    types = tree.get("available_node_types", {})
    if types and tree.get("head_node_type") not in types:
        wrong.append(f"head_node_type: there is no {tree.get('head_node_type')!r} in available_node_types")
    if wrong:
        message = "cluster.yaml is nothing for Ray's cluster launcher: " + "; ".join(wrong)
        raise FileError(message, file="cluster.yaml", faults=wrong)
    return [f"cluster.yaml: the schema of Ray {version('ray')}'s launcher"]


def look_at_sky(files: Mapping[str, str]) -> list[str]:
    """What was looked at, a line each. Raises SettingError, with the place and the fault."""
    tree = yaml.safe_load(files["task.yaml"])
    wrong = schema_faults(sky_schema("task"), tree) + schema_faults(sky_schema("resources"), tree.get("resources", {}))
    wrong += [f"secrets.{name} has a value" for name, value in tree.get("secrets", {}).items() if value is not None]
    if wrong:
        raise FileError("task.yaml is no task of SkyPilot's: " + "; ".join(wrong), file="task.yaml", faults=wrong)
    return ["task.yaml: SkyPilot 0.14.1's schema"]
