"""The last lines of `raystride deploy`: what was written and looked at, what it costs, and what to type next."""

from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from raystride.pipelines.deploy.plan import Deployment, Kind

COMMANDS: dict[Kind, tuple[str, ...]] = {
    "slurm": ("cd {folder} && sbatch job.sbatch",),
    "compose": ("cd {folder} && sh secrets.sh && docker compose up --detach && docker compose run --rm job",),
    "kuberay": ("kubectl apply -k {folder}/overlays/{overlay}",),
    "launcher": (
        "cd {folder} && ray up --yes cluster.yaml && ray exec cluster.yaml --no-config-cache 'bash ~/raystride/job.sh'",
    ),
    "sky": ("cd {folder} && sky launch --cluster {name} task.yaml",),
}
"""What to type next, by kind."""


def next_steps(deployment: Deployment, folder: Path, files: Sequence[str], looked_at: Sequence[str]) -> list[str]:
    """A line each: files, looks, size and price, and the commands."""
    told, place = deployment, deployment.place
    workers = f"{told.workers} workers" if told.workers else "as many workers as are fastest"
    size = f"{told.nodes} node(s), {told.gpus_per_node} GPU(s) each, {workers}; {told.grace_s} s to save"
    price = f"; {told.price_per_hour:g} an hour" if told.price_per_hour else ""
    overlay = ("spot" if place.kubernetes.spot else "gpu") if told.gpus_per_node else "cpu"
    values = {"folder": quote(str(folder)), "nodes": told.nodes, "name": told.name, "overlay": overlay}
    return [
        *(f"looked   {line}" for line in looked_at),
        f"run      {told.run} in {place.storage}: {size}{price}",
        f"results  {folder}: {', '.join(files)}",
        *(f"next     {command.format(**values)}" for command in COMMANDS[told.kind]),
    ]
