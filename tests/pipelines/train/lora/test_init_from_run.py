"""A run of ours is the base of another: of adapters on a classifier, of a decoder that is trained on."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raystride.pipelines.config import (
    Config,
    DataConfig,
    LoraConfig,
    ModelConfig,
    SettingError,
    TokenizerConfig,
    TrainConfig,
    ValidationConfig,
)
from raystride.pipelines.config.base_model import is_run
from raystride.pipelines.config.parse import to_yaml
from raystride.pipelines.system.storage.folder import Folder
from raystride.pipelines.train.loop import Training
from raystride.pipelines.train.lora.init_from_run import check_run
from raystride.pipelines.train.worker.build import build_training
from raystride.pipelines.train.worker.job import WorkerInfo
from tests.errors import refused
from tests.flips import flip_bit
from tests.processes import make_job
from tests.tiny import tiny, write_text


def _training(config: Config, storage: Path, run: str) -> Training:
    training = build_training(make_job(config, storage, run), WorkerInfo(), [], lambda: False, lambda _: None)
    Folder(str(storage / run)).put("config.yaml", to_yaml(config))
    return training


@pytest.fixture
def earlier(tmp_path: Path) -> tuple[Config, Training]:
    """A finished run in the folder `first`."""
    config = tiny(write_text(tmp_path))
    training = _training(config, tmp_path, "first")
    training.run()
    return config, training


def test_a_run_begins_with_anothers_best_weights(earlier: tuple[Config, Training], tmp_path: Path) -> None:
    config, first = earlier
    again = replace(config, model=replace(config.model, init_from=str(tmp_path / "first"), dropout=0.1))
    assert is_run(str(tmp_path / "first"))
    check_run(again.model, again.task, Folder(str(tmp_path / "first")))
    second = _training(again, tmp_path, "second")
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True))


def test_damaged_best_weights_are_refused_and_not_replaced(earlier: tuple[Config, Training], tmp_path: Path) -> None:
    config, _ = earlier
    name = (tmp_path / "first" / "checkpoints" / "best").read_text().strip()
    (data,) = (tmp_path / "first" / "checkpoints" / name).glob("*/rank-0.bin")
    flip_bit(data, data.stat().st_size - 1)
    again = replace(config, model=replace(config.model, init_from=str(tmp_path / "first")))
    with refused("model.init_from", str(tmp_path / "first"), names=["best", name, "rank-0.bin differs", "raystride export"]):
        _training(again, tmp_path, "second")


def test_adapters_on_a_run_of_ours_leave_it_as_it_was(earlier: tuple[Config, Training], tmp_path: Path) -> None:
    config, first = earlier
    again = replace(config, model=replace(config.model, init_from=str(tmp_path / "first")), lora=LoraConfig(rank=2))
    second = _training(again, tmp_path, "second")
    second.run()
    base = dict(second.model.named_parameters())
    assert all(torch.equal(each, base[name]) for name, each in first.model.named_parameters())
    stacked = replace(again, model=replace(config.model, init_from=str(tmp_path / "second")))
    with refused("model.init_from", str(tmp_path / "second"), names=["adapters", "raystride export --merge true"]):
        check_run(stacked.model, stacked.task, Folder(str(tmp_path / "second")))


def test_a_classifier_gets_adapters_on_a_run_of_its_task(tmp_path: Path) -> None:
    rows = "".join(f"{'NUM' if number % 2 else 'LOC'}:x where or how many {number}\n" for number in range(60))
    (tmp_path / "rows.txt").write_text(rows)
    config = tiny(write_text(tmp_path), task="classification", tokenizer=TokenizerConfig(kind="bytes"))
    config = replace(config, data=replace(config.data, source=str(tmp_path / "rows.txt"), kind="labelled"))
    config = replace(config, model=replace(config.model, context=64))
    _training(config, tmp_path, "first").run()
    again = replace(config, model=replace(config.model, init_from=str(tmp_path / "first")), lora=LoraConfig(rank=2))
    second = _training(again, tmp_path, "second")
    _, metrics = second.run()
    assert "val_accuracy" in metrics
    assert not any(each.requires_grad for name, each in second.model.named_parameters() if ".adapters." not in name)
    (tmp_path / "rows.txt").write_text(rows.replace("LOC", "ZIP"))
    with refused("model.init_from", str(tmp_path / "first"), names=["'LOC:x', 'NUM:x'", "'NUM:x', 'ZIP:x'"]):
        _training(again, tmp_path, "third")


def test_a_translator_gets_adapters_on_a_run_of_ours(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.jsonl"

    def training(run: str, target: str, base: str | None = None) -> Training:
        rows = [{"text": f"{number} is asked", "target": f"{number} {target}"} for number in range(60)]
        pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = tiny(
            pairs,
            task="translation",
            data=DataConfig(source=str(pairs), validation_fraction=0.2),
            tokenizer=TokenizerConfig(kind="characters", shared=False),
            model=ModelConfig(layers=1, heads=2, hidden_size=16, context=32, init_from=base),
            lora=LoraConfig(rank=2 if base else 0),
            train=TrainConfig(steps=2, slots=2, slot_size=2),
            validation=ValidationConfig(every=0),
        )
        return _training(config, tmp_path, run)

    training("first", "answered").run()
    second = training("second", "answered", base=str(tmp_path / "first"))
    before = {name: each.clone() for name, each in second.model.named_parameters()}
    second.run()
    changed = {name for name, each in second.model.named_parameters() if not torch.equal(each, before[name])}
    assert changed
    assert all(".adapters." in name for name in changed)
    # As many characters in the answers, but other ones.
    with refused("model.init_from", str(tmp_path / "first"), names=["its target tokenizer"]):
        training("third", "answerek", base=str(tmp_path / "first"))


@pytest.mark.parametrize(
    ("model", "wanted", "flags"),
    [
        (ModelConfig(layers=3, heads=2, hidden_size=16, context=16), {"model.layers": 2}, "--model.layers 2"),
        (
            ModelConfig(layers=2, heads=2, hidden_size=32, context=8),
            {"model.hidden_size": 16, "model.context": 16},
            "--model.hidden_size 16 --model.context 16",
        ),
    ],
)
def test_another_network_is_refused_with_the_flags_that_make_it_this_one(
    model: ModelConfig, wanted: dict[str, int], flags: str, earlier: tuple[Config, Training], tmp_path: Path
) -> None:
    config = replace(earlier[0], model=replace(model, init_from=str(tmp_path / "first")))
    with refused("model.init_from", str(tmp_path / "first"), names=[flags]) as raised:
        check_run(config.model, config.task, Folder(str(tmp_path / "first")))
    assert raised.value.allowed == wanted


def test_another_tokenizer_is_refused(earlier: tuple[Config, Training], tmp_path: Path) -> None:
    config = replace(earlier[0], tokenizer=TokenizerConfig(kind="characters"))
    config = replace(config, model=replace(config.model, init_from=str(tmp_path / "first")))
    with pytest.raises(
        SettingError, match=r"^model\.init_from is '.*/first': its tokenizer gives other ids than the run's: "
    ):
        _training(config, tmp_path, "second")


def test_characters_of_other_data_are_refused_also_where_there_are_as_many(tmp_path: Path) -> None:
    def config(letter: str, **model: str) -> Config:
        folder = tmp_path / letter
        folder.mkdir()
        text = write_text(folder)
        text.write_text(text.read_text().replace("lazy", f"la{letter}y"))
        found = tiny(text)
        return replace(found, tokenizer=TokenizerConfig(kind="characters"), model=replace(found.model, **model))

    _training(config("\N{LATIN SMALL LETTER ETH}"), tmp_path, "first").run()
    other = config("\N{LATIN SMALL LETTER THORN}", init_from=str(tmp_path / "first"))
    with refused("model.init_from", str(tmp_path / "first"), names=["by its name"]):
        _training(other, tmp_path, "second")
