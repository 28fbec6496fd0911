"""The last lines of `raystride deploy`: what was written and looked at, what it costs, and what to type next."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from raystride.pipelines.deploy.plan import Deployment, Kind

COMMANDS: dict[Kind, tuple[str, ...]] = {
    "slurm": ("cd {folder} && sbatch job.sbatch",),
    "compose": ("cd {folder} && sh secrets.sh && docker compose up --detach && docker compose run --rm job",),
    "kuberay": (
        "kubectl create namespace {namespace}        # once, and the next two",
        "{secret}",
        "kubectl apply -k {folder}/once",
        "kubectl apply -k {folder}/overlays/{overlay}",
        "kubectl --namespace {namespace} get rayjob {name} --watch",
    ),
    "launcher": (
        "ray get-auth-token --generate > /dev/null",
        "cd {folder} && ray up --yes cluster.yaml && ray exec cluster.yaml 'bash ~/raystride-job/job.sh'",
        "cd {folder} && {stop}ray down --yes cluster.yaml        # when it is done",
    ),
    "sky": (
        "export RAY_AUTH_TOKEN=$(openssl rand -hex 32)",
        "cd {folder} && sky jobs launch --secret RAY_AUTH_TOKEN task.yaml",
    ),
}
"""What to type next, by kind."""
_MADE = "kubectl --namespace {namespace} create secret generic mlflow-database"
DATABASE_KEY = _MADE + ' --from-literal=password="$(openssl rand -hex 32)"'
"""On Kubernetes, where MLflow is deployed along: its database's password, which no file holds."""


def next_steps(deployment: Deployment, folder: Path, files: Sequence[str], looked_at: Sequence[str]) -> list[str]:
    """A line each: files, looks, size and price, and the commands."""
    told, place = deployment, deployment.place
    workers = f"{told.workers} workers" if told.workers else "as many workers as are fastest"
    size = f"{told.nodes} node(s), {told.gpus_per_node} GPU(s) each, {workers}; {told.grace_s} s to save"
    price = f"; {told.price_per_hour:g} an hour" if told.price_per_hour else ""
    overlay = "spot" if place.kubernetes.spot else "gpu" if told.gpus_per_node else "cpu"
    values = {"folder": quote(str(folder)), "nodes": told.nodes, "name": told.name, "overlay": overlay}
    values["stop"] = "ray exec cluster.yaml 'bash ~/raystride-job/stop.sh'; " if place.cloud.provider == "local" else ""
    values["namespace"] = place.kubernetes.namespace
    values["secret"] = "" if place.mlflow_uri else DATABASE_KEY.format(**values)
    commands = [command.format(**values) for command in COMMANDS[told.kind]]
    return [
        *(f"looked   {line}" for line in looked_at),
        f"run      {told.run} in {place.storage}: {size}{price}",
        f"results  {folder}: {', '.join(files)}",
        *(f"next     {command}" for command in commands if command),
    ]
