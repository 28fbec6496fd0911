"""A network of a user's own on a task of ours: what works with which methods, and what is refused before the first step."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import raystride
from raystride.model.generate import generate
from raystride.pipelines.config import Config, LaunchConfig, SettingError, TrainConfig
from raystride.pipelines.data.plugins import TASKS
from raystride.pipelines.data.tasks.language_model import LanguageModel
from raystride.pipelines.data.tasks.task import IGNORED
from tests.tiny import tiny, write_text


def _read_page() -> dict[str, Any]:
    """The names that docs/own-task.md defines under "Less than a task"."""
    page = (Path(__file__).parents[4] / "docs" / "own-task.md").read_text().split("## Less than a task")[1]
    names: dict[str, Any] = {"nn": nn, "raystride": raystride, "cross_entropy": cross_entropy, "IGNORED": IGNORED}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if "LanguageModel" in block:
            exec(block, names)
    return names


PAGE = _read_page()
Gru, GruModel = PAGE["Gru"], PAGE["GruLanguageModel"]


class Plain(nn.Module):
    """The same with its forward alone."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.gru = Gru(*sizes)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.gru(ids, targets)  # type: ignore[no-any-return]


class PlainModel(LanguageModel):
    """A task with that network."""

    def build_model(self) -> Any:
        return Plain(self.facts["vocabulary_size"], self.config.model.hidden_size)


class Smoothed(GruModel):  # type: ignore[misc, valid-type]
    """The page's loss, with a stronger penalty on large logits."""

    def loss(self, model: Any, inputs: Any, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plain, count = super().loss(model, inputs, targets)
        logits = model.logits(model.hidden(inputs[0]))
        return plain + 0.1 * logits.logsumexp(-1).square().sum(), count


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, task in {"plain": PlainModel, "smoothed": Smoothed}.items():
        monkeypatch.setitem(TASKS, name, task)


def _config(folder: Path, task: str, **changes: Any) -> Config:
    text = folder / "text.txt"
    return tiny(text if text.exists() else write_text(folder), task=task, launch=LaunchConfig(mode="inline"), **changes)


def _train(folder: Path, task: str, **changes: Any) -> raystride.Run:
    return raystride.train(_config(folder, task, **changes), run=task, storage=folder)


def test_a_network_with_all_methods_goes_the_whole_way(tmp_path: Path) -> None:
    run = _train(tmp_path, "gru")
    model: Any = run.load_model()
    scored = run.evaluate("validation", {"launch.mode": "inline"})
    assert scored.metrics["loss"] == pytest.approx(run.summary["val_loss"], rel=0.2)
    text = run.generate("line 1", {"sample.temperature": 0.0, "sample.tokens": 30})
    ids = list(b"line 1")
    for _ in range(30):  # the reference: one token after another, no padding
        ids.append(int(model.logits(model.hidden(torch.tensor([ids[-16:]]))[0, -1]).argmax()))
    assert text == bytes(ids[6:]).decode(errors="replace")
    answers = run.predict(["line 1", "the quick brown"], {"sample.temperature": 0.0, "sample.tokens": 30})
    assert answers[0]["continuation"] == text
    with pytest.raises(
        SettingError, match=r"network of this run is a Gru, for which Hugging Face has no layout; .*state_dict"
    ):
        run.export()
    assert (Path(run.export("state_dict")) / "model.safetensors").exists()


def test_the_losses_of_the_page_are_registered() -> None:
    assert issubclass(TASKS["smooth_language_model"], LanguageModel)
    assert TASKS["gru"] is GruModel


def test_prompts_of_several_lengths_do_not_see_each_others_padding() -> None:
    torch.manual_seed(0)
    model, prompts = Gru(20, 8).eval(), [[1, 2, 3, 4, 5, 6], [7], [8, 9]]
    together = list(generate(model, prompts, tokens=12, temperature=0.0, context=5))
    apart = [list(generate(model, [prompt], tokens=12, temperature=0.0, context=5)) for prompt in prompts]
    assert [list(row) for row in zip(*together, strict=True)] == [[ids[0] for ids in each] for each in apart]


def test_a_network_with_its_forward_alone_says_what_will_not_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = _train(tmp_path, "plain")
    assert "generate and predict will not work: Plain has no hidden() and logits() (docs/own-task.md)" in caplog.text
    scored = run.evaluate("validation", {"launch.mode": "inline"})
    whole = _train(tmp_path, "gru")
    assert scored.metrics["loss"] == pytest.approx(whole.evaluate("validation", {"launch.mode": "inline"}).metrics["loss"])
    for ask in (lambda: run.generate("a"), lambda: run.predict(["a"])):
        with pytest.raises(SettingError, match=r"needs hidden\(\) and logits\(\) of its network, and Plain has none"):
            ask()


@pytest.mark.long
def test_a_loss_of_ones_own_is_trained_and_validated(tmp_path: Path) -> None:
    run, plain = _train(tmp_path, "smoothed"), _train(tmp_path, "gru")
    model: Any = run.load_model()
    assert type(model) is Gru
    assert run.summary["val_loss"] > plain.summary["val_loss"] + 0.1
    text = torch.tensor([list((tmp_path / "text.txt").read_bytes()[:200])])
    penalties = [each.logits(each.hidden(text)).logsumexp(-1).square().mean() for each in (model, plain.load_model())]
    assert penalties[0] < penalties[1]


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        (
            "gru",
            {"train": TrainConfig(steps=2, packing="documents")},
            "train.packing is 'documents': it must be `none` with Gru",
        ),
        ("smoothed", {"pipeline": 2}, "scaling.pipeline is 2: it must be 1 with a task that has a loss of its own"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    tmp_path: Path, task: str, changes: dict[str, Any], words: str
) -> None:
    config = _config(tmp_path, task)
    if pipeline := changes.pop("pipeline", 0):
        changes["scaling"] = replace(config.scaling, pipeline=pipeline, workers=2)
    with pytest.raises((SettingError, raystride.TrainingFailed)) as raised:
        raystride.train(replace(config, **changes), run="refused", storage=tmp_path)
    assert words in str(raised.value)
