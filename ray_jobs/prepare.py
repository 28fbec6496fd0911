"""Prepares the data of a configuration, so that a training starts at once.

python ray_jobs/prepare.py --config configs/lm_python.yaml
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pipelines.config import Config  # noqa: E402
from pipelines.config.parse import command  # noqa: E402
from pipelines.launch.driver import run_preparation  # noqa: E402

if __name__ == "__main__":
    sys.exit(command(Config, run_preparation, program="prepare.py", description="Turn raw data into shards, on Ray."))
