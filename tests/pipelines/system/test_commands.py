"""Printed commands have the same meaning when pasted into the user's shell."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from raystride.pipelines.system import commands
from raystride.pipelines.system.commands import launch_command, shell_command


@pytest.fixture
def _looked_for_anew() -> None:
    launch_command.cache_clear()


@pytest.mark.usefixtures("_looked_for_anew")
def test_the_installed_command_or_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shlex.split(launch_command()) == [sys.executable, "-m", "raystride"]
    launch_command.cache_clear()
    (tmp_path / "raystride").write_text("#!/bin/sh\n")
    (tmp_path / "raystride").chmod(0o755)
    assert launch_command() == "raystride"
    launch_command.cache_clear()


def test_names_with_blanks_and_storages_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "launch_command", lambda: "raystride")
    monkeypatch.chdir(tmp_path)
    given = shlex.split(shell_command("evaluate", "my run's", "/data/all runs", "--split test"))
    assert given == ["raystride", "evaluate", "--run", "my run's", "--storage", "/data/all runs", "--split", "test"]
    assert shell_command("train", "a", os.path.join(os.getcwd(), "runs")) == "raystride train --run a"
    assert shell_command("ui", storage="s3://bucket/runs") == "raystride ui --storage s3://bucket/runs"
