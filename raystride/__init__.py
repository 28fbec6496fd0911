"""Raystride: reliable, reproducible transformer training on Ray, with measured answers on how to scale it.

    run = raystride.train("lm_python", {"train.steps": 200}, run="mine")
    run.summary["val_loss"]; run.metrics("train_loss").to_pandas(); model = run.load_model("best")
    print(raystride.generate(run, "def main():"))

The repository's folders are subpackages of this one (`raystride/model` links to `model`, and so on), so that they cannot
clash with a user's own `model.py`. Names are imported lazily.
"""

import sys
from importlib import import_module
from os.path import dirname, isdir
from typing import TYPE_CHECKING, Any

from raystride import old_names, project_folder
from raystride.locations import __version__ as __version__

if not isdir(f"{dirname(__file__)}/pipelines"):
    sys.tracebacklimit = 0  # the message is enough
    raise ImportError(
        "raystride/pipelines is no folder: this clone has no symbolic links. Clone it again with `git clone -c "
        "core.symlinks=true` (on Windows inside WSL), or install a wheel of Raystride"
    )

old_names.install()
project_folder.put_last_in_worker()

if TYPE_CHECKING:
    from raystride.api import (
        SweepInterrupted,
        SweepTerminated,
        TrainingInterrupted,
        TrainingTerminated,
        check,
        prepare,
        sweep,
        train,
    )
    from raystride.own_model import fit, register_model
    from raystride.pipelines.config import (
        CheckpointConfig,
        Config,
        DataConfig,
        FitConfig,
        GuardConfig,
        LaunchConfig,
        LoraConfig,
        ModelConfig,
        ObjectiveConfig,
        OptimizerConfig,
        ProfileConfig,
        RecordConfig,
        ResumeConfig,
        SampleConfig,
        ScalingConfig,
        SettingError,
        TokenizerConfig,
        TrainConfig,
        ValidationConfig,
    )
    from raystride.pipelines.config.sweep import SweepConfig, SweepJobConfig
    from raystride.pipelines.data.plugins import register_observer, register_source, register_task
    from raystride.pipelines.data.sources.faults import DataError
    from raystride.pipelines.data.tasks.task import Task
    from raystride.pipelines.launch.cluster.cluster import CannotRun
    from raystride.pipelines.launch.console.failure import TrainingFailed
    from raystride.pipelines.observability.observers.observer import Observer
    from raystride.run import Run, evaluate, export, generate, predict

__all__ = [
    "CannotRun",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DataError",
    "FitConfig",
    "GuardConfig",
    "LaunchConfig",
    "LoraConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "Observer",
    "OptimizerConfig",
    "ProfileConfig",
    "RecordConfig",
    "ResumeConfig",
    "Run",
    "SampleConfig",
    "ScalingConfig",
    "SettingError",
    "SweepConfig",
    "SweepInterrupted",
    "SweepJobConfig",
    "SweepTerminated",
    "Task",
    "TokenizerConfig",
    "TrainConfig",
    "TrainingFailed",
    "TrainingInterrupted",
    "TrainingTerminated",
    "ValidationConfig",
    "check",
    "evaluate",
    "export",
    "fit",
    "generate",
    "predict",
    "prepare",
    "register_model",
    "register_observer",
    "register_source",
    "register_task",
    "sweep",
    "train",
]

_HOMES = {
    **dict.fromkeys(("check", "prepare", "sweep", "train"), "api"),
    **dict.fromkeys(("SweepInterrupted", "SweepTerminated", "TrainingInterrupted", "TrainingTerminated"), "api"),
    **dict.fromkeys(("Run", "evaluate", "export", "generate", "predict"), "run"),
    **dict.fromkeys(("fit", "register_model"), "own_model"),
    **dict.fromkeys(("register_observer", "register_source", "register_task"), "pipelines.data.plugins"),
    "SettingError": "pipelines.config",
    **dict.fromkeys((name for name in __all__ if name.endswith("Config")), "pipelines.config"),
    **dict.fromkeys(("SweepConfig", "SweepJobConfig"), "pipelines.config.sweep"),
    "CannotRun": "pipelines.launch.cluster.cluster",
    "DataError": "pipelines.data.sources.faults",
    "Observer": "pipelines.observability.observers.observer",
    "Task": "pipelines.data.tasks.task",
    "TrainingFailed": "pipelines.launch.console.failure",
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    """Imports a name of `__all__` at its first use. Raises AttributeError for any other."""
    if name not in _HOMES:
        raise AttributeError(f"module 'raystride' has no attribute {name!r}")
    value = getattr(import_module(f"raystride.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
