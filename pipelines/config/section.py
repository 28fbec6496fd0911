"""Declaration and checks of settings: default, range, and behaviour on resume.

A section is a frozen keyword-only dataclass. Each field is declared with `setting`, carries its docstring below it, and is
checked when the section is created, from YAML, from a flag or in Python:

    @dataclass(frozen=True, kw_only=True)
    class Train(Section):
        steps: int = setting(1000, at_least=0)
        "Optimiser updates in the whole run."
"""

import difflib
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args, get_origin, get_type_hints

from raystride.pipelines.system.credentials import (
    MissingSecret,
    is_redacted,
    redact_all_uris,
    remember_secrets,
    restore_secrets,
)
from raystride.pipelines.system.errors import SettingError


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    fixed: bool = False,
    shapes_result: bool = False,
    since: str = "",
    was: str | Sequence[str] = "",
    renamed: str = "",
    also: str = "",
    logins: Sequence[str] = (),
    table: Mapping[Any, Any] | None = None,
) -> Any:
    """Declares a field with a range. `fixed` settings may not differ when a run is resumed; the others may.

    A run's default name is hashed from `fixed` settings and from those with `shapes_result`: free on a resume, but with
    another result.

    `since`: version that added it; at its default it leaves the names of existing runs unchanged.
    `was`: earlier full names, the newest first; `renamed`: version of the last renaming (see `config.renamed`).
    `also`: names in other trainers, separated by blanks, by which errors and `--help` find it.
    `logins`: environment variables, one of which replaces the password in an address.
    `table`: its choices by name, each with a `sentence` for the reference.
    """
    earlier = (was,) if isinstance(was, str) and was else tuple(was)
    limits = {"at_least": at_least, "at_most": at_most, "above": above, "below": below}
    told = {"fixed": fixed, "shapes_result": shapes_result, "since": since, "was": earlier, "renamed": renamed}
    return field(default=default, metadata={"limits": limits, **told, "also": also, "logins": logins, "table": table or {}})


@cache
def _types(cls: type) -> Mapping[str, Any]:
    return get_type_hints(cls)


@dataclass(frozen=True, kw_only=True)
class Section:
    """A group of settings that checks itself; `name` is the prefix of their full names."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        """Registers the names of its fields in other trainers."""
        super().__init_subclass__()
        for key, value in list(vars(cls).items()):
            if isinstance(value, Field):
                for alias in value.metadata.get("also", "").split():
                    full = f"{cls.name}.{key}".lstrip(".")
                    if full not in ALIASES.setdefault(alias, []):
                        ALIASES[alias].append(full)

    def __post_init__(self) -> None:
        """Raises SettingError if a field is out of range, or a word that is not among its choices."""
        for item in fields(self):
            if "limits" in item.metadata:
                self._check(item.name, getattr(self, item.name), item.metadata["limits"])
        self._note_secrets()

    if not TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            """Returns a field by an earlier name, with a DeprecationWarning: plug-ins use attributes."""
            for item in fields(type(self)):
                if f"{self.name}.{key}".lstrip(".") in item.metadata.get("was", ()):
                    new = f"{self.name}.{item.name}".lstrip(".")
                    warnings.warn(f"{self.name}.{key} is now {new}", DeprecationWarning, stacklevel=2)
                    return getattr(self, item.name)
            raise AttributeError(f"{type(self).__name__!r} has no setting {key!r}", name=key, obj=self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Registers secrets in another process as well, so that they are redacted there."""
        self.__dict__.update(state)
        self._note_secrets()

    def _note_secrets(self) -> None:
        for item in fields(self):
            for text in _texts(getattr(self, item.name)):
                if "://" in text:
                    remember_secrets(text)

    def with_secrets(self, *, optional: Collection[str] = ()) -> Self:
        """Returns the settings with the secrets that were redacted in the file.

        Raises SettingError for a missing secret, unless the full name of its setting is in `optional`.
        """
        changes: dict[str, Any] = {}
        for item in fields(self):
            value, name = getattr(self, item.name), f"{self.name}.{item.name}".lstrip(".")
            if isinstance(value, Section):
                changes[item.name] = value.with_secrets(optional=optional)
            elif isinstance(value, dict) or (isinstance(value, str) and is_redacted(value)):
                try:
                    changes[item.name] = _whole(value, item.metadata.get("logins", ()))
                except MissingSecret as error:
                    if name not in optional:
                        message, allowed = f"{name} is {value!r}: {error}", error.variables
                        raise SettingError(message, setting=name, value=value, allowed=allowed) from None
        return replace(self, **changes) if any(getattr(self, key) != value for key, value in changes.items()) else self

    def _check(self, key: str, value: Any, limits: dict[str, float | None]) -> None:
        cls: Any = type(self)
        allowed = _types(cls)[key]
        choices = choices_of(allowed)
        nothing = value is None and type(None) in get_args(allowed)
        if choices and not nothing and not isinstance(value, int) and value not in choices:
            raise self.error(key, f"must be one of {', '.join(map(str, choices))}", choices)
        if isinstance(value, tuple):
            for part in value:
                if isinstance(part, int | float):
                    self._check_range(key, part, limits)
        elif isinstance(value, int | float):
            self._check_range(key, value, limits)

    def _check_range(self, key: str, value: float, limits: dict[str, float | None]) -> None:
        if not math.isfinite(value):
            raise self.error(key, "must be a finite number")
        low, high, above, below = (limits[k] for k in ("at_least", "at_most", "above", "below"))
        allowed = {name: limit for name, limit in limits.items() if limit is not None}
        if (low is not None and value < low) or (above is not None and value <= above):
            raise self.error(key, f"must be {'at least' if low is not None else 'above'} {_first(low, above)}", allowed)
        if (high is not None and value > high) or (below is not None and value >= below):
            raise self.error(key, f"must be {'at most' if high is not None else 'below'} {_first(high, below)}", allowed)

    def error(self, key: str, rule: str, allowed: Any = None) -> SettingError:
        """Returns the error for field `key`: its full name, its value and `rule`, the allowed values in words."""
        name, value = f"{self.name}.{key}" if self.name else key, redact_all_uris(getattr(self, key))
        return SettingError(f"{name} is {value!r}: it {rule}", setting=name, value=value, allowed=allowed or rule)


