"""What this cluster has, and whether this configuration will run on it.

python ray_jobs/check.py --config configs/lm_python.yaml --scaling.workers 4
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["check", *sys.argv[1:]]))

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import Parsed, command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return command(
        Config, _check, arguments, program="raystride check", description="See whether a configuration will run here."
    )


def _check(parsed: Parsed[Config]) -> int:
    from raystride.pipelines.launch.check import run_check  # when the settings stand: it takes most of a second

    return run_check(parsed)
