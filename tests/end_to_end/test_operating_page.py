"""The operator's page: each row of its tables has a command, setting or link; commands parse, and those for a storage run.

Commands of Ray go through Ray's own parser, ours through that of their job; what a cluster, a network or another machine is
needed for is parsed and not run.
"""

import argparse
import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonargparse
import pytest

from raystride import command
from raystride.pipelines.config import LaunchConfig, RecordConfig
from raystride.pipelines.launch.console.run_metrics import DRIVER_GAUGES
from raystride.pipelines.observability.observers.ray_metrics import GAUGES, SAVE_WAIT, STEP
from tests.ray_jobs.jobs import run_well
from tests.some import some
from tests.test_documentation import FLAGS, faults
from tests.tiny import tiny, write_text

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operating.md").read_text()
ROWS = re.findall(r"^(?!\| ---)(\| .*)$(?!\n\| ---)", PAGE, re.MULTILINE)
"""Rows of all tables, without their heads."""
SPANS = [span for row in ROWS for span in re.findall(r"`([^`]+)`", row)]
PROGRAMS = ("raystride", "ray", "python", "pip", "find", "rm", "cp", "chmod", "du", "ss")
RUN = re.compile(r"raystride (storage|runs (list|show|audit|replay|prune mine --keep))|cp |python -c|find ")
"""Commands that are really run, in the page's order, with a run `mine` in `runs`."""


def words_of(span: str) -> list[str]:
    """The words of a command without the variables before it; none of what is no command."""
    words = shlex.split(span)
    while words and re.match(r"[A-Za-z_]+=", words[0]):
        words = words[1:]
    return words if words and words[0] in PROGRAMS and len(words) > 1 else []


COMMANDS = list(dict.fromkeys(span for span in SPANS if words_of(span)))


class Parsed(BaseException):
    """The arguments were accepted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the storage `runs`, and in it the run `mine`."""
    place = tmp_path_factory.mktemp("operating")
    config = tiny(write_text(place), storage=str(place / "runs"), launch=LaunchConfig(mode="inline"))
    run_well("train", replace(config, record=RecordConfig()), "--run", "mine")
    return place


def test_every_row_names_a_command_a_setting_or_a_page() -> None:
    assert len(some(ROWS)) > 60
    assert not [row for row in ROWS if not re.search(r"`[^`]+`|\]\(", row)]


@pytest.mark.parametrize("span", COMMANDS)
def test_a_command_is_accepted_by_its_own_parser(span: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = words_of(span)
    assert not list(faults([program, *arguments]))
    if program == "ray":
        from ray.scripts.scripts import cli

        context, group = None, cli
        while hasattr(group, "commands") and arguments and arguments[0] in group.commands:
            group, arguments = group.commands[arguments[0]], arguments[1:]
        context = group.make_context(group.name, list(arguments))
        assert context.command is group
        assert not hasattr(group, "commands"), "it names no command of Ray's"
    elif program == "raystride":
        _parse_ours(arguments, monkeypatch)
    else:
        subprocess.run(["bash", "-n"], input=span, text=True, check=True)


def _parse_ours(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def then_stop(parse: object) -> object:
        def parse_and_stop(*given: object, **named: object) -> None:
            parse(*given, **named)  # type: ignore[operator]
            raise Parsed

        return parse_and_stop

    for cls in (argparse.ArgumentParser, jsonargparse.ArgumentParser):
        monkeypatch.setattr(cls, "parse_args", then_stop(cls.parse_args))
    with pytest.raises(Parsed):
        command.run(arguments)


def test_commands_for_a_storage_do_what_the_page_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for span in some([span for span in COMMANDS if RUN.match(span)]):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            if span.startswith("raystride"):
                assert command.run(shlex.split(span)[1:]) == 0, span
            else:
                subprocess.run(["bash", "-c", span], check=True, env=os.environ | {"PATH": path}, stdout=subprocess.DEVNULL)
        if span.startswith("raystride storage") and "--json" in span:
            kinds = {entry["kind"] for entry in json.loads(printed.getvalue())["entries"]}
            assert kinds >= {"run", "prepared", "mlflow", "artifacts"}
    assert (folder / "copy.db").stat().st_size == (folder / "runs" / "mlflow.db").stat().st_size


def test_settings_of_the_page_exist() -> None:
    sections = {flag.partition(".")[0] for flag in FLAGS["train"] if "." in flag}
    named = [span for span in SPANS if re.fullmatch(r"[a-z]+\.[a-z_]+", span) and span.partition(".")[0] in sections]
    assert len(some(named)) > 10
    assert not set(named) - set(FLAGS["train"])


def test_variables_of_the_page_are_read_by_whom_it_says() -> None:
    from datasets import config as of_datasets
    from huggingface_hub import constants
    from mlflow import environment_variables
    from ray._common.usage import usage_constants

    assert "HF_HUB_OFFLINE" in PAGE
    assert all(hasattr(constants, name) for name in ("HF_HUB_OFFLINE", "HF_HOME"))
    assert "HF_ENDPOINT" in Path(constants.__file__).read_text()
    assert of_datasets.HF_HUB_OFFLINE == constants.HF_HUB_OFFLINE
    assert environment_variables.MLFLOW_DISABLE_TELEMETRY.name in PAGE
    assert usage_constants.USAGE_STATS_ENABLED_ENV_VAR in PAGE
    sources = "".join(path.read_text() for path in ROOT.glob("deploy/**/*") if path.is_file())
    for name in ("BASE", "TORCH_INDEX", "POSTGRES_IMAGE"):
        assert f"`{name}`" in PAGE
        assert name in sources


def test_the_page_names_every_host_that_stands_in_the_sources() -> None:
    folders = ("pipelines", "model", "triton_kernels", "ray_jobs", "raystride/jobs")
    sources = some([path for name in folders for path in (ROOT / name).rglob("*.py")])
    # The left out one is the first line of a Git LFS pointer.
    addresses = re.compile(r"https?://((?:[\w-]+\.)+[a-z]{2,})\b")
    found = {host for path in sources for host in addresses.findall(path.read_text())}
    assert "download.pytorch.org" in found
    unnamed = {host for host in found - {"git-lfs.github.com"} if host not in PAGE}
    assert not unnamed, "who calls it, when, and what turns it off?"


def test_expressions_of_alerts_ask_for_figures_that_are_exported() -> None:
    from ray.dashboard.modules.reporter import reporter_agent

    ours = {f"ray_{spec.name}" for spec in (*GAUGES.values(), STEP, SAVE_WAIT)}
    ours |= {f"ray_{name}" for name, _ in DRIVER_GAUGES.values()}
    asked = {name for span in SPANS for name in re.findall(r"\bray_[a-z_]+", span)} - {"ray_jobs"}
    nodes = {name for name in asked if name.startswith("ray_node_")}
    assert len(asked - nodes) >= 3
    assert not asked - nodes - ours
    assert all(f'"{name.removeprefix("ray_")}"' in Path(reporter_agent.__file__).read_text() for name in some(list(nodes)))
