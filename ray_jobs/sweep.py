"""Many short trainings over scaling settings, and one answer: how to train here.

python ray_jobs/sweep.py --config configs/sweep_scaling.yaml --storage runs
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["sweep", *sys.argv[1:]]))

from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.config.sweep import SweepConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return command(
        SweepConfig,
        _sweep,
        arguments,
        program="raystride sweep",
        description="Measure many settings, and say which to use.",
    )


def _sweep(parsed: Parsed[SweepConfig]) -> int:
    from raystride.pipelines.sweep.driver import run_sweep  # when the settings stand: it takes most of a second

    return run_sweep(parsed)
