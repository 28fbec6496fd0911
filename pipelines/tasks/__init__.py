"""What is trained: one file a task against the protocol in `task`, chosen by the setting `task`."""

from pipelines.config import Config
from pipelines.tasks.language_model import LanguageModel
from pipelines.tasks.task import Task

__all__ = ["Task", "build_task"]


def build_task(config: Config) -> Task:
    """The task that `config.task` names."""
    return {"language_model": LanguageModel}[config.task](config.model)
