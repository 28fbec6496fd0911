"""The description of a run's environment, also without git or a working tree."""

import json
import subprocess
from pathlib import Path

import pytest

import raystride
from raystride.pipelines.observability.record.environment import describe_environment, describe_source


def test_versions_and_hardware_are_named() -> None:
    found = json.loads(json.dumps(describe_environment()))
    assert found["versions"]["torch"]
    assert found["versions"]["raystride"] == raystride.__version__
    assert len(found["commit"]) == 40
    assert found["cores"] >= 1
    assert found["memory_bytes"] > 2**28
    assert isinstance(found["gpus"], list)


def test_a_changed_working_tree_is_dirty(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *identity, *words], check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    clean = describe_source(tmp_path)
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "file").write_text("2")
    assert describe_source(tmp_path) == {"commit": clean["commit"], "dirty": True}


def test_without_git_or_a_tree_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = {"commit": None, "dirty": None}
    assert describe_source(tmp_path) == nothing
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert describe_source(tmp_path) == nothing
    assert describe_environment()["versions"]["torch"]
