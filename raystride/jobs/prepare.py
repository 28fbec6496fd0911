"""Prepares the data of a configuration, so that a training can start immediately.

python ray_jobs/prepare.py --config configs/lm_python.yaml
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
        program="raystride prepare",
        description="Prepare the data of a configuration, so that a training starts at once.",
        common=COMMON,
        examples=("raystride prepare --config lm_python",),
    )


def _run_job(parsed: Parsed[Config]) -> int:
    # After the settings are parsed: it takes most of a second.
    from raystride.pipelines.launch.preparing import run_preparation

    return run_preparation(parsed)
