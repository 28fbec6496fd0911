"""What is printed to be pasted means the same to a shell, from where the user is."""

import os
import shlex
import sys
from pathlib import Path

import pytest

from raystride.pipelines import commands
from raystride.pipelines.commands import pasted, program


@pytest.fixture
def _looked_for_anew() -> None:
    program.cache_clear()


@pytest.mark.usefixtures("_looked_for_anew")
def test_the_installed_command_or_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shlex.split(program()) == [sys.executable, "-m", "raystride"]
    program.cache_clear()
    (tmp_path / "raystride").write_text("#!/bin/sh\n")
    (tmp_path / "raystride").chmod(0o755)
    assert program() == "raystride"
    program.cache_clear()


def test_names_with_blanks_and_storages_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(commands, "program", lambda: "raystride")
    monkeypatch.chdir(tmp_path)
    given = shlex.split(pasted("evaluate", "my run's", "/data/all runs", "--split test"))
    assert given == ["raystride", "evaluate", "--run", "my run's", "--storage", "/data/all runs", "--split", "test"]
    assert pasted("train", "a", os.path.join(os.getcwd(), "runs")) == "raystride train --run a"
    assert pasted("ui", storage="s3://bucket/runs") == "raystride ui --storage s3://bucket/runs"
