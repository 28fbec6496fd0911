"""Sources of a mixture, weights and curricula: what they may be, and what is said of those that cannot."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig, SettingError
from raystride.pipelines.config.mixture import mixture_entries, wanted_weights
from raystride.pipelines.config.parse import from_yaml, load_settings, parse, to_yaml
from tests.errors import refused
from tests.tiny import tiny

SOURCES = {"web": {"source": "a.txt", "weight": 0.7}, "code": {"source": "python", "weight": 0.3, "epochs_at_most": 4}}


def _config(sources: dict[str, Any], **data: Any) -> Config:
    return replace(tiny(Path("unused")), data=DataConfig(sources=sources, **data))


def test_an_entry_takes_the_other_settings_of_data() -> None:
    config = _config(
        {"web": {"source": "a.csv", "columns": ["x", "y"]}, "code": {"source": "b", "encoding": "latin-1"}}, column="x"
    )
    entries = mixture_entries(config.data)
    assert entries["web"].data.columns == ("x", "y")
    assert (entries["web"].data.column, entries["code"].data.encoding) == ("x", "latin-1")
    assert {name: each.data.source for name, each in config.by_source().items()} == {"web": "a.csv", "code": "b"}
    assert tiny(Path("t")).by_source() == {"": tiny(Path("t"))}


def test_settings_are_read_as_they_are_written(tmp_path: Path) -> None:
    config = load_settings(
        Config, {"data": {"sources": SOURCES, "curriculum": [{"from_step": 8, "weights": {"web": 1}}]}}
    ).settings
    assert from_yaml(Config, to_yaml(config)) == config
    (tmp_path / "mixed.yaml").write_text(to_yaml(config))
    assert parse(Config, ["--config", str(tmp_path / "mixed.yaml")], program="test").settings.data == config.data


def test_a_name_stands_for_sources_and_weights_and_neither_weights_nor_bounds_are_fixed() -> None:
    config = _config(SOURCES)
    other = _config(SOURCES | {"code": SOURCES["code"] | {"weight": 0.5}})
    assert config.fixed_settings() == other.fixed_settings()
    assert {key for key in config.fixed_settings() if "sources" in key} == {
        "data.sources.web.source",
        "data.sources.code.source",
    }
    assert config.default_run("x") != other.default_run("x")


def test_weights_by_step_by_name_and_by_temperature() -> None:
    curriculum = ({"from_step": 0}, {"from_step": 8, "weights": {"web": 1}}, {"from_step": 9, "weights": "temperature 0.5"})
    wanted = wanted_weights(DataConfig(sources=SOURCES, curriculum=curriculum), {"web": 400, "code": 900})
    assert wanted == [
        (0, {"web": 0.7, "code": 0.3}),
        (8, {"web": 1.0, "code": 0.0}),
        (9, {"web": 20.0, "code": 30.0}),
    ]
    alike = wanted_weights(DataConfig(sources=SOURCES, weights="temperature 0"), {"web": 400, "code": 900})
    assert alike == [(0, {"web": 1.0, "code": 1.0})]


def test_a_secret_in_a_source_s_address_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config({"web": {"source": "s3://user:word@bucket/web"}})
    written = from_yaml(Config, to_yaml(config))
    assert "word" not in to_yaml(config)
    assert "word" not in str(config.flat())
    assert written.data.sources["web"]["source"] != config.data.sources["web"]["source"]


@pytest.mark.parametrize(
    ("sources", "setting", "value", "names"),
    [
        ({"web": {"sorce": "x"}}, "data.sources.web", {"sorce": "x"}, ("source",)),
        ({"web": {"source": "x", "colum": "y"}}, "data.sources.web.colum", None, ("column",)),
        ({"web": {"source": "x", "weight": -1}}, "data.sources.web.weight", -1, ("0",)),
        ({"web": {"source": "x", "epochs_at_most": 0}}, "data.sources.web.epochs_at_most", 0, ("above 0",)),
        ({"a/b": {"source": "x"}}, "data.sources", "a/b", ("digits",)),
        ({"web": {"source": "x", "weight": 0}}, "data.weights", {"web": 0}, ("above 0",)),
    ],
)
def test_what_is_wrong_with_a_source_is_named(
    sources: dict[str, Any], setting: str, value: Any, names: tuple[str, ...]
) -> None:
    with refused(setting, value, names=names):
        _config(sources)


@pytest.mark.parametrize(("key", "value"), [("column", 5), ("validation_fraction", 2)])
def test_a_setting_of_data_that_is_wrong_in_a_source_is_that_source_s(key: str, value: Any) -> None:
    with pytest.raises(SettingError, match=rf"^data\.sources\.web: .*{key}") as raised:
        _config({"web": {"source": "x", key: value}, "code": {"source": "y"}})
    assert (raised.value.setting, raised.value.value) == (f"data.sources.web.{key}", value)


def test_the_sentence_says_source_setting_and_what_is_allowed() -> None:
    with pytest.raises(SettingError, match=r"^data\.sources\.web: column is 5: it must be text$"):
        _config({"web": {"source": "x", "column": 5}})


@pytest.mark.parametrize(
    ("changes", "setting", "value", "names"),
    [
        ({"curriculum": ({"from_step": 3, "weights": {"wep": 1}},)}, "data.curriculum[0].weights", "wep", ("web",)),
        ({"curriculum": ({"step": 3},)}, "data.curriculum[0]", {"step": 3}, ("from_step",)),
        ({"curriculum": ({"from_step": 5}, {"from_step": 5})}, "data.curriculum[1].from_step", 5, ("above",)),
        ({"weights": "temperature 1.5"}, "data.weights", "temperature 1.5", ("from 0 to 1",)),
        ({"source": "elsewhere"}, "data.source", "elsewhere", ("data.sources",)),
    ],
)
def test_wrong_weights_and_curricula_are_named(
    changes: dict[str, Any], setting: str, value: Any, names: tuple[str, ...]
) -> None:
    config = _config({"web": {"source": "x"}})
    with refused(setting, value, names=names):
        replace(config, data=replace(config.data, **changes))


def test_epochs_of_a_mixture_are_its_sources() -> None:
    config = _config(SOURCES)
    with refused("train.epochs", 2, names=["data.sources"]):
        replace(config, train=replace(config.train, epochs=2.0))
    with refused("data.weights", "temperature 1", names=["data.sources"]):
        _config({}, weights="temperature 1")
