"""Prepares the data of a configuration, so that a training starts at once.

python ray_jobs/prepare.py --config configs/lm_python.yaml
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import command
from raystride.pipelines.launch.driver import run_preparation

if __name__ == "__main__":
    sys.exit(command(Config, run_preparation, program="prepare.py", description="Turn raw data into shards, on Ray."))
