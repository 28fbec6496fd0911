"""Initialises a run from another run's best weights, if `model.init_from` names its folder.

if is_run(place):
    check_run(config, folder)                             # in the driver, before anything starts
    init_weights_from_run(model, folder, task, log=print)
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import ModelConfig, SettingError
from raystride.pipelines.config.base_model import FREE, is_run
from raystride.pipelines.config.stored_run import read_settings
from raystride.pipelines.data.tasks import Task
from raystride.pipelines.data.tokenizers import load_tokenizer
from raystride.pipelines.data.tokenizers.byte_pairs import CharacterEncoder
from raystride.pipelines.data.tokenizers.loading import has_same_ids
from raystride.pipelines.system.hub import read_token_ids
from raystride.pipelines.system.storage.folder import Folder

if TYPE_CHECKING:
    from torch import nn

    from raystride.pipelines.train.checkpoint.manager import ValidCheckpoint


def check_run(model: ModelConfig, task: str, folder: Folder) -> None:
    """Raises SettingError if the run in a folder trained another network, or adapters."""
    run_config = read_settings(folder)
    if run_config.lora.rank:
        raise _setting_error(folder, "that run has trained adapters; merge them first, `raystride export --merge true`")
    if run_config.task != task and "classification" in (run_config.task, task):
        raise _setting_error(folder, f"that run's task is `{run_config.task}`, whose network is another one")
    differing: dict[str, Any] = {}
    for item in fields(model):
        value = getattr(run_config.model, item.name)
        if item.metadata.get("fixed") and item.name not in FREE and getattr(model, item.name) != value:
            differing[f"model.{item.name}"] = value
    if differing:
        flags = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in differing.items())
        raise _setting_error(folder, f"its network is not the one that the settings describe: give {flags}", differing)


def init_weights(
    model: "nn.Module",
    place: str,
    task: Task,
    tokenizer: Folder,
    log: Callable[[str], None],
    *,
    share_frozen: bool = False,
) -> None:
    """Loads a task's fresh network from a run, a folder or a name on the hub; `tokenizer` is that of its data.

    `share_frozen`: parameters without a gradient are mapped from a folder's files if possible, not copied. Raises
    SettingError.
    """
    from raystride.pipelines.data.pretrained import load_base_weights

    if is_run(place):
        init_weights_from_run(model, Folder(place), task, log)
    else:
        load_base_weights(model, place, tokenizer, log, labels=task.facts.get("labels", ()), share_frozen=share_frozen)


def with_base_ids(task: Task, place: str | None, found: "ValidCheckpoint | None") -> Task:
    """Returns the task with the ids by which the run's initial model begins, ends and pads a text (`base_ids`).

    They are read from `place` when a run begins, and stored in its checkpoints, of which `found` is the newest.
    """
    if found is not None:
        ids = _read_base_ids(found.data)
    elif place and is_run(place):
        best = _best_checkpoint(Folder(place), log=lambda _: None)
        ids = _read_base_ids(best.data) if best else {}
    else:
        try:
            ids = read_token_ids(place) if place else {}
        except (ValueError, OSError):  # reading the weights will report the problem
            ids = {}
    return task.knowing({**task.facts, "base_ids": ids}, task.encoders) if ids else task


def _read_base_ids(data: Folder) -> dict[str, list[int]]:
    """Returns the `base_ids` stored in a checkpoint's facts, if any."""
    ids: dict[str, list[int]] = data.read_json("facts.json").get("base_ids", {}) if data.exists("facts.json") else {}
    return ids


def _best_checkpoint(folder: Folder, log: Callable[[str], None]) -> "ValidCheckpoint | None":
    """Returns a run's checkpoint with the least validation loss, or its newest one if it has not validated; None if it has
    saved none. Raises SettingError if that checkpoint is not complete, and Unreadable.
    """
    from raystride.pipelines.train.checkpoint.manager import Checkpoints

    checkpoints = Checkpoints(folder / "checkpoints", attempt="", keep=1, log=log)
    try:
        return checkpoints.find_best() or checkpoints.find_newest()
    except SettingError as error:
        remedy = "`raystride export --checkpoint STEP` makes a folder of one, which model.init_from may name"
        raise _setting_error(folder, f"{error}; {remedy}") from None


def init_weights_from_run(model: "nn.Module", folder: Folder, task: Task, log: Callable[[str], None]) -> None:
    """Loads a task's fresh network, or a worker's part of one, from a run's best checkpoint.

    Raises SettingError if it has none, or another network, tokenizer or labels.
    """
    found = _best_checkpoint(folder, log)
    if found is None:
        raise _setting_error(folder, "that run has no checkpoint")
    _check_ids(folder, found.data, task)
    try:
        _load_base_parameters(model, found)
    except ValueError as error:
        raise _setting_error(folder, str(error)) from None
    log(f"weights of step {found.step} from {folder}")


def _check_ids(folder: Folder, data: Folder, task: Task) -> None:
    """Raises SettingError if words or labels have other ids in a task than in a run's training data."""
    for name in task.tokenizers:
        place, tokenizer_name = data / name, name.replace("_", " ")
        if not place.exists() or not has_same_ids(load_tokenizer(place), task.encoders[name]):
            remedy = f"train with the settings of its {tokenizer_name}"
            if isinstance(task.encoders[name], CharacterEncoder):
                remedy = "each text has characters of its own, and only the run itself can go on with them, by its name"
            raise _setting_error(folder, f"its {tokenizer_name} gives other ids than the run's: {remedy}")
    before = data.read_json("facts.json").get("labels") if data.exists("facts.json") else None
    if before is not None and before != task.facts.get("labels"):
        raise _setting_error(
            folder,
            f"its labels are {_format_labels(before)}, and those of the data {_format_labels(task.facts.get('labels'))}",
        )


def _format_labels(labels: Sequence[str] | None) -> str:
    return ", ".join(map(repr, (labels or ())[:5])) + (", ..." if len(labels or ()) > 5 else "")


def _load_base_parameters(model: "nn.Module", found: "ValidCheckpoint") -> None:
    """Fills a network except its adapters. Raises ValueError if the checkpoint is of another network."""
    from raystride.model.cut import full_shape, get_cut
    from raystride.model.lora import base_parameters
    from raystride.pipelines.train.checkpoint.manager import read
    from raystride.pipelines.train.checkpoint.pieces import Pieces

    stored, targets = found.manifest["tensors"], {}
    for name, parameter in base_parameters(model):
        entry = stored.get(f"model.{name}")
        if entry is None or list(entry["size"]) != list(full_shape(parameter)):
            raise ValueError(f"its checkpoint has no {name} of {list(full_shape(parameter))}: it is of another network")
        cut = get_cut(parameter)
        targets[f"model.{name}"] = parameter.detach() if cut is None else Pieces(parameter.detach(), cut)
    read(targets, found.folder, found.manifest, found.rank)


def _setting_error(folder: Folder, problem: str, allowed: Any = None) -> SettingError:
    """Returns an error for `model.init_from`; `allowed`: settings that would be valid, by full names."""
    message = f"model.init_from is {folder.uri!r}: {problem}"
    return SettingError(message, setting="model.init_from", value=folder.uri, allowed=allowed)
