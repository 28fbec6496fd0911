"""Many short trainings over scaling settings, and one answer: how to train here.

python ray_jobs/sweep.py --config configs/sweep_scaling.yaml --storage runs
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from pipelines.config.parse import command  # noqa: E402
from pipelines.config.sweep import SweepConfig  # noqa: E402
from pipelines.sweep.driver import run_sweep  # noqa: E402

if __name__ == "__main__":
    sys.exit(command(SweepConfig, run_sweep, program="sweep.py", description="Measure many settings, and say which to use."))