def _texts(value: Any) -> Iterator[str]:
    """Yields all texts in a setting's value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _whole(value: Any, logins: Sequence[str]) -> Any:
    """Returns a value with its redacted secrets restored. Raises MissingSecret."""
    if isinstance(value, dict):
        return {key: _whole(part, logins) for key, part in value.items()}
    return restore_secrets(value, logins) if isinstance(value, str) and is_redacted(value) else value


def choices_of(annotation: Any) -> tuple[Any, ...]:
    """Returns the choices of a setting: those of its Literal, also inside a union such as `Literal["auto"] | int`."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return tuple(choice for part in get_args(annotation) for choice in choices_of(part))


def names_with(table: Mapping[Any, Any], condition: str, value: bool = True) -> str:
    """Returns the names of a table's rows, but `auto`, with a condition, for an error: "`adamw` or `sgd`"."""
    names = [f"`{name}`" for name, row in table.items() if name != "auto" and getattr(row, condition) == value]
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _first(value: float | None, other: float | None) -> float | None:
    return other if value is None else value


ALIASES: dict[str, list[str]] = {}
"""Settings by their names in other trainers (`also`), for suggestions and help alone."""
BESIDE = {
    "train.batch": "samples in a step, over all workers",
    "optimizer.min_lr_ratio": "as a share of optimizer.learning_rate",
    "optimizer.warmup_steps": "in steps",
    "train.slot_size": "a step has train.slots times as many samples",
    "train.slots": "a step is train.slots times train.slot_size samples, whatever the number of workers",
    "run": "the same --run NAME goes on where it was",
    "storage": "runs lie there",
}
"""Remarks on suggested settings."""


BARE = {"steps": "train.steps", "every": "checkpoint.every"}
"""The likeliest setting for a name that several sections have."""


def find_alias(name: str, known: Collection[str]) -> str | None:
    """Returns the `known` setting with this name in other trainers (`lr`, `max-steps`), None if there is none."""
    last = name.rsplit(".", 1)[-1].lower().replace("-", "_")
    return next((setting for setting in ALIASES.get(last, ()) if setting in known), None)


def nearest(key: str, known: Collection[str]) -> str:
    """Returns the end of an error's sentence: the known setting that was probably meant, if any."""
    last = key.rsplit(".", 1)[-1]
    if same_last := [name for name in known if name.rsplit(".", 1)[-1] == last]:
        # Several sections have `steps` and `every`: the likeliest is the one that is most like what was written.
        meant: str | None = BARE.get(key) or difflib.get_close_matches(key, sorted(same_last), 1, 0)[0]
    else:
        meant = find_alias(key, known) or _most_similar(key, last, known)
    if meant is None:
        return "; --help lists all"
    return f"; did you mean {meant}?" + (f" ({BESIDE[meant]})" if meant in BESIDE else "")


def _most_similar(key: str, last: str, known: Collection[str]) -> str | None:
    """Returns the known name that is most like `key`, or else ends most like `last`, unless that is too short to tell."""
    by_last = {name.rsplit(".", 1)[-1]: name for name in sorted(known, reverse=True)}
    whole = difflib.get_close_matches(key, sorted(known), 1, 0.75)
    ending = difflib.get_close_matches(last, sorted(by_last), 1, 0.8) if len(last) > 3 else []
    return next(iter([*whole, *(by_last[word] for word in ending)]), None)
