"""A run of ours as the base of another one: its best weights, where `model.init_from` names its folder.

if is_run(place):
    check_run(config, folder)                             # in the driver, before anything starts
    start_from_run(model, folder, task, log=print)
"""

import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from raystride.pipelines.config import Config, SettingError
from raystride.pipelines.config.parse import from_yaml
from raystride.pipelines.files import Folder
from raystride.pipelines.hub import is_hub_name
from raystride.pipelines.tasks import Task
from raystride.pipelines.tokenizers import load_tokenizer
from raystride.pipelines.tokenizers.loading import PROBE

if TYPE_CHECKING:
    from torch import nn

    from raystride.pipelines.train.checkpoint import Found

_FREE = ("init_from", "dropout")
"""Settings of the network that may differ from the base's, beside those that a resumed run may change."""


def is_run(place: str) -> bool:
    """Whether a place is the folder of a run of ours, and no name on the hub."""
    if is_hub_name(place):
        return False
    folder = Folder(place)
    return folder.exists("config.yaml") and not folder.exists("config.json")


def check_run(config: Config, folder: Folder) -> None:
    """Raises SettingError where the run in a folder trained another network, or adapters."""
    theirs = from_yaml(Config, folder.read("config.yaml").decode())
    if theirs.lora.rank:
        raise _error(folder, "that run has trained adapters; merge them first, `raystride export --merge true`")
    if theirs.task != config.task and "classification" in (theirs.task, config.task):
        raise _error(folder, f"that run's task is `{theirs.task}`, whose network is another one")
    wanted: dict[str, Any] = {}
    for item in fields(config.model):
        value = getattr(theirs.model, item.name)
        if item.metadata.get("fixed") and item.name not in _FREE and getattr(config.model, item.name) != value:
            wanted[f"model.{item.name}"] = value
    if wanted:
        flags = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in wanted.items())
        raise _error(folder, f"its network is not the one that the settings describe: give {flags}", wanted)


def start_with(model: "nn.Module", place: str, task: Task, tokenizer: Folder, log: Callable[[str], None]) -> None:
    """Gives a fresh network of a task the weights of a run, of a folder or of a name on the hub; `tokenizer` is its data's.

    Raises SettingError.
    """
    from raystride.pipelines.pretrained import start_from

    if is_run(place):
        start_from_run(model, Folder(place), task, log)
    else:
        start_from(model, place, tokenizer, log)


def start_from_run(model: "nn.Module", folder: Folder, task: Task, log: Callable[[str], None]) -> None:
    """Gives a fresh network of a task, or a worker's part of one, the weights of a run's best checkpoint.

    Raises SettingError where it has none, or another network, tokenizer or labels.
    """
    from raystride.pipelines.train.checkpoint import Checkpoints

    checkpoints = Checkpoints(folder / "checkpoints", attempt="", keep=1, log=log)
    found = checkpoints.at_hint("best") or checkpoints.newest()
    if found is None:
        raise _error(folder, "that run has no whole checkpoint")
    _check_ids(folder, found.data, task)
    try:
        _load(model, found)
    except ValueError as error:
        raise _error(folder, str(error)) from None
    log(f"weights of step {found.step} from {folder}")


def _check_ids(folder: Folder, data: Folder, task: Task) -> None:
    """Raises SettingError where words or labels have other numbers in a task than in the data that a run was trained on."""
    for name in task.tokenizers:
        place, called = data / name, name.replace("_", " ")
        if not place.exists() or load_tokenizer(place).encode(PROBE).tolist() != task.encoders[name].encode(PROBE).tolist():
            raise _error(folder, f"its {called} gives other ids than the run's: train with the settings of its {called}")
    before = data.read_json("facts.json").get("labels") if data.exists("facts.json") else None
    if before is not None and before != task.facts.get("labels"):
        raise _error(folder, f"its labels are {_some(before)}, and those of the data {_some(task.facts.get('labels'))}")


def _some(labels: Sequence[str] | None) -> str:
    return ", ".join(map(repr, (labels or ())[:5])) + (", ..." if len(labels or ()) > 5 else "")


def _load(model: "nn.Module", found: "Found") -> None:
    """Fills a network, and not its adapters. Raises ValueError where the checkpoint is of another network."""
    from raystride.model.cut import cut_of, shape_of_whole
    from raystride.model.lora import base_parameters
    from raystride.pipelines.train.pieces import Pieces
    from raystride.pipelines.train.reading import read

    stored, wanted = found.manifest["tensors"], {}
    for name, each in base_parameters(model):
        entry = stored.get(f"model.{name}")
        if entry is None or list(entry["size"]) != list(shape_of_whole(each)):
            raise ValueError(f"its checkpoint has no {name} of {list(shape_of_whole(each))}: it is of another network")
        cut = cut_of(each)
        wanted[f"model.{name}"] = each.detach() if cut is None else Pieces(each.detach(), cut)
    read(wanted, found.folder, found.manifest, found.rank)


def _error(folder: Folder, what: str, allowed: Any = None) -> SettingError:
    """`allowed` are the settings with which it would go, by full names."""
    message = f"model.init_from is {folder.uri!r}: {what}"
    return SettingError(message, setting="model.init_from", value=folder.uri, allowed=allowed)
