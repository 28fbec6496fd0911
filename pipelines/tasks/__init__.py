"""What is trained: one file a task against `task.Task`, chosen by the setting `task`."""

from importlib import import_module

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.tasks.task import Encoders, Facts, Task

TASKS = {
    "language_model": "LanguageModel",
    "completion": "Completion",
    "classification": "Classification",
    "translation": "Translation",
    "images": "Images",
}
"""The class of each task, in the file of its name. A task of one's own is one more line; see docs/own-task.md."""

__all__ = ["TASKS", "Task", "build_task"]


def build_task(config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> Task:
    """The task that `config.task` names, knowing what preparation learned, if it did. Raises SettingError."""
    if config.task not in TASKS:
        raise SettingError(f"task is {config.task!r}: it must be one of {', '.join(TASKS)}")
    chosen: type[Task] = getattr(import_module(f"raystride.pipelines.tasks.{config.task}"), TASKS[config.task])
    return chosen(config, facts, encoders)
