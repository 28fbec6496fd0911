"""Runs many short trainings over scaling settings, and recommends one of them.

python ray_jobs/sweep.py --config configs/sweep_scaling.yaml --storage runs
"""

from collections.abc import Sequence

from raystride.pipelines.config.parse import Parsed, command
from raystride.pipelines.config.sweep import SweepJobConfig

COMMON = (
    "sweep.space", "sweep.search", "sweep.objective", "sweep.trials", "run", "storage", "data.source", "task",
    "model.layers", "model.hidden_size", "train.batch", "optimizer.learning_rate",
)  # fmt: skip
"""Settings that people try first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    return command(
        SweepJobConfig,
        _run_job,
        arguments,
        program="raystride sweep",
        description="Measure many settings and recommend the best.",
        common=COMMON,
        examples=(
            "raystride sweep --config sweep_scaling",
            """raystride sweep --config lm_python --sweep.space '{"scaling.workers": [1, 2, 4]}'""",
        ),
    )


def _run_job(parsed: Parsed[SweepJobConfig]) -> int:
    from raystride.pipelines.sweep.sweep_job import run_sweep  # after the settings are parsed: it takes most of a second

    return run_sweep(parsed)
