"""Keeps MLflow credentials in environment variables away from workers; only the recorder gets them.

Ray's processes inherit the environment of the process that starts them, and a submitted job's processes get the variables of
its `runtime_env`. Both are scrubbed of passwords, and the recorder's process, the only client of the tracking server, gets
them as an argument.

    with scrubbed_environment():
        ray.init(...)                                         # no process that Ray starts has a login
    ray.remote(RecorderActor).remote(..., environment=mlflow_environment())
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from raystride.pipelines.cluster.internals import JOB_CONFIG_VARIABLE

LOGINS = ("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_URI")


def mlflow_environment() -> dict[str, str]:
    """Returns this process's environment variables for MLflow's client, logins included."""
    return {name: value for name, value in os.environ.items() if name.startswith("MLFLOW_")}


@contextmanager
def scrubbed_environment() -> Iterator[None]:
    """Removes MLflow credentials from the environment inside the block, also from Ray's variable about a submitted job."""
    before = {name: os.environ[name] for name in (*LOGINS, JOB_CONFIG_VARIABLE) if name in os.environ}
    for name in LOGINS:
        os.environ.pop(name, None)
    if JOB_CONFIG_VARIABLE in before:
        os.environ[JOB_CONFIG_VARIABLE] = _strip_logins(before[JOB_CONFIG_VARIABLE])
    try:
        yield
    finally:
        os.environ.update(before)


def _strip_logins(job: str) -> str:
    """Returns Ray's JSON about a submitted job without logins among its workers' variables."""
    try:
        job_config = json.loads(job)
        variables = job_config["runtime_env"]["env_vars"]
        job_config["runtime_env"]["env_vars"] = {name: value for name, value in variables.items() if name not in LOGINS}
    except (ValueError, KeyError, TypeError, AttributeError):
        return job  # it has no variables, or another form than Ray 2.60's
    return json.dumps(job_config)
