"""Every text of a place is unchanged in every rendered file, or is refused by the name of its setting."""

import shlex
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from raystride.pipelines.config import SettingError
from raystride.pipelines.config.deploy import CONTROL, TargetConfig
from raystride.pipelines.launch.deploy.plan import Deployment, Kind
from raystride.pipelines.launch.deploy.render import render_files
from tests.deploy.rendering import plan_for

PLACES: dict[Kind, dict[str, Any]] = {
    "compose": {"place": "this_machine", "nodes": 1},
    "kuberay": {"place": "kubernetes"},
    "launcher": {"place": "machines_by_ssh", "cloud": {"hosts": ("10.0.0.1", "10.0.0.2"), "ssh_key": "k", "python": "/v"}},
    "sky": {"place": "aws"},
    "slurm": {"place": "slurm"},
}
CLOUDS: dict[str, dict[str, Any]] = {"aws": {"place": "aws"}, "gcp": {"place": "gcp"}}
CASES = [*((kind, values) for kind, values in PLACES.items()), *(("launcher", values) for values in CLOUDS.values())]
HOSTILE = [
    "on",
    "yes",
    "null",
    "1e3",
    "0x10",
    "~",
    "1:30",
    "'",
    '"',
    "a: b",
    "- a",
    "# a",
    "{{ run }}",
    "{a",
    "é",
    "😀",
    "&a",
    "*a",
    "$x",
    "\x85",
]
MARKER = "marker"
CHECKED = {("gpu",), ("about",), ("cloud", "provider"), ("slurm", "time_limit")}
"""Fields that no file quotes: one is parsed, one is not rendered, and two have values that Raystride checks."""


def _list_text_fields(section: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the paths of all fields of a place that are texts or lists of texts."""
    for item in fields(section):
        value, here = getattr(section, item.name), (*path, item.name)
        if is_dataclass(value):
            yield from _list_text_fields(value, here)
        elif isinstance(value, str | tuple) and here not in CHECKED:
            yield here


@cache
def _plan_case(number: int) -> Deployment:
    kind, values = CASES[number]
    return plan_for(kind, preset="lm_python", shared=True, **values)


def _with_text(section: Any, field: tuple[str, ...], text: str) -> Any:
    """Returns the section with a field set to a text; a list of texts has it twice."""
    name, *rest = field
    value = getattr(section, name)
    if rest:
        return replace(section, **{name: _with_text(value, tuple(rest), text)})
    if isinstance(value, tuple):
        listed = {"node_labels": (f"key={text}",), "extra": (f"--{text}",)}.get(name, (text, text))
        return replace(section, **{name: listed})
    return replace(section, **{name: text})


def _render_with(number: int, field: tuple[str, ...], text: str) -> dict[str, str]:
    planned = _plan_case(number)
    return render_files(replace(planned, place=_with_text(planned.place, field, text)))


@cache
def _marked_leaves(number: int, field: tuple[str, ...]) -> dict[tuple[Any, ...], Any]:
    """Returns all scalars of the files when the field is the marker."""
    return _list_leaves(_render_with(number, field, MARKER))


def _list_leaves(files: dict[str, str]) -> dict[tuple[Any, ...], Any]:
    """Returns all scalars of all YAML files, by their paths."""

    def walk(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
        if isinstance(value, dict):
            for key, each in value.items():
                yield (*path, key, "key"), key
                yield from walk(each, (*path, key))
        elif isinstance(value, list):
            for number, each in enumerate(value):
                yield from walk(each, (*path, number))
        else:
            yield path, value

    documents = {name: list(yaml.load_all(text, yaml.CSafeLoader)) for name, text in files.items() if name.endswith(".yaml")}
    return dict(walk(documents, ()))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{kind} {values['place']}" for kind, values in CASES])
@given(data=st.data())
def test_any_text_of_a_place_is_unchanged_in_yaml_or_refused_by_name(number: int, data: st.DataObject) -> None:
    kind, field = CASES[number][0], data.draw(st.sampled_from(list(_list_text_fields(TargetConfig()))), label="field")
    text = data.draw(st.sampled_from(HOSTILE) | st.text(min_size=1, max_size=8), label="text")
    expected = _marked_leaves(number, field)
    try:
        files = _render_with(number, field, text)
    except SettingError as error:
        refused = error.setting
    else:
        refused = None
    if refused:
        assert refused == ".".join(field)
        return
    assert not CONTROL.search(text)
    text = text.replace("$", "$$") if (kind, field) == ("compose", ("mlflow_uri",)) else text  # which Compose reads as one
    found = _list_leaves(files)
    for path, value in expected.items():
        if isinstance(value, str) and MARKER in value:
            place = tuple(part.replace(MARKER, text) if isinstance(part, str) else part for part in path)
            if field == ("cloud", "python"):  # stands in commands
                words = [word.replace(MARKER, text) for word in shlex.split(value)]
                assert shlex.split(found[place]) == words, path
            else:
                assert found[place] == value.replace(MARKER, text), path


@pytest.mark.parametrize("text", HOSTILE[:-1])
def test_the_python_of_a_machine_is_quoted_in_commands(text: str) -> None:
    number = next(number for number, (kind, values) in enumerate(CASES) if (kind, values["place"]) == ("launcher", "gcp"))
    (command,) = yaml.safe_load(_render_with(number, ("cloud", "python"), text)["cluster.yaml"])["setup_commands"]
    assert shlex.split(command) == ["test", "-x", f"{text}/bin/raystride"]


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("name", ["on", "yes", "true", "null", "no", "off", "y"])
def test_any_run_name_is_text_in_yaml(number: int, name: str) -> None:
    planned = _plan_case(number)
    named, usual = (_list_leaves(render_files(replace(planned, name=each))) for each in (name, "usual"))
    told = [path for path, value in usual.items() if value == "usual"]
    assert bool(told) == (planned.kind != "slurm")
    assert all(named[path] == name for path in told)
