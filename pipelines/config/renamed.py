"""Settings that got other names. The old one works for two versions, with a line that says the new one.

    layers: int = setting(6, was="model.depth", renamed="0.3")     # depth works in 0.3 and 0.4, and is unknown from 0.5 on

    with_new_names({"model": {"depth": 2}}, Config, tell=print)    # {"model": {"layers": 2}}, and a line

Settings that a run has stored are read under their old names for ever, without a word: nobody wrote them.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from functools import reduce
from typing import Any, TypeVar

from raystride.locations import __version__
from raystride.pipelines.system.errors import SettingError

Tell = Callable[[str], None]
T = TypeVar("T")


def old_names(cls: Any, prefix: str = "") -> Mapping[str, tuple[str, str]]:
    """Returns the new full name of each old one, and the version of the change."""
    found: dict[str, tuple[str, str]] = {}
    for item in fields(cls):
        for old in item.metadata.get("was", ()):
            found[old] = (f"{prefix}{item.name}", item.metadata["renamed"])
        if isinstance(item.type, type) and is_dataclass(item.type):
            found |= old_names(item.type, f"{prefix}{item.name}.")
    return found


def oldest_names(cls: Any) -> Mapping[str, str]:
    """Returns the oldest full name of each renamed setting; names of runs and keys of trials are made of these."""
    return {new: old for old, (new, _) in old_names(cls).items()}


def with_current_names(settings: Mapping[str, T], cls: Any) -> dict[str, T]:
    """Returns values by full names with the current names for old ones, silently: of stored trials, of a sweep's space."""
    current = old_names(cls)
    return {current.get(name, (name,))[0]: value for name, value in settings.items()}


def with_current_names_in(text: str, cls: Any) -> str:
    """Returns a condition such as `launch.lean and model.width < 64` with the current names for old ones."""
    current = old_names(cls)
    return re.sub(r"[a-z_]+(?:\.[a-z_]+)+", lambda found: current.get(found[0], (found[0],))[0], text)


def _new_name(old: str, cls: Any, tell: Tell) -> str:
    """Raises SettingError if the old name is no longer accepted."""
    new, renamed = old_names(cls)[old]
    major, minor = (int(part) for part in renamed.split(".")[:2])
    if tuple(int(part) for part in __version__.split(".")[:2]) > (major, minor + 1):
        raise SettingError(f"there is no setting {old} any more: since {renamed} it is {new}", setting=old)
    tell(f"{old} is now {new}; the old name works until {major}.{minor + 1}")
    return new


def with_new_flags(arguments: Sequence[str], cls: Any, tell: Tell) -> Iterator[str]:
    """The words of a command line."""
    renamed = old_names(cls)
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        old = flag.removeprefix("--")
        known = argument.startswith("--") and old in renamed
        yield f"--{_new_name(old, cls, tell)}{equals}{value}" if known else argument


def with_new_names(content: Mapping[str, Any], cls: Any, tell: Tell | None) -> dict[str, Any]:
    """Nested settings; without `tell` for ever and silently. Raises SettingError."""
    changed: dict[str, Any] = deepcopy(dict(content))
    for old, (new, _) in old_names(cls).items():
        *sections, last = old.split(".")
        place: Any = changed
        for section in sections:
            place = place.get(section) if isinstance(place, dict) else None
        if isinstance(place, dict) and last in place:
            *sections, name = (_new_name(old, cls, tell) if tell else new).split(".")
            target = reduce(lambda place, name: place.setdefault(name, {}), sections, changed)
            if name in target:
                raise SettingError(f"{old} and {new} are one setting: give it the new name alone", setting=new)
            target[name] = place.pop(last)
            if not place and old.count(".") == 1:  # the section may be gone, too
                del changed[old.partition(".")[0]]
    return changed
