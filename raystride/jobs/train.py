"""The main job: trains a configuration on Ray, or resumes a run.

python ray_jobs/train.py --config configs/lm_python.yaml --train.steps 500 --scaling.workers 2 --run NAME
"""

import sys
from collections.abc import Sequence

from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.config.presets import presets
from raystride.pipelines.config.words import words_to_flags
from raystride.pipelines.run_store.stored_config import stored_settings

COMMON = (
    "data.source", "task", "model.init_from", "run", "storage", "model.layers", "model.hidden_size", "model.context",
    "train.steps", "train.epochs", "train.batch", "optimizer.learning_rate", "train.precision",
    "validation.every", "scaling.workers", "launch.mode",
)  # fmt: skip
"""Settings that presets change and people try first."""
EXAMPLES = (
    "raystride train --config lm_python --train.steps 500",
    "raystride train --config finetune --model.init_from FOLDER --data.source chats.jsonl",
    "raystride train --run NAME                           # resumes it",
    "raystride train --run NAME --train.steps 5000        # trains it further",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    words = words_to_flags(Config, sys.argv[1:] if arguments is None else arguments, presets())
    with stored_settings(words) as given:
        return command(
            Config,
            _run_job,
            given,
            program="raystride train",
            description="Train or resume a run.",
            common=COMMON,
            examples=EXAMPLES,
        )


def _run_job(parsed: Parsed[Config]) -> int:
    from raystride.pipelines.launch.train_job import run_training  # after the settings are parsed: it takes most of a second

    return run_training(parsed)
