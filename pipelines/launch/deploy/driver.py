"""`raystride deploy`: writes the files with which a run is deployed, and prints the commands to run next.

main(["slurm", "--config", "lm_124m", "--nodes", "4", "--gpus-per-node", "8", "--output", "job"])
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from shlex import quote

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.deploy import DeployConfig, DeployServeConfig
from raystride.pipelines.config.parse import Parsed, parse
from raystride.pipelines.config.section import nearest
from raystride.pipelines.config.sweep import SweepJobConfig
from raystride.pipelines.launch.console.exit_codes import DONE
from raystride.pipelines.launch.deploy.llm_serving import write_serving_config
from raystride.pipelines.launch.deploy.plan import (
    DEFAULT_PLACES,
    KINDS,
    Deployment,
    Kind,
    known_places,
    load_place,
    plan_deployment,
)
from raystride.pipelines.launch.deploy.render import render_files, write_files

DEPLOY_FLAGS = {item.name for item in fields(DeployConfig)}
"""Names of the flags of this command; all others are settings of the run."""
NEXT_COMMANDS: dict[Kind, tuple[str, ...]] = {
    "slurm": ("cd {folder} && sbatch job.sbatch",),
    "compose": (
        "docker build -f deploy/Dockerfile -t {image}{build} .        # from the project's folder, once",
        "cd {folder} && sh secrets.sh && docker compose up --detach && docker compose run --rm job",
    ),
    "kuberay": (
        "docker build -f deploy/Dockerfile -t {image}{build} .        # from the project's folder, once, and the next",
        "docker push {image}",
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
"""Commands to run after the files are written, by kind."""
DATABASE_KEY_COMMAND = (
    'kubectl --namespace {namespace} create secret generic mlflow-database --from-literal=password="$(openssl rand -hex 32)"'
)
"""On Kubernetes, creates the password of MLflow's database, if MLflow is deployed too; no file holds the password."""


def main(arguments: list[str]) -> int:
    """Plans, renders and writes the files, and prints the summary. Returns the exit code. Raises SettingError."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help_text())
        return DONE
    if arguments[0] == "serve":
        flags = [_normalize_flag(argument) for argument in arguments[1:]]
        print("\n".join(write_serving_config(parse(DeployServeConfig, flags, program="raystride deploy serve").settings)))
        return DONE
    kind, arguments = _parse_kind(arguments[0]), arguments[1:]
    deploy_flags, run_flags = _split_flags(arguments)
    if {"-h", "--help"} & set(run_flags):
        parse(DeployConfig, ["--help"], program=f"raystride deploy {kind}", description=_help_text())
    request = parse(DeployConfig, deploy_flags, program="raystride deploy").settings
    parsed: Parsed[Config] | Parsed[SweepJobConfig]
    if request.job == "sweep":
        parsed = parse(SweepJobConfig, run_flags, program="raystride deploy")
    else:
        parsed = parse(Config, run_flags, program="raystride deploy")
    if request.array and (kind != "slurm" or request.job != "sweep"):
        raise request.error("array", "needs `raystride deploy slurm --job sweep`")
    deployment = plan_deployment(kind, request, load_place(request.place or DEFAULT_PLACES[kind]), parsed)
    files = render_files(deployment)
    folder = Path(request.output or f"deploy-{kind}-{deployment.run}")
    write_files(files, folder, overwrite=request.overwrite)
    if not request.place:
        example = DEFAULT_PLACES[kind]
        print(
            f"place    the example {example!r}: copy deploy/places/{example}.yaml, describe yours, and give it with --place",
        )
    for line in _summary_lines(deployment, folder, sorted(files)):
        print(line)
    return DONE


def _summary_lines(deployment: Deployment, folder: Path, files: Sequence[str]) -> list[str]:
    """Returns the lines to print: the run with its size and price, the files, each command."""
    place = deployment.place
    workers = f"{deployment.workers} workers" if deployment.workers else "as many workers as are fastest"
    size = f"{deployment.nodes} node(s), {deployment.gpus_per_node} GPU(s) each, {workers}; {deployment.grace_s} s to save"
    price = f"; {deployment.price_per_hour:g} an hour" if deployment.price_per_hour else ""
    overlay = "spot" if place.kubernetes.spot else "gpu" if deployment.gpus_per_node else "cpu"
    values = {"folder": quote(str(folder)), "nodes": deployment.nodes, "name": deployment.name, "overlay": overlay}
    values["stop"] = "ray exec cluster.yaml 'bash ~/raystride-job/stop.sh'; " if place.cloud.provider == "local" else ""
    values["image"] = place.image
    values["build"] = " --target cuda --build-arg TORCH_INDEX=" if deployment.gpus_per_node else ""
    values["namespace"] = place.kubernetes.namespace
    values["secret"] = "" if place.mlflow_uri else DATABASE_KEY_COMMAND.format(**values)
    commands = [command.format(**values) for command in NEXT_COMMANDS[deployment.kind]]
    return [
        *([f"not yet  {_describe_image(place.image)}"] if deployment.kind == "kuberay" and "/" not in place.image else []),
        f"run      {deployment.run} in {place.storage}: {size}{price}",
        f"results  {folder}: {', '.join(files)}",
        *(f"next     {command}" for command in commands if command),
    ]


def _describe_image(image: str) -> str:
    return f"image is {image!r}, which names no registry: give your place's image as REGISTRY/{image}, so that nodes find it"


def _parse_kind(word: str) -> Kind:
    """Returns the word as a kind of deployment. Raises SettingError, which names the nearest kind."""
    for kind in KINDS:
        if word == kind:
            return kind
    message = f"there is no kind {word!r} of deployment{nearest(word, KINDS)}; there are {', '.join(KINDS)}"
    raise SettingError(message, setting="kind", value=word, allowed=KINDS)


def _normalize_flag(argument: str) -> str:
    """Returns a flag with underscores for dashes, and a value as it is."""
    flag, separator, value = argument.removeprefix("--").partition("=")
    return f"--{flag.replace('-', '_')}{separator}{value}" if argument.startswith("--") else argument


def _split_flags(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the arguments. Returns those of this command, their flags with underscores for dashes, and those of the run."""
    deploy_flags: list[str] = []
    run_flags: list[str] = []
    target = run_flags
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
            target = deploy_flags if name in DEPLOY_FLAGS else run_flags
            argument = _normalize_flag(argument) if name in DEPLOY_FLAGS else argument
        target.append(argument)
    return deploy_flags, run_flags


def _help_text() -> str:
    lines = [
        f"raystride deploy {'|'.join(KINDS)} --config PRESET [--nodes N] [--gpus-per-node N] [--place PLACE] [--output DIR]",
        "",
        "Writes the files with which the run goes there, and says what to type next. All settings of a training may follow;",
        "`raystride deploy slurm --help` lists the flags of this command.",
        "`raystride deploy serve --run NAME` writes what serves a run's model on GPUs. Places:",
        "",
        *(f"  {name:<28} {load_place(name).about}" for name in known_places()),
    ]
    return "\n".join(lines)
