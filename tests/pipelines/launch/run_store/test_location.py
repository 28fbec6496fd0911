"""Where a run lies, and which places of data become absolute."""

from dataclasses import replace
from pathlib import Path

import pytest

from raystride.command import run
from raystride.pipelines.config import Config, DataConfig, LoraConfig, ModelConfig, RecordConfig, TokenizerConfig
from raystride.pipelines.config.parse import Parsed
from raystride.pipelines.config.stored_run import put_attempt
from raystride.pipelines.launch.run_store.location import (
    is_path,
    locate_run,
    map_data_paths,
    storage_base,
    with_absolute_paths,
)
from raystride.pipelines.launch.run_store.naming import expand_adapters
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused


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
    (here / "d").mkdir()
    found = with_absolute_paths(Config(data=DataConfig(source="d", test_source="d#test")))
    assert (found.data.source, found.data.test_source) == (f"{here}/d", f"{here}/d#test")


def test_every_place_is_changed_and_none_is_made() -> None:
    data = DataConfig(source="a", validation="source", validation_source="b", test_source="c")
    config = Config(data=data)
    found = map_data_paths(config, str.upper)
    assert found == replace(config, data=replace(data, source="A", validation_source="B", test_source="C"))
    file = Config(tokenizer=TokenizerConfig(kind="file", file="f"))
    assert map_data_paths(file, str.upper).tokenizer.file == "F"


def test_a_run_under_its_name_of_0_3_is_taken_if_its_result_is_the_same(here: Path) -> None:
    """Until 0.3 a name left out the learning rate, so its run may be one of another rate."""
    given = Config(storage="runs", record=RecordConfig(mlflow=False), data=DataConfig(source="a.txt", validation="tail"))
    digits, earlier = given.default_run("p"), given.default_run_of_0_3("p")
    assert digits != earlier
    assert locate_run(Parsed(given, "p"))[0].run == digits
    put_attempt(Folder(f"{here}/runs/{earlier}"), "a1", with_absolute_paths(replace(given, run=earlier)), {})
    longer = replace(given, train=replace(given.train, steps=9_000), scaling=replace(given.scaling, workers=2))
    for same in (given, longer):
        assert locate_run(Parsed(same, "p"))[0].run == earlier, "the same command goes on with it"
    other = replace(given, optimizer=replace(given.optimizer, learning_rate=0.5))
    assert locate_run(Parsed(other, "p"))[0].run == other.default_run("p")
    put_attempt(Folder(f"{here}/runs/{digits}"), "a2", replace(given, run=digits), {})
    assert locate_run(Parsed(given, "p"))[0].run == digits


def test_adapters_under_their_names_of_0_3_are_taken_if_all_are_the_same(here: Path) -> None:
    lora = LoraConfig(rank=2, adapters=2, variants={"optimizer.learning_rate": [0.1, 0.2]})
    model = ModelConfig(init_from=str(here))
    data = DataConfig(source="a.txt", validation="tail")
    given = Config(storage="runs", record=RecordConfig(mlflow=False), data=data, lora=lora, model=model)
    earlier = given.default_run_of_0_3("p")
    for own in expand_adapters(replace(given, run=earlier)):
        put_attempt(Folder(f"{here}/runs/{own.run}"), "a1", own, {})
    assert locate_run(Parsed(given, "p"))[0].run == earlier
    other = replace(given, lora=replace(lora, variants={"optimizer.learning_rate": [0.1, 0.3]}))
    assert other.default_run_of_0_3("p") == earlier
    assert locate_run(Parsed(other, "p"))[0].run == other.default_run("p")


def test_a_run_that_is_not_there_is_named_and_not_its_missing_data(here: Path) -> None:
    """A forgotten --storage was answered by "data.source must be given"."""
    empty = Parsed(Config(storage="runs", run="mine"), "run", has_source=False)
    with refused("storage", f"{here}/runs", names=["there is no storage", "'mine'", "--data.source"]):
        locate_run(empty)
    put_attempt(Folder(f"{here}/runs/mime"), "a1", Config(), {})
    with refused("run", "mine", names=["there is no run 'mine'", "did you mean mime?", "--config NAME"]):
        locate_run(empty)
    with refused("data.source", names=["must be given"]):
        locate_run(Parsed(Config(storage="runs", run="mine"), "finetune", has_source=False))


@pytest.mark.parametrize(
    "command",
    [
        *(["evaluate", "--run", "mine"], ["predict", "--run", "mine", "--text", "x"], ["generate", "--run", "mine"]),
        *(["export", "--run", "mine"], ["report", "--run", "mine"], ["serve", "--run", "mine"], ["train", "--run", "mine"]),
        *(["runs", "show", "mine"], ["runs", "compare", "mine", "other"], ["runs", "prune", "mine"]),
        *(["runs", "replay", "mine"], ["runs", "audit", "mine"], ["runs", "list"]),
    ],
    ids=" ".join,
)
def test_a_storage_that_is_not_there_is_named(here: Path, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--storage", "nowhere"]) == 2
    assert f"there is no storage {here}/nowhere" in capsys.readouterr().err
    assert not (here / "nowhere").exists()
    (here / "nowhere" / "other").mkdir(parents=True)
    (here / "nowhere" / "other" / "config.yaml").touch()
    if command != ["runs", "list"]:
        assert run([*command, "--storage", "nowhere"]) == 2
        assert f"there is no run 'mine' in {here}/nowhere" in capsys.readouterr().err
