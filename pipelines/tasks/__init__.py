"""What is trained: one file a task against `task.Task`, chosen by the setting `task`."""

from importlib import import_module

from pipelines.config import Config
from pipelines.tasks.task import Facts, Task, unknown_task

TASKS = {
    "language_model": "LanguageModel",
}
"""The class of each task, in the file of its name. A task of one's own is one more line; see docs/own-task.md."""

__all__ = ["TASKS", "Task", "build_task"]


def build_task(config: Config, facts: Facts | None = None) -> Task:
    """The task that `config.task` names, knowing what preparation learned, if it did. Raises SettingError."""
    if config.task not in TASKS:
        raise unknown_task(config.task, TASKS)
    task: Task = getattr(import_module(f"pipelines.tasks.{config.task}"), TASKS[config.task])(config, facts)
    return task
