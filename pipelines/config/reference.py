"""Every setting of a dataclass with its type, default, range and meaning, for `--help` and docs/settings.

reference = {entry.name: entry for entry in settings_reference(Config)}
reference["train.steps"].type                             # "whole number"
reference["train.steps"].meaning                          # "Number of optimiser steps of the whole run. 0: ..."
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from raystride.pipelines.config.section import choices_of

LIMITS = {"at_least": "≥ {}", "above": "> {}", "at_most": "≤ {}", "below": "< {}"}


@dataclass(frozen=True)
class SettingReference:
    """One setting, in words."""

    name: str
    """Full name, such as `train.steps`."""
    type: str
    """The values it takes, such as `whole number` or `cosine, linear`."""
    choices: tuple[str, ...]
    """The words it takes, also beside numbers (`auto`); empty if it takes any text or none."""
    default: str
    """Default as YAML writes it."""
    limits: str
    """Range of numbers, such as `≥ 0, < 1`; empty if there is none."""
    meaning: str
    """The docstring, with its lines joined and a sentence for each choice; paragraphs are separated by a line break."""
    since: str
    """Version that added it; empty for the first."""
    fixed: bool
    """Whether a resumed run has to keep the value."""

    @property
    def summary(self) -> str:
        """The first sentence of its meaning."""
        return self.meaning.split("\n")[0].split(". ")[0].rstrip(".") + "."


@dataclass(frozen=True)
class SectionReference:
    """A section of settings, in words."""

    name: str
    """Prefix of its settings; empty for those that are in no section."""
    meaning: str
    """The docstring of the field that holds it."""
    settings: tuple[SettingReference, ...]
    """Its settings, in the order of their definition."""


def sections_reference(cls: type) -> Iterator[SectionReference]:
    """Yields the settings outside of sections, as a section without a name, and then each section of `cls`."""
    types, docs = get_type_hints(cls), attribute_docstrings(cls)
    nested = [item for item in fields(cls) if is_dataclass(types[item.name])]  # type: ignore[arg-type]
    outside = [item for item in fields(cls) if item not in nested]  # type: ignore[arg-type]
    yield SectionReference("", "", tuple(_describe(item, "", types, docs) for item in outside))
    for item in nested:
        settings = tuple(settings_reference(types[item.name], f"{item.name}."))
        yield SectionReference(item.name, docs.get(item.name, ""), settings)


def settings_reference(cls: type, prefix: str = "") -> Iterator[SettingReference]:
    """Yields all settings of a dataclass and its sections, in the order of their definition."""
    types, docs = get_type_hints(cls), attribute_docstrings(cls)
    for item in fields(cls):  # type: ignore[arg-type]
        if is_dataclass(types[item.name]):
            yield from settings_reference(types[item.name], f"{prefix}{item.name}.")
        else:
            yield _describe(item, prefix, types, docs)


def _describe(item: Field[Any], prefix: str, types: Mapping[str, Any], docs: Mapping[str, str]) -> SettingReference:
    annotation, bounds = types[item.name], item.metadata.get("limits", {})
    choices = (f"`{name}`: {row.sentence}." for name, row in item.metadata.get("table", {}).items())
    return SettingReference(
        name=f"{prefix}{item.name}",
        type=describe_type(annotation),
        choices=("true", "false") if annotation is bool else tuple(map(str, choices_of(annotation))),
        default=_to_text({} if item.default is MISSING else item.default),
        limits=", ".join(text.format(bounds[key]) for key, text in LIMITS.items() if bounds.get(key) is not None),
        meaning=" ".join((docs.get(item.name, ""), *choices)),
        since=item.metadata.get("since", ""),
        fixed=item.metadata.get("fixed", False),
    )


@cache
def attribute_docstrings(cls: type) -> Mapping[str, str]:
    """Returns the docstring below each field of a dataclass, inherited ones included, by the field's name."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                paragraphs = inspect.cleandoc(str(below.value.value)).split("\n\n")
                found[ast.unparse(field.target)] = "\n".join(" ".join(text.split()) for text in paragraphs)
    return found


def describe_type(annotation: Any) -> str:
    """Returns the values that a type admits, in words without an article."""
    words = {int: "whole number", float: "number", bool: "true, false", str: "text", type(None): "null"}
    if annotation in words:
        return words[annotation]
    if get_origin(annotation) is Literal:
        return ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) is tuple:
        parts = get_args(annotation)
        return f"list of {describe_type(parts[0])}" if Ellipsis in parts else f"list of {len(parts)} numbers"
    if annotation is dict or get_origin(annotation) is dict:
        return "mapping"
    if annotation is Any:
        return "any"
    return " or ".join(dict.fromkeys(describe_type(part) for part in get_args(annotation)))


def _to_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return str(value) if value != "" else '""'
