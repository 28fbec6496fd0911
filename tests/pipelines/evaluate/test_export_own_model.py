"""Weights and programs that other programs read, without the code of the training."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raystride
from raystride.pipelines.config import SettingError
from tests.pipelines.evaluate.test_apply_own_model import SETTINGS
from tests.pipelines.train.own_model.models import DATA, X, make_mlp, masked_loss


def _fit(storage: Path, model: Any, loss: Any = masked_loss, data: Any = DATA) -> raystride.Run:
    return raystride.fit(model, data, loss, settings=SETTINGS, run="own", storage=storage)


def test_a_state_dict_is_read_by_torch_and_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = _fit(tmp_path, make_mlp)
    folder = Path(run.export())
    assert sorted(file.name for file in folder.iterdir()) == ["model.safetensors", "state_dict.pt"]
    wanted = run.load_model().state_dict()
    for found in (torch.load(folder / "state_dict.pt"), load_file(folder / "model.safetensors")):
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))[:, :3]  # type: ignore[no-any-return]


def test_tied_weights_are_loaded_again(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = _fit(tmp_path, Tied)
    trained, fresh = run.load_model(), Tied()
    stored = load_file(Path(run.export()) / "model.safetensors")
    assert stored.keys() == trained.state_dict().keys()
    fresh.load_state_dict(stored, strict=True)
    assert trained.second.weight is trained.first.weight  # type: ignore[union-attr]
    assert torch.equal(fresh(torch.from_numpy(X)), trained(torch.from_numpy(X)))


@pytest.mark.long
def test_a_program_needs_nothing_of_the_models_code_and_takes_any_batch(tmp_path: Path) -> None:
    run = _fit(tmp_path, make_mlp)
    program = Path(run.export("torch_export")) / "model.pt2"
    torch.save(torch.from_numpy(X), tmp_path / "x.pt")
    script = f"""
import torch
x = torch.load({str(tmp_path / "x.pt")!r})
model = torch.export.load({str(program)!r}).module()
torch.save([model(x), model(x[:5])], {str(tmp_path / "y.pt")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    whole, part = torch.load(tmp_path / "y.pt")
    assert torch.equal(whole, run.load_model()(torch.from_numpy(X)))
    assert torch.allclose(part, whole[:5], atol=1e-6)


def _shift(model: nn.Module, batch: Any) -> torch.Tensor:
    return ((model.layers[0](batch["x"])) ** 2).mean()  # type: ignore[index, operator]


class Branching(nn.Module):
    """Its path depends on its values, which no trace holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) if x.sum() > 0 else self.layers[0](-x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "loss", "to", "words"),
    [
        (
            make_mlp,
            masked_loss,
            "hugging_face",
            "it must be `state_dict`, `torch_export` or `onnx` for a module without save_",
        ),
        (
            make_mlp,
            masked_loss,
            "mlflow",
            "it must be one of state_dict, hugging_face, torch_export, onnx for a model of your",
        ),
        (Branching, masked_loss, "torch_export", "torch.export cannot trace the model: "),
        (Branching, _shift, "torch_export", "the loss does not call the model itself"),
    ],
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, model: Any, loss: Any, to: str, words: str) -> None:
    run = _fit(tmp_path, model, loss)
    with pytest.raises(SettingError) as raised:
        run.export(to)
    assert words in str(raised.value)
    assert not (tmp_path / "own" / "export").exists()


@pytest.mark.long
def test_a_pretrained_model_is_saved_in_its_own_layout(tmp_path: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_labels=2
    )
    data = [{"input_ids": torch.arange(4) + i % 3, "labels": i % 2} for i in range(20)]
    run = _fit(tmp_path, lambda: BertForSequenceClassification(sizes), lambda model, batch: model(**batch).loss, data)
    loaded = BertForSequenceClassification.from_pretrained(run.export("hugging_face"))
    ids = torch.stack([each["input_ids"] for each in data])  # type: ignore[misc, arg-type]
    assert torch.equal(loaded(ids).logits, run.load_model()(ids).logits)
