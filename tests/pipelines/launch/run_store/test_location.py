"""Where a run lies, and which places of data become absolute."""

from dataclasses import replace
from pathlib import Path

import pytest

from raystride.pipelines.config import Config, DataConfig, RecordConfig, TokenizerConfig
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.launch.run_store.location import (
    is_path,
    locate_run,
    map_data_paths,
    storage_base,
    with_absolute_paths,
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a file of data and without what names another storage."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAYSTRIDE_STORAGE", raising=False)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    (tmp_path / "a.txt").write_text("a")
    return tmp_path


def test_a_storage_is_absolute_and_a_run_has_a_name(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, storage = locate_run(Parsed(Config(storage="runs", record=RecordConfig(mlflow=False)), "preset"))
    assert config.storage == storage.uri == f"{here}/runs"
    assert config.run
    assert config.run.startswith("preset-")
    named, _ = locate_run(Parsed(Config(run="own", record=RecordConfig(mlflow=False)), "preset"))
    assert named.run == "own"
    assert storage_base() is None
    monkeypatch.setenv("RAYSTRIDE_STORAGE", "/elsewhere")
    assert storage_base() == "/elsewhere"
    assert locate_run(Parsed(Config(storage="runs", record=RecordConfig(mlflow=False)), "p"))[1].uri == "/elsewhere/runs"


@pytest.mark.parametrize(
    ("place", "path"),
    [("a.txt", True), ("/a/b", True), ("s3://bucket/a", False), ("python", False), ("hf://org/name", False)],
)
def test_a_path_is_no_uri_and_no_name_of_a_source(place: str, path: bool) -> None:
    assert is_path(place) is path


def test_places_that_are_here_become_absolute(here: Path) -> None:
    data = DataConfig(
        source="a.txt", validation="source", validation_source="*.txt", test_source="trec", target_source="s3://bucket/a"
    )
    found = with_absolute_paths(Config(data=data, tokenizer=TokenizerConfig(kind="file", file="a.txt")))
    assert (found.data.source, found.data.validation_source) == (f"{here}/a.txt", f"{here}/*.txt")
    assert (found.data.test_source, found.data.target_source) == ("trec", "s3://bucket/a"), "what is not here is a name"
    assert found.tokenizer.file == f"{here}/a.txt"


def test_every_place_is_changed_and_none_is_made() -> None:
    data = DataConfig(source="a", validation="source", validation_source="b", test_source="c")
    config = Config(data=data)
    found = map_data_paths(config, str.upper)
    assert found == replace(config, data=replace(data, source="A", validation_source="B", test_source="C"))
    file = Config(tokenizer=TokenizerConfig(kind="file", file="f"))
    assert map_data_paths(file, str.upper).tokenizer.file == "F"
