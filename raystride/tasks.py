"""All that a task of your own is written with: the classes to derive from, and the types of their methods; docs/own-task.md.

from raystride.tasks import IGNORED, Document, Inputs, Rows, Task, Window, mean
from raystride.tasks import LanguageModel                 # a network or a loss of your own on an existing task
"""

from raystride.pipelines.data.tasks.classification import Classification
from raystride.pipelines.data.tasks.completion import Completion
from raystride.pipelines.data.tasks.images import Images
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tasks.preference import Preference
from raystride.pipelines.data.tasks.task import (
    IGNORED,
    Column,
    Document,
    Encoded,
    Encoders,
    Facts,
    Inputs,
    Rows,
    Task,
    Window,
    mean,
)
from raystride.pipelines.data.tasks.translation import Translation

__all__ = [
    "IGNORED",
    "Classification",
    "Column",
    "Completion",
    "Document",
    "Encoded",
    "Encoders",
    "Facts",
    "Images",
    "Inputs",
    "LanguageModel",
    "Preference",
    "Rows",
    "Task",
    "Translation",
    "Window",
    "mean",
]
