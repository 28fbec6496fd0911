"""Reports the cluster's resources, and whether a configuration will run on it.

python ray_jobs/check.py --config configs/lm_python.yaml --scaling.workers 4
"""

from collections.abc import Sequence

from raystride.jobs.train import COMMON
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import Parsed, command


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return command(
        Config,
        _run_job,
        arguments,
        program="raystride check",
        description="Report whether a configuration will run here.",
        common=COMMON,
        examples=("raystride check --config lm_python --scaling.workers 4",),
    )


def _run_job(parsed: Parsed[Config]) -> int:
    # After the settings are parsed: it takes most of a second.
    from raystride.pipelines.launch.preflight.check import run_check

    return run_check(parsed)
