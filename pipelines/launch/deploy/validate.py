"""Checks rendered files before they are written: scripts with `bash -n`, YAML by loading it, the rest by installed programs.

result = check_files("slurm", {"job.sbatch": "#!/bin/bash ..."})
result.passed, result.skipped    # ["job.sbatch: bash -n"], "by Slurm, which is not here: sbatch --test-only job.sbatch"

The project's tests (tests/deploy) check the templates against their readers' schemas, for all settings of all places.
"""

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shutil import which
from typing import NamedTuple

import yaml

from raystride.pipelines.config import SettingError
from raystride.pipelines.launch.deploy.plan import Kind
from raystride.pipelines.system.credentials import redact

TIMEOUT_S = 60
EXAMPLE_VARIABLES = {"NFS_SERVER": "10.0.0.5", "NFS_FOLDER": "/exports/runs"}
"""Example values of the variables that Compose requires to read `network_drive.yaml`."""


class FileError(SettingError):
    """A rendered file that its reader would refuse. `file` is its name, `faults` a line for each fault, with its place."""

    def __init__(self, message: str = "", *, file: str = "", faults: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.file, self.faults = file, tuple(map(redact, faults))


class CheckResult(NamedTuple):
    """Result of checks that found no fault."""

    passed: list[str]
    """A line for each check that was made."""
    skipped: str
    """The check that was not made, with the command that makes it; empty if all were made."""


Check = Callable[[Path, Mapping[str, str]], CheckResult]
"""A check by installed programs: takes the folder that holds the files, and their texts by name. Raises FileError."""


def check_files(kind: Kind, files: Mapping[str, str]) -> CheckResult:
    """Checks every file by its name and content, then all files with the kind's programs. Raises FileError."""
    passed, loaded = [], []
    for name, text in files.items():
        if name.endswith((".yaml", ".yml")):
            _check_yaml(name, text)
            loaded.append(name)
        elif text.startswith(("#!/bin/bash", "#!/usr/bin/env bash")):
            _run_checker("bash -n", ["bash", "-n"], file=name, stdin=text)
            passed.append(f"{name}: bash -n")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name, text in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        by_programs = CHECKS[kind](folder, files)
    return CheckResult([f"{', '.join(loaded)}: YAML", *passed, *by_programs.passed], by_programs.skipped)


def _check_yaml(name: str, text: str) -> None:
    try:
        list(yaml.safe_load_all(text))
    except yaml.YAMLError as error:
        raise FileError(f"{name} is no YAML: {error}", file=name, faults=[str(error)]) from None


def _run_checker(
    program: str,
    command: Sequence[str],
    *,
    file: str,
    stdin: str = "",
    folder: Path | None = None,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Runs a program that reads a file. Raises FileError with the program's message if it refuses the file."""
    try:
        completed = subprocess.run(
            command,
            cwd=folder,
            input=stdin,
            env=os.environ | (variables or {}),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        fault = f"no answer in {TIMEOUT_S} s"
    else:
        if not completed.returncode:
            return
        fault = completed.stderr.strip() or f"exit code {completed.returncode}"
    raise FileError(f"{file}: {program} refuses it: {fault}", file=file, faults=[fault])


def _check_compose(folder: Path, files: Mapping[str, str]) -> CheckResult:
    """Checks the files with Docker Compose if it is installed; needs no daemon."""
    command = ["docker", "compose", "--file", "compose.yaml"]
    if not _is_runnable(["docker", "compose", "version"]):
        return CheckResult([], "by Docker Compose, which is not here: docker compose config --quiet")
    drive = [*command, "--file", "network_drive.yaml", "config", "--quiet"]
    _run_checker("Docker Compose", [*command, "config", "--quiet"], file="compose.yaml", folder=folder)
    _run_checker("Docker Compose", drive, file="network_drive.yaml", folder=folder, variables=EXAMPLE_VARIABLES)
    return CheckResult(["compose.yaml, network_drive.yaml: docker compose config"], "")


def _is_runnable(command: Sequence[str]) -> bool:
    """Returns whether a program is installed and the command succeeds."""
    return bool(which(command[0])) and not subprocess.run(command, capture_output=True, timeout=TIMEOUT_S).returncode


def _check_sbatch(folder: Path, files: Mapping[str, str]) -> CheckResult:
    """Tests the script with Slurm if it is installed. A full or unreachable queue is no fault of the file."""
    if which("sbatch") is None:
        return CheckResult([], "by Slurm, which is not here: sbatch --test-only job.sbatch")
    completed = subprocess.run(
        ["sbatch", "--test-only"], input=files["job.sbatch"], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    lines = (completed.stderr or completed.stdout).strip().splitlines()
    if completed.returncode and any("nvalid" in line for line in lines):
        raise FileError(f"job.sbatch: Slurm refuses it: {'; '.join(lines)}", file="job.sbatch", faults=lines)
    return CheckResult([f"job.sbatch: sbatch --test-only: {lines[-1] if lines else 'accepted'}"], "")


def _check_kubernetes(folder: Path, files: Mapping[str, str]) -> CheckResult:
    """Builds every kustomize folder with kubectl if it is installed; needs no cluster."""
    server = "by your cluster: kubectl apply --dry-run=server -k FOLDER"
    server += "; RAYSTRIDE_CRDS is not read any more" if "RAYSTRIDE_CRDS" in os.environ else ""
    if which("kubectl") is None:
        return CheckResult([], f"by kubectl, which is not here, nor {server}")
    folders = [name.rpartition("/")[0] for name in files if name.endswith("/kustomization.yaml")]
    for folder_name in folders:
        _run_checker("kubectl kustomize", ["kubectl", "kustomize", folder_name], file=folder_name, folder=folder)
    return CheckResult([f"{', '.join(folders)}: kubectl kustomize"], server)


CHECKS: dict[Kind, Check] = {
    "compose": _check_compose,
    "slurm": _check_sbatch,
    "kuberay": _check_kubernetes,
    "launcher": lambda folder, files: CheckResult([], "by Ray's launcher, which reads cluster.yaml when it starts: ray up"),
    "sky": lambda folder, files: CheckResult([], "by SkyPilot, which reads task.yaml: sky launch --dryrun task.yaml"),
}
"""The check by installed programs, by kind."""
