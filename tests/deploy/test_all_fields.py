"""Rendered files have no faults by the schemas of their readers, for any value of any field of a place."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from jinja2 import TemplateError
from yaml import YAMLError

from raystride.pipelines.config import SettingError
from raystride.pipelines.config.deploy import TargetConfig
from raystride.pipelines.launch.cluster.cluster import CannotRun
from raystride.pipelines.launch.deploy.plan import Deployment, Kind
from raystride.pipelines.launch.deploy.render import render_files
from tests.deploy.faults import find_faults
from tests.deploy.rendering import plan_for, render_for
from tests.some import some

CASES: dict[str, tuple[Kind, dict[str, Any]]] = {
    "compose": ("compose", {"place": "this_machine", "nodes": 1, "preset": "lm_python"}),
    "kuberay": ("kuberay", {"place": "kubernetes", "gpus": 8}),
    "slurm": ("slurm", {"place": "slurm", "gpus": 8}),
    "launcher by ssh": ("launcher", {"place": "machines_by_ssh", "cloud": {"hosts": ("10.0.0.1", "10.0.0.2")}}),
    "launcher aws": ("launcher", {"place": "aws", "gpus": 8}),
    "launcher gcp": ("launcher", {"place": "gcp", "gpus": 8}),
    "sky": ("sky", {"place": "aws", "gpus": 8}),
    "sky cpu": ("sky", {"place": "gcp", "cloud": {"worker_type": ""}}),
}
TEXTS = ("", "a b", "a/b", "on", '"', "local")
LISTS: tuple[tuple[str, ...], ...] = ((), ("a=on", "c=1e3"))


def _list_fields(section: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the path and value of each field of a place."""
    for item in fields(section):
        value, here = getattr(section, item.name), (*path, item.name)
        yield from _list_fields(value, here) if is_dataclass(value) else [(here, value)]


def _other_values(value: Any) -> tuple[Any, ...]:
    """Returns other values of a field's type."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, int | float):
        return (1, 10**6)
    return LISTS if isinstance(value, tuple) else TEXTS


def _with_field(place: TargetConfig, path: tuple[str, ...], value: Any) -> TargetConfig:
    name, *rest = path
    return replace(place, **{name: replace(getattr(place, name), **{rest[0]: value}) if rest else value})


def _uses_field(planned: Deployment, usual: dict[str, str], path: tuple[str, ...], values: tuple[Any, ...]) -> bool:
    """Returns whether a file of this kind depends on the field."""
    for value in values:
        try:
            if render_files(replace(planned, place=_with_field(planned.place, path, value))) != usual:
                return True
        except SettingError:
            continue
        except (YAMLError, TemplateError):  # the plan refuses it before
            return True
    return False


LONG = ("kuberay", "launcher aws", "launcher by ssh", "launcher gcp", "sky cpu")


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in CASES])
def test_readers_accept_every_value_of_every_field(case: str) -> None:
    kind, given = CASES[case]
    planned = plan_for(kind, **given)
    usual = render_files(planned)
    assert not find_faults(kind, usual)
    found, used = {}, []
    for path, before in some(list(_list_fields(planned.place))):
        name, *rest = path
        if not _uses_field(planned, usual, path, _other_values(before)[-2:]):
            continue
        used.append(path)
        for value in _other_values(before):
            change = {name: given.get(name, {}) | {rest[0]: value} if rest else value}
            try:
                files = render_for(kind, **given | change)
            except (SettingError, CannotRun):  # refused by its name
                continue
            if faults := find_faults(kind, files):
                found[".".join(path), value] = faults
    assert len(used) > 1
    assert not found
