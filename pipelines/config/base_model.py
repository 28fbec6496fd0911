"""Settings that follow from the base: settings of `model` and `tokenizer` that nobody gave come from `model.init_from`.

    settings_from_base({"model.init_from": "/models/SmolLM2", "model.layers": 4, ...}, given={"model.init_from"})
    # {"model.architecture": "llama", "model.layers": 30, ..., "tokenizer.kind": "file", "tokenizer.file": "/models/..."}

Only differences are returned, so a run with all settings given keeps its name.
"""

from collections.abc import Collection, Mapping
from dataclasses import fields
from os.path import exists
from types import SimpleNamespace
from typing import Any

import yaml

from raystride.model.hugging_face_config import (
    described_type,
    differing_settings,
    format_flag,
    is_encoder_type,
    model_type,
    trained_context,
)
from raystride.model.hugging_face_encoders import head_settings
from raystride.pipelines.config.attempts import check_settings_file, read_environment
from raystride.pipelines.config.data import TokenizerConfig
from raystride.pipelines.config.model import ModelConfig
from raystride.pipelines.system.errors import SettingError
from raystride.pipelines.system.hub import TOKENIZER, is_hub_name, read_description
from raystride.pipelines.system.storage.folder import Folder, absolute_uri

MAX_TAKEN_CONTEXT = 2048
"""The longest context, in tokens, that is taken from a base; a longer one is for who gives `model.context`."""
FREE = ("init_from", "dropout")
"""Settings of the network that may differ from those of a run that is the base, besides those that a resume may change."""
_SIZES = ("architecture", "layers", "heads", "hidden_size")
"""Settings from which others follow: they are taken first."""


def is_run(place: str) -> bool:
    """Returns whether a place is the folder of a run of ours, and no name on the hub."""
    if is_hub_name(place):
        return False
    folder = Folder(place)
    return folder.exists("config.yaml") and not folder.exists("config.json")


def can_be_read(place: str) -> bool:
    """Returns whether a base is there: a run, or a folder or model of the hub with a description."""
    try:
        return is_run(place) or isinstance(read_description(place), dict)
    except (OSError, ValueError):
        return False


