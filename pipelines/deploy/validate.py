"""What was rendered, looked at before anything is written: scripts by bash, YAML by the schemas of who will read it.

look_at_files("slurm", {"job.sbatch": "#!/bin/bash ..."})       # ["job.sbatch: bash -n"]
"""

import subprocess
from collections.abc import Callable, Mapping
from shutil import which

import yaml

from raystride.pipelines.deploy.clouds import look_at_launcher, look_at_sky
from raystride.pipelines.deploy.compose_file import look_at_compose
from raystride.pipelines.deploy.kuberay import look_at_kuberay
from raystride.pipelines.deploy.plan import Kind
from raystride.pipelines.deploy.schemas import FileError

Look = Callable[[Mapping[str, str]], list[str]]
"""Takes the files; returns what was looked at, a line each. Raises SettingError."""


def look_at_files(kind: Kind, files: Mapping[str, str]) -> list[str]:
    """Looks at every file; returns a line for each look. Raises SettingError."""
    looked = []
    for name, text in files.items():
        if name.endswith((".yaml", ".yml")):
            _documents(name, text)
        elif text.startswith(("#!/bin/bash", "#!/usr/bin/env bash")):
            _bash(name, text)
            looked.append(f"{name}: bash -n")
    return [*looked, *LOOKS[kind](files)]


def _documents(name: str, text: str) -> list[object]:
    """The YAML documents of a file. Raises SettingError."""
    try:
        return list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise FileError(f"{name} is no YAML: {error}", file=name, faults=[str(error)]) from None


def _bash(name: str, text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    if done.returncode:
        fault = done.stderr.strip()
        raise FileError(f"{name} is no script: {fault}", file=name, faults=[fault])


def _sbatch(files: Mapping[str, str]) -> list[str]:
    """Slurm's own look, where this machine has Slurm. A queue that is full, or away, says nothing of the file."""
    if which("sbatch") is None:
        return ["job.sbatch: not by Slurm, which is not on this machine: sbatch --test-only job.sbatch"]
    done = subprocess.run(
        ["sbatch", "--test-only"], input=files["job.sbatch"], capture_output=True, text=True, timeout=60, check=False
    )
    said = (done.stderr or done.stdout).strip().splitlines()
    if done.returncode and any("nvalid" in line for line in said):
        raise FileError(f"job.sbatch: Slurm says: {'; '.join(said)}", file="job.sbatch", faults=said)
    return [f"job.sbatch: sbatch --test-only: {said[-1] if said else 'accepted'}"]


LOOKS: dict[Kind, Look] = {
    "compose": look_at_compose,
    "slurm": _sbatch,
    "kuberay": look_at_kuberay,
    "launcher": look_at_launcher,
    "sky": look_at_sky,
}
"""What only one kind is asked."""
