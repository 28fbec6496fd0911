"""Groups of parameters with their own learning rate or decay (`optimizer.groups`), by patterns of their names.

groups = ({"pattern": "*.norm?.*", "weight_decay": 0.0}, {"pattern": "embedding.*", "lr_ratio": 0.1})
find_group(groups, "embedding.weight")                    # the second; None: the parameter is in none
refuse_unmatched(groups, ["embedding.weight"])            # raises SettingError: the first matches nothing
"""

import math
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from raystride.pipelines.config.section import nearest
from raystride.pipelines.system.errors import SettingError

NUMBERS = ("lr_ratio", "weight_decay")
"""Keys of a group besides its pattern: a fraction of the learning rate, and a decay."""
NUM_SHOWN = 4
"""Number of parameters that a refusal names."""


def check_group(number: int, group: Any) -> dict[str, Any]:
    """Returns a group with its numbers as such. Raises SettingError for one that is none."""
    where = f"optimizer.groups[{number}]"
    if not isinstance(group, Mapping) or not isinstance(group.get("pattern"), str) or not group["pattern"]:
        rule = 'must have a pattern and lr_ratio or weight_decay, {pattern: "embedding.*", lr_ratio: 0.1}'
        raise SettingError(f"{where} is {group!r}: it {rule}", setting=where, value=group, allowed=rule)
    known = ("pattern", *NUMBERS)
    if unknown := [key for key in group if key not in known]:
        name = f"{where}.{unknown[0]}"
        raise SettingError(f"there is no setting {name}{nearest(str(unknown[0]), known)}", setting=name, allowed=known)
    if not group.keys() & set(NUMBERS):
        rule = f"must have lr_ratio or weight_decay besides its pattern {group['pattern']!r}"
        raise SettingError(f"{where} {rule}", setting=where, value=group, allowed=rule)
    checked = dict(group)
    for key in group.keys() & set(NUMBERS):
        value = group[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            rule = "must be a number of at least 0"
            name = f"{where}.{key}"
            raise SettingError(f"{name} is {value!r}: it {rule}", setting=name, value=value, allowed={"at_least": 0})
        checked[key] = float(value)
    return checked


def find_group(groups: Sequence[Mapping[str, Any]], name: str) -> int | None:
    """Returns the number of the first group with a pattern that matches a parameter's name, None if there is none."""
    return next((number for number, group in enumerate(groups) if fnmatchcase(name, group["pattern"])), None)


def refuse_unmatched(groups: Sequence[Mapping[str, Any]], names: Collection[str]) -> None:
    """Raises SettingError for a pattern that no trained parameter is in a group by."""
    matched = {find_group(groups, name) for name in names}
    for number, group in enumerate(groups):
        if number in matched:
            continue
        where, pattern = f"optimizer.groups[{number}].pattern", group["pattern"]
        earlier = [find_group(groups, name) for name in names if fnmatchcase(name, pattern)]
        taken = [group for group in earlier if group is not None]
        if taken:
            rule = f"must match a parameter that no group before it has: put it before optimizer.groups[{min(taken)}]"
        else:
            shown = [*names][:NUM_SHOWN]
            more = ", ..." if len(names) > NUM_SHOWN else ""
            rule = f"must match the whole name of a trained parameter, as of {', '.join(shown)}{more}"
        raise SettingError(f"{where} is {pattern!r}: it {rule}", setting=where, value=pattern, allowed=rule)
