"""The main job: trains what a configuration says, on Ray, and resumes a run that was started before.

python ray_jobs/train.py --config configs/lm_python.yaml --train.steps 500 --scaling.workers 2 --run NAME
"""

import sys
import time
from pathlib import Path

STARTED_AT = time.time()
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pipelines.config import Config, SettingError  # noqa: E402
from pipelines.config.parse import fail, parse  # noqa: E402


def main(arguments: list[str]) -> int:
    """Trains; returns the exit code: 0 done, 1 failed, 2 wrong settings or data, 3 the cluster cannot run it."""
    try:
        parsed = parse(Config, arguments, program="train.py", description="Train, or resume, a model on Ray.")
    except SettingError as error:
        return fail(error)
    from pipelines.launch.driver import run_training

    return run_training(parsed, STARTED_AT)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
