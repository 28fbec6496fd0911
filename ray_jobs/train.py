"""The main job: trains what a configuration says, on Ray, and resumes a run that was started before.

python ray_jobs/train.py --config configs/lm_python.yaml --train.steps 500 --scaling.workers 2 --run NAME
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":  # started as a script, from any folder
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from raystride.command import run

    sys.exit(run(["train", *sys.argv[1:]]))

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.launch.stored import stored_settings


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    about = "Train, or resume, a model on Ray."
    with stored_settings(sys.argv[1:] if arguments is None else arguments) as given:
        return command(Config, _train, given, program="raystride train", description=about)


def _train(parsed: Parsed[Config]) -> int:
    from raystride.pipelines.launch.driver import run_training  # when the settings stand: it takes most of a second

    return run_training(parsed)
