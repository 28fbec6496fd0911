"""Protocols of users' networks, one for each task of ours, and the jobs that need each method.

    class Mine(nn.Module):                       # a TextNetwork
        def forward(self, ids, targets): ...     # the sum of the losses, and how many targets counted
        def hidden(self, ids): ...
        def logits(self, hidden): ...

    list_missing(task, model)                    # {"logits": ("generate", "predict")} where Mine has no such method

A network of `translation` is a subclass of `raystride.model.translator.Translator`, one of `preference` of
`raystride.model.preference.PreferenceDecoder`: their searches and rewards take more than a few methods.
"""

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from raystride.pipelines.config import SettingError
from raystride.pipelines.data.tasks.task import TRAINING, Task

if TYPE_CHECKING:
    import torch


class TextNetwork(Protocol):
    """A network of `language_model` and `completion`. Without `hidden` and `logits` it trains and is scored, and no more."""

    def forward(self, ids: "torch.Tensor", targets: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns the loss sum and the number of counted targets, scalars; ids and targets (B, T) int64, -100: ignored.

        With `train.packing` another argument follows the ids: `documents`, the positions at which documents begin.
        """
        ...

    def hidden(self, ids: "torch.Tensor") -> "torch.Tensor":
        """Returns the last hidden states (B, T, C) of ids (B, T); those of a position do not depend on later ids."""
        ...

    def logits(self, hidden: "torch.Tensor") -> "torch.Tensor":
        """Returns the logits (..., V) of hidden states (..., C)."""
        ...


class LabelNetwork(Protocol):
    """A network of `classification` (ids (B, T) and their lengths as inputs) or of `images` ((B, channels, H, W))."""

    def forward(self, *inputs_and_labels: "torch.Tensor") -> "tuple[torch.Tensor, torch.Tensor]":
        """Returns the loss sum and the number of labels, scalars."""
        ...

    def logits(self, *inputs: "torch.Tensor") -> "torch.Tensor":
        """Returns the logits (B, labels)."""
        ...


def list_missing(task: Task, network: Any) -> dict[str, tuple[str, ...]]:
    """Returns the methods that a network lacks for the task, with the jobs that need them."""
    return {name: jobs for name, jobs in task.network_methods.items() if not callable(getattr(network, name, None))}


def check_network(task: Task, network: Any) -> str:
    """Returns in a line which jobs will not work with a network of a user's own; "" if all will.

    Raises SettingError if it cannot be trained and validated.
    """
    name = type(network).__name__
    if getattr(task, "packs_documents", False):
        try:
            inspect.signature(network.forward).bind(None, None, None)
        except TypeError:
            rule = f"must be `none` with {name}, whose forward does not take (ids, documents, targets)"
            raise task.config.train.error("packing", rule) from None
    refuse_missing(task, network, TRAINING)
    missing = list_missing(task, network)
    if not missing:
        return ""
    jobs = sorted({job for needed in missing.values() for job in needed})
    return f"{' and '.join(jobs)} will not work: {name} has no {_list_methods(missing)} (docs/own-task.md)"


def refuse_missing(task: Task, network: Any, job: str) -> None:
    """Raises SettingError if a network lacks what a job needs."""
    lacking = [name for name, jobs in list_missing(task, network).items() if job in jobs]
    if lacking:
        raise SettingError(
            f"task is {task.config.task!r}: {job} needs {_list_methods(lacking)} of its network, and "
            f"{type(network).__name__} has none (docs/own-task.md)",
            setting="task",
            value=task.config.task,
        )


def use_loss_of(task: Task, network: Any) -> None:
    """Makes a network compute the loss of a task that has one of its own (`Task.loss`), instead of that of its `forward`."""
    if type(task).loss is Task.loss:
        return
    kind = type(network)

    def forward(self: Any, *inputs_and_targets: Any) -> Any:
        return task.loss(self, inputs_and_targets[:-1], inputs_and_targets[-1])

    network.__class__ = type(kind.__name__, (kind,), {"forward": forward, "forward_of_network": kind.forward})


def _list_methods(names: Iterable[str]) -> str:
    return " and ".join(f"{name}()" for name in names)
