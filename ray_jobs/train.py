"""The main job: trains what a configuration says, on Ray, and resumes a run that was started before.

python ray_jobs/train.py --config configs/lm_python.yaml --train.steps 500 --scaling.workers 2 --run NAME
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import command
from raystride.pipelines.launch.driver import run_training

if __name__ == "__main__":
    sys.exit(command(Config, run_training, program="train.py", description="Train, or resume, a model on Ray."))