def settings_from_base(settings: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Returns the settings, by full names, that nobody gave and the base has otherwise; none if it cannot be read.

    `settings` are all of `model` and `tokenizer`, `given` the full names of those that a user has written. Raises
    SettingError if one that was given contradicts the base, or the base is no network that can be trained here.
    """
    place = settings.get("model.init_from")
    if not isinstance(place, str) or not place:
        return {}
    if not is_hub_name(place) or exists(place):
        place = absolute_uri(place)  # as `ModelConfig` has it
    try:
        if is_run(place):
            return _from_run(Folder(place), settings, given)
        description = read_description(place)
    except (OSError, ValueError):
        return {}  # a run that goes on needs its base no more; of a new one the driver says what is wrong
    return settings_from_description(place, description, settings, given) if isinstance(description, dict) else {}


def defaults_without_base(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults, by full names, of the settings of a training that have the values of its base.

    Such values follow if another base is chosen. One that was given and is the base's as well counts as the base's.
    """
    place = settings.get("model.init_from")
    taken = settings_from_base({**defaults, "model.init_from": place}, {"model.init_from"})
    return {name: defaults[name] for name, value in taken.items() if _as_tuple(settings[name]) == _as_tuple(value)}


def settings_from_description(
    place: str, description: Mapping[str, Any], settings: Mapping[str, Any], given: Collection[str]
) -> dict[str, Any]:
    """Returns the same for a base in Hugging Face's layout, from its `config.json`. Raises SettingError."""
    taken = {f"model.{name}": value for name, value in _shape_from(place, description, settings, given).items()}
    return taken | _tokenizer_from(place, given)


def _shape_from(
    place: str, description: Mapping[str, Any], settings: Mapping[str, Any], given: Collection[str]
) -> dict[str, Any]:
    """Returns the settings of `model` that come from a `config.json`. Raises SettingError."""
    values = {item.name: _as_tuple(settings.get(f"model.{item.name}", item.default)) for item in fields(ModelConfig)}
    taken: dict[str, Any] = {}
    try:
        for names in (_SIZES, tuple(values)):  # the second time what the sizes leave otherwise
            wanted = differing_settings(SimpleNamespace(**values), description)  # type: ignore[arg-type]
            new = {name: wanted[name] for name in names if name in wanted and f"model.{name}" not in given}
            taken, values = taken | new, values | new
        if is_encoder_type(described_type(description)):
            suggested = head_settings(description).items()
            new = {name: value for name, value in suggested if f"model.{name}" not in given and values[name] != value}
            taken, values = taken | new, values | new
        if "model.context" not in given and (context := trained_context(description)):
            values["context"] = min(context, MAX_TAKEN_CONTEXT)
            taken["context"] = values["context"]
        contradicting = differing_settings(SimpleNamespace(**values), description)  # type: ignore[arg-type]
        if not contradicting and "model.family" not in given and _plainest(values) != described_type(description):
            taken["family"] = described_type(description)
    except ValueError as error:
        raise SettingError(f"model.init_from is {place!r}: {error}", setting="model.init_from", value=place) from error
    if contradicting:
        name, value = next(iter(contradicting.items()))
        flags = " ".join(format_flag(each, wanted) for each, wanted in contradicting.items())
        raise SettingError(
            f"model.{name} is {values[name]!r}: the model of model.init_from, {place!r}, has another network. Leave it out, "
            f"or give {flags}",
            setting=f"model.{name}",
            value=values[name],
            allowed=value,
        )
    return taken


def _plainest(values: Mapping[str, Any]) -> str:
    """Returns the family that would be guessed; empty if none would."""
    try:
        return model_type(SimpleNamespace(**values))  # type: ignore[arg-type]
    except ValueError:
        return ""


def _tokenizer_from(place: str, given: Collection[str]) -> dict[str, Any]:
    """Returns the settings that take the tokenizer of the base, if it has one and nobody gave another."""
    if {"tokenizer.kind", "tokenizer.file"} & {*given}:
        return {}
    if is_hub_name(place):
        return {"tokenizer.kind": "file", "tokenizer.file": place}
    if not Folder(place).exists(TOKENIZER[0]):
        return {}
    return {"tokenizer.kind": "file", "tokenizer.file": str(Folder(place) / TOKENIZER[0])}


def _from_run(folder: Folder, settings: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Returns the settings of `model` and `tokenizer` of a run of ours."""
    check_settings_file(folder)
    stored = yaml.safe_load(folder.read("config.yaml"))
    taken: dict[str, Any] = {}
    for section in (ModelConfig, TokenizerConfig):
        theirs = stored.get(section.name) or {}
        for item in fields(section):
            name = f"{section.name}.{item.name}"
            fixed = item.metadata.get("fixed") and not (section is ModelConfig and item.name in FREE)
            if fixed and item.name in theirs and name not in given and theirs[item.name] != settings.get(name):
                taken[name] = theirs[item.name]
    kind = taken.get("tokenizer.kind", settings.get("tokenizer.kind"))
    if kind == "bpe" and not {"tokenizer.kind", "tokenizer.file"} & {*given} and (file := _trained_tokenizer(folder)):
        network = {name: value for name, value in taken.items() if not name.startswith("tokenizer.")}
        return network | {"tokenizer.kind": "file", "tokenizer.file": file}
    return taken


def _trained_tokenizer(folder: Folder) -> str | None:
    """Returns the path of the `tokenizer.json` that a run trained on its data; None if it is gone."""
    environment = read_environment(folder)
    if not (prepared := environment.get("data")):
        return None
    file = folder.parent / ".prepared" / prepared / "tokenizer" / TOKENIZER[0]
    return str(file) if file.exists() else None


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
