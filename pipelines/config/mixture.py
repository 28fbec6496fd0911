"""Several sources in one training: their settings, weights, and curriculum.

entries = mixture_entries(config.data)                    # {"web": Entry(data=Data(source=...), weight=0.7), ...}
wanted_weights(config.data, {"web": 10**6, ...})          # [(0, {"web": 0.7, ...}), (8000, {...})]: from which steps

A source's entry takes every setting of `data` that describes a source; the defaults are those of `data`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from raystride.pipelines.config.data import DataConfig
from raystride.pipelines.config.parse import parse_value
from raystride.pipelines.config.section import nearest
from raystride.pipelines.system.errors import SettingError

OWN = ("weight", "epochs_at_most")
"""Further settings of an entry: neither shapes the prepared data, and both may change on resume."""
OF_ALL = (
    *("sources", "shuffle", "shuffle_block", "shuffle_window", "shuffle_first_window"),
    *("image_shorter_side", "image_mean", "image_std"),
)
"""Settings of the whole mixture, which no entry has."""
KEYS = (*(each.name for each in fields(DataConfig) if each.metadata["fixed"] and each.name not in OF_ALL), "image_root")
NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
TEMPERATURE = re.compile(r"temperature +([0-9.]+)")


@dataclass(frozen=True)
class Entry:
    """A source of a mixture."""

    data: DataConfig
    """Settings of `data` for a training on this source alone."""
    weight: float = 1.0
    """Its share of the samples, beside the other sources' weights."""
    epochs_at_most: float = math.inf
    """Maximum number of passes; its weight then goes to the others."""


def mixture_entries(data: DataConfig) -> dict[str, Entry]:
    """Returns the sources by name, in the order of the settings; none if there is one source. Raises SettingError."""
    return {name: _entry(data, name, content) for name, content in data.sources.items()}


def refuse_mixture(data: DataConfig, epochs: float) -> None:
    """Raises SettingError for sources, weights or a curriculum that cannot be; `epochs` is `train.epochs`."""
    if not data.sources:
        if data.curriculum or data.weights != "given":
            name = "curriculum" if data.curriculum else "weights"
            raise data.error(name, "needs data.sources, whose weights it is about")
        return
    if data.source != DataConfig().source:
        raise data.error("source", "must be left out with data.sources: make it one of them")
    if epochs:
        raise SettingError(
            f"train.epochs is {epochs:g}: it must be 0 with data.sources, whose epochs differ: give train.steps, or each "
            "source its epochs_at_most",
            setting="train.epochs",
            value=epochs,
        )
    entries = mixture_entries(data)
    wanted_weights(data, dict.fromkeys(entries, 1))


def wanted_weights(data: DataConfig, sizes: Mapping[str, int]) -> list[tuple[int, dict[str, float]]]:
    """Returns the weights by source and the steps from which they hold, 0 first. `sizes`: samples of each source.

    Raises SettingError.
    """
    given = {name: entry.weight for name, entry in mixture_entries(data).items()}
    first = _weights(data, data.weights if data.weights != "given" else given, sizes, "data.weights")
    found = [(0, first)]
    for number, item in enumerate(data.curriculum):
        where = f"data.curriculum[{number}]"
        if not isinstance(item, Mapping) or "from_step" not in item or set(item) - {"from_step", "weights"}:
            raise SettingError(
                f"{where} is {item!r}: it must have from_step and weights, {{from_step: 8000, weights: {{...}}}}",
                setting=where,
                value=item,
            )
        step = item["from_step"]
        if not isinstance(step, int) or isinstance(step, bool) or step < 0 or (number and step <= found[-1][0]):
            raise SettingError(
                f"{where}.from_step is {step!r}: it must be a whole number, and above the one before",
                setting=f"{where}.from_step",
                value=step,
            )
        weights = _weights(data, item.get("weights", first), sizes, f"{where}.weights")
        found = [*(each for each in found if each[0] < step), (step, weights)]
    return found


def defines_source(key: str) -> bool:
    """Returns whether a setting, `data.sources.web.column` for instance, defines a source of a mixture."""
    return key.startswith("data.sources.") and key.rpartition(".")[2] not in OWN


def _entry(data: DataConfig, name: str, content: object) -> Entry:
    where = f"data.sources.{name}"
    if not NAME.fullmatch(name):
        raise SettingError(
            f"data.sources has {name!r}: a name must be letters, digits, _, . and -", setting="data.sources", value=name
        )
    if not isinstance(content, Mapping) or "source" not in content:
        raise SettingError(
            f"{where} is {content!r}: it must be settings with a source, {{source: PATH, weight: 0.5}}",
            setting=where,
            value=content,
        )
    if unknown := [key for key in content if key not in (*OWN, *KEYS)]:
        raise SettingError(
            f"there is no setting {where}.{unknown[0]}{nearest(unknown[0], [*OWN, *KEYS])}", setting=f"{where}.{unknown[0]}"
        )
    own: dict[str, float] = {}
    for key in content.keys() & set(OWN):
        value = content[key]
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (key == "epochs_at_most" and not value):
            raise SettingError(
                f"{where}.{key} is {value!r}: it must be a number {'above' if key != 'weight' else 'of at least'} 0",
                setting=f"{where}.{key}",
                value=value,
                allowed={"above" if key != "weight" else "at_least": 0},
            )
        own[key] = float(value)
    changes: dict[str, Any] = {key: value for key, value in content.items() if key not in OWN}
    try:
        changes = {key: parse_value(DataConfig, key, value) for key, value in changes.items()}
        if "transforms" in changes:  # the names themselves, which may be marked as stored ones
            changes["transforms"] = tuple(content["transforms"])
        return Entry(replace(data, sources={}, curriculum=(), weights="given", **changes), **own)
    except SettingError as error:
        own_name = f"{where}.{error.setting.removeprefix('data.')}"
        raise SettingError(f"{where}: {error}", setting=own_name, value=error.value, allowed=error.allowed) from None


def _weights(data: DataConfig, given: object, sizes: Mapping[str, int], where: str) -> dict[str, float]:
    """A weight for each source, from weights by name or a temperature."""
    if isinstance(given, str):
        found = TEMPERATURE.fullmatch(given.strip())
        power = float(found[1]) if found and found[1].count(".") <= 1 and found[1] != "." else math.nan
        if not 0 <= power <= 1:
            raise SettingError(
                f"{where} is {given!r}: it must be `given`, or `temperature` and a number from 0 to 1",
                setting=where,
                value=given,
            )
        return {name: float(size) ** power for name, size in sizes.items()}
    if not isinstance(given, Mapping):
        raise SettingError(
            f"{where} is {given!r}: it must be weights by source, {{web: 0.7, code: 0.3}}", setting=where, value=given
        )
    for name, weight in given.items():
        if name not in sizes:
            raise SettingError(
                f"{where} names {name!r}, which data.sources has not: it has {', '.join(sizes)}",
                setting=where,
                value=name,
                allowed=tuple(sizes),
            )
        if not isinstance(weight, int | float) or isinstance(weight, bool) or not 0 <= weight < math.inf:
            raise SettingError(
                f"{where}.{name} is {weight!r}: it must be a number of at least 0",
                setting=f"{where}.{name}",
                value=weight,
                allowed={"at_least": 0},
            )
    if not any(given.values()):
        raise SettingError(
            f"{where} is {dict(given)!r}: one weight at least must be above 0", setting=where, value=dict(given)
        )
    return {name: float(given.get(name, 0.0)) for name in sizes}
