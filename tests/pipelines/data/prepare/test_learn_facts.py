"""A mixture's sources are prepared once for all mixtures that use them, with facts learned from all of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raystride.pipelines.config import Config, DataConfig, LaunchConfig, TokenizerConfig
from raystride.pipelines.data.prepare.fingerprint import KeptPreparations
from raystride.pipelines.data.prepare.one_source import BYTES_SPEEDUP, PreparedData
from raystride.pipelines.data.prepare.prepare import needs_ray, prepare
from raystride.pipelines.data.prepare.run_context import RunContext
from raystride.pipelines.data.sources.faults import DataError
from raystride.pipelines.data.tasks import build_task
from raystride.pipelines.data.tokenizers import load_tokenizer
from raystride.pipelines.launch.console.screen import SilentScreen
from raystride.pipelines.launch.train_job import train
from raystride.pipelines.system.storage.folder import Folder
from tests.errors import refused, unreadable
from tests.tiny import tiny


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, str]:
    """Three sources without common words."""
    for name, word in (("web", "the cat sat"), ("code", "return self"), ("math", "1 + 1 = 2")):
        (tmp_path / f"{name}.txt").write_text(f"{word}\n" * 900)
    return {name: str(tmp_path / f"{name}.txt") for name in ("web", "code", "math")}


def _config(sources: dict[str, Any], **tokenizer: Any) -> Config:
    entries = {name: each if isinstance(each, dict) else {"source": each} for name, each in sources.items()}
    data = DataConfig(sources=entries, validation="tail", validation_fraction=0.1)
    return replace(tiny(Path("unused")), data=data, tokenizer=TokenizerConfig(**{"kind": "bytes"} | tokenizer))


def _prepared(config: Config, folder: Path, lines: list[str] | None = None, learned: str = "") -> PreparedData:
    log = (lambda _: None) if lines is None else lines.append
    return prepare(
        RunContext(config, Folder.from_uri(str(folder)), log=log, kept=KeptPreparations(learned)),
        build_task(config),
        on_ray=False,
    )


def test_sources_are_prepared_once_whatever_mixture_uses_them(texts: dict[str, str], tmp_path: Path) -> None:
    both = _prepared(_config({name: texts[name] for name in ("web", "code")}), tmp_path / "runs")
    lines: list[str] = []
    other = _prepared(_config({name: texts[name] for name in ("code", "math")}), tmp_path / "runs", lines)
    assert both.manifest.sources["code"] == other.manifest.sources["code"]
    assert ["prepared before" in line for line in lines[:3]] == [True, False, False]
    assert [line.split(":")[0] for line in lines[:3]] == ["data code", *["data math"] * 2]
    alone = _config({})
    alone = replace(alone, data=DataConfig(source=texts["web"], validation="tail", validation_fraction=0.1))
    assert _prepared(alone, tmp_path / "runs").manifest.fingerprint == both.manifest.sources["web"]
    assert _prepared(_config({name: texts[name] for name in ("web", "code")}), tmp_path / "runs").reused


def test_sources_that_are_small_by_themselves_need_ray_together(
    texts: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = RunContext(_config(texts), Folder(str(tmp_path)), log=lambda _: None)
    sizes = [Path(text).stat().st_size for text in texts.values()]
    monkeypatch.setattr("raystride.pipelines.data.prepare.one_source.MAX_LOCAL_BYTES", sum(sizes) // BYTES_SPEEDUP)
    assert not needs_ray(context)
    monkeypatch.setattr("raystride.pipelines.data.prepare.one_source.MAX_LOCAL_BYTES", (sum(sizes) - 3) // BYTES_SPEEDUP)
    assert needs_ray(context)


def test_a_source_with_two_names_is_prepared_once(texts: dict[str, str], tmp_path: Path) -> None:
    lines: list[str] = []
    result = _prepared(_config({"b": texts["web"], "a": texts["web"], "c": texts["code"]}), tmp_path / "runs", lines)
    assert result.manifest.sources["a"] == result.manifest.sources["b"]
    assert [line.split(":")[0] for line in lines if "prepared in" in line] == ["data b", "data c"]
    assert [line.split(":")[0] for line in lines if "prepared before" in line] == ["data a"]


def test_all_sources_of_a_mixture_are_checked_before_the_first_is_prepared(texts: dict[str, str], tmp_path: Path) -> None:
    Path(texts["math"]).write_bytes(b"\xff\xfe\x00" * 100)
    with unreadable(texts["math"]):
        _prepared(_config(texts), tmp_path / "runs")
    assert not list((tmp_path / "runs").rglob("*.arrow"))


def test_a_tokenizer_is_made_from_all_sources_or_from_those_that_are_named(texts: dict[str, str], tmp_path: Path) -> None:
    all_of_them = _prepared(_config(texts, kind="bpe", vocabulary_size=280), tmp_path / "runs")
    encoder = load_tokenizer(all_of_them.folder / "tokenizer")
    assert {len(encoder.encode(word)) < len(word) for word in ("the cat", "return", "1 + 1")} == {True}
    for name, (folder, manifest) in all_of_them.manifest.by_source(all_of_them.folder).items():
        assert manifest.facts == all_of_them.manifest.facts
        assert (folder / "tokenizer").read("tokenizer.json") == (all_of_them.folder / "tokenizer").read("tokenizer.json")
        assert manifest.tokens("train"), name
    named = _prepared(_config(texts, kind="bpe", vocabulary_size=280, trained_on=("math",)), tmp_path / "runs")
    encoder = load_tokenizer(named.folder / "tokenizer")
    assert len(encoder.encode("return")) == len("return")
    assert len(encoder.encode("1 + 1 = 2")) < len("1 + 1 = 2")
    only = _config({"math": texts["math"], "web": texts["web"]}, kind="bpe", vocabulary_size=280, trained_on=("math",))
    assert _prepared(only, tmp_path / "runs").manifest.sources["web"] == named.manifest.sources["web"]


def test_an_added_source_gets_the_tokenizer_that_the_run_has(texts: dict[str, str], tmp_path: Path) -> None:
    first = _prepared(_config({"web": texts["web"]}, kind="bpe", vocabulary_size=280), tmp_path / "runs")
    added = _config({name: texts[name] for name in ("web", "math")}, kind="bpe", vocabulary_size=280)
    then = _prepared(added, tmp_path / "runs", learned=first.learned)
    assert then.manifest.sources["web"] == first.manifest.sources["web"]
    assert (then.folder / "tokenizer").read("tokenizer.json") == (first.folder / "tokenizer").read("tokenizer.json")
    Folder.from_uri(str(tmp_path / "runs")).remove(f".prepared/{first.learned}")
    assert _prepared(added, tmp_path / "runs", learned=first.learned).reused, "nothing is left to learn for"
    further = _config(texts, kind="bpe", vocabulary_size=280)
    with pytest.raises(DataError, match="is gone"):
        _prepared(further, tmp_path / "runs", learned=first.learned)


def test_labels_are_learned_from_all_sources(tmp_path: Path) -> None:
    for name, labels in (("one", "ab"), ("two", "bc")):
        rows = "".join(f"{labels[i % 2]},words {i}\n" for i in range(200))
        (tmp_path / f"{name}.csv").write_text("label,text\n" + rows)
    config = _config({name: str(tmp_path / f"{name}.csv") for name in ("one", "two")})
    prepared = _prepared(replace(config, task="classification"), tmp_path / "runs")
    assert prepared.manifest.learned["labels"] == ["a", "b", "c"]


def test_a_source_that_became_another_one_is_refused_on_resume(texts: dict[str, str], tmp_path: Path) -> None:
    config = replace(
        _config({name: texts[name] for name in ("web", "math")}), run="mine", launch=LaunchConfig(mode="inline")
    )
    storage = Folder.from_uri(str(tmp_path / "runs"))
    train(config, storage, SilentScreen())
    longer = replace(config, train=replace(config.train, steps=9))
    other = {"web": {"source": texts["code"]}, "math": {"source": texts["math"]}}
    with refused("data.sources.web.source", texts["code"], names=[f"{texts['web']!r} before, {texts['code']!r} now"]):
        train(replace(longer, data=replace(config.data, sources=other)), storage, SilentScreen())
    Path(texts["web"]).write_text("something else\n" * 900)
    assert train(longer, storage, SilentScreen())["steps"] == 9, "it goes on with what was prepared"
    prepared = (storage / "mine").read_json("environment.json")["sources"]["web"]
    (storage / ".prepared" / prepared).remove("manifest.json")
    with unreadable(prepared, names=["data.sources.web", "bytes before"]):
        train(replace(config, train=replace(config.train, steps=12)), storage, SilentScreen())
