"""`raystride deploy` from its command line to its exit code.

run_deploy(["slurm", "--config", "lm_124m", "--nodes", "4", "--gpus-per-node", "8", "--output", "job"])
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.deploy import Deploy, DeployServe
from raystride.pipelines.config.parse import Parsed, parse
from raystride.pipelines.config.section import nearest
from raystride.pipelines.config.sweep import SweepConfig
from raystride.pipelines.deploy.llm_serving import deploy_serving
from raystride.pipelines.deploy.next_steps import next_steps
from raystride.pipelines.deploy.plan import FIRST_PLACE, KINDS, Kind, find_place, known_places, plan
from raystride.pipelines.deploy.render import rendered, write
from raystride.pipelines.deploy.validate import look_at_files
from raystride.pipelines.launch.exit_codes import DONE, guarded

OWN = {item.name for item in fields(Deploy)}
"""Flags that are not the run's, but for `--config` and what stands in it."""


def run_deploy(arguments: Sequence[str]) -> int:
    """Plans, renders, validates and writes; returns the exit code and raises nothing a user can cause."""
    return guarded(lambda: _deploy(list(arguments)))


def _deploy(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return DONE
    if arguments[0] == "serve":
        flags = [_underscored(each) for each in arguments[1:]]
        print("\n".join(deploy_serving(parse(DeployServe, flags, program="raystride deploy serve").settings)))
        return DONE
    kind = _kind(arguments.pop(0))
    own, others = _split(arguments)
    if {"-h", "--help"} & set(others):
        parse(Deploy, ["--help"], program=f"raystride deploy {kind}", description=_help())
    request = parse(Deploy, own, program="raystride deploy").settings
    parsed: Parsed[Config] | Parsed[SweepConfig]
    if request.job == "sweep":
        parsed = parse(SweepConfig, others, program="raystride deploy")
    else:
        parsed = parse(Config, others, program="raystride deploy")
    if request.array and (kind != "slurm" or request.job != "sweep"):
        raise request.error("array", "needs `raystride deploy slurm --job sweep`")
    deployment = plan(kind, request, find_place(request.place or FIRST_PLACE[kind]), parsed)
    files = rendered(deployment)
    looked_at = look_at_files(kind, files)
    folder = Path(request.output or f"deploy-{deployment.run}")
    write(files, folder, overwrite=request.overwrite)
    for line in next_steps(deployment, folder, sorted(files), looked_at):
        print(line)
    return DONE


def _kind(word: str) -> Kind:
    for kind in KINDS:
        if word == kind:
            return kind
    message = f"there is no kind {word!r} of deployment{nearest(word, KINDS)}; there are {', '.join(KINDS)}"
    raise SettingError(message, setting="kind", value=word, allowed=KINDS)


def _underscored(argument: str) -> str:
    """A flag with underscores for dashes; a value as it is."""
    flag, equals, value = argument.removeprefix("--").partition("=")
    return f"--{flag.replace('-', '_')}{equals}{value}" if argument.startswith("--") else argument


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The flags of this command, with underscores for dashes, and those of the run."""
    own: list[str] = []
    others: list[str] = []
    into = others
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.removeprefix("--").partition("=")[0].replace("-", "_")
            into = own if name in OWN else others
            argument = _underscored(argument) if name in OWN else argument
        into.append(argument)
    return own, others


def _help() -> str:
    lines = [
        f"raystride deploy {'|'.join(KINDS)} --config PRESET [--nodes N] [--gpus-per-node N] [--place PLACE] [--output DIR]",
        "",
        "Writes the files with which the run goes there, looks whether they are valid, and says what to type next. All",
        "settings of a training may follow; `raystride deploy slurm --help` lists the flags of this command.",
        "`raystride deploy serve --run NAME` writes what serves a run's model on GPUs. Places:",
        "",
        *(f"  {name:<28} {find_place(name).about}" for name in known_places()),
    ]
    return "\n".join(lines)
