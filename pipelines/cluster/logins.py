"""What a user gives to MLflow's client by the environment: the recorder has it, and no worker does.

Ray's processes have the environment of the one that starts them, and a submitted job's what its `runtime_env` names. So both
go without passwords, and the recorder's process, the only one that talks to the tracking server, is told of them.

    with withheld():
        ray.init(...)                                         # nobody that Ray starts has a login
    ray.remote(RecorderActor).remote(..., surroundings=of_mlflow())
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from raystride.pipelines.cluster.internals import JOB

LOGINS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_URI")


def of_mlflow() -> dict[str, str]:
    """All that this process's environment has for MLflow's client, logins and the rest."""
    return {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}


@contextmanager
def withheld() -> Iterator[None]:
    """Has this process's environment be without logins in the block, also what it says of the submitted job that this is."""
    before = {name: os.environ[name] for name in (*LOGINS, JOB) if name in os.environ}
    for name in LOGINS:
        os.environ.pop(name, None)
    if JOB in before:
        os.environ[JOB] = _without_logins(before[JOB])
    try:
        yield
    finally:
        os.environ.update(before)


def _without_logins(job: str) -> str:
    """What Ray tells a submitted job of itself, without logins among the variables of its workers."""
    try:
        told = json.loads(job)
        variables = told["runtime_env"]["env_vars"]
        told["runtime_env"]["env_vars"] = {name: value for name, value in variables.items() if name not in LOGINS}
    except (ValueError, KeyError, TypeError, AttributeError):
        return job  # nothing is asked for, or not as Ray 2.60 writes it
    return json.dumps(told)
