"""Reports the cluster's resources, and whether a configuration will run on it.

python ray_jobs/check.py --config configs/lm_python.yaml --scaling.workers 4
raystride check --config lm_124m --kernels                    # also proves the run's kernels on every node's GPU
"""

import sys
from collections.abc import Sequence
from functools import partial

from raystride.jobs.train import COMMON
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import Parsed, command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code. `--kernels` is no setting, but asks for more."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    return command(
        Config,
        partial(_run_job, kernels="--kernels" in words),
        [word for word in words if word != "--kernels"],
        program="raystride check",
        description="Report whether a configuration will run here; --kernels: and prove its kernels on every GPU.",
        common=COMMON,
        examples=("raystride check --config lm_python --scaling.workers 4", "raystride check --config lm_124m --kernels"),
    )


def _run_job(parsed: Parsed[Config], kernels: bool) -> int:
    # After the settings are parsed: it takes most of a second.
    from raystride.pipelines.launch.preflight.check import run_check

    if not kernels:
        return run_check(parsed)
    from raystride.pipelines.launch.preflight.prove_kernels import prove_ahead

    return run_check(parsed, prove_ahead)
