"""Losses of rows equal those of each row alone, for any number of chunks of logits."""

import pytest
import torch

from raystride.model.transformer import Decoder
from raystride.model.translator import Translator
from raystride.pipelines.config import ModelConfig
from raystride.pipelines.data.tasks import rows as module
from raystride.pipelines.data.tasks.rows import row_losses
from raystride.pipelines.data.tasks.task import IGNORED

TARGETS = torch.tensor([[3, 1, IGNORED], [2, 2, 5], [IGNORED, IGNORED, IGNORED], [4, 0, 1]])
IDS = torch.tensor([[1, 2, 0], [5, 3, 2], [1, 1, 1], [0, 6, 4]])


@pytest.mark.parametrize("numbers", [1, 45, 1 << 25])
def test_each_row_has_its_own_loss(monkeypatch: pytest.MonkeyPatch, numbers: int) -> None:
    monkeypatch.setattr(module, "MAX_LOGITS", numbers)
    torch.manual_seed(0)
    decoder = Decoder(ModelConfig(layers=1, heads=1, hidden_size=8, context=4), 7).eval()
    translator = Translator(ModelConfig(architecture="original", layers=1, heads=1, hidden_size=8, context=4), 7).eval()
    lengths = torch.tensor([3, 1, 2, 3])
    for model, inputs in ((decoder, (IDS,)), (translator, (IDS, lengths, IDS))):
        with torch.no_grad():
            sums, counts = row_losses(model.logits, model.hidden(*inputs), TARGETS)  # type: ignore[operator, arg-type]
            alone = [model(*(each[row : row + 1] for each in inputs), TARGETS[row : row + 1]) for row in range(4)]
        assert torch.allclose(sums, torch.stack([loss for loss, _ in alone]), atol=1e-5)
        assert counts.tolist() == [int(count) for _, count in alone] == [2, 3, 0, 3]
