"""What no schema says of Kubernetes files: names that nothing has, rights, and secrets."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

from raystride.pipelines.deploy.kuberay import look_at_kuberay
from tests.deploy.rendering import rendered_for
from tests.errors import rejected


def _with(change: Callable[[Any], object]) -> dict[str, str]:
    """The files, with something changed in the job."""
    files = rendered_for("kuberay", "kubernetes")
    job = yaml.safe_load(files["base/rayjob.yaml"])
    change(job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["template"]["spec"])
    return {**files, "base/rayjob.yaml": yaml.safe_dump(job)}


@pytest.mark.parametrize(("change", "names"), [
    (lambda pod: pod.update(serviceAccountName="other"), ("ServiceAccount 'other'",)),
    (lambda pod: pod["volumes"].pop(), ("volume 'home'",)),
    (lambda pod: pod["securityContext"].update(runAsNonRoot=False), ("root",)),
    (lambda pod: pod["containers"][0]["securityContext"].pop("capabilities"), ("ray-worker", "privileges")),
    (lambda pod: pod["containers"][0]["resources"].pop("limits"), ("ray-worker", "no limits")),
    (lambda pod: pod["containers"][0].update(comand=[]), ("'comand'", "mean command?")),
])  # fmt: skip
def test_what_cannot_work_is_told(change: Callable[[Any], object], names: tuple[str, ...]) -> None:
    with rejected("base", *names):
        look_at_kuberay(_with(change))


def test_a_secret_in_a_file_and_a_missing_volume_are_refused() -> None:
    files = rendered_for("kuberay", "kubernetes")
    with rejected("base", "Secret"):
        look_at_kuberay({**files, "once/runs.yaml": "kind: Secret\nmetadata: {name: x}\n"})
    with rejected("base", "PersistentVolumeClaim 'raystride-runs'"):
        look_at_kuberay({**files, "once/runs.yaml": "---\n"})
