"""What this cluster has, and whether this configuration will run on it.

python ray_jobs/check.py --config configs/lm_python.yaml --scaling.workers 4
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import command
from raystride.pipelines.launch.driver import run_check

if __name__ == "__main__":
    sys.exit(command(Config, run_check, program="check.py", description="See whether a configuration will run here."))
