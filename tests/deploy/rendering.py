"""Renders files as `raystride deploy` writes them, without a command line or a folder.

files = render_for("kuberay", "kubernetes", nodes=2, kubernetes={"queue": "team"})
command, settings = find_entry_point(files)       # ["raystride", "train", ...], {"/etc/raystride/settings.yaml": "..."}
"""

import shlex
from dataclasses import replace
from functools import cache
from typing import Any

from raystride.pipelines.config import Config
from raystride.pipelines.config.deploy import DeployConfig
from raystride.pipelines.config.parse import Parsed, load_settings
from raystride.pipelines.launch.deploy.plan import Deployment, Kind, load_place, plan_deployment
from raystride.pipelines.launch.deploy.render import render_files
from tests.deploy.kustomize import Document, build_folder


def render_for(kind: Kind, place: str, **changes: Any) -> dict[str, str]:
    """Renders the files of `plan_for`'s deployment. Returns their texts by path."""
    return render_files(plan_for(kind, place, **changes))


def plan_for(
    kind: Kind, place: str, nodes: int = 2, gpus: int = 0, preset: Any = "lm_124m", run: str = "mine", **changes: Any
) -> Deployment:
    """Plans a deployment. `preset` may be settings; `changes` are fields of the place, sections of it as mappings."""
    described = load_place(place)
    for name, value in changes.items():
        value = replace(getattr(described, name), **value) if isinstance(value, dict) else value
        described = replace(described, **{name: value})
    parsed = _load_preset(preset, run) if isinstance(preset, str) else load_settings(Config, preset, {"run": run})
    return plan_deployment(kind, DeployConfig(nodes=nodes, gpus_per_node=gpus), described, parsed)


@cache
def _load_preset(preset: str, run: str) -> Parsed[Config]:
    source = {"data.source": "python"} if preset == "lm_124m" else {}
    return load_settings(Config, preset, {"run": run} | source)


def find_ray_object(files: dict[str, str], folder: str) -> Document:
    """Returns the RayJob or RayCluster of a folder that kubectl applies."""
    (found,) = [each for each in build_folder(files, folder) if each["kind"] in ("RayJob", "RayCluster")]
    return found


def find_entry_point(files: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns the command that the head of the rendered RayJob runs, and the texts of its mounted files by path."""
    (overlay,) = [name for name in ("overlays/cpu", "overlays/gpu") if f"{name}/kustomization.yaml" in files]
    job = find_ray_object(files, overlay)
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "settings"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "settings"]
    (found,) = [each for each in build_folder(files, overlay) if each["kind"] == "ConfigMap"]
    assert found["metadata"]["name"] == volume["configMap"]["name"]
    contents = {f"{mount['mountPath']}/{name}": text for name, text in found["data"].items()}
    return shlex.split(job["spec"]["entrypoint"]), contents
