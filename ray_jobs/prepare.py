"""Prepares the data of a configuration, so that a training starts at once.

python ray_jobs/prepare.py --config configs/lm_python.yaml
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["prepare", *sys.argv[1:]]))

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import Parsed, command


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    return command(
        Config, _prepare, arguments, program="raystride prepare", description="Turn raw data into shards, on Ray."
    )


def _prepare(parsed: Parsed[Config]) -> int:
    from raystride.pipelines.launch.driver import run_preparation  # when the settings stand: it takes most of a second

    return run_preparation(parsed)
