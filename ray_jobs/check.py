"""What this cluster has, and whether this configuration will run on it.

python ray_jobs/check.py --config configs/lm_python.yaml --scaling.workers 4
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pipelines.config import Config  # noqa: E402
from pipelines.config.parse import command  # noqa: E402
from pipelines.launch.driver import run_check  # noqa: E402

if __name__ == "__main__":
    sys.exit(command(Config, run_check, program="check.py", description="See whether a configuration will run here."))
