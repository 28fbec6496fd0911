"""A setting's old name works for two versions on the command line, in files and in mappings, and for ever in stored runs."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from raystride import __version__
from raystride.pipelines.config import Config
from raystride.pipelines.config.parse import from_yaml, load_settings, parse, to_yaml
from raystride.pipelines.config.section import Section, setting
from tests.errors import refused

MAJOR, MINOR = (int(part) for part in __version__.split(".")[:2])
NOW, BEFORE, LONG_AGO = (f"{MAJOR}.{MINOR - back}" for back in range(3))


@dataclass(frozen=True, kw_only=True)
class _Net(Section):
    name: ClassVar[str] = "net"

    layers: int = setting(2, was=("net.rows", "net.depth"), renamed=NOW)
    """Within its section, twice."""
    heads: int = setting(1, was="top.heads", renamed=BEFORE)
    """From another section, in the version before."""
    width: int = setting(8, was="net.breadth", renamed=LONG_AGO)
    """Two versions ago."""


@dataclass(frozen=True, kw_only=True)
class _Settings(Section):
    net: _Net = _Net()
    """A section."""
    label: str = setting("a", was="title", renamed=NOW)
    """In none."""


@dataclass(frozen=True, kw_only=True)
class _Renamed(Config):
    """All settings of a training, one of which was another section's."""

    start: int = setting(3, fixed=True, was="train.start", renamed=NOW)
    """A number."""


def _line(old: str, new: str, until: str) -> str:
    return f"{old} is now {new}; the old name works until {until}"


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = parse(_Settings, ["--net.depth", "5", "--top.heads=4", "--title", "b"], program="x").settings
    assert (given.net.layers, given.net.heads, given.label) == (5, 4, "b")
    assert capsys.readouterr().err.splitlines() == [
        f"warning: {_line('net.depth', 'net.layers', f'{MAJOR}.{MINOR + 1}')}",
        f"warning: {_line('top.heads', 'net.heads', NOW)}",
        f"warning: {_line('title', 'label', f'{MAJOR}.{MINOR + 1}')}",
    ]


@pytest.mark.parametrize("content", ["net: {depth: 5}\ntop: {heads: 4}\n", "net.depth: 5\ntop.heads: 4\n"])
def test_in_a_file_which_flags_go_over(tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    parsed = parse(_Settings, [f"--config={file}", "--net.layers", "6"], program="x")
    assert (parsed.settings.net.layers, parsed.settings.net.heads, parsed.preset) == (6, 4, "mine")
    first, _ = capsys.readouterr().err.splitlines()
    assert first == f"warning: {file}: {_line('net.depth', 'net.layers', f'{MAJOR}.{MINOR + 1}')}"
    assert load_settings(_Settings, str(file)).settings.net.layers == 5


@pytest.mark.parametrize("old", ["depth", "rows"])
@pytest.mark.parametrize("nested", [False, True])
def test_in_a_mapping(old: str, nested: bool, caplog: pytest.LogCaptureFixture) -> None:
    given: dict[str, object] = {"net": {old: 5}} if nested else {f"net.{old}": 5}
    with caplog.at_level(logging.WARNING, "raystride"):
        assert load_settings(_Settings, given).settings.net.layers == 5
        assert load_settings(_Settings, {}, given).settings.net.layers == 5
    assert caplog.messages == [_line(f"net.{old}", "net.layers", f"{MAJOR}.{MINOR + 1}")] * 2
    assert from_yaml(_Settings, f"net: {{{old}: 5}}").net.layers == 5


@pytest.mark.parametrize("given", [{"net.breadth": 5}, {"net.depth": 5, "net.layers": 5}])
def test_not_after_its_time_nor_beside_the_new_one(given: dict[str, object]) -> None:
    late = "net.breadth" in given
    setting, names = ("net.breadth", [LONG_AGO, "net.width"]) if late else ("net.layers", ["net.depth"])
    with refused(setting, None, names=names):
        load_settings(_Settings, given)
    if late:
        with refused(setting, None, names=names):
            parse(_Settings, ["--net.breadth", "5"], program="x")


def test_in_what_a_run_has_stored_for_ever(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    stored = from_yaml(_Settings, "net: {breadth: 5, depth: 4}\ntop: {heads: 3}\ntitle: b\nunknown: 1\n")
    assert stored == _Settings(net=_Net(width=5, layers=4, heads=3), label="b")
    assert from_yaml(_Settings, to_yaml(stored)) == stored
    assert not caplog.messages
    assert capsys.readouterr().err == ""


def test_names_of_runs_stay() -> None:
    """They are made of the settings' first names."""
    renamed = _Renamed(start=5)
    assert renamed.naming_settings()["train.start"] == 5
    assert "start" not in renamed.naming_settings()
    assert renamed.default_run("x") != _Renamed(start=6).default_run("x")
