"""Prepares the data of a configuration, so that a training starts at once.

python ray_jobs/prepare.py --config configs/lm_python.yaml
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pipelines.config import Config, SettingError  # noqa: E402
from pipelines.config.parse import fail, parse  # noqa: E402


def main(arguments: list[str]) -> int:
    """Prepares; returns the exit code."""
    try:
        parsed = parse(Config, arguments, program="prepare.py", description="Turn raw data into shards, on Ray.")
    except SettingError as error:
        return fail(error)
    from pipelines.launch.driver import run_preparation

    return run_preparation(parsed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
