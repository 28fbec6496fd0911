"""Training tasks: one file a task, a subclass of `task.Task`, chosen by the setting `task`."""

from importlib import import_module

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.data import plugins
from raystride.pipelines.data.stored_code import SCRIPT
from raystride.pipelines.data.tasks.encoder import Encoders
from raystride.pipelines.data.tasks.task import Facts, Task

TASKS = {
    "language_model": "LanguageModel",
    "completion": "Completion",
    "preference": "Preference",
    "classification": "Classification",
    "translation": "Translation",
    "images": "Images",
}
"""The class of each task, in the file of its name. User-defined tasks are plug-ins; see docs/own-task.md."""

__all__ = ["TASKS", "Task", "build_task"]


def build_task(config: Config, facts: Facts | None = None, encoders: Encoders | None = None) -> Task:
    """Builds the task that `config.task` names, with the facts and tokenizers of a preparation if there are any.

    Loads the settings' plug-ins. Raises SettingError if there is no such task, or a plug-in is missing.
    """
    plugins.load_plugins(config.plugins)
    if config.task in TASKS:
        chosen: type[Task] = getattr(import_module(f"raystride.pipelines.data.tasks.{config.task}"), TASKS[config.task])
        return chosen(config, facts, encoders)
    if config.task not in plugins.TASKS:
        plugins.load_plugins(plugins.installed_plugins())
    if config.task in plugins.TASKS:
        registered: type[Task] = plugins.TASKS[config.task]
        return registered(config, facts, encoders)
    if SCRIPT in config.plugins:
        raise SettingError(
            f"task is {config.task!r}: the script that trained this run has registered it, and only there it can be opened; "
            "put it into a module of its own and name that in plugins",
            setting="task",
            value=config.task,
        )
    known = ", ".join([*TASKS, *plugins.TASKS])
    raise SettingError(
        f"task is {config.task!r}: it must be one of {known}, or one that a module in plugins registers",
        setting="task",
        value=config.task,
    )
