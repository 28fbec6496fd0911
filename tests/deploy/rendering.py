"""Files as `raystride deploy` writes them, without a command line or a folder.

files = rendered_for("kuberay", "kubernetes", nodes=2, kubernetes={"queue": "team"})
command, settings = entry_point(files)            # ["raystride", "train", ...], {"/etc/raystride/settings.yaml": "..."}
"""

import shlex
from dataclasses import replace
from typing import Any

from raystride.pipelines.config import Config
from raystride.pipelines.config.deploy import Deploy
from raystride.pipelines.config.parse import configured
from raystride.pipelines.deploy.overlays import Document, built
from raystride.pipelines.deploy.plan import Deployment, Kind, find_place, plan
from raystride.pipelines.deploy.render import rendered


def rendered_for(kind: Kind, place: str, **changes: Any) -> dict[str, str]:
    """Every file by its path, of what `plan_for` plans."""
    return rendered(plan_for(kind, place, **changes))


def plan_for(
    kind: Kind, place: str, nodes: int = 2, gpus: int = 0, preset: Any = "lm_124m", run: str = "mine", **changes: Any
) -> Deployment:
    """Returns a plan; `preset` may be settings; changes are of the place, those of its sections as mappings."""
    described = find_place(place)
    for name, value in changes.items():
        value = replace(getattr(described, name), **value) if isinstance(value, dict) else value
        described = replace(described, **{name: value})
    return plan(kind, Deploy(nodes=nodes, gpus_per_node=gpus), described, configured(Config, preset, {"run": run}))


def ray_object(files: dict[str, str], folder: str) -> Document:
    """The RayJob or RayCluster of a folder that kubectl applies."""
    (found,) = [each for each in built(files, folder) if each["kind"] in ("RayJob", "RayCluster")]
    return found


def entry_point(files: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """What the head of the rendered RayJob runs, and the files that it finds, by their paths."""
    (overlay,) = [name for name in ("overlays/cpu", "overlays/gpu") if f"{name}/kustomization.yaml" in files]
    job = ray_object(files, overlay)
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (mount,) = [each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "settings"]
    (volume,) = [each for each in pod["volumes"] if each["name"] == "settings"]
    (found,) = [each for each in built(files, overlay) if each["kind"] == "ConfigMap"]
    assert found["metadata"]["name"] == volume["configMap"]["name"]
    contents = {f"{mount['mountPath']}/{name}": text for name, text in found["data"].items()}
    return shlex.split(job["spec"]["entrypoint"]), contents
